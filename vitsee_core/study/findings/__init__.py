"""What the papers found, as numbers with intervals that are above 0 where it holds."""
