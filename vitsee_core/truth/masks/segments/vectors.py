"""The vector of a segment: the mean of a site's tokens, weighted by how much of it lies on each.

Read slab by slab and, in a slab, some rows of the grid at a time, so that memory does not grow with
the images. The sums run in float32, over a segment's tokens in the grid's order and row by row, so
that a vector does not depend on slabs, jobs or memory.

How much each token of a grid counts for a segment: (tokens, weights), the weights' sum 1.

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

Sparse = tuple[Integers, Float32]
SMALLEST = 1e-9  # of a segment's area: less is rounding at a cell's edge


class SegmentWeights:
    """Weights of the segments of one image on one grid."""

    def __init__(
        self,
        size: tuple[int, int],
        place: Placement,
        layout: TokenLayout,
        seen: tuple[int, int],
    ) -> None:
        """Size: (height, width) of the image. place: where it lies on the input. layout: of the
        tokens. seen: (height, width) of the input. Raises VitseeError: the layout has no grid, or
        does not say where it lies."""
        if layout.grid is None or layout.stride_px is None:
            raise VitseeError("these tokens do not say which pixels are theirs")
        self.grid = layout.grid
        self._size = size
        self._place = place
        self._seen = seen
        self._offset = layout.offset_px
        self._stride = layout.stride_px
        self._scales = (
            (place.bottom - place.top) / size[0],
            (place.right - place.left) / size[1],
        )
        along = zip(
            (place.top, place.left),
            (place.bottom, place.right),
            size,
            seen,
            layout.offset_px,
            layout.stride_px,
            layout.grid,
            strict=True,
        )
        # (cells, pixels): how much of each pixel's side each cell has.
        self._rows, self._cols = (
            _overlaps(
                first + (last - first) / n * np.arange(n + 1),
                np.clip(offset + stride * np.arange(cells + 1), 0, length),
            )
            for first, last, n, length, offset, stride, cells in along
        )

    def of(self, mask: Mask, kind: str = "area") -> Sparse | None:
        """Tokens, ascending, counted row by row, and their weights; None where the segment cannot
        be seen.

        Args:
            mask: (height, width) of the image.
            kind: `area`, `any` or `vit_analysis`.
        """
        whole = self._resized(mask) if kind == "vit_analysis" else self._areas(mask)
        total = float(whole.sum())
        if not total > 0:
            return None
        flat = whole.ravel() / total
        tokens = np.flatnonzero(flat > SMALLEST)
        weights = np.ones(len(tokens)) if kind == "any" else flat[tokens]
        return tokens, (weights / weights.sum()).astype(np.float32)

    def _areas(self, mask: Mask) -> Float:
        """(rows, cols) of the grid: the area of the segment in each cell, in the input's pixels."""
        on = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(on[0]):
            return np.zeros(self.grid)
        rows, cols = (slice(where[0], where[-1] + 1) for where in on)
        inside = mask[rows, cols].astype(np.float64)
        return self._rows[:, rows] @ inside @ self._cols[:, cols].T

    def _resized(self, mask: Mask) -> Float:
        """The same by Pillow's default resize of the visible part to the cells that it lies on."""
        place, (height, width) = self._place, self._size
        rows, top, bottom = self._visible(place.top, place.bottom, height, 0)
        cols, left, right = self._visible(place.left, place.right, width, 1)
        whole = np.zeros(self.grid)
        cells = whole[rows, cols]
        if cells.size:
            box = (left, top, right, bottom)
            image = Image.fromarray(mask.astype(np.uint8) * np.uint8(255)).crop(box)
            cells[...] = np.asarray(
                image.resize(cells.shape[::-1], Image.Resampling.BICUBIC)
            )
        return whole

    def _visible(
        self, first: float, last: float, n: int, axis: int
    ) -> tuple[slice, int, int]:
        """Along one axis: the cells that the image lies on, and their first pixel of the image and
        the one after the last. Of a centred crop these begin at (n - length) / 2 as in the
        published code, whose halves Pillow rounds to the even pixel."""
        offset = self._offset[axis]
        stride = self._stride[axis]
        ends = max(first, 0.0), min(last, float(self._seen[axis]))
        low = max(0, math.floor((ends[0] - offset) / stride + SMALLEST))
        high = min(self.grid[axis], math.ceil((ends[1] - offset) / stride - SMALLEST))
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
    """(cells, pixels) the length that each cell has in common with each pixel, from their edges."""
    first = np.maximum(cells[:-1, None], pixels[None, :-1])
    last = np.minimum(cells[1:, None], pixels[None, 1:])
    return np.maximum(last - first, 0)


GROUP_BYTES = 1 << 25  # of float32 tokens that are multiplied at a time


@dataclass(frozen=True)
class Weights:
    """The weights of many segments: those of segment s are values[starts[s]:starts[s + 1]], of the
    tokens with these numbers. 8 bytes for each token that a segment lies on."""

    starts: Integers
    tokens: NDArray[np.int32]
    values: Float32

    @classmethod
    def of(cls, segments: Sequence[Sparse]) -> Weights:
        """The weights of these segments, in their order."""
        starts = np.cumsum([0, *(len(tokens) for tokens, _ in segments)])
        tokens = np.concatenate([tokens for tokens, _ in segments]).astype(np.int32)
        return cls(starts, tokens, np.concatenate([values for _, values in segments]))

    def part(self, numbers: Integers) -> tuple[Integers, NDArray[np.int32], Float32]:
        """Place among `numbers`, token and weight, of every weight of these segments."""
        lengths = self.starts[numbers + 1] - self.starts[numbers]
        places = np.repeat(np.arange(len(numbers)), lengths)
        ends = np.cumsum(lengths)
        at = np.arange(len(places)) + np.repeat(
            self.starts[numbers] - ends + lengths, lengths
        )
        return places, self.tokens[at], self.values[at]


@dataclass(frozen=True)
class SegmentFeatures:
    """The vectors of a store's segments at one site, as `SiteFeatures` are those of its images.

    patches: the site's patches. weights: of all segments, on the site's grid.
    """

    patches: SiteFeatures
    weights: Weights

    matching = None
    n_prefix = 0
    several = False
    selection = TokenSelection("segments")

    @property
    def store(self) -> Store:
        return self.patches.store

    @property
    def site(self) -> SiteSpec:
        return self.patches.site

    @property
    def layout(self) -> TokenLayout | None:
        return self.patches.layout

    @property
    def dim(self) -> int:
        return self.patches.dim

    @property
    def tokens(self) -> list[Token]:
        return [Token("")]

    def groups(self, n_tokens: int) -> list[slice]:
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
        """(segments of a slab, dim) of these segments, in their order.

        Args:
            rows: (n,) of each one's image, ascending.
            numbers: (n,) their places in `weights`.
            jobs: slabs read at a time.
            memory: bytes to stay within: fewer slabs are read at a time.

        Raises:
            VitseeError: a number is not finite.
        """
        mask = np.zeros(self.store.n_images, bool)
        mask[rows] = True
        if memory is not None:
            jobs = max(1, min(jobs, memory // self._slab_bytes))

        def work(slab: Slab) -> Float32:
            first, last = np.searchsorted(rows, [slab.rows.start, slab.rows.stop])
            return self._of_slab(
                slab, rows[first:last] - slab.rows.start, numbers[first:last]
            )

        yield from each_slab(self.store, work, rows=Rows(mask, 0, ""), jobs=jobs)

    @property
    def _slab_bytes(self) -> int:
        """The memory in bytes that a slab takes while it is read: a group as it is stored, and in
        float32."""
        group = self._groups()[0]
        return int(8 * self.store.plan.slab * (group.stop - group.start) * self.dim)

    @property
    def _n_cols(self) -> int:
        assert self.layout is not None and self.layout.grid is not None
        return self.layout.grid[1]

    def _groups(self) -> list[slice]:
        row_bytes = 4 * self.store.plan.slab * self._n_cols * self.dim
        return self.patches.groups(max(1, GROUP_BYTES // row_bytes) * self._n_cols)

    def _of_slab(self, slab: Slab, images: Integers, numbers: Integers) -> Float32:
        places, tokens, values = self.weights.part(numbers)
        total = np.zeros((len(numbers), self.dim), np.float32)
        # Written again for every row: fresh memory would cost more than the conversion.
        wide = np.empty(
            ((slab.rows.stop - slab.rows.start) * self._n_cols, self.dim), np.float32
        )
        for group in self._groups():
            if not ((tokens >= group.start) & (tokens < group.stop)).any():
                continue
            x = self.patches.load(slab.rows, group)
            # Row by row of the grid, so that the sums do not depend on what is read together.
            for start in range(group.start, group.stop, self._n_cols):
                own = np.flatnonzero((tokens >= start) & (tokens < start + self._n_cols))
                if len(own):
                    cells = (images[places[own]], tokens[own] - start)
                    row = x[:, start - group.start : start - group.start + self._n_cols]
                    _add(total, row, places[own], cells, values[own], wide)
        if not np.isfinite(total).all():
            raise not_finite(slab.store, self.site.name, slab.rows)
        return total


def _add(
    total: Float32,
    x: NDArray[Any],
    places: Integers,
    cells: tuple[Integers, NDArray[np.int32]],
    values: Float32,
    wide: Float32,
) -> None:
    """Add to (segments, dim) some of their tokens, weighted.

    Args:
        total: what is added to.
        x: (images, tokens, dim), as stored.
        places: (weights,) the segment that each belongs to, ascending.
        cells: (weights,) each one's image and token.
        values: (weights,).
        wide: (images * tokens, dim), for the tokens in float32.
    """
    from scipy.sparse import csr_array

    # Only the tokens that some segment lies on are brought to float32.
    used = np.zeros(x.shape[:2], bool)
    used[cells] = True
    columns = (np.cumsum(used) - 1).reshape(used.shape)[cells]
    segments, starts = np.unique(places, return_index=True)
    wide = wide[: np.count_nonzero(used)]
    wide[...] = x[used]
    shape = (len(segments), len(wide))
    weights = csr_array((values, columns, np.append(starts, len(places))), shape=shape)
    total[segments] += weights @ wide


def patches_of(store: Store, site: SiteSpec) -> SiteFeatures:
    """The patches of a site. Raises SiteError: it has no grid in image geometry; MissingInput: it
    is stored pooled only."""
    layout = store.site(site.name).layout
    if layout is None or layout.grid is None or layout.stride_px is None:
        raise SiteError(
            f"{site.name} of {store.label} has no grid of patches, so that no segment lies on it; "
            "expected sites like --sites blocks"
        )
    return choose_features(
        store, site, "patches", partial=True
    )  # no weight beside an image
