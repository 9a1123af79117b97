"""Arrays that are read when sliced, and the part of an array that an index takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_stores.chunks import Box
from vitsee_stores.layout import ArraySpec
from vitsee_stores.sealed import ChunkPart, VerifiedChunks, chunk_parts

# ---------------- the part of an array that an index takes

Part = int | slice | EllipsisType | Sequence[int] | Sequence[bool] | NDArray[Any]
Index = Part | tuple[Part, ...]


@dataclass(frozen=True)
class Cut:
    """An index that is resolved against an array's shape."""

    box: Box  # the smallest box with everything requested, (start, stop) on every axis
    # index into that box or, with listed places, into the box with these in their stead
    within: tuple[slice | int, ...]
    # (axis, places) of the axis that is indexed by a list, in the requested order
    listed: tuple[int, NDArray[np.int64]] | None = None
    # numpy moves that axis to the front, as a slice separates it from an integer
    to_front: bool = False

    @property
    def result_axis(self) -> int:
        """The listed axis among the axes of the result."""
        assert self.listed is not None
        return sum(isinstance(part, slice) for part in self.within[: self.listed[0]])


def cut_out(index: Any, shape: tuple[int, ...]) -> Cut:
    """Resolve an index into an array of this shape. Raises IndexError: a place beyond its axis, a
    mask of the wrong length, or too many indices; TypeError: not integers, slices, and at most one
    list of places or mask."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index with two ellipses")
    if ellipses:
        rest = [slice(None)] * (len(shape) - len(parts) + 1)
        parts[ellipses[0] : ellipses[0] + 1] = rest
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"{len(parts)} indices for an array with {len(shape)} axes")
    box: list[slice] = []
    within: list[slice | int] = []
    listed: tuple[int, NDArray[np.int64]] | None = None
    for axis, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            chosen = range(*part.indices(n))
            first, last = sorted((chosen[0], chosen[-1])) if chosen else (0, -1)
            box.append(slice(first, last + 1))
            within.append(slice(None, None, chosen.step))
        elif isinstance(part, (list, np.ndarray)) and np.ndim(part) > 0:
            if listed is not None:
                raise TypeError(
                    "a lazy array takes one list of places or mask; index the result"
                )
            places = _places(part, n)
            listed = (axis, places)
            low, high = (
                (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)
            )
            box.append(slice(low, high))
            within.append(slice(None))
        else:
            at = _integer(part)
            if not -n <= at < n:
                raise IndexError(f"index {at} of an axis with {n} entries")
            box.append(slice(at % n, at % n + 1))
            within.append(0)
    advanced = [i for i, part in enumerate(parts) if not isinstance(part, slice)]
    apart = listed is not None and advanced[-1] - advanced[0] + 1 != len(advanced)
    return Cut(tuple(box), tuple(within), listed, apart)


def _integer(part: Any) -> int:
    if not isinstance(part, (bool, np.bool_)):
        try:
            return operator.index(part)
        except TypeError:
            pass
    raise TypeError("a lazy array takes integers, slices, and one list of places or mask")


def _places(part: Any, n: int) -> NDArray[np.int64]:
    """The places that a list or mask selects on an axis of `n` entries, in its order."""
    values = np.asarray(part)
    if values.ndim != 1:
        raise TypeError("a lazy array takes lists of places and masks of one axis only")
    if values.dtype == np.bool_:
        if len(values) != n:
            raise IndexError(f"a mask of {len(values)} entries for an axis with {n}")
        return np.flatnonzero(values)
    if not len(values):
        return np.zeros(0, np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"a lazy array takes whole numbers or a mask, not {values.dtype}")
    wrong = (values < -n) | (values >= n)
    if wrong.any():
        raise IndexError(f"index {values[wrong][0]} of an axis with {n} entries")
    return np.where(values < 0, values + n, values).astype(np.int64)


# ---------------- arrays


class LazyArray:
    """An array of a store. Indexing reads from disk; nothing is cached.

    Accepts integers, slices and at most one list of places or mask, with numpy's results. The first
    axis is cheap to cut at multiples of the slab, the others at chunk boundaries: read a slab and
    index that, or give all rows at once (in any order: each slab is read once), rather than one
    image at a time. `numpy.asarray` reads all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows_per_chunk: int  # along the first axis, that are read together

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
        start = box[0].start
        stop = box[0].stop
        for low in range(start - start % step, stop, step):
            rows = slice(max(low, start), min(low + step, stop))
            here = np.arange(len(places))
            if axis == 0:
                here = np.flatnonzero((places >= rows.start) & (places < rows.stop))
                if not len(here):
                    continue
                rows = slice(int(places[here].min()), int(places[here].max()) + 1)
            slab = self.load((rows, *box[1:]))
            taken = slab.take(
                places[here] - (rows if axis == 0 else box[axis]).start, axis
            )
            if axis == 0:
                out[here] = taken
            else:
                out[rows.start - start : rows.stop - start] = taken
        values: NDArray[Any] = out[cut.within]
        if cut.to_front:
            return np.moveaxis(values, cut.result_axis, 0)
        return values

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a lazy array cannot become an array without being read")
        values = self[...]
        if dtype is None:
            return values
        return values.astype(dtype, copy=False)

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
        self.source = chunks
        self.spec = spec
        self.committed = committed
        self.fixed = fixed or {}
        self.shape = tuple(
            n for axis, n in enumerate(spec.shape) if axis not in self.fixed
        )
        self.dtype = np.dtype(spec.dtype)
        free = (n for axis, n in enumerate(spec.chunks) if axis not in self.fixed)
        self.rows_per_chunk = next(free)

    def load(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The part inside `box`; into `out` if given (no fixed axes then)."""
        free = iter(box)
        full = tuple(
            slice(self.fixed[axis], self.fixed[axis] + 1)
            if axis in self.fixed
            else next(free)
            for axis in range(len(self.spec.shape))
        )
        values = self.source.read_box(
            self.spec, full, out, skip=lambda slab: not self.committed[slab]
        )
        if out is not None:
            return values
        return values.reshape([p.stop - p.start for p in box])

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
        self.prefix = prefix
        self.body = body
        self.n_prefix = 0 if prefix is None else prefix.shape[1]
        n_body = math.prod(body.shape[1:-1])
        self.shape = (body.shape[0], self.n_prefix + n_body, body.shape[-1])
        self.dtype = body.dtype
        self.rows_per_chunk = body.rows_per_chunk

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
        self.tokens = tokens
        self.first = first
        self.shape = (tokens.shape[0], tokens.shape[2])
        self.dtype = np.dtype(np.float32)
        self.rows_per_chunk = tokens.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        rows, channels = box
        values = self.tokens.load(
            (rows, slice(self.first, self.tokens.shape[1]), channels)
        )
        return values.mean(1, dtype=np.float64).astype(np.float32)


class NormalisedInputs(LazyArray):
    """(images, 3, H, W), of clips (clips, frames, 3, H, W), float32: pixels as the model saw them;
    NaN for unreadable images.

    Same float32 operations in the same order as timm's transform, hence bitwise equal.
    """

    def __init__(
        self,
        pixels: StoredArray,
        valid: NDArray[np.bool_],
        mean: list[float],
        std: list[float],
    ):
        self.pixels = pixels
        self.valid = valid
        self.shape = pixels.shape
        self.mean = np.array(mean, np.float32)
        self.std = np.array(std, np.float32)
        self.dtype = np.dtype(np.float32)
        self.rows_per_chunk = pixels.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        values = self.pixels.load(box).astype(np.float32)
        values /= np.float32(255)
        values -= self.mean[box[-3], None, None]
        values /= self.std[box[-3], None, None]
        values[~self.valid[box[0]]] = np.nan
        return values
