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

Box = tuple[slice, ...]  # ranges of an array's axes after the first, that of images
ArrayPart = tuple[LazyArray, Box]
RADIX_BITS = 16  # of a float32's 32 bits, which a pass of the radix selection counts
# Rows and columns that `_count_halves` reads at a time: 64 MB in float32.
_ROWS = 256
_COLUMNS = 1 << 16


def not_finite(store: Store, site: str, rows: slice | int | None = None) -> VitseeError:
    """Return the error that a site has numbers that are not finite, in these rows of the store."""
    where = "" if rows is None else f", in row {rows}"
    if isinstance(rows, slice):
        where = f", in rows {rows.start} to {rows.stop - 1}"
    return VitseeError(
        f"{store.label} holds numbers in {site} that are not finite{where} (look at it with vitsee "
        "validate)"
    )


@dataclass(frozen=True)
class FeatureBlock:
    """Columns of a feature matrix that are in one stored array.

    Attributes:
        array: the array, images first.
        box: ranges of the array's axes after the first; the columns are their values, flattened.
    """

    array: LazyArray
    box: Box

    @property
    def n_columns(self) -> int:
        """The number of columns."""
        return math.prod(_lengths(self.box))

    def read(self, rows: slice, memory: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """Return (rows, columns) of consecutive images, in their stored type.

        Args:
            rows: a range of the store's rows.
            memory: bytes to read into where possible, so that a loop allocates nothing.
        """
        n = rows.stop - rows.start
        if memory is None or not isinstance(self.array, StoredArray) or self.array.fixed:
            return self.array.load((rows, *self.box)).reshape(n, -1)
        dtype = self.array.dtype
        flat = memory[: n * self.n_columns * dtype.itemsize].view(dtype)
        out = flat.reshape(n, *_lengths(self.box))
        return self.array.load((rows, *self.box), out).reshape(n, -1)

    def pieces(
        self, rows: slice, memory: NDArray[np.uint8] | None = None
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield the result of `read` for rows of a slab in pieces: columns, and (rows, columns).

        If the columns of each chunk are contiguous, a piece is a part of a decoded chunk without a
        copy; it may change when the next piece is requested. Otherwise there is one piece.
        """
        array = self.array
        if isinstance(array, StoredArray) and not array.fixed:
            chunk_parts = array.parts((rows, *self.box))
            shape = _lengths(self.box)
            ranges = [_contiguous_columns(part.target[1:], shape) for part in chunk_parts]
            n_chunk_rows = len({part.chunk[0] for part in chunk_parts})
            if n_chunk_rows == 1 and None not in ranges:
                for part, columns in zip(chunk_parts, ranges, strict=True):
                    assert columns is not None
                    values = array.read_part(part)
                    yield columns, values.reshape(len(values), -1)
                return
        yield slice(0, self.n_columns), self.read(rows, memory)

    def in_one_chunk(self, rows: slice) -> bool:
        """Return whether `pieces` yields a single piece, of all columns, for rows of a slab."""
        array = self.array
        return (
            isinstance(array, StoredArray)
            and not array.fixed
            and len(array.parts((rows, *self.box))) == 1
        )

    def cut(self, columns: int) -> list[FeatureBlock]:
        """Return this block cut into blocks of at most `columns` columns."""
        chunks = _chunk_lengths(self.array)
        return [
            FeatureBlock(self.array, box) for box in _cut_box(self.box, chunks, columns)
        ]


class FeatureMatrix:
    """A matrix of images by features: columns of stored arrays, side by side.

    Args:
        store: the store of the arrays.
        key: identifies these features among others of the same store, for a cache.
        parts: the arrays, and which ranges of their axes are columns.
    """

    def __init__(
        self, store: Store, key: Sequence[str], parts: Sequence[ArrayPart]
    ) -> None:
        self.store = store
        self.key = tuple(key)
        self.parts = tuple(parts)

    @property
    def identity(self) -> tuple[str, ...]:
        """Store and key: equal for equal features only."""
        return (self.store.manifest.store_id, *self.key)

    @property
    def n_features(self) -> int:
        """The number of columns."""
        return sum(FeatureBlock(array, box).n_columns for array, box in self.parts)

    @property
    def item_size(self) -> int:
        """Bytes of a stored value, in the array with the widest type."""
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
        widths = []
        for array, box in self.parts:
            chunk = _chunk_lengths(array)
            widths.append(math.prod(map(min, chunk, _lengths(box))))
        return max(widths)

    def strips(self, columns: int) -> list[FeatureBlock]:
        """Return all features in strips of at most `columns` columns.

        They are cut at chunk boundaries if possible, so that each byte is read once.
        """
        return [
            strip
            for array, box in self.parts
            for strip in FeatureBlock(array, box).cut(columns)
        ]


def _lengths(box: Box) -> list[int]:
    """Return the length of each range."""
    return [span.stop - span.start for span in box]


def _contiguous_columns(target: Box, shape: Sequence[int]) -> slice | None:
    """Return the flat range that `target` selects from an array of a shape.

    None is returned if the selected values are not contiguous in the flattened array.
    """
    lengths = _lengths(target)
    # Contiguous means: some axes of a single index, one axis of any range, and then whole axes.
    first = 0
    while first < len(shape) and lengths[first] == 1:
        first += 1
    if lengths[first + 1 :] != list(shape[first + 1 :]):
        return None
    start = 0
    for span, length in zip(target, shape, strict=True):
        start = start * length + span.start
    return slice(start, start + math.prod(lengths))


def _chunk_lengths(array: LazyArray) -> tuple[int, ...]:
    """Return the lengths of an array's chunks along the axes after the first."""
    if isinstance(array, StoredArray):
        free = [c for axis, c in enumerate(array.spec.chunks) if axis not in array.fixed]
        return tuple(free[1:])
    # Computed from whole tokens, which each cut would read again.
    return array.shape[1:]


def _cut_box(box: Box, chunks: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` values that together are `box`, in its flat order.

    Args:
        box: ranges of axes.
        chunks: the lengths of chunks along these axes; cuts are at their boundaries if possible.
        limit: the largest number of values.
    """
    lengths = _lengths(box)
    if math.prod(lengths) <= limit or not box:
        yield box
        return
    first = box[0]
    n_behind = math.prod(lengths[1:])
    if n_behind <= limit:
        # Cut the first axis, in whole chunks if more than one fits.
        step = limit // n_behind
        if step > chunks[0]:
            step -= step % chunks[0]
        for start in range(first.start, first.stop, step):
            yield (slice(start, min(start + step, first.stop)), *box[1:])
        return
    # An index of the first axis is too much already: cut the axes behind it.
    for index in range(first.start, first.stop):
        for rest in _cut_box(box[1:], chunks[1:], limit):
            yield (slice(index, index + 1), *rest)


class ClampedArray(LazyArray):
    """An array whose values are clipped to [-bound, bound]."""

    def __init__(self, array: LazyArray, bound: float):
        self.array = array
        self.bound = bound
        self.shape = array.shape
        self.dtype = array.dtype
        self.rows_per_chunk = array.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        """Return the clipped values of a box, in the array's type."""
        bound = self.dtype.type(self.bound)
        return np.clip(self.array.load(box), -bound, bound)


def clamped(features: FeatureMatrix, bound: float) -> FeatureMatrix:
    """Return the same features with values clipped to [-bound, bound]."""
    parts = [(ClampedArray(array, bound), box) for array, box in features.parts]
    return FeatureMatrix(features.store, (*features.key, f"clamped at {bound!r}"), parts)


def quantile_of_sizes(
    matrices: Sequence[FeatureMatrix], mask: Mask, quantile: float
) -> float:
    """Return a quantile of |x| over all values: the floor(quantile m)-th of m, counted from 0.

    It is exact for |x| in float32 and takes two passes over the features in constant memory (a
    radix selection). The bit patterns of non-negative floats sort like the numbers, so the first
    pass counts the upper halves of the patterns, and the second one the lower halves of those
    numbers whose upper half is that of the quantile.

    Args:
        matrices: matrices whose values together are the sample.
        mask: (rows,) which rows of their store count.
        quantile: from 0 to below 1.

    Raises:
        VitseeError: a number is not finite.
    """
    n = int(mask.sum())
    rank = int(quantile * (n * sum(matrix.n_features for matrix in matrices)))
    upper = _count_halves(matrices, mask, None)
    high = int(np.searchsorted(np.cumsum(upper), rank, "right"))
    rank -= int(upper[:high].sum())  # the rank among the numbers with this upper half
    lower = _count_halves(matrices, mask, high)
    low = int(np.searchsorted(np.cumsum(lower), rank, "right"))
    return float(np.uint32(high << RADIX_BITS | low).view(np.float32))


def _count_halves(
    matrices: Sequence[FeatureMatrix], mask: Mask, high: int | None
) -> Integers:
    """Return (2^16,) counts of |x| by the upper half of the bits, or by the lower half.

    Args:
        matrices: matrices whose values together are the sample.
        mask: (rows,) which rows of their store count.
        high: count the lower halves of the numbers with this upper half; None counts upper halves.
    """
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
