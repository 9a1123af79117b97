"""Gram matrices, strip by strip, on the CPU and on a GPU: in extraction and in CKA."""
