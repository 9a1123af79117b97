"""Image retrieval: ground-truth files, ranks by counting, average precision."""
