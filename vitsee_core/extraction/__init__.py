"""model x images -> store (run.py describes the data's path)."""
