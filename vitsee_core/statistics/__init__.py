"""Means, medians and intervals over images."""
