"""The pictures, each drawn from a table alone."""
