"""model x images -> store (see run.py for the path the data takes)."""
