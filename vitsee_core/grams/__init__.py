"""Products that Gram matrices are made of, on the CPU and on a GPU: for extraction and CKA alike."""
