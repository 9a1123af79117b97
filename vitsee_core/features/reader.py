"""The only reader of features: it knows the arrays of a store in which a site's tokens are.

    features = choose_features(store, site, "cls")
    features.vectors(mask)              (images, dim) float32, slab by slab
    features.blocks(mask, tokens)       (images, tokens, dim) float32, slab by slab
    features.load(rows, tokens)         (rows, tokens, dim) of consecutive rows, in the stored type
    features.matrix()                   a matrix, images by all features of each, read in strips

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
    """The conversion of a CNN stage's grid to that of the last stage (Raghu et al. 2021).

    Attributes:
        patch: patches of patch x patch cells are flattened into one cell.
        grid: these cells are then averaged to so many rows and columns.
    """

    patch: int
    grid: tuple[int, int]

    def apply(self, maps: Float32) -> Float32:
        """Return (images, cells, channels) of maps (images, rows, cols, channels).

        Clips (clips, times, rows, cols, channels) are converted frame by frame; their cells are
        those of all times.
        """
        frames = maps.reshape(-1, *maps.shape[-3:])
        cells = adaptive_average(flatten_patches(frames, self.patch), self.grid)
        return cells.reshape(len(maps), -1, cells.shape[-1])


def last_stage_matching(store: Store, site: SiteSpec) -> Matching | None:
    """Return a site's conversion to the last stage's grid, or None if it needs none.

    Raises:
        MissingInput: the store lacks the output of the last block.
    """
    layout = site.layout
    if layout is None or layout.grid is None or layout.n_prefix:
        return None
    block_outputs = [
        spec
        for spec in store.sites.values()
        if "blocks" in spec.groups and spec.layout is not None
    ]
    last = block_outputs[-1] if block_outputs else None
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
    dim: int, grid: tuple[int, int], last_dim: int, last_grid: tuple[int, int]
) -> int:
    """Return the side p, in cells, of the patches into which a grid is cut.

    It is the largest p with dim x p^2 <= last_dim that divides the grid and leaves at least as many
    rows and columns as the last stage has; 1 if no larger one does.
    """
    rows, cols = grid
    last_rows, last_cols = last_grid
    max_patch = math.isqrt(max(last_dim // dim, 1))
    for patch in range(max_patch, 1, -1):
        divides = rows % patch == 0 and cols % patch == 0
        if divides and rows // patch >= last_rows and cols // patch >= last_cols:
            return patch
    return 1


def flatten_patches(maps: Float32, patch: int) -> Float32:
    """Return (images, rows / p, cols / p, p * p * channels) of (images, rows, cols, channels)."""
    n, rows, cols, dim = maps.shape
    # (images, patch rows, p, patch cols, p, channels)
    patches = maps.reshape(n, rows // patch, patch, cols // patch, patch, dim)
    # (images, patch rows, patch cols, p, p, channels)
    patches = patches.transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(n, rows // patch, cols // patch, -1)


def adaptive_average(maps: Float32, grid: tuple[int, int]) -> Float32:
    """Return maps (images, rows, cols, channels) averaged to (images, *grid, channels).

    Cell i of k is the mean of the rows from floor(i n / k) to ceil((i + 1) n / k), as in
    torch.nn.AdaptiveAvgPool2d. NumPy computes it, since this module does not import torch.
    """
    n_rows, n_cols = grid
    return _average_axis(_average_axis(maps, 1, n_rows), 2, n_cols)


def _average_axis(maps: Float32, axis: int, n_cells: int) -> Float32:
    """Return maps with an axis averaged to `n_cells` bins, which may overlap by an entry."""
    n = maps.shape[axis]
    if n == n_cells:
        return maps
    means = []
    selection = [slice(None)] * maps.ndim
    for i in range(n_cells):
        stop = -(-(i + 1) * n // n_cells)  # rounded up
        selection[axis] = slice(i * n // n_cells, stop)
        means.append(maps[tuple(selection)].mean(axis=axis, keepdims=True))
    return np.concatenate(means, axis=axis)


@dataclass(frozen=True)
class SiteFeatures:
    """The features that an analysis reads of a site: the chosen tokens of each image.

    A site without tokens is read as it is, flattened to a vector for each image.

    Attributes:
        store: the store.
        site: a stored site, not an alias.
        selection: the chosen tokens.
        matching: for CNNs, the conversion to the last stage's grid, if it was asked for.
        partial: whether images may be smaller than their canvas, see `Store.acts`.
    """

    store: Store
    site: SiteSpec
    selection: TokenSelection
    matching: Matching | None = None
    partial: bool = False

    @cached_property
    def arrays(self) -> list[LazyArray]:
        """The stored arrays with the tokens, in the tokens' order.

        Raises:
            SiteError: the site has no such tokens.
            MissingInput: only means of the site's tokens are stored.
        """
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
        store.acts(name, "all", partial=self.partial)  # raises if only means are stored
        arrays: list[LazyArray] = []
        if layout.prefix:
            arrays.append(store.array(f"acts/{name}/prefix"))
        body = "rows" if layout.grid is None else "grid"
        arrays.append(store.array(f"acts/{name}/{body}"))
        return arrays

    @property
    def layout(self) -> TokenLayout | None:
        """The layout of the tokens as they are read, so after a conversion."""
        if self.matching is None or self.site.layout is None:
            return self.site.layout
        return dataclasses.replace(self.site.layout, grid=self.matching.grid)

    @property
    def has_tokens(self) -> bool:
        """Whether an image has, or may have, several vectors: one for each token."""
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
        """The number of prefix tokens (class, registers) among the chosen tokens."""
        layout = self.layout
        if layout is None or not self.has_tokens:
            return 0
        members = self.selection.members(layout)
        return max(0, min(layout.n_prefix, members.stop) - members.start)

    @property
    def dim(self) -> int:
        """The number of features of a token, or of an image if the site has no tokens."""
        if self.site.layout is None:
            return math.prod(self.site.shape)
        if self.matching is None:
            return self.site.dim
        return self.site.dim * self.matching.patch**2

    @property
    def slab_bytes(self) -> int:
        """Bytes of memory of a slab while it is read: at most as stored and in float32."""
        reads_all_tokens = (
            self.has_tokens
            or self.selection in ("mean-all", "rest")
            or self.matching is not None
        )
        n_values = math.prod(self.site.shape) if reads_all_tokens else self.site.dim
        # Two copies of 4 bytes.
        return 2 * 4 * n_values * self.store.plan.slab

    def groups(self, n_tokens: int) -> list[slice]:
        """Return ranges of `tokens` of about `n_tokens` each.

        They are cut at chunk boundaries as far as possible, so that each byte is read once.
        """
        n = len(self.tokens)
        n_prefix = self.n_prefix
        if n <= n_tokens:
            return [slice(0, n)]
        chunk_tokens = self._chunk_tokens()
        if n_tokens < chunk_tokens:
            step = max(1, n_tokens)
        else:
            step = n_tokens // chunk_tokens * chunk_tokens
        if step >= n:
            return [slice(0, n)]
        starts = [*range(n_prefix, n, step)]
        if n_prefix:
            if n_prefix <= step:  # few prefix tokens go with the first tokens of the grid
                starts[0] = 0
            else:
                starts.insert(0, 0)
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    def _chunk_tokens(self) -> int:
        """Return the number of grid tokens in a chunk, which are read together."""
        layout = self.site.layout
        if layout is None or layout.grid is None or self.matching is not None:
            return 1
        rows = self.store.array(f"acts/{self.site.name}/grid").spec.chunks[1]
        return rows * math.prod(layout.body[1:])

    def load(self, rows: slice, tokens: slice) -> NDArray[np.floating]:
        """Return (rows, tokens, dim) of consecutive rows of the store, in the stored type.

        Args:
            rows: a range of the store's rows.
            tokens: a range of `tokens`, with both ends.
        """
        if self.matching is not None:
            return self._load_matched(rows)[:, tokens]
        if not self.has_tokens:
            values = self.arrays[0][rows]
            return values.reshape(len(values), 1, -1)
        pieces = []
        first_token = 0  # of the array, among all chosen tokens
        for array in self.arrays:
            n = math.prod(array.shape[1:-1])
            start = max(tokens.start - first_token, 0)
            stop = min(tokens.stop - first_token, n)
            if start < stop:
                pieces.append(_load_tokens(array, rows, start, stop))
            first_token += n
        if len(pieces) == 1:
            return pieces[0]  # without a copy
        return np.concatenate(pieces, axis=1)

    def _load_matched(self, rows: slice) -> Float32:
        """Return (rows, tokens, dim) after the conversion to the last stage's grid."""
        assert self.matching is not None and self.layout is not None
        cells = self.matching.apply(self.arrays[0][rows].astype(np.float32))
        members = self.selection.members(self.layout)
        chosen = cells[:, members.start : members.stop]
        if self.selection.is_mean:
            return chosen.mean(axis=1, keepdims=True)
        return chosen

    def of_slab(self, slab: Slab, tokens: slice) -> Float32:
        """Return (images, tokens, dim) of a slab's valid images in float32.

        Raises:
            VitseeError: a number is not finite.
        """
        values = self.load(slab.rows, tokens)
        if not slab.valid.all():
            values = values[slab.valid]
        float32_values, all_finite = widened(values)
        if not all_finite:
            raise not_finite(slab.store, self.site.name, slab.rows)
        return float32_values

    def blocks(
        self,
        mask: Mask,
        tokens: slice | None = None,
        *,
        jobs: int = 1,
        memory: int | None = None,
    ) -> Iterator[Float32]:
        """Yield (images of a slab, tokens, dim) of the images in `mask`, in the store's order.

        Args:
            mask: (images,) which rows of the store are read.
            tokens: a range of `tokens`, by default all.
            jobs: the number of slabs that are read at a time.
            memory: bytes to stay within, for which fewer slabs are read at a time.

        Raises:
            VitseeError: a number is not finite.
        """
        if tokens is None:
            tokens = slice(0, len(self.tokens))
        if memory is not None:
            jobs = max(1, min(jobs, memory // self.slab_bytes))
        work = partial(self.of_slab, tokens=tokens)
        yield from each_slab(self.store, work, rows=Rows(mask, 0, ""), jobs=jobs)

    def vectors(
        self, mask: Mask, *, jobs: int = 1, memory: int | None = None
    ) -> Iterator[Float32]:
        """Yield (images of a slab, dim) of features with a single vector for each image."""
        for block in self.blocks(mask, slice(0, 1), jobs=jobs, memory=memory):
            yield block[:, 0]

    def matrix(self, channels: slice | None = None) -> FeatureMatrix:
        """Return the matrix of images by all features of each image, which is read in strips.

        Args:
            channels: only these channels of each token, by default all.

        Raises:
            SiteError: the site has no such tokens.
            MissingInput: only means of the site's tokens are stored.
        """
        key = [self.site.name]
        key.append("all" if self.site.kind == "vector" else str(self.selection))
        if channels is not None:
            low, high, _ = channels.indices(self.arrays[0].shape[-1])
            key.append(f"channels {low}-{high}")
        blocks = []
        for array in self.arrays:
            box = [slice(0, n) for n in array.shape[1:]]
            if channels is not None:
                box[-1] = slice(low, high)
            blocks.append((array, tuple(box)))
        return FeatureMatrix(self.store, key, blocks)


def _load_tokens(array: LazyArray, rows: slice, start: int, stop: int) -> NDArray[Any]:
    """Return (rows, tokens, dim) of the tokens from `start` to `stop` of an array.

    The tokens of a grid (rows, grid rows, grid cols, dim) are counted row by row, those of clips
    (rows, times, grid rows, grid cols, dim) frame by frame.
    """
    if array.ndim == 3:
        return array[rows, start:stop]
    # Tokens behind each index of the first axis: a row of the grid, or a frame. Only the indices
    # that the range touches are read.
    n_behind = math.prod(array.shape[2:-1])
    first = start // n_behind
    last = -(-stop // n_behind)  # rounded up
    cells = array[rows, first:last]
    cells = cells.reshape(len(cells), -1, cells.shape[-1])
    return cells[:, start - first * n_behind : stop - first * n_behind]


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
    """Return the features that an analysis reads of a site.

    Errors are raised here rather than during the work.

    Args:
        store: an open store.
        site: a site of the store, or an alias.
        tokens: by default `cls` if the site has a class token, else `mean` (over patches); a site
            without tokens is read as it is.
        among: stores that it is compared with; the default is then the same in all of them.
        one_vector: refuse tokens that give several vectors for an image.
        match_last_stage: convert a CNN's grids and channels to the last stage's, see `Matching`.
        partial: whether images may be smaller than their canvas, see `Store.acts`.

    Raises:
        SiteError: the site has no such tokens, or several where one vector is needed; or images do
            not fill their canvas.
        MissingInput: only means of the site's tokens are stored, or the last stage is not stored.
    """
    site = store.site(site.name)
    layout = site.layout
    if layout is None:
        features = SiteFeatures(store, site, TokenSelection.parse("all"))
    else:
        default = default_token((store, *among), site.name)
        matching = last_stage_matching(store, site) if match_last_stage else None
        features = SiteFeatures(
            store=store,
            site=site,
            selection=TokenSelection.parse(tokens or default),
            matching=matching,
            partial=partial,
        )
    if one_vector and features.has_tokens:
        raise SiteError(
            f"--tokens {features.selection} is several tokens of {site.name}; expected one vector"
        )
    _ = features.arrays  # raises if they are not stored
    return features


def check_alike(train: SiteFeatures, test: SiteFeatures) -> None:
    """Raise StoreMismatch if a site has other tokens or channels in the test store."""
    train_tokens = [token.name for token in train.tokens]
    test_tokens = [token.name for token in test.tokens]
    if train.dim != test.dim or train_tokens != test_tokens:
        shapes = (
            f"{len(train_tokens)} x {train.dim} against {len(test_tokens)} x {test.dim}"
        )
        raise StoreMismatch(
            f"{train.site.name} differs between {train.store.label} and {test.store.label}: tokens "
            f"x channels are {shapes} (extract both with the same --img-size)"
        )


# ---------------- float16 to float32
#
# A float16 has a sign, 5 bits of exponent (bias 15) and 10 bits of mantissa; a float32 a sign, 8
# bits of exponent (bias 127) and 23 bits of mantissa. Sign-extended to 32 bits and shifted left by
# 13, the bits of a float16 are those of a float32 that is too small by 2^(127 - 15) = 2^112, once
# the copies of the sign are cleared from the upper three bits of the exponent.

BLOCK_VALUES = 1 << 15  # numbers that stay in the processor's cache during the steps
CLEAR_SIGN_COPIES = np.int32(-0x70000001)  # 0x8fffffff: all bits but these three
EXPONENT_CORRECTION = np.float32(2.0**112)
# Exponent 31 of a float16 marks infinity and NaN; it becomes the value 2^16 or more.
FIRST_NOT_FINITE = np.float32(2.0**16)


def widened(values: NDArray[Any]) -> tuple[Float32, bool]:
    """Return the values in float32, and whether all are finite.

    Values that are float32 already are returned without a copy.
    """
    if values.dtype == np.float16 and values.flags.c_contiguous:
        # NumPy converts number by number and takes four times as long as these steps on the bits.
        out = np.empty(values.shape, np.float32)
        halves = values.reshape(-1).view(np.int16)
        out_bits = out.reshape(-1).view(np.int32)
        all_finite = True
        for start in range(0, values.size, BLOCK_VALUES):
            bits = out_bits[start : start + BLOCK_VALUES]
            bits[:] = halves[start : start + BLOCK_VALUES]  # sign-extended
            bits <<= 13
            bits &= CLEAR_SIGN_COPIES
            numbers = bits.view(np.float32)
            # A multiplication and not an addition to the exponent: right for subnormals too.
            numbers *= EXPONENT_CORRECTION
            largest = numbers.max()
            smallest = numbers.min()
            all_finite &= bool(
                largest < FIRST_NOT_FINITE and smallest > -FIRST_NOT_FINITE
            )
        if all_finite:
            return out, True
        # Infinity and NaN are not right after these steps, so NumPy converts them below.
    converted: Float32 = values.astype(np.float32, copy=False)
    return converted, bool(np.isfinite(converted).all())
