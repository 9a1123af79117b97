"""Arrays that are read when sliced.

`cut_out` resolves an index as numpy would; `LazyArray` reads the box that the index needs and
cuts it in memory. The other classes are the kinds of arrays that a store returns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vitsee_stores.chunks import Box
from vitsee_stores.layout import ArraySpec
from vitsee_stores.sealed import ChunkPart, VerifiedChunks, chunk_parts

# ---------------- indices

AxisIndex = int | slice | EllipsisType | Sequence[int] | Sequence[bool] | NDArray[Any]
Index = AxisIndex | tuple[AxisIndex, ...]


class ListedAxis(NamedTuple):
    """The axis that an index takes by a list or mask."""

    axis: int
    indices: NDArray[np.int64]  # not negative, in the requested order


@dataclass(frozen=True)
class Cut:
    """An index that is resolved against an array's shape.

    Attributes:
        box: the smallest box that contains everything requested, (start, stop) on every axis.
        within: index into that box; where an axis is listed, into the box whose entries along
            that axis were already replaced by the listed ones.
        listed: the axis that is indexed by a list, if there is one.
        to_front: whether numpy moves that axis to the front of the result, as it does if a
            slice stands between the list and an integer.
    """

    box: Box
    within: tuple[slice | int, ...]
    listed: ListedAxis | None = None
    to_front: bool = False

    @property
    def result_axis(self) -> int:
        """The listed axis among the axes of the result, before it is moved to the front."""
        assert self.listed is not None
        # Integers drop their axes.
        before = self.within[: self.listed.axis]
        return sum(isinstance(axis_index, slice) for axis_index in before)


def cut_out(index: Any, shape: tuple[int, ...]) -> Cut:
    """Resolve an index into an array of this shape.

    Raises:
        IndexError: an index beyond its axis, a mask of the wrong length, or too many indices.
        TypeError: something else than integers, slices, and at most one list or mask.
    """
    axis_indices = _one_index_per_axis(index, len(shape))
    box: list[slice] = []
    within: list[slice | int] = []
    listed: ListedAxis | None = None
    for axis, (axis_index, n) in enumerate(zip(axis_indices, shape, strict=True)):
        if isinstance(axis_index, slice):
            selected = range(*axis_index.indices(n))
            if selected:
                low = min(selected[0], selected[-1])
                high = max(selected[0], selected[-1]) + 1
            else:
                low = high = 0
            box.append(slice(low, high))
            # The box holds the first and the last selected entry, so the step alone is left;
            # a negative one begins at the box's end.
            within.append(slice(None, None, selected.step))
        elif isinstance(axis_index, (list, np.ndarray)) and np.ndim(axis_index) > 0:
            if listed is not None:
                raise TypeError(
                    "a lazy array takes one list of places or mask; index the result"
                )
            indices = _list_indices(axis_index, n)
            listed = ListedAxis(axis, indices)
            if len(indices):
                box.append(slice(int(indices.min()), int(indices.max()) + 1))
            else:
                box.append(slice(0, 0))
            within.append(slice(None))
        else:
            entry = _integer(axis_index)
            if not -n <= entry < n:
                raise IndexError(f"index {entry} of an axis with {n} entries")
            box.append(slice(entry % n, entry % n + 1))
            within.append(0)
    # numpy's rule: the list's axis stays in place only if integers and list are neighbours.
    advanced = [
        axis
        for axis, axis_index in enumerate(axis_indices)
        if not isinstance(axis_index, slice)
    ]
    to_front = False
    if listed is not None:
        are_neighbours = advanced[-1] - advanced[0] + 1 == len(advanced)
        to_front = not are_neighbours
    return Cut(tuple(box), tuple(within), listed, to_front)


def _one_index_per_axis(index: Any, ndim: int) -> list[Any]:
    """Expand an ellipsis and axes that an index leaves out to full slices."""
    axis_indices = list(index) if isinstance(index, tuple) else [index]
    # by identity: `==` with an array would compare its values
    ellipses = [
        axis for axis, axis_index in enumerate(axis_indices) if axis_index is Ellipsis
    ]
    if len(ellipses) > 1:
        raise IndexError("an index with two ellipses")
    if ellipses:
        full_slices = [slice(None)] * (ndim - len(axis_indices) + 1)
        axis_indices[ellipses[0] : ellipses[0] + 1] = full_slices
    axis_indices += [slice(None)] * (ndim - len(axis_indices))
    if len(axis_indices) != ndim:
        raise IndexError(f"{len(axis_indices)} indices for an array with {ndim} axes")
    return axis_indices


def _integer(axis_index: Any) -> int:
    """Return an integer index as an int. Raises TypeError: anything else, booleans too."""
    if not isinstance(axis_index, (bool, np.bool_)):
        try:
            return operator.index(axis_index)
        except TypeError:
            pass
    raise TypeError("a lazy array takes integers, slices, and one list of places or mask")


def _list_indices(axis_index: Any, n: int) -> NDArray[np.int64]:
    """Return the entries that a list or mask selects on an axis of `n`, none negative.

    Raises:
        IndexError: an index beyond the axis, or a mask of another length.
        TypeError: more than one axis, or neither whole numbers nor booleans.
    """
    values = np.asarray(axis_index)
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
    """An array of a store, which is read when it is indexed; nothing is cached.

    An index may have integers, slices and at most one list of integers or mask; the result is
    numpy's. `numpy.asarray` reads all of the array.

    Cutting is cheap at multiples of the slab along the first axis, and at chunk boundaries
    along the others. Read a slab and index that, or give all rows at once, in any order: each
    slab is then read once. One image at a time reads its slab again for each image.

    Attributes:
        shape: lengths of the axes.
        dtype: numpy type of the values.
        rows_per_chunk: number of rows along the first axis that are read together.

    Example:
        >>> acts = store.acts("blocks.3.out", tokens="patches")
        >>> acts[[7, 2], 0, 0].shape        # the first patch of two images
        (2, 768)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows_per_chunk: int

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the whole array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyArray {self.dtype} {self.shape}>"

    # Iteration would read a slab again for each of its images.
    __iter__ = None

    def __getitem__(self, index: Index) -> NDArray[Any]:
        """Read the values at an index."""
        cut = cut_out(index, self.shape)
        if cut.listed is None:
            return self.load(cut.box)[cut.within]
        return self._load_listed(cut)

    def _load_listed(self, cut: Cut) -> NDArray[Any]:
        """Read the values at an index with a list, slab by slab.

        Memory: the result and one slab.
        """
        assert cut.listed is not None
        axis = cut.listed.axis
        shape = [axis_range.stop - axis_range.start for axis_range in cut.box]
        shape[axis] = len(cut.listed.indices)
        # the box, with the listed entries in place of its entries along their axis
        out = np.empty(shape, self.dtype)
        if out.size:
            if axis == 0:
                self._fill_listed_rows(out, cut.box, cut.listed.indices)
            else:
                self._fill_listed_entries(out, cut.box, cut.listed)
        values: NDArray[Any] = out[cut.within]
        if cut.to_front:
            return np.moveaxis(values, cut.result_axis, 0)
        return values

    def _row_blocks(self, rows: slice) -> Iterator[slice]:
        """Yield the parts of a range of rows that lie in one slab each."""
        step = self.rows_per_chunk
        for low in range(rows.start - rows.start % step, rows.stop, step):
            yield slice(max(low, rows.start), min(low + step, rows.stop))

    def _fill_listed_rows(
        self, out: NDArray[Any], box: Box, indices: NDArray[np.int64]
    ) -> None:
        """Read listed rows of the array into `out`; each slab is read at most once."""
        for block in self._row_blocks(box[0]):
            in_block = (indices >= block.start) & (indices < block.stop)
            positions = np.flatnonzero(in_block)  # in `out`
            if not len(positions):
                continue
            block_indices = indices[positions]
            rows = slice(int(block_indices.min()), int(block_indices.max()) + 1)
            values = self.load((rows, *box[1:]))
            out[positions] = values.take(block_indices - rows.start, axis=0)

    def _fill_listed_entries(
        self, out: NDArray[Any], box: Box, listed: ListedAxis
    ) -> None:
        """Read listed entries along another axis than the first into `out`."""
        first_row = box[0].start
        entries = listed.indices - box[listed.axis].start
        for rows in self._row_blocks(box[0]):
            values = self.load((rows, *box[1:]))
            out_rows = slice(rows.start - first_row, rows.stop - first_row)
            out[out_rows] = values.take(entries, axis=listed.axis)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        """Read all of the array, for `numpy.asarray`."""
        if copy is False:
            raise ValueError("a lazy array cannot become an array without being read")
        values = self[...]
        if dtype is None:
            return values
        return values.astype(dtype, copy=False)

    def load(self, box: Box) -> NDArray[Any]:
        """Read the part of the array inside `box`, (start, stop) on every axis."""
        raise TypeError(f"{type(self).__name__} has no way to be read")


class StoredArray(LazyArray):
    """One array on disk, some axes of which may be fixed at an index and dropped.

    Attributes:
        source: the chunks that it is read from.
        spec: the array on disk.
        committed: (slabs,) which slabs may be read; the others read as fill values.
        fixed: axis on disk -> index at which it is fixed.
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
        free_axes = [axis for axis in range(len(spec.chunks)) if axis not in self.fixed]
        self.rows_per_chunk = spec.chunks[free_axes[0]]

    def load(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the part of the array inside `box`.

        Args:
            box: (start, stop) on every axis that is not fixed.
            out: array of the box's shape to read into, for an array without fixed axes.
        """
        free_ranges = iter(box)
        disk_box = []
        for axis in range(len(self.spec.shape)):
            if axis in self.fixed:
                disk_box.append(slice(self.fixed[axis], self.fixed[axis] + 1))
            else:
                disk_box.append(next(free_ranges))
        values = self.source.read_box(
            self.spec, tuple(disk_box), out, skip=lambda slab: not self.committed[slab]
        )
        if out is not None:
            return values
        return values.reshape([axis_range.stop - axis_range.start for axis_range in box])

    def parts(self, box: Box) -> list[ChunkPart]:
        """Return the intersections of `box` with chunks, for `read_part`."""
        return chunk_parts(self.spec, box)

    def read_part(self, part: ChunkPart) -> NDArray[Any]:
        """Return the values of one intersection, for an array without fixed axes.

        They are a view of the chunk if it is not compressed, valid until this thread reads
        again.
        """
        if self.spec.per == "once" or self.committed[part.chunk[0]]:
            return self.source.read(self.spec, part.chunk)[part.inside]
        shape = [axis_range.stop - axis_range.start for axis_range in part.target]
        return np.full(shape, self.spec.fill, self.dtype)


class TokenArray(LazyArray):
    """All tokens of a site, (images, tokens, dim): prefix tokens, then the body.

    The body is the grid, cell by cell in C order, or plain rows.
    """

    def __init__(self, prefix: StoredArray | None, body: StoredArray):
        """Join the prefix, (images, prefix tokens, dim), and the body, (images, ..., dim)."""
        self.prefix = prefix
        self.body = body
        self.n_prefix = 0 if prefix is None else prefix.shape[1]
        n_body = math.prod(body.shape[1:-1])
        self.shape = (body.shape[0], self.n_prefix + n_body, body.shape[-1])
        self.dtype = body.dtype
        self.rows_per_chunk = body.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        """Read all tokens of the images in `box`, and cut them."""
        rows, tokens, channels = box
        n_rows = rows.stop - rows.start
        out = np.empty((n_rows, *self.shape[1:]), self.dtype)
        if self.prefix is not None:
            prefix_box = (rows, *(slice(0, n) for n in self.prefix.shape[1:]))
            self.prefix.load(prefix_box, out[:, : self.n_prefix])
        # Cutting one axis into several is always a view, so the chunks are read into `out`.
        body = out[:, self.n_prefix :].reshape(n_rows, *self.body.shape[1:])
        body_box = (rows, *(slice(0, n) for n in self.body.shape[1:]))
        self.body.load(body_box, body)
        return out[:, tokens, channels]


class LazyTokenMean(LazyArray):
    """The mean over the tokens from `first` on, (images, dim) float32."""

    def __init__(self, tokens: TokenArray, first: int):
        """Average `tokens`, (images, tokens, dim), over those from index `first` on."""
        self.tokens = tokens
        self.first = first
        self.shape = (tokens.shape[0], tokens.shape[2])
        self.dtype = np.dtype(np.float32)
        self.rows_per_chunk = tokens.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        """Read the tokens of the images in `box`, and average them."""
        rows, channels = box
        values = self.tokens.load(
            (rows, slice(self.first, self.tokens.shape[1]), channels)
        )
        # Summed in float64: stored activations are float16, and tokens are many.
        return values.mean(axis=1, dtype=np.float64).astype(np.float32)


class NormalisedInputs(LazyArray):
    """The pixels as the model saw them, (images, 3, H, W) float32; NaN for unreadable images.

    Clips have (clips, frames, 3, H, W). The values equal those of timm's transform to the bit:
    the float32 operations and their order are the same.
    """

    def __init__(
        self,
        pixels: StoredArray,
        valid: NDArray[np.bool_],
        mean: list[float],
        std: list[float],
    ):
        """Normalise uint8 `pixels` by `mean` and `std` of the RGB channels on [0, 1].

        Args:
            valid: (images,) which images could be read.
        """
        self.raw = pixels
        self.valid = valid
        self.shape = pixels.shape
        self.mean = np.array(mean, np.float32)
        self.std = np.array(std, np.float32)
        self.dtype = np.dtype(np.float32)
        self.rows_per_chunk = pixels.rows_per_chunk

    def load(self, box: Box) -> NDArray[Any]:
        """Read pixels, and normalise them."""
        rows = box[0]
        rgb = box[-3]
        values = self.raw.load(box).astype(np.float32)
        # torchvision's ToTensor divides by 255 before Normalize: one factor would round
        # otherwise.
        values /= np.float32(255)
        values -= self.mean[rgb, None, None]
        values /= self.std[rgb, None, None]
        values[~self.valid[rows]] = np.nan
        return values
