"""Videos with masks: their layout on disk, propagation of labels through frames, and its scores."""
