"""The vector of a segment: the mean of a site's tokens, weighted by how much of it lies on each.

Tokens are read slab by slab and, in a slab, some rows of the grid at a time, so that memory does
not grow with the images. The sums run in float32, over a segment's tokens in the grid's order and
row by row, so that a vector does not depend on slabs, jobs or memory.

There are three ways to weight the tokens of a grid; the weights' sum is 1:

    area           the share of the segment's visible area in the token's cell, exact: the image's
                   pixels are rectangles on the model's input (`images.placement`), and so are cells
    any            equal for every token with some of the segment in its cell
    vit_analysis   as the code of Walmer et al. 2023 has it: the mask, cut to what the model sees,
                   is resized to the grid by Pillow's antialiased bicubic and clipped to 0..255

By area no segment with a visible pixel is lost, and an object of a few pixels is not spread over
its neighbours: bicubic weights of a disk of 2 px radius differ from its area by half their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.features.matrix import not_finite
from vitsee_core.images.placement import Placement
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.selectors import Token, TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

Sparse = tuple[Integers, Float32]  # tokens, ascending, and their weights
ROUNDING = 1e-9  # a smaller fraction of a segment's area is rounding at a cell's edge


class SegmentWeights:
    """Computes the weights of tokens for the segments of an image, on a site's grid."""

    def __init__(
        self,
        size: tuple[int, int],
        placement: Placement,
        layout: TokenLayout,
        input_size: tuple[int, int],
    ) -> None:
        """Compute how image pixels and cells overlap.

        Args:
            size: (height, width) of the image.
            placement: the position of the image on the model's input.
            layout: the layout of the tokens.
            input_size: (height, width) of the model's input.

        Raises:
            VitseeError: the layout has no grid, or does not say where it lies.
        """
        if layout.grid is None or layout.stride_px is None:
            raise VitseeError("these tokens do not say which pixels are theirs")
        self.grid = layout.grid
        self._size = size
        self._placement = placement
        self._input_size = input_size
        self._offset = layout.offset_px
        self._stride = layout.stride_px
        # Pixels of the input for each pixel of the image, vertically and horizontally.
        self._scales = (
            (placement.bottom - placement.top) / size[0],
            (placement.right - placement.left) / size[1],
        )
        # (grid rows, image rows) and (grid cols, image cols): how much of a pixel's side is in a
        # cell. Both are rectangles, so the area of a pixel in a cell is the product.
        self._rows = self._overlaps_along(0, placement.top, placement.bottom)
        self._cols = self._overlaps_along(1, placement.left, placement.right)

    def _overlaps_along(self, axis: int, first: float, last: float) -> Float:
        """Return (cells, pixels) the lengths that cells and the image's pixels have in common.

        Args:
            axis: 0 for rows, 1 for columns.
            first: where the image begins on the input, in its pixels.
            last: where the image ends.
        """
        n_pixels = self._size[axis]
        n_cells = self.grid[axis]
        steps = np.arange(n_pixels + 1, dtype=np.float64)
        pixel_edges = first + (last - first) / n_pixels * steps
        cell_edges = self._offset[axis] + self._stride[axis] * np.arange(n_cells + 1)
        return _overlaps(pixel_edges, np.clip(cell_edges, 0, self._input_size[axis]))

    def of(self, mask: Mask, kind: str = "area") -> Sparse | None:
        """Return the tokens on which a segment lies, and their weights.

        Tokens are numbers of cells, counted row by row, ascending. None is returned if the model
        does not see the segment.

        Args:
            mask: (height, width) of the image.
            kind: `area`, `any` or `vit_analysis`.
        """
        if kind == "vit_analysis":
            grid_weights = self._bicubic_weights(mask)
        else:
            grid_weights = self._areas(mask)
        total = float(grid_weights.sum())
        if not total > 0:
            return None
        fractions = grid_weights.ravel() / total
        tokens = np.flatnonzero(fractions > ROUNDING)
        weights = np.ones(len(tokens)) if kind == "any" else fractions[tokens]
        return tokens, (weights / weights.sum()).astype(np.float32)

    def _areas(self, mask: Mask) -> Float:
        """Return (grid rows, grid cols) the segment's area in each cell, in pixels of the input."""
        rows_on = np.flatnonzero(mask.any(1))
        cols_on = np.flatnonzero(mask.any(0))
        if not len(rows_on):
            return np.zeros(self.grid)
        # Within the segment's bounding box, as most segments are small.
        rows = slice(rows_on[0], rows_on[-1] + 1)
        cols = slice(cols_on[0], cols_on[-1] + 1)
        inside = mask[rows, cols].astype(np.float64)
        return self._rows[:, rows] @ inside @ self._cols[:, cols].T

    def _bicubic_weights(self, mask: Mask) -> Float:
        """Return (grid rows, grid cols) the mask's visible part, resized to the cells it lies on.

        By Pillow's antialiased bicubic resize to 8 bits, as in the code of Walmer et al. 2023.
        """
        placement = self._placement
        height, width = self._size
        rows, top, bottom = self._visible(placement.top, placement.bottom, height, 0)
        cols, left, right = self._visible(placement.left, placement.right, width, 1)
        grid_weights = np.zeros(self.grid)
        cells = grid_weights[rows, cols]  # a view
        if cells.size:
            box = (left, top, right, bottom)
            image = Image.fromarray(mask.astype(np.uint8) * np.uint8(255)).crop(box)
            resized = image.resize(cells.shape[::-1], Image.Resampling.BICUBIC)
            cells[...] = np.asarray(resized)
        return grid_weights

    def _visible(
        self, first: float, last: float, n: int, axis: int
    ) -> tuple[slice, int, int]:
        """Return the cells that the image lies on along an axis, and the pixels that they cover.

        The pixels are those of the image, from the first to the one after the last. For a centred
        crop they begin at (n - length) / 2, as in the published code, where Pillow rounds halves
        to the even pixel.

        Args:
            first: where the image begins on the input, in pixels of the input.
            last: where it ends.
            n: its length in its own pixels.
            axis: 0 for rows, 1 for columns.
        """
        offset = self._offset[axis]
        stride = self._stride[axis]
        visible_first = max(first, 0.0)
        visible_last = min(last, float(self._input_size[axis]))
        low = max(0, math.floor((visible_first - offset) / stride + ROUNDING))
        high = min(
            self.grid[axis], math.ceil((visible_last - offset) / stride - ROUNDING)
        )
        scale = self._scales[axis]
        start = (offset + low * stride - first) / scale
        if first < 0:
            # A resize keeps proportions but for the long side's rounding, a crop is centred but
            # for its own; those of the image itself are exact.
            scale = max(self._scales)
        length = max(1, round((high - low) * stride / scale))
        centred = (n - length) / 2
        if abs(start - centred) * scale < 1:
            start = centred
        return slice(low, max(low, high)), round(start), round(start + length)


def _overlaps(pixels: Float, cells: Float) -> Float:
    """Return (cells, pixels) the length that each cell has in common with each pixel.

    Args:
        pixels: (pixels + 1,) edges.
        cells: (cells + 1,) edges.
    """
    first = np.maximum(cells[:-1, None], pixels[None, :-1])
    last = np.minimum(cells[1:, None], pixels[None, 1:])
    return np.maximum(last - first, 0)


GROUP_BYTES = 1 << 25  # of float32 tokens that are multiplied at a time


@dataclass(frozen=True)
class Weights:
    """The weights of many segments, as a sparse matrix of segments by tokens in CSR form.

    They take 8 bytes for each token that a segment lies on.

    Attributes:
        starts: (segments + 1,) where each segment's weights begin in the other arrays.
        tokens: (weights,) the token of each weight.
        values: (weights,) the weights; those of a segment sum to 1.
    """

    starts: Integers
    tokens: NDArray[np.int32]
    values: Float32

    @classmethod
    def of(cls, segments: Sequence[Sparse]) -> Weights:
        """Return the weights of these segments, in their order."""
        starts = np.cumsum([0, *(len(tokens) for tokens, _ in segments)])
        tokens = np.concatenate([tokens for tokens, _ in segments]).astype(np.int32)
        return cls(starts, tokens, np.concatenate([values for _, values in segments]))

    def part(self, numbers: Integers) -> tuple[Integers, NDArray[np.int32], Float32]:
        """Return all weights of some segments.

        Returns:
            (weights,) the segment's position in `numbers`, the token, and the weight.
        """
        lengths = self.starts[numbers + 1] - self.starts[numbers]
        positions = np.repeat(np.arange(len(numbers)), lengths)
        ends = np.cumsum(lengths)
        # Weight j of the result is weight j + (start here - start in the result) of its segment.
        shift = self.starts[numbers] - (ends - lengths)
        indices = np.arange(len(positions)) + np.repeat(shift, lengths)
        return positions, self.tokens[indices], self.values[indices]


@dataclass(frozen=True)
class SegmentFeatures:
    """The vectors of a store's segments at a site, as `SiteFeatures` are those of its images.

    Attributes:
        patches: the site's patches.
        weights: the weights of all segments, on the site's grid.
    """

    patches: SiteFeatures
    weights: Weights

    matching = None
    n_prefix = 0
    has_tokens = False
    selection = TokenSelection("segments")

    @property
    def store(self) -> Store:
        """The store of the patches."""
        return self.patches.store

    @property
    def site(self) -> SiteSpec:
        """The site of the patches."""
        return self.patches.site

    @property
    def layout(self) -> TokenLayout | None:
        """The layout of the patches."""
        return self.patches.layout

    @property
    def dim(self) -> int:
        """The number of features of a segment."""
        return self.patches.dim

    @property
    def tokens(self) -> list[Token]:
        """A single nameless token: a segment has a single vector."""
        return [Token("")]

    def groups(self, n_tokens: int) -> list[slice]:
        """Return the only range of `tokens`."""
        del n_tokens
        return [slice(0, 1)]

    def of_segments(
        self,
        rows: Integers,
        numbers: Integers,
        *,
        jobs: int = 1,
        memory: int | None = None,
    ) -> Iterator[Float32]:
        """Yield (segments of a slab, dim) vectors of segments, in their order.

        Args:
            rows: (n,) the row of each segment's image, ascending.
            numbers: (n,) the segments' positions in `weights`.
            jobs: the number of slabs that are read at a time.
            memory: bytes to stay within, for which fewer slabs are read at a time.

        Raises:
            VitseeError: a number is not finite.
        """
        mask = np.zeros(self.store.n_images, bool)
        mask[rows] = True
        if memory is not None:
            jobs = max(1, min(jobs, memory // self._slab_bytes))

        def work(slab: Slab) -> Float32:
            """Return (segments, dim) of the segments whose images are in a slab."""
            first, last = np.searchsorted(rows, [slab.rows.start, slab.rows.stop])
            images = rows[first:last] - slab.rows.start
            return self._vectors_in_slab(slab, images, numbers[first:last])

        yield from each_slab(self.store, work, rows=Rows(mask, 0, ""), jobs=jobs)

    @property
    def _slab_bytes(self) -> int:
        """Bytes of memory of a slab while it is read: a group as it is stored, and in float32."""
        group = self._token_groups()[0]
        return int(8 * self.store.plan.slab * (group.stop - group.start) * self.dim)

    @property
    def _n_cols(self) -> int:
        """The number of columns of the grid."""
        assert self.layout is not None and self.layout.grid is not None
        return self.layout.grid[1]

    def _token_groups(self) -> list[slice]:
        """Return ranges of the grid's tokens to read at a time: whole rows of the grid."""
        row_bytes = 4 * self.store.plan.slab * self._n_cols * self.dim
        n_rows = max(1, GROUP_BYTES // row_bytes)
        return self.patches.groups(n_rows * self._n_cols)

    def _vectors_in_slab(
        self, slab: Slab, images: Integers, numbers: Integers
    ) -> Float32:
        """Return (segments, dim) of segments whose images are in a slab.

        Args:
            slab: the slab.
            images: (segments,) the position of each segment's image in the slab.
            numbers: (segments,) the segments' positions in `weights`.
        """
        segments, tokens, values = self.weights.part(numbers)
        vectors = np.zeros((len(numbers), self.dim), np.float32)
        # Written again for every row: fresh memory would cost more than the conversion.
        n_images = slab.rows.stop - slab.rows.start
        buffer = np.empty((n_images * self._n_cols, self.dim), np.float32)
        for group in self._token_groups():
            if not ((tokens >= group.start) & (tokens < group.stop)).any():
                continue
            x = self.patches.load(slab.rows, group)
            # Row by row of the grid, so that the sums do not depend on what is read together.
            for start in range(group.start, group.stop, self._n_cols):
                in_row = (tokens >= start) & (tokens < start + self._n_cols)
                selected = np.flatnonzero(in_row)
                if not len(selected):
                    continue
                first = start - group.start
                _add_weighted_tokens(
                    vectors,
                    x[:, first : first + self._n_cols],
                    segments=segments[selected],
                    cells=(images[segments[selected]], tokens[selected] - start),
                    values=values[selected],
                    buffer=buffer,
                )
        if not np.isfinite(vectors).all():
            raise not_finite(slab.store, self.site.name, slab.rows)
        return vectors


def _add_weighted_tokens(
    vectors: Float32,
    x: NDArray[Any],
    *,
    segments: Integers,
    cells: tuple[Integers, NDArray[np.int32]],
    values: Float32,
    buffer: Float32,
) -> None:
    """Add weighted tokens to the vectors of the segments that lie on them.

    Args:
        vectors: (segments, dim), changed in place.
        x: (images, tokens, dim), as stored.
        segments: (weights,) the segment that each weight belongs to, ascending.
        cells: (weights,) the image and the token that each weight belongs to.
        values: (weights,) the weights.
        buffer: (images * tokens, dim), memory for the tokens in float32.
    """
    from scipy.sparse import csr_array

    # Only the tokens that some segment lies on are converted to float32.
    used = np.zeros(x.shape[:2], bool)
    used[cells] = True
    columns = (np.cumsum(used) - 1).reshape(used.shape)[cells]  # numbers among the used
    distinct_segments, starts = np.unique(segments, return_index=True)
    used_tokens = buffer[: np.count_nonzero(used)]
    used_tokens[...] = x[used]
    weights = csr_array(
        (values, columns, np.append(starts, len(segments))),
        shape=(len(distinct_segments), len(used_tokens)),
    )
    vectors[distinct_segments] += weights @ used_tokens


def patches_of(store: Store, site: SiteSpec) -> SiteFeatures:
    """Return the patches of a site.

    Raises:
        SiteError: the site has no grid in image geometry.
        MissingInput: only means of the site's tokens are stored.
    """
    layout = store.site(site.name).layout
    if layout is None or layout.grid is None or layout.stride_px is None:
        raise SiteError(
            f"{site.name} of {store.label} has no grid of patches, so that no segment lies on it; "
            "expected sites like --sites blocks"
        )
    # Images may be smaller than their canvas: tokens beside an image have no weight.
    return choose_features(store, site, "patches", partial=True)
