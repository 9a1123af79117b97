"""Arrays that are read when they are sliced."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_stores.chunks import Box
from vitsee_stores.layout import ArraySpec
from vitsee_stores.sealed import SealedChunks

Index = int | slice | EllipsisType


class LazyArray:
    """An array of a store. Slices and integers read from disk; nothing is kept in memory.

    The first axis is cheap to cut at multiples of the slab, the others where chunks end: read a
    slab and index that, rather than one image at a time. `numpy.asarray` reads all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size_bytes(self) -> int:
        """Memory that all of it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyArray {self.dtype} {self.shape}>"

    # Without this, iteration would read the slab anew for each of its images.
    __iter__ = None

    def __getitem__(self, index: Index | tuple[Index, ...]) -> NDArray[Any]:
        box, within = _split(index, self.shape)
        values: NDArray[Any] = self.load(box)[within]
        return values

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy array cannot become an array without being read")
        values = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def load(self, box: Box) -> NDArray[Any]:
        """The part of the array that `box` cuts out: (start, stop) on every axis."""
        raise TypeError(f"{type(self).__name__} has no way to be read")


def _split(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box to read, and what to take of it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{len(parts)} indices for an array with {len(shape)} axes")
    box: list[slice] = []
    within: list[slice | int] = []
    for part, n in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            chosen = range(*part.indices(n))
            low, high = (min(chosen[0], chosen[-1]), max(chosen) + 1) if chosen else (0, 0)
            box.append(slice(low, high))
            within.append(slice(None, None, chosen.step))
            continue
        try:
            at = operator.index(part)
        except TypeError:
            at = None
        if at is None or isinstance(part, (bool, np.bool_)):
            raise TypeError("a lazy array takes integers and slices; read a slab and index that")
        if not -n <= at < n:
            raise IndexError(f"index {at} of an axis with {n} entries")
        box.append(slice(at % n, at % n + 1))
        within.append(0)
    return tuple(box), tuple(within)


class StoredArray(LazyArray):
    """One array on disk, at fixed places along its `fixed` axes, which then are no axes any more.

    committed: (slabs,) which slabs may be read; fill values stand for the others.
    """

    def __init__(
        self,
        chunks: SealedChunks,
        spec: ArraySpec,
        committed: NDArray[np.bool_],
        fixed: Mapping[int, int] | None = None,
    ):
        self.source, self.spec, self.committed, self.fixed = chunks, spec, committed, fixed or {}
        self.shape = tuple(n for axis, n in enumerate(spec.shape) if axis not in self.fixed)
        self.dtype = np.dtype(spec.dtype)

    def load(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The part that `box` cuts out; into `out` where given (no fixed axes then)."""
        free = iter(box)
        full = tuple(
            slice(self.fixed[axis], self.fixed[axis] + 1) if axis in self.fixed else next(free)
            for axis in range(len(self.spec.shape))
        )
        values = self.source.read_box(
            self.spec, full, out, skip=lambda slab: not self.committed[slab]
        )
        return values if out is not None else values.reshape([p.stop - p.start for p in box])


class TokenArray(LazyArray):
    """(images, tokens, dim): the prefix tokens, then the grid's cells row by row, or the rows."""

    def __init__(self, prefix: StoredArray | None, body: StoredArray):
        self.prefix, self.body = prefix, body
        self.n_prefix = 0 if prefix is None else prefix.shape[1]
        n_body = math.prod(body.shape[1:-1])
        self.shape = (body.shape[0], self.n_prefix + n_body, body.shape[-1])
        self.dtype = body.dtype

    def load(self, box: Box) -> NDArray[Any]:
        """The part that `box` cuts out; all tokens of its images are read."""
        rows, tokens, channels = box
        n = rows.stop - rows.start
        out = np.empty((n, *self.shape[1:]), self.dtype)
        if self.prefix is not None:
            whole = (rows, *(slice(0, k) for k in self.prefix.shape[1:]))
            self.prefix.load(whole, out[:, : self.n_prefix])
        # Cutting one axis into several is always a view, so the chunks are read into `out`.
        body = out[:, self.n_prefix :].reshape(n, *self.body.shape[1:])
        self.body.load((rows, *(slice(0, k) for k in self.body.shape[1:])), body)
        return out[:, tokens, channels]


class TokenMean(LazyArray):
    """(images, dim) float32: the mean over tokens from `first` on, summed in float64."""

    def __init__(self, tokens: TokenArray, first: int):
        self.tokens, self.first = tokens, first
        self.shape = (tokens.shape[0], tokens.shape[2])
        self.dtype = np.dtype(np.float32)

    def load(self, box: Box) -> NDArray[Any]:
        """The part that `box` cuts out."""
        rows, channels = box
        values = self.tokens.load((rows, slice(self.first, self.tokens.shape[1]), channels))
        mean: NDArray[Any] = values.mean(1, dtype=np.float64).astype(np.float32)
        return mean


class NormalisedInputs(LazyArray):
    """(images, 3, H, W) float32: pixels as the model saw them; NaN for unreadable images.

    The same float32 operations in the same order as in timm's transform, hence the same bits.
    """

    def __init__(
        self, pixels: StoredArray, valid: NDArray[np.bool_], mean: list[float], std: list[float]
    ):
        self.pixels, self.valid, self.shape = pixels, valid, pixels.shape
        self.mean, self.std = np.array(mean, np.float32), np.array(std, np.float32)
        self.dtype = np.dtype(np.float32)

    def load(self, box: Box) -> NDArray[Any]:
        """The part that `box` cuts out."""
        values = self.pixels.load(box).astype(np.float32)
        values /= np.float32(255)
        values -= self.mean[box[1], None, None]
        values /= self.std[box[1], None, None]
        values[~self.valid[box[0]]] = np.nan
        return values
