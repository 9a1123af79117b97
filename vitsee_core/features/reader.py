"""The single reader of features: which tokens of a site, from which arrays, in which form.

    features = choose_features(store, site, "cls")
    features.vectors(mask)              (images, dim) float32, slab by slab
    features.blocks(mask, part)         (images, tokens, dim) float32, slab by slab
    features.load(rows, part)           the same of consecutive rows, in the stored type
    features.matrix()                   one matrix, images by all its features, read in strips

Pooled tokens (`cls`, `mean`) are read from `pooled/` in float32, and so from stores that have
nothing else; other tokens from `acts/`, in their stored type.

For CNNs, whose stages differ in channels and resolution, Raghu et al. 2021 (appendix A) split a
feature map into patches, flatten each, and pool to the last stage's grid; patch sizes are not
given. The rule here (`last_stage_matching`): patches of p x p cells with the largest p such that
channels x p^2 is at most the last stage's channels and p divides the grid without leaving fewer
cells than the last stage has, then adaptive average pooling to the last stage's grid. ResNet-50: p
= 2, 2, 1, 1. If nothing needs conversion (every ViT) the tokens stay unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features.compared import default_token
from vitsee_core.features.matrix import FeatureMatrix, not_finite
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.types import Float32, Mask
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch
from vitsee_stores.selectors import Token, TokenSelection, layout_tokens

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store
    from vitsee_stores.layout import TokenLayout
    from vitsee_stores.lazy import LazyArray


@dataclass(frozen=True)
class Matching:
    """Conversion of a grid to the last stage's: patches of `patch` cells, then `grid` cells."""

    patch: int
    grid: tuple[int, int]

    def apply(self, maps: Float32) -> Float32:
        """(images, cells, channels) of maps (images, rows, cols, channels); of clips (clips, times,
        rows, cols, channels) each time by itself."""
        each = maps.reshape(-1, *maps.shape[-3:])
        cells = adaptive_average(flatten_patches(each, self.patch), self.grid)
        return cells.reshape(len(maps), -1, cells.shape[-1])


def last_stage_matching(store: Store, site: SiteSpec) -> Matching | None:
    """A site's conversion to the last stage's grid; None if it needs none. Raises MissingInput: the
    store lacks the output of the last block."""
    layout = site.layout
    if layout is None or layout.grid is None or layout.n_prefix:
        return None
    outs = [
        s for s in store.sites.values() if "blocks" in s.groups and s.layout is not None
    ]
    last = outs[-1] if outs else None
    if last is None or last.rel_depth != 1 or last.layout is None:
        raise MissingInput(
            f"{store.label} lacks the output of the last block, whose grid and channels "
            "--match-last-stage needs; extract it with --sites blocks"
        )
    grid = layout.grid
    target = last.layout.grid
    if target is None:
        return None
    patch = largest_patch(site.dim, grid, last.dim, target)
    if patch == 1 and grid == target:
        return None
    return Matching(patch, target)


def largest_patch(
    dim: int, grid: tuple[int, int], last_dim: int, last: tuple[int, int]
) -> int:
    """The largest p with dim x p^2 <= last_dim that divides the grid and leaves at least as many
    cells each way as the last stage has; 1 if there is none."""
    (rows, cols), (last_rows, last_cols) = grid, last
    return max(
        (
            p
            for p in range(2, math.isqrt(max(last_dim // dim, 1)) + 1)
            if rows % p == cols % p == 0
            and rows // p >= last_rows
            and cols // p >= last_cols
        ),
        default=1,
    )


def flatten_patches(maps: Float32, patch: int) -> Float32:
    """(images, rows / p, cols / p, p * p * channels) of maps (images, rows, cols, channels)."""
    n, rows, cols, dim = maps.shape
    cut = maps.reshape(n, rows // patch, patch, cols // patch, patch, dim)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows // patch, cols // patch, -1)


def adaptive_average(maps: Float32, grid: tuple[int, int]) -> Float32:
    """Maps (images, rows, cols, channels) averaged to `grid` cells: cell i of k is the mean of the
    rows from floor(i n / k) to ceil((i + 1) n / k), like torch's adaptive average pooling."""
    out = maps
    for axis, k in zip((1, 2), grid, strict=True):
        n = out.shape[axis]
        if n == k:
            continue
        bins = [slice(i * n // k, -(-(i + 1) * n // k)) for i in range(k)]
        means = [
            out[(slice(None),) * axis + (b,)].mean(axis=axis, keepdims=True) for b in bins
        ]
        out = np.concatenate(means, axis=axis)
    return out


@dataclass(frozen=True)
class SiteFeatures:
    """Some tokens of one site of a store. A site without tokens is read as it is, flattened: one
    vector per image.

    Attributes:
        site: a stored site, not an alias.
        matching: for CNNs, see above.
        partial: see `Store.acts`.
    """

    store: Store
    site: SiteSpec
    selection: TokenSelection
    matching: Matching | None = None
    partial: bool = False

    @cached_property
    def arrays(self) -> list[LazyArray]:
        """The stored arrays with the tokens, in the tokens' order. Raises SiteError: the site has
        no such tokens; MissingInput: the site is stored pooled only."""
        store = self.store
        name = self.site.name
        layout = self.site.layout
        if layout is None:
            return [store.acts(name, self.selection)]
        if self.matching is not None:
            assert self.layout is not None
            self.selection.require(
                self.layout, f"{store.label}: {name} on the last stage's grid"
            )
            return [store.acts(name, "patches")]
        if self.selection in ("cls", "mean"):
            return [store.pooled(name, self.selection)]
        if self.selection not in ("all", "each"):
            return [store.acts(name, self.selection, partial=self.partial)]
        store.acts(name, "all", partial=self.partial)  # raises if it is pooled only
        body = "rows" if layout.grid is None else "grid"
        parts = ("prefix", body) if layout.prefix else (body,)
        return [store.array(f"acts/{name}/{part}") for part in parts]

    @property
    def layout(self) -> TokenLayout | None:
        """Layout of the tokens as read: the site's, or after conversion."""
        if self.matching is None or self.site.layout is None:
            return self.site.layout
        return dataclasses.replace(self.site.layout, grid=self.matching.grid)

    @property
    def has_tokens(self) -> bool:
        """Whether an image has, or may have, several vectors: one per token."""
        return self.site.layout is not None and not self.selection.is_vector

    @cached_property
    def tokens(self) -> list[Token]:
        """The token that each vector of an image belongs to."""
        layout = self.layout
        if layout is None:
            return [Token("")]
        if not self.has_tokens:
            row, col = self.selection.cell or (None, None)
            return [Token(self.selection, row, col, self.selection.frame)]
        members = self.selection.members(layout)
        return [*layout_tokens(layout)[members.start : members.stop]]

    @property
    def n_prefix(self) -> int:
        layout = self.layout
        if layout is None or not self.has_tokens:
            return 0
        members = self.selection.members(layout)
        return max(0, min(layout.n_prefix, members.stop) - members.start)

    @property
    def dim(self) -> int:
        if self.site.layout is None:
            return math.prod(self.site.shape)
        return self.site.dim * (self.matching.patch**2 if self.matching else 1)

    @property
    def slab_bytes(self) -> int:
        """Memory of a slab while it is read: as stored, and in float32."""
        whole = (
            self.has_tokens
            or self.selection in ("mean-all", "rest")
            or self.matching is not None
        )
        of_image = math.prod(self.site.shape) if whole else self.site.dim
        return 2 * 4 * of_image * self.store.plan.slab

    def groups(self, n_tokens: int) -> list[slice]:
        """`tokens` in groups of about `n_tokens`, cut at chunk boundaries as far as possible, so
        that each byte is read once."""
        n = len(self.tokens)
        n_prefix = self.n_prefix
        if n <= n_tokens:
            return [slice(0, n)]
        unit = self._chunk_tokens()
        step = max(1, n_tokens) if n_tokens < unit else n_tokens // unit * unit
        if step >= n:
            return [slice(0, n)]
        starts = [*range(n_prefix, n, step)]
        if n_prefix:  # together with the first grid tokens, or alone
            starts = [0, *(starts[1:] if n_prefix <= step else starts)]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    def _chunk_tokens(self) -> int:
        """Number of grid tokens that are read together."""
        layout = self.site.layout
        if layout is None or layout.grid is None or self.matching is not None:
            return 1
        rows = self.store.array(f"acts/{self.site.name}/grid").spec.chunks[1]
        return rows * math.prod(layout.body[1:])

    def load(self, rows: slice, part: slice) -> NDArray[np.floating]:
        """(rows, tokens, dim) of consecutive rows of the store, in the stored type.

        Args:
            rows: of the store.
            part: of `tokens`, with both ends.
        """
        if self.matching is not None:
            return self._matched(rows)[:, part]
        if not self.has_tokens:
            values = self.arrays[0][rows]
            return values.reshape(len(values), 1, -1)
        pieces = []
        at = 0
        for array in self.arrays:
            n = math.prod(array.shape[1:-1])
            start = max(part.start - at, 0)
            stop = min(part.stop - at, n)
            if start < stop:
                pieces.append(_consecutive(array, rows, start, stop))
            at += n
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces, axis=1)

    def _matched(self, rows: slice) -> Float32:
        assert self.matching is not None and self.layout is not None
        cells = self.matching.apply(self.arrays[0][rows].astype(np.float32))
        members = self.selection.members(self.layout)
        chosen = cells[:, members.start : members.stop]
        if self.selection.is_mean:
            return chosen.mean(axis=1, keepdims=True)
        return chosen

    def of_slab(self, slab: Slab, part: slice) -> Float32:
        """(images, tokens, dim) of a slab's images that count. Raises VitseeError: a number is not
        finite."""
        values = self.load(slab.rows, part)
        wide, finite = widened(values if slab.valid.all() else values[slab.valid])
        if not finite:
            raise not_finite(slab.store, self.site.name, slab.rows)
        return wide

    def blocks(
        self,
        mask: Mask,
        part: slice | None = None,
        *,
        jobs: int = 1,
        memory: int | None = None,
    ) -> Iterator[Float32]:
        """(images of a slab, tokens, dim) of the images in `mask`, in the store's order.

        Args:
            mask: (images,) over all rows of the store.
            part: of `tokens`, by default all.
            jobs: slabs read at a time.
            memory: bytes to stay within: fewer slabs are read at a time.

        Raises:
            VitseeError: a number is not finite.
        """
        part = slice(0, len(self.tokens)) if part is None else part
        if memory is not None:
            jobs = max(1, min(jobs, memory // self.slab_bytes))
        work = partial(self.of_slab, part=part)
        yield from each_slab(self.store, work, rows=Rows(mask, 0, ""), jobs=jobs)

    def vectors(
        self, mask: Mask, *, jobs: int = 1, memory: int | None = None
    ) -> Iterator[Float32]:
        """(images of a slab, dim): `blocks` of features with one vector per image."""
        for block in self.blocks(mask, slice(0, 1), jobs=jobs, memory=memory):
            yield block[:, 0]

    def matrix(self, channels: slice | None = None) -> FeatureMatrix:
        """All features of an image side by side, as one matrix that is read in strips.

        Args:
            channels: only these channels of every token.

        Raises:
            SiteError: the site has no such tokens.
            MissingInput: the site is stored pooled only.
        """
        key = [
            self.site.name,
            "all" if self.site.kind == "vector" else str(self.selection),
        ]
        last: tuple[slice, ...] = ()
        if channels is not None:
            low, high, _ = channels.indices(self.arrays[0].shape[-1])
            last = (slice(low, high),)
            key.append(f"channels {low}-{high}")
        parts = []
        for array in self.arrays:
            whole = tuple(slice(0, n) for n in array.shape[1:])
            parts.append((array, (*whole[: len(whole) - len(last)], *last)))
        return FeatureMatrix(self.store, key, parts)


def _consecutive(array: LazyArray, rows: slice, start: int, stop: int) -> NDArray[Any]:
    """(rows, tokens, dim): tokens from `start` to `stop` of an array of tokens, or of a grid, whose
    cells are counted row by row, of clips frame by frame."""
    if array.ndim == 3:
        return array[rows, start:stop]
    n_cells = math.prod(array.shape[2:-1])  # of one place along the first axis
    first = start // n_cells
    last = -(-stop // n_cells)
    cells = array[rows, first:last]
    cells = cells.reshape(len(cells), -1, cells.shape[-1])
    return cells[:, start - first * n_cells : stop - first * n_cells]


def choose_features(
    store: Store,
    site: SiteSpec,
    tokens: str | None = None,
    *,
    among: Sequence[Store] = (),
    one_vector: bool = False,
    match_last_stage: bool = False,
    partial: bool = False,
) -> SiteFeatures:
    """The features that an analysis reads of a site; errors are raised here rather than during the
    work.

    Args:
        store: an open store.
        site: one of its sites, or an alias.
        tokens: by default `cls` if the site has a class token, else `mean` (over patches); a site
            without tokens is read as it is.
        among: stores that it is compared with; the default is then the same in all of them.
        one_vector: refuse tokens that give several vectors per image.
        match_last_stage: convert a CNN's grids and channels to the last stage's; see `Matching`.
        partial: whether images may be smaller than their canvas; see `Store.acts`.

    Raises:
        SiteError: the site has no such tokens, or several where one vector is needed; or images do
            not fill their canvas.
        MissingInput: the site is stored pooled only, or the last stage is not stored.
    """
    site = store.site(site.name)
    layout = site.layout
    if layout is None:
        features = SiteFeatures(store, site, TokenSelection.parse("all"))
    else:
        default = default_token((store, *among), site.name)
        features = SiteFeatures(
            store,
            site,
            TokenSelection.parse(tokens or default),
            last_stage_matching(store, site) if match_last_stage else None,
            partial,
        )
    if one_vector and features.has_tokens:
        raise SiteError(
            f"--tokens {features.selection} is several tokens of {site.name}; expected one vector"
        )
    _ = features.arrays
    return features


def check_alike(ours: SiteFeatures, theirs: SiteFeatures) -> None:
    """Refuse a site with other tokens or channels in the test store. Raises StoreMismatch: names
    both."""
    a = ours.store.label
    b = theirs.store.label
    names = [[token.name for token in features.tokens] for features in (ours, theirs)]
    if ours.dim != theirs.dim or names[0] != names[1]:
        shapes = f"{len(names[0])} x {ours.dim} against {len(names[1])} x {theirs.dim}"
        raise StoreMismatch(
            f"{ours.site.name} differs between {a} and {b}: tokens x channels are {shapes} "
            "(extract both with the same --img-size)"
        )


AT_ONCE = 1 << 15  # numbers that stay in the cache during the steps of `widened`
KEPT = np.int32(
    -0x70000001
)  # all bits but those of the exponent that the sign was spread over
TO_FLOAT32 = np.float32(2.0**112)  # between the exponents of both types
INFINITE = np.float32(2.0**16)  # what the least float16 that is no number becomes


def widened(values: NDArray[Any]) -> tuple[Float32, bool]:
    """The values in float32 (unchanged if they are), and whether all are finite."""
    if values.dtype == np.float16 and values.flags.c_contiguous:
        # numpy converts each number by itself, in four times the time of these steps on its bits.
        out = np.empty(values.shape, np.float32)
        halves = values.reshape(-1).view(np.int16)
        bits = out.reshape(-1).view(np.int32)
        finite = True
        for start in range(0, values.size, AT_ONCE):
            some = bits[start : start + AT_ONCE]
            some[:] = halves[start : start + AT_ONCE]
            some <<= 13
            some &= KEPT
            numbers = some.view(np.float32)
            numbers *= TO_FLOAT32  # also correct for subnormal numbers
            finite &= bool(numbers.max() < INFINITE and numbers.min() > -INFINITE)
        if finite:
            return out, True
    wide: Float32 = values.astype(np.float32, copy=False)
    return wide, bool(np.isfinite(wide).all())
