"""Models while they are trained: measured in the training loop."""
