"""Arrays that are read when they are sliced."""

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
    """An array of a store. Indexing reads from disk; nothing is kept in memory.

    Integers, slices and at most one list of places or mask of an axis, with numpy's results. The
    first axis is cheap to cut at multiples of the slab, the others where chunks end: read a slab
    and index that, or give all rows at once (in any order: each slab is read once), rather than
    one image at a time. `numpy.asarray` reads all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def rows_per_chunk(self) -> int:
        """Rows of the first axis that are read together."""
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

    # Without this, iteration would read the slab anew for each of its images.
    __iter__ = None

    def __getitem__(self, index: Index) -> NDArray[Any]:
        cut = cut_out(index, self.shape)
        if cut.listed is None:
            return self.load(cut.box)[cut.within]
        return self._load_listed(cut)

    def _load_listed(self, cut: Cut) -> NDArray[Any]:
        """What an index with a list of places asks for, slab by slab.

        Memory: the result and one slab of it.
        """
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
        """The part of the array that `box` cuts out: (start, stop) on every axis."""
        raise TypeError(f"{type(self).__name__} has no way to be read")


class StoredArray(LazyArray):
    """One array on disk, at fixed places along its `fixed` axes, which then are no axes any more.

    committed: (slabs,) which slabs may be read; fill values stand for the others.
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
        """Rows of the first axis that are read together."""
        return next(n for axis, n in enumerate(self.spec.chunks) if axis not in self.fixed)

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

    def parts(self, box: Box) -> list[ChunkPart]:
        """What `box` has of each chunk that it touches, for `read_part`."""
        return chunk_parts(self.spec, box)

    def read_part(self, part: ChunkPart) -> NDArray[Any]:
        """The values of one part, of an array without fixed axes: of a chunk that is not compressed
        they are no copy, and this thread's next reading takes their memory."""
        if self.spec.per == "once" or self.committed[part.chunk[0]]:
            return self.source.read(self.spec, part.chunk)[part.inside]
        shape = [axis.stop - axis.start for axis in part.target]
        return np.full(shape, self.spec.fill, self.dtype)


class TokenArray(LazyArray):
    """(images, tokens, dim): the prefix tokens, then the grid's cells row by row, or the rows."""

    def __init__(self, prefix: StoredArray | None, body: StoredArray):
        self.prefix, self.body = prefix, body
        self.n_prefix = 0 if prefix is None else prefix.shape[1]
        n_body = math.prod(body.shape[1:-1])
        self.shape = (body.shape[0], self.n_prefix + n_body, body.shape[-1])
        self.dtype = body.dtype

    @property
    def rows_per_chunk(self) -> int:
        """Rows of the first axis that are read together."""
        return self.body.rows_per_chunk

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


class LazyTokenMean(LazyArray):
    """(images, dim) float32: the mean over tokens from `first` on, summed in float64."""

    def __init__(self, tokens: TokenArray, first: int):
        self.tokens, self.first = tokens, first
        self.shape = (tokens.shape[0], tokens.shape[2])
        self.dtype = np.dtype(np.float32)

    @property
    def rows_per_chunk(self) -> int:
        """Rows of the first axis that are read together."""
        return self.tokens.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        rows, channels = box
        values = self.tokens.load((rows, slice(self.first, self.tokens.shape[1]), channels))
        return values.mean(1, dtype=np.float64).astype(np.float32)


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

    @property
    def rows_per_chunk(self) -> int:
        """Rows of the first axis that are read together."""
        return self.pixels.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        values = self.pixels.load(box).astype(np.float32)
        values /= np.float32(255)
        values -= self.mean[box[1], None, None]
        values /= self.std[box[1], None, None]
        values[~self.valid[box[0]]] = np.nan
        return values
