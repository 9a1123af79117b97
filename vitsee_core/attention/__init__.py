"""Attention per head: the summaries that stores contain, and attention recomputed."""
