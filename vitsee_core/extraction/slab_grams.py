"""Gram matrices of a slab's images, made while the slab is.

    for each site:  X = (valid images, tokens x channels), less the mean image;  K = X X^T

HSIC_1 is exactly invariant to that shift (rounding the mean to float32 does no harm); without it
single precision fails on features with a common offset. Columns go through float32 in chunks, sums
over chunks are in float64. The product itself is in float32 whatever the model's precision: no
TF32, no autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.device import precision_context
from vitsee_core.grams.arithmetic import arithmetic

# On the CPU a chunk stays near the caches; on a GPU it is large enough to fill it.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20, "mps": 64 << 20}


class GramProducts:
    """X X^T on one device, through one buffer that every call takes again: for one thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._buffer = torch.empty(0, device=device)
        self._arithmetic = arithmetic(device.type, 0)

    def gram(self, parts: Sequence[Tensor], valid: Tensor) -> Tensor:
        """(n, n) float32 on the device, exactly symmetric, n the number of valid images.

        Args:
            parts: (images, ...) each, on this device or on the host; an image's features are all
                of theirs.
            valid: (images,) bool, on the host: which images count.
        """
        n = int(valid.sum())
        total = torch.zeros(n, n, dtype=self._wide, device=self._device)
        if n:
            rows = None if n == len(valid) else valid.nonzero()[:, 0]
            with precision_context(self._device, "fp32"):
                for part in parts:
                    self._add(_flat(self._near(part)), rows, total)
        return (total.triu() + total.triu(1).T).float()

    def _add(self, features: Tensor, rows: Tensor | None, total: Tensor) -> None:
        """Add the product of one part's features (images, columns)."""
        n, width = len(total), features.shape[1]
        columns = max(1, CHUNK_BYTES[self._device.type] // (4 * n))
        if len(self._buffer) < n * min(columns, width):
            self._buffer = torch.empty(n * min(columns, width), device=self._device)
        rows = None if rows is None else rows.to(features.device)
        for first in range(0, width, columns):
            piece = features[:, first : first + columns]
            x = self._buffer[: n * piece.shape[1]].view(n, -1)
            x.copy_(piece if rows is None else piece[rows])
            x -= x.mean(0)
            if self._device.type == "cpu":
                with np.errstate(all="ignore"):  # `check_peaks` reports what is not finite
                    self._arithmetic.add_gram(total.numpy(), x.numpy())
            else:
                self._arithmetic.add_gram(total, x)

    def _near(self, part: Tensor) -> Tensor:
        """The part on the device where it fits, in one copy; else as it is, to be fetched in
        pieces."""
        if self._device.type != "cuda" or part.is_cuda:
            return part
        free, _ = torch.cuda.mem_get_info(self._device)
        fits = part.numel() * part.element_size() <= free // 4
        return part.to(self._device, non_blocking=True) if fits else part


def _flat(x: Tensor) -> Tensor:
    """(images, features), the features in the order of memory (which changes no product): a CNN's
    output, seen channels last, is not copied for it."""
    strides = x.stride()
    order = sorted(range(1, x.ndim), key=lambda axis: -strides[axis])
    return x.permute(0, *order).reshape(len(x), -1)


def as_block(gram: NDArray[Any], valid: NDArray[np.bool_], slab: int) -> NDArray[np.float32]:
    """(slab, slab): the matrix of the valid images in their places, NaN in all others."""
    block = np.full((slab, slab), np.nan, np.float32)
    places = np.flatnonzero(valid)
    block[np.ix_(places, places)] = gram
    return block
