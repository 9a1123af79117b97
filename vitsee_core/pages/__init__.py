"""The HTML pages that vitsee writes: the report, the explorer, and what they share."""
