"""Products that Gram matrices are made of, on the CPU and on a GPU: in extraction and in CKA."""
