"""Features as a matrix, images by columns, in strips of columns that fit the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Integers, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.lazy import LazyArray, StoredArray

if TYPE_CHECKING:
    from vitsee_stores import Store

Box = tuple[slice, ...]
Part = tuple[LazyArray, Box]
RADIX_BITS = 16  # of a float32, that one pass of the radix selection counts
_ROWS = 256
_COLUMNS = 1 << 16


def not_finite(store: Store, site: str, rows: slice | int | None = None) -> VitseeError:
    """The error that a site holds numbers that are not finite, in these rows of the store."""
    where = "" if rows is None else f", in row {rows}"
    if isinstance(rows, slice):
        where = f", in rows {rows.start} to {rows.stop - 1}"
    return VitseeError(
        f"{store.label} holds numbers in {site} that are not finite{where} (look at it with vitsee "
        "validate)"
    )


@dataclass(frozen=True)
class FeatureBlock:
    """Some columns of a feature matrix: the part of `array` that `box` selects on its axes after
    the first."""

    array: LazyArray
    box: Box

    @property
    def n_columns(self) -> int:
        return math.prod(part.stop - part.start for part in self.box)

    def read(self, rows: slice, memory: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """(rows, columns) of consecutive images, in their stored type; in `memory`, bytes, if
        possible."""
        n = rows.stop - rows.start
        if memory is None or not isinstance(self.array, StoredArray) or self.array.fixed:
            return self.array.load((rows, *self.box)).reshape(n, -1)
        dtype = self.array.dtype
        flat = memory[: n * self.n_columns * dtype.itemsize].view(dtype)
        shape = (n, *(part.stop - part.start for part in self.box))
        return self.array.load((rows, *self.box), flat.reshape(shape)).reshape(n, -1)

    def pieces(
        self, rows: slice, memory: NDArray[np.uint8] | None = None
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """The result of `read` for rows of one slab, in pieces to be used before the next is
        requested: which columns, and their values (rows, columns). Uncopied parts of chunks, if a
        chunk's columns are contiguous."""
        array = self.array
        shape = [part.stop - part.start for part in self.box]
        if isinstance(array, StoredArray) and not array.fixed:
            parts = array.parts((rows, *self.box))
            places = [_consecutive(part.target[1:], shape) for part in parts]
            if len({part.chunk[0] for part in parts}) == 1 and None not in places:
                for part, columns in zip(parts, places, strict=True):
                    assert columns is not None
                    values = array.read_part(part)
                    yield columns, values.reshape(len(values), -1)
                return
        yield slice(0, self.n_columns), self.read(rows, memory)

    def in_one_chunk(self, rows: slice) -> bool:
        """Whether `pieces` yields a single piece, of all columns, for these rows of one slab."""
        array = self.array
        return (
            isinstance(array, StoredArray)
            and not array.fixed
            and len(array.parts((rows, *self.box))) == 1
        )

    def cut(self, columns: int) -> list[FeatureBlock]:
        """This strip in strips of at most `columns` columns."""
        chunks = _chunk_lengths(self.array)
        return [
            FeatureBlock(self.array, piece)
            for piece in _pieces(self.box, chunks, columns)
        ]


class FeatureMatrix:
    """Images by features: columns of stored arrays, side by side. key: identifies these features
    among others of the same store, for a cache."""

    def __init__(self, store: Store, key: Sequence[str], parts: Sequence[Part]) -> None:
        self.store = store
        self.key = tuple(key)
        self.parts = tuple(parts)

    @property
    def identity(self) -> tuple[str, ...]:
        """Store and key: equal for equal features only."""
        return (self.store.manifest.store_id, *self.key)

    @property
    def n_features(self) -> int:
        return sum(FeatureBlock(array, box).n_columns for array, box in self.parts)

    @property
    def item_size(self) -> int:
        """Bytes of a stored value, of the widest part."""
        return max(array.dtype.itemsize for array, _ in self.parts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """A type that holds the values of all parts."""
        return np.result_type(*(array.dtype for array, _ in self.parts))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest stored chunk: memory of a reading thread beside its strip."""
        return max(
            (a.spec.chunk_bytes for a, _ in self.parts if isinstance(a, StoredArray)),
            default=0,
        )

    @property
    def chunk_columns(self) -> int:
        """Columns of the widest stored chunk: narrower strips read it several times."""
        return max(
            math.prod(
                min(chunk, part.stop - part.start)
                for chunk, part in zip(_chunk_lengths(array), box, strict=True)
            )
            for array, box in self.parts
        )

    def strips(self, columns: int) -> list[FeatureBlock]:
        """All features in strips of at most `columns` columns, cut at chunk boundaries if possible,
        so that each byte is read once."""
        return [
            strip
            for array, box in self.parts
            for strip in FeatureBlock(array, box).cut(columns)
        ]


def _consecutive(target: Box, shape: Sequence[int]) -> slice | None:
    """The columns that `target` selects from axes of these lengths, flattened; None if they are not
    contiguous."""
    lengths = [part.stop - part.start for part in target]
    first = 0  # the first axis that is not cut to one place; those after it must be whole
    while first < len(shape) and lengths[first] == 1:
        first += 1
    if lengths[first + 1 :] != list(shape[first + 1 :]):
        return None
    start = 0
    for part, length in zip(target, shape, strict=True):
        start = start * length + part.start
    return slice(start, start + math.prod(lengths))


def _chunk_lengths(array: LazyArray) -> tuple[int, ...]:
    if isinstance(array, StoredArray):
        free = [c for axis, c in enumerate(array.spec.chunks) if axis not in array.fixed]
        return tuple(free[1:])
    return array.shape[1:]  # computed from whole tokens: cuts would read them again


def _pieces(box: Box, chunks: Sequence[int], limit: int) -> Iterator[Box]:
    lengths = [part.stop - part.start for part in box]
    if math.prod(lengths) <= limit or not box:
        yield box
        return
    first = box[0]
    inner = math.prod(lengths[1:])
    if inner <= limit:
        step = limit // inner
        if step > chunks[0]:
            step -= step % chunks[0]
        for start in range(first.start, first.stop, step):
            yield (slice(start, min(start + step, first.stop)), *box[1:])
        return
    for at in range(first.start, first.stop):
        for rest in _pieces(box[1:], chunks[1:], limit):
            yield (slice(at, at + 1), *rest)


class ClampedArray(LazyArray):
    """An array whose values are clipped to [-bound, bound]."""

    def __init__(self, array: LazyArray, bound: float):
        self.array = array
        self.bound = bound
        self.shape = array.shape
        self.dtype = array.dtype
        self.rows_per_chunk = array.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        bound = self.dtype.type(self.bound)
        return np.clip(self.array.load(box), -bound, bound)


def clamped(features: FeatureMatrix, bound: float) -> FeatureMatrix:
    """The same features, clipped to [-bound, bound]."""
    parts = [(ClampedArray(array, bound), box) for array, box in features.parts]
    return FeatureMatrix(features.store, (*features.key, f"clamped at {bound!r}"), parts)


def quantile_of_sizes(
    matrices: Sequence[FeatureMatrix], mask: Mask, share: float
) -> float:
    """The value below which this share of all |x| lies: the floor(share m)-th of m ascending
    values, counted from 0; |x| as float32.

    Two passes over the features, in constant memory: the first counts the upper halves of the
    numbers' bit patterns, which sort like the numbers, the second the lower halves within the half
    that contains the quantile.

    Args:
        matrices: together one sample.
        mask: (rows,) of their store, the images that count.
        share: from 0 to below 1.

    Raises:
        VitseeError: a number is not finite.
    """
    n = int(mask.sum())
    place = int(share * (n * sum(matrix.n_features for matrix in matrices)))
    upper = _count(matrices, mask, None)
    high = int(np.searchsorted(np.cumsum(upper), place, "right"))
    place -= int(upper[:high].sum())
    lower = _count(matrices, mask, high)
    low = int(np.searchsorted(np.cumsum(lower), place, "right"))
    return float(np.uint32(high << RADIX_BITS | low).view(np.float32))


def _count(matrices: Sequence[FeatureMatrix], mask: Mask, high: int | None) -> Integers:
    """Counts of upper halves, or of lower halves below the upper half `high`."""
    counts = np.zeros(1 << RADIX_BITS, np.int64)
    for matrix in matrices:
        for strip in matrix.strips(_COLUMNS):
            for start in range(0, len(mask), _ROWS):
                rows = slice(start, min(start + _ROWS, len(mask)))
                if not mask[rows].any():
                    continue
                sizes = np.abs(strip.read(rows)[mask[rows]].astype(np.float32))
                if not np.isfinite(sizes).all():
                    raise not_finite(matrix.store, matrix.key[0])
                bits = sizes.view(np.uint32).ravel()
                halves = bits >> RADIX_BITS
                if high is not None:
                    halves = bits[halves == high] & ((1 << RADIX_BITS) - 1)
                counts += np.bincount(halves, minlength=1 << RADIX_BITS)
    return counts
