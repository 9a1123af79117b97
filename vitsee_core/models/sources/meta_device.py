"""Models that are made without values, on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def meta_device() -> Iterator[None]:
    """Return a context in which a new tensor has a shape and no values, and takes no memory."""
    # timm is imported before the context: its first import also imports torch._dynamo, which in
    # torch 2.6 reads the values of tensors that it makes.
    import timm  # noqa: F401

    with torch.device("meta"):
        yield
