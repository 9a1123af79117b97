"""Arrays that are read when sliced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_stores.chunks import Box
from vitsee_stores.indexing import Cut, Index, cut_out
from vitsee_stores.layout import ArraySpec
from vitsee_stores.sealed import ChunkPart, VerifiedChunks, chunk_parts


class LazyArray:
    """An array of a store. Indexing reads from disk; nothing is cached.

    Accepts integers, slices and at most one list of places or mask, with numpy's results. The first
    axis is cheap to cut at multiples of the slab, the others at chunk boundaries: read a slab and
    index that, or give all rows at once (in any order: each slab is read once), rather than one
    image at a time. `numpy.asarray` reads all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def rows_per_chunk(self) -> int:
        """Rows along the first axis that are read together."""
        raise TypeError(f"{type(self).__name__} does not say how it is chunked")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyArray {self.dtype} {self.shape}>"

    # Iteration would read a slab again for each of its images.
    __iter__ = None

    def __getitem__(self, index: Index) -> NDArray[Any]:
        cut = cut_out(index, self.shape)
        if cut.listed is None:
            return self.load(cut.box)[cut.within]
        return self._load_listed(cut)

    def _load_listed(self, cut: Cut) -> NDArray[Any]:
        """Index with a list of places, slab by slab. Memory: the result and one slab."""
        assert cut.listed is not None
        (axis, places), box, step = cut.listed, list(cut.box), self.rows_per_chunk
        shape = [part.stop - part.start for part in box]
        shape[axis] = len(places)
        out = np.empty(shape, self.dtype)
        if not out.size:
            box[0] = slice(0, 0)
        start, stop = box[0].start, box[0].stop
        for low in range(start - start % step, stop, step):
            rows = slice(max(low, start), min(low + step, stop))
            here = np.arange(len(places))
            if axis == 0:
                here = np.flatnonzero((places >= rows.start) & (places < rows.stop))
                if not len(here):
                    continue
                rows = slice(int(places[here].min()), int(places[here].max()) + 1)
            slab = self.load((rows, *box[1:]))
            taken = slab.take(places[here] - (rows if axis == 0 else box[axis]).start, axis)
            if axis == 0:
                out[here] = taken
            else:
                out[rows.start - start : rows.stop - start] = taken
        values: NDArray[Any] = out[cut.within]
        return np.moveaxis(values, cut.result_axis, 0) if cut.to_front else values

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy array cannot become an array without being read")
        values = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def load(self, box: Box) -> NDArray[Any]:
        """The part of the array inside `box`, (start, stop) on every axis."""
        raise TypeError(f"{type(self).__name__} has no way to be read")


class StoredArray(LazyArray):
    """One array on disk; axes in `fixed` (axis -> place) are dropped.

    Attributes:
        committed: (slabs,) which slabs may be read; the others read as fill values.
    """

    def __init__(
        self,
        chunks: VerifiedChunks,
        spec: ArraySpec,
        committed: NDArray[np.bool_],
        fixed: Mapping[int, int] | None = None,
    ):
        self.source, self.spec, self.committed, self.fixed = chunks, spec, committed, fixed or {}
        self.shape = tuple(n for axis, n in enumerate(spec.shape) if axis not in self.fixed)
        self.dtype = np.dtype(spec.dtype)

    @property
    def rows_per_chunk(self) -> int:
        return next(n for axis, n in enumerate(self.spec.chunks) if axis not in self.fixed)

    def load(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The part inside `box`; into `out` if given (no fixed axes then)."""
        free = iter(box)
        full = tuple(
            slice(self.fixed[axis], self.fixed[axis] + 1) if axis in self.fixed else next(free)
            for axis in range(len(self.spec.shape))
        )
        values = self.source.read_box(
            self.spec, full, out, skip=lambda slab: not self.committed[slab]
        )
        return values if out is not None else values.reshape([p.stop - p.start for p in box])

    def parts(self, box: Box) -> list[ChunkPart]:
        """The intersections of `box` with chunks, for `read_part`."""
        return chunk_parts(self.spec, box)

    def read_part(self, part: ChunkPart) -> NDArray[Any]:
        """The values of one part, of an array without fixed axes. A view if the chunk is
        uncompressed, valid until this thread's next read."""
        if self.spec.per == "once" or self.committed[part.chunk[0]]:
            return self.source.read(self.spec, part.chunk)[part.inside]
        shape = [axis.stop - axis.start for axis in part.target]
        return np.full(shape, self.spec.fill, self.dtype)


class TokenArray(LazyArray):
    """(images, tokens, dim): prefix tokens, then grid cells row by row, or plain rows."""

    def __init__(self, prefix: StoredArray | None, body: StoredArray):
        self.prefix, self.body = prefix, body
        self.n_prefix = 0 if prefix is None else prefix.shape[1]
        n_body = math.prod(body.shape[1:-1])
        self.shape = (body.shape[0], self.n_prefix + n_body, body.shape[-1])
        self.dtype = body.dtype

    @property
    def rows_per_chunk(self) -> int:
        return self.body.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        """Reads all tokens of the images in `box`."""
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


class LazyTokenMean(LazyArray):
    """(images, dim) float32: the mean over tokens from `first` on, summed in float64."""

    def __init__(self, tokens: TokenArray, first: int):
        self.tokens, self.first = tokens, first
        self.shape = (tokens.shape[0], tokens.shape[2])
        self.dtype = np.dtype(np.float32)

    @property
    def rows_per_chunk(self) -> int:
        return self.tokens.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        rows, channels = box
        values = self.tokens.load((rows, slice(self.first, self.tokens.shape[1]), channels))
        return values.mean(1, dtype=np.float64).astype(np.float32)


class NormalisedInputs(LazyArray):
    """(images, 3, H, W) float32: pixels as the model saw them; NaN for unreadable images.

    Same float32 operations in the same order as timm's transform, hence bitwise equal.
    """

    def __init__(
        self, pixels: StoredArray, valid: NDArray[np.bool_], mean: list[float], std: list[float]
    ):
        self.pixels, self.valid, self.shape = pixels, valid, pixels.shape
        self.mean, self.std = np.array(mean, np.float32), np.array(std, np.float32)
        self.dtype = np.dtype(np.float32)

    @property
    def rows_per_chunk(self) -> int:
        return self.pixels.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        values = self.pixels.load(box).astype(np.float32)
        values /= np.float32(255)
        values -= self.mean[box[1], None, None]
        values /= self.std[box[1], None, None]
        values[~self.valid[box[0]]] = np.nan
        return values
