"""The tokens of a site as features: one vector an image, or one for each token.

For CNNs, whose stages differ in channels and resolution, Raghu et al. 2021 (appendix A) split a
feature map into patches, flatten each, and pool to the last stage's grid; patch sizes are not
given. The rule here (`match_last_stage`): patches of p x p cells with the largest p such that
channels x p^2 is at most the last stage's channels and p divides the grid without leaving fewer
cells than the last stage has, then adaptive average pooling to the last stage's grid. ResNet-50:
p = 2, 2, 1, 1. Where nothing is to be done (every ViT) the tokens stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.classes.labelled import choose_tokens, site_vectors
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

Float32 = NDArray[np.float32]

WORDS = ("cls", "mean", "mean-all", "first", "rest", "each", "all")


@dataclass(frozen=True)
class Token:
    """One probed vector: its name, and row and column where it is a cell of the grid."""

    name: str
    row: int | None = None
    col: int | None = None


@dataclass(frozen=True)
class Matching:
    """How a grid is brought to the last stage's: patches of `patch` cells, then `grid` cells."""

    patch: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class Features:
    """What a probe sees of one site.

    word: `each` gives a probe to every token, any other one to the image. matching: for CNNs.
    """

    store: Store
    site: SiteSpec
    word: str
    matching: Matching | None = None

    @cached_property
    def tokens(self) -> list[Token]:
        """One for each probe; for `all` those that are put side by side."""
        layout = self.site.layout
        if layout is None or self.word not in ("each", "all"):
            return [Token("" if layout is None else self.word, *(_cell(self.word) or ()))]
        prefix = [Token(name) for name in layout.prefix]
        if layout.grid is None:
            return prefix + [Token(str(i)) for i in range(layout.rows)]
        rows, cols = layout.grid if self.matching is None else self.matching.grid
        return prefix + [Token(f"{r},{c}", r, c) for r in range(rows) for c in range(cols)]

    @property
    def n_prefix(self) -> int:
        """How many of `tokens` are prefix tokens."""
        many = self.word in ("each", "all") and self.site.layout is not None
        return self.site.layout.n_prefix if many and self.site.layout is not None else 0

    @property
    def dim(self) -> int:
        """Channels of a token."""
        if self.site.layout is None:
            return math.prod(self.site.shape)
        return self.site.dim * (self.matching.patch**2 if self.matching else 1)

    @property
    def image_bytes(self) -> int:
        """What one image takes while it is read."""
        whole = self.word in ("each", "all", "mean-all", "rest") or self.matching is not None
        return 4 * (math.prod(self.site.shape) if whole else self.site.dim)

    def groups(self, n_tokens: int) -> list[slice]:
        """`tokens` in pieces of about `n_tokens`, cut where chunks of the store end as far as
        that is possible, so that each byte is read once."""
        n, n_prefix = len(self.tokens), self.n_prefix
        if n <= n_tokens:
            return [slice(0, n)]
        unit = self._chunk_tokens()
        step = max(1, n_tokens) if n_tokens < unit else n_tokens // unit * unit
        if step >= n:
            return [slice(0, n)]
        starts = [*range(n_prefix, n, step)]
        if n_prefix:
            starts[:1] = [0] if n_prefix <= step else [0, n_prefix]
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], n], strict=True)]

    def _chunk_tokens(self) -> int:
        """Tokens of the grid that are read together."""
        layout = self.site.layout
        if layout is None or layout.grid is None or self.matching is not None:
            return 1
        rows = self.store.array(f"acts/{self.site.name}/grid").spec.chunks[1]
        return rows * layout.grid[1]

    def read(self, slab: Slab, part: slice) -> Float32:
        """(images, tokens, dim) of the slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        values = self._load(slab, part)[slab.valid]
        if not np.isfinite(values).all():
            raise VitseeError(
                f"{slab.store.label} holds numbers in {self.site.name} that are not finite, in "
                f"rows {slab.rows.start} to {slab.rows.stop - 1} (look at it with vitsee validate)"
            )
        return values.astype(np.float32, copy=False)

    def _load(self, slab: Slab, part: slice) -> NDArray[np.floating]:
        store, site = slab.store, self.site.name
        if self.matching is not None:
            return self._matched(slab)[:, part]
        layout = self.site.layout
        if layout is None or self.word not in ("each", "all"):
            values = site_vectors(store, site, self.word)[slab.rows]
            return values.reshape(len(values), 1, -1)
        if layout.grid is None:
            return store.acts(site, "all")[slab.rows, part]
        pieces = []
        if part.start < layout.n_prefix:
            pieces.append(store.acts(site, "prefix")[slab.rows, part])
        if part.stop > layout.n_prefix:
            start, stop = max(part.start - layout.n_prefix, 0), part.stop - layout.n_prefix
            cols = layout.grid[1]
            first, last = start // cols, -(-stop // cols)
            cells = store.acts(site, "patches")[slab.rows, first:last]
            cells = cells.reshape(len(cells), -1, cells.shape[-1])
            pieces.append(cells[:, start - first * cols : stop - first * cols])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def _matched(self, slab: Slab) -> Float32:
        assert self.matching is not None
        maps = slab.store.acts(self.site.name, "patches")[slab.rows].astype(np.float32)
        cells = pooled(flatten_patches(maps, self.matching.patch), self.matching.grid)
        cells = cells.reshape(len(cells), -1, cells.shape[-1])
        if self.word in ("each", "all"):
            return cells
        if self.word in ("mean", "mean-all", "rest"):
            return np.asarray(cells[:, int(self.word == "rest") :].mean(axis=1, keepdims=True))
        row, col = _cell(self.word) or (0, 0)
        place = row * self.matching.grid[1] + col
        return cells[:, place : place + 1]


def _cell(word: str) -> tuple[int, int] | None:
    row, comma, col = word.partition(",")
    return (int(row), int(col)) if comma else None


def choose_features(
    store: Store, site: SiteSpec, word: str | None, *, match_last_stage: bool = False
) -> Features:
    """What a probe sees of a site.

    Raises:
        SiteError: the site has no such tokens.
        MissingInput: the site is kept pooled only, or the last stage is not stored.
    """
    layout = site.layout
    word = choose_tokens(store, site.name, word)
    if layout is None:
        return Features(store, site, "all")
    matching = None
    if match_last_stage and layout.grid is not None and not layout.n_prefix:
        matching = _matching(site, _last_stage(store))
    features = Features(store, site, word, matching)
    # Refused here rather than in the middle of the work.
    if word in ("each", "all"):
        store.acts(site.name, "all")
    elif matching is None or word == "cls":
        site_vectors(store, site.name, word)
    else:
        store.acts(site.name, "all")
        row, col = _cell(word) or (0, 0)
        nothing = word == "rest" and math.prod(matching.grid) == 1
        if nothing or row >= matching.grid[0] or col >= matching.grid[1]:
            grid = " x ".join(map(str, matching.grid))
            raise SiteError(f"{site.name}: the last stage's grid has {grid} cells, none at {word}")
    return features


def check_alike(ours: Features, theirs: Features) -> None:
    """Refuse a site that has other tokens or channels in the store that tests.

    Raises:
        StoreMismatch: names both.
    """
    a, b = ours.store.label, theirs.store.label
    if (ours.dim, len(ours.tokens)) != (theirs.dim, len(theirs.tokens)) or (
        [token.name for token in ours.tokens] != [token.name for token in theirs.tokens]
    ):
        shapes = f"{len(ours.tokens)} x {ours.dim} against {len(theirs.tokens)} x {theirs.dim}"
        raise StoreMismatch(
            f"{ours.site.name} differs between {a} and {b}: tokens x channels are {shapes} "
            "(extract both with the same --img-size)"
        )


def _last_stage(store: Store) -> SiteSpec:
    """The output of the model's last block."""
    outs = [s for s in store.sites.values() if "blocks" in s.groups and s.layout is not None]
    if not outs or outs[-1].rel_depth != 1 or outs[-1].layout is None:
        raise MissingInput(
            f"{store.label} lacks the output of the last block, whose grid and channels "
            "--match-last-stage needs; extract it with --sites blocks"
        )
    return outs[-1]


def _matching(site: SiteSpec, last: SiteSpec) -> Matching | None:
    assert site.layout is not None and last.layout is not None
    grid, target = site.layout.grid, last.layout.grid
    if grid is None or target is None:
        return None
    patch = largest_patch(site.dim, grid, last.dim, target)
    return None if patch == 1 and grid == target else Matching(patch, target)


def largest_patch(dim: int, grid: tuple[int, int], last_dim: int, last: tuple[int, int]) -> int:
    """The largest p with dim x p^2 <= last_dim that divides the grid and leaves at least as many
    cells each way as the last stage has; 1 if there is none."""
    (rows, cols), (last_rows, last_cols) = grid, last
    return max(
        (
            p
            for p in range(2, math.isqrt(max(last_dim // dim, 1)) + 1)
            if rows % p == cols % p == 0 and rows // p >= last_rows and cols // p >= last_cols
        ),
        default=1,
    )


def flatten_patches(maps: Float32, patch: int) -> Float32:
    """(images, rows / p, cols / p, p * p * channels) of maps (images, rows, cols, channels)."""
    n, rows, cols, dim = maps.shape
    cut = maps.reshape(n, rows // patch, patch, cols // patch, patch, dim)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows // patch, cols // patch, -1)


def pooled(maps: Float32, grid: tuple[int, int]) -> Float32:
    """Maps (images, rows, cols, channels) averaged to `grid` cells: cell i of k is the mean of the
    rows from floor(i n / k) to ceil((i + 1) n / k), as torch's adaptive average pooling."""
    out = maps
    for axis, k in zip((1, 2), grid, strict=True):
        n = out.shape[axis]
        if n == k:
            continue
        bins = [slice(i * n // k, -(-(i + 1) * n // k)) for i in range(k)]
        means = [out[(slice(None),) * axis + (b,)].mean(axis=axis, keepdims=True) for b in bins]
        out = np.concatenate(means, axis=axis)
    return out
