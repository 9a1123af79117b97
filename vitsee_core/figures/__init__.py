"""The figures, each drawn from a table alone."""
