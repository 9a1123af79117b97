"""The maps of patches of a store's sites, and measures of each token's own patch from its map.

Sites are checked before any work. Those whose grids are alike have the same patches, and are
computed together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.features import choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import say_cost
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.similarity import (
    Estimator,
    Hsic,
    Similarity,
    centred_alignment,
    summarise,
)
from vitsee_core.similarity.on_the_fly import hsic_on_the_fly, multiplications, shapes
from vitsee_core.similarity.stacks import (
    PatchPixels,
    Stack,
    TokenStack,
    patch_shape,
    pixels_shape,
)
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.manifest import by_reason
from vitsee_stores.selectors import TokenSelection

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

OWN_METRICS = ("own_cka", "own_rank", "own_rank_relative", "own_margin")
TOKEN_METRICS = (*OWN_METRICS, "peak_distance_px")
# A jackknife says nothing about ranks, positions and counts, which leaving a few images out seldom
# changes.
SMOOTH = ("own_cka", "own_margin")
SITE_METRICS = ("own_top1", *TOKEN_METRICS)
WORDS = ("each", "cls")
# Tokens times patches of a site up to which all tokens are compared by default: grids of up to
# 38 x 38. A constant beside the memory, so that machines give the same table.
MAX_PAIRS = 1 << 21
JACKKNIFE_COPIES = 21  # the values of all images, and 20 replicates
DEFAULT_REPEATS = 20


@dataclass(frozen=True)
class Maps:
    """One site's maps.

    Attributes:
        h: HSICs of the site's tokens (rows) with the patches (cols), which go row by row of the
            grid.
        tokens: their names.
        cells: (tokens,) index of each token's own patch, -1 for a token without one.
        patch_px: (channels, rows, cols) of a patch.
    """

    h: Hsic
    site: SiteSpec
    tokens: list[str]
    cells: Integers
    layout: TokenLayout
    patch_px: tuple[int, ...]

    @cached_property
    def similarity(self) -> Similarity:
        """CKA and its spread; arrays are (tokens, patches)."""
        return summarise(self.h)

    @cached_property
    def cka(self) -> Float:
        """(tokens, patches) CKA, without computing a spread as `similarity` does."""
        if self.h.spread == "repeats":
            return self.replicates.mean(0)
        return centred_alignment(self.h.cross, self.h.rows, self.h.cols)

    @cached_property
    def replicates(self) -> Float:
        """(m, tokens, patches) CKA, m = 0 without a spread."""
        replicates = self.h.replicates
        if replicates is None:
            return np.zeros((0, *self.h.cross.shape))
        return centred_alignment(replicates.cross, replicates.rows, replicates.cols)

    @cached_property
    def metrics(self) -> tuple[Float, Float]:
        """`TOKEN_METRICS` of the maps (metrics, tokens), and of the m replicates (metrics, m,
        tokens)."""
        metrics = _token_metrics(self, self.cka)
        replicates = self.h.replicates
        if replicates is None:
            return metrics, np.zeros((len(metrics), 0, metrics.shape[-1]))
        # One replicate at a time: all of a large grid take much longer to go through memory than
        # to compute.
        buffer = np.empty_like(self.cka)
        metrics_of_replicates = []
        for cross, rows, cols in zip(
            replicates.cross, replicates.rows, replicates.cols, strict=True
        ):
            cka = centred_alignment(cross, rows, cols)
            metrics_of_replicates.append(_token_metrics(self, cka, buffer))
        return metrics, np.stack(metrics_of_replicates, 1)

    @property
    def n_replicates(self) -> int:
        """The number of replicates; 0 without a spread."""
        if self.h.replicates is None:
            return 0
        return len(self.h.replicates.cross)

    @property
    def n_cols(self) -> int:
        """The number of columns of the grid."""
        assert self.layout.grid is not None
        return self.layout.grid[1]


def every_nth(n: int, step: int) -> Integers:
    """Return the indices of n // step (at least one) of n rows, `step` apart.

    The first is as far from the border as the last, so that the border counts neither more nor less
    than its share.
    """
    count = max(1, n // step)
    span = (count - 1) * step  # from the first to the last
    first = (n - 1 - span) // 2
    return first + step * np.arange(count)


def nan_as_lowest(cka: Float, out: Float | None = None) -> Float:
    """Return a copy with -inf for NaN, so that a similarity without a value is never the largest.

    Args:
        cka: similarities.
        out: memory of that shape for the result, as new memory takes longer than the arithmetic.
    """
    if out is None:
        out = np.empty_like(cka)
    np.copyto(out, cka)
    np.copyto(out, -np.inf, where=np.isnan(cka))
    return out


def own_patch(cka: Float, own_patches: Integers | Sequence[int]) -> Float:
    """Return `OWN_METRICS`, how each token's own patch compares with the others.

    Args:
        cka: maps, (..., tokens, patches).
        own_patches: (tokens,) index of each token's own patch.

    Returns:
        (metrics, ..., tokens). NaN if a token has no value at its own patch, or at no other.
        Equally similar patches do not rank before each other.
    """
    return _own_patch_metrics(cka, nan_as_lowest(cka), own_patches)


def _own_patch_metrics(
    cka: Float, others: Float, own_patches: Integers | Sequence[int]
) -> Float:
    """Return what `own_patch` returns.

    Args:
        cka: maps, (..., tokens, patches).
        others: the maps as `nan_as_lowest` returns them; overwritten.
        own_patches: (tokens,) index of each token's own patch.
    """
    indices = np.broadcast_to(np.asarray(own_patches), cka.shape[:-1])[..., np.newaxis]
    value = np.take_along_axis(cka, indices, -1)  # (..., tokens, 1)
    np.put_along_axis(others, indices, -np.inf, -1)
    n_others = _count_true(others > -np.inf)
    most_similar_other = others.max(-1)
    n_before = _count_true(others > value)
    value = value[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        rank = 1.0 + n_before
        relative_rank = n_before / n_others
        margin = value - most_similar_other
    metrics = np.stack([value, rank, relative_rank, margin])  # as OWN_METRICS
    return np.where(np.isnan(value) | (n_others == 0), np.nan, metrics)


def _count_true(mask: Mask) -> Integers:
    """Return how many are true along the last axis."""
    # Row by row this takes a fifth of the time that numpy takes along an axis.
    rows = mask.reshape(-1, mask.shape[-1])
    return np.array([np.count_nonzero(row) for row in rows]).reshape(mask.shape[:-1])


def token_summary(maps: Maps) -> dict[str, Float]:
    """Return value, std, low and high of `TOKEN_METRICS`, (tokens, metrics) each."""
    value, replicates = maps.metrics
    numbers = _with_spread(value, replicates.swapaxes(0, 1), maps.h.spread, TOKEN_METRICS)
    return {name: array.T for name, array in numbers.items()}


def site_summary(maps: Maps) -> tuple[int, dict[str, Float]]:
    """Return the number of tokens that count, and value, std, low and high of `SITE_METRICS` over
    these tokens, (metrics,) each."""
    value, replicates = maps.metrics
    numbers = _with_spread(
        _mean_over_tokens(value),
        _mean_over_tokens(replicates).T,
        maps.h.spread,
        SITE_METRICS,
    )
    n_tokens = int((~np.isnan(value[0])).sum())
    return n_tokens, numbers


def replicates_of(maps: Maps, summary: str | None) -> Float | None:
    """Return the jackknife's replicates for the rows that `localize` makes of these maps.

    Args:
        maps: of one site.
        summary: None, rows are tokens by patches; "token", tokens by `TOKEN_METRICS`; "site",
            `SITE_METRICS`.

    Returns:
        (rows, blocks); NaN for metrics without a jackknife. None if there is none at all.
    """
    m = maps.n_replicates
    if m < 2 or maps.h.spread == "repeats":
        return None
    if summary is None:
        return np.moveaxis(maps.replicates, 0, -1).reshape(-1, m)
    metrics = maps.metrics[1].copy()  # (metrics, m, tokens)
    names: Sequence[str] = TOKEN_METRICS
    if summary == "site":
        names = SITE_METRICS
        metrics = _mean_over_tokens(metrics)[..., np.newaxis]
    metrics[[name not in SMOOTH for name in names]] = np.nan
    return metrics.transpose(2, 0, 1).reshape(-1, m)


def _token_metrics(maps: Maps, cka: Float, buffer: Float | None = None) -> Float:
    """Return `TOKEN_METRICS` of each token, (metrics, ..., tokens).

    Args:
        maps: of the site; says which patch is each token's own.
        cka: (..., tokens, patches) CKA of these maps, or of a replicate.
        buffer: memory of that shape, which is overwritten.
    """
    comparable = nan_as_lowest(cka, buffer)
    peak = comparable.argmax(-1)  # before the next line overwrites it
    own_metrics = _own_patch_metrics(cka, comparable, maps.cells)
    peak_row, peak_col = np.divmod(peak, maps.n_cols)
    own_row, own_col = np.divmod(maps.cells, maps.n_cols)
    stride_y, stride_x = maps.layout.stride_px or (np.nan, np.nan)
    distance = np.hypot((peak_row - own_row) * stride_y, (peak_col - own_col) * stride_x)
    distance = np.where(np.isnan(own_metrics[0]), np.nan, distance)
    return np.concatenate([own_metrics, distance[np.newaxis]])


def chance(maps: Maps) -> float:
    """Return the `own_top1` of tokens without information: 1 / (patches with a value)."""
    n_patches = int((~np.isnan(maps.cka)).any(0).sum())
    return 1 / n_patches if n_patches > 1 else np.nan


def _mean_over_tokens(metrics: Float) -> Float:
    """Return `SITE_METRICS`, means over the tokens with a value, (metrics, ...), from
    `TOKEN_METRICS` (metrics, ..., tokens)."""
    rank = metrics[TOKEN_METRICS.index("own_rank")]
    has_value = ~np.isnan(rank)
    n_tokens = has_value.sum(-1)
    # Without any token 0 / 0 is NaN, as it should be.
    with np.errstate(invalid="ignore", divide="ignore"):
        top1 = np.where(has_value, rank == 1, 0.0).sum(-1) / n_tokens
        means = np.where(has_value, metrics, 0.0).sum(-1) / n_tokens
    return np.concatenate([top1[np.newaxis], means])


def _with_spread(
    value: Float, replicates: Float, spread: str, metrics: Sequence[str]
) -> dict[str, Float]:
    """Return value, std, low and high, (metrics, ...) each; NaN if there is no spread.

    Args:
        value: (metrics, ...).
        replicates: (m, metrics, ...) values without one block of images each, or one per repeat.
        spread: "jackknife", "repeats" or "".
        metrics: their names.
    """
    missing = np.full_like(value, np.nan)
    m = len(replicates)
    if m < 2:
        return {"value": value, "std": missing, "low": missing, "high": missing}
    if spread == "repeats":
        std = replicates.std(0, ddof=1)
        return {"value": value, "std": std, "low": missing, "high": missing}
    std = standard_error(replicates, 0)
    std[[name not in SMOOTH for name in metrics]] = np.nan
    half = t_quantile(m - 1) * std
    return {"value": value, "std": std, "low": value - half, "high": value + half}


@dataclass(frozen=True)
class SiteTokens:
    """The selected tokens of a site."""

    site: SiteSpec
    layout: TokenLayout
    stacks: list[Stack]  # from which they are read
    names: list[str]
    cells: Integers  # (tokens,) their cells of the grid, -1 for the class token
    thinned: dict[str, Any] = field(default_factory=dict)  # which tokens, if not all

    def map_bytes(self, estimator: Estimator) -> int:
        """Return the bytes that its maps with their replicates take, in float64."""
        copies = JACKKNIFE_COPIES
        if estimator.kind == "minibatch":
            copies = (estimator.repeats or DEFAULT_REPEATS) + 1
        # HSICs, CKAs and the table's columns
        return 8 * 3 * copies * len(self.names) * self.layout.n_body


class SiteMaps:
    """The sites of a store and their chosen tokens, checked before any work.

    Args:
        store: with the features of all tokens.
        sites: of the store; those without a grid are left out.
        tokens: "each", "cls" or cells; none: each, thinned on fine grids.
        summary: "token", "site", or None for maps.

    Raises:
        SiteError: no site has a grid, or a site lacks a token.
        MissingInput: the tokens are not stored.
    """

    def __init__(
        self,
        store: Store,
        sites: Sequence[SiteSpec],
        tokens: Sequence[str],
        summary: str | None,
    ) -> None:
        words = tokens or ("each",)
        if (
            summary
        ):  # summaries are about own patches, which the class token does not have
            words = [word for word in words if word != "cls"]
        self.store = store
        self.may_thin = not tokens
        self.sites = [
            _select_tokens(store, site, words) for site in _with_grid(store, sites)
        ]

    def say_cost(self, n_images: int) -> None:
        """Log how long the comparison takes if that is more than seconds."""
        pixels = pixels_shape(self.store)
        total = 0.0
        if pixels is None:
            return
        for sites in self._groups_with_same_patches():
            layout = sites[0].layout
            tokens = shapes([stack for site in sites for stack in site.stacks])
            patches = layout.n_body, math.prod(patch_shape(layout, pixels))
            total += multiplications(tokens, [patches], n_images)
        say_cost(self.store.label, n_images, total)

    def _groups_with_same_patches(self) -> list[list[SiteTokens]]:
        """Return the sites grouped by their grids."""
        groups: dict[Any, list[SiteTokens]] = {}
        for site in self.sites:
            layout = site.layout
            key = layout.grid, layout.stride_px, layout.offset_px
            groups.setdefault(key, []).append(site)
        return list(groups.values())

    def maps(
        self,
        group: Sequence[int],
        *,
        pixels: Any,
        images: Integers,
        estimator: Estimator,
        seed: int,
        execution: Execution,
    ) -> list[Maps]:
        """Return the maps of some of the sites.

        Args:
            group: indices of the sites, whose patches are the same.
            pixels: of the images, as `input_pixels` returns them.
            images: rows of the store.
            estimator: of HSIC.
            seed: of minibatches and jackknife blocks.
            execution: resources.
        """
        sites = [self.sites[k] for k in group]
        patches = PatchPixels(self.store, pixels, sites[0].layout)
        h = hsic_on_the_fly(
            [stack for site in sites for stack in site.stacks],
            [patches],
            images,
            estimator=estimator,
            shuffled=self.store.shuffled,
            seed=seed,
            device=execution.device,
            memory=execution.budget - execution.budget // 4,
            progress=execution.progress,
        )
        maps_of_sites = []
        first = 0
        for site in sites:
            rows = slice(first, first + len(site.names))
            maps = Maps(
                h=_select_rows(h, rows),
                site=site.site,
                tokens=site.names,
                cells=site.cells,
                layout=site.layout,
                patch_px=patches.shape[1:],
            )
            maps_of_sites.append(maps)
            first = rows.stop
        return maps_of_sites

    def groups_in_memory(self, estimator: Estimator, memory: int) -> list[list[int]]:
        """Return groups of sites with the same patches, whose maps together fit the memory.

        Args:
            estimator: of HSIC; its replicates take memory, too.
            memory: in bytes, a quarter of which is for maps.

        Returns:
            The sites' indices in each group.
        """
        index = {site.site.name: k for k, site in enumerate(self.sites)}
        groups: list[list[int]] = []
        for sites in self._groups_with_same_patches():
            free = 0  # what is left for the current group
            for site in sites:
                size = site.map_bytes(estimator)
                if size > free:
                    groups.append([])
                    free = memory // 4
                groups[-1].append(index[site.site.name])
                free -= size
        return groups

    def thin(self, estimator: Estimator, memory: int) -> dict[str, Any]:
        """Keep only every s-th row and column of grids that are too fine, unless the user chose the
        tokens.

        s is the smallest for which tokens times patches are `MAX_PAIRS` at most and the maps fit
        into a quarter of the memory, in bytes.

        Returns:
            Site -> which of its tokens are left, for the sites that were thinned.
        """
        if self.may_thin:
            self.sites = [_thin_to_fit(site, estimator, memory) for site in self.sites]
        thinned = {site.site.name: site.thinned for site in self.sites if site.thinned}
        texts = {
            name: "{n_tokens} of its {of} tokens are compared, every {every}th row and column; "
            "--tokens each takes all".format(**tokens)
            for name, tokens in thinned.items()
        }
        for line in by_reason(texts):
            log.warning("%s: %s", self.store.label, line)
        return thinned

    def leave_out_large(self, estimator: Estimator, memory: int) -> dict[str, str]:
        """Leave out the sites whose maps do not fit a quarter of the memory.

        Returns:
            Site -> reason, for the sites that were left out.

        Raises:
            VitseeError: all are too large.
        """
        reasons: dict[str, str] = {}
        for site in self.sites:
            size = site.map_bytes(estimator)
            if size > memory // 4:
                reasons[site.site.name] = (
                    f"its maps of {len(site.names)} tokens take {human_bytes(size)}; "
                    "choose some with --tokens ROW,COL, or give --memory "
                    f"{math.ceil(4 * size / 1e6)}M"
                )
        remaining = [site for site in self.sites if site.site.name not in reasons]
        if not remaining:
            smallest = min(self.sites, key=lambda site: site.map_bytes(estimator))
            name = smallest.site.name
            raise VitseeError(f"{self.store.label}: {name}: {reasons[name]}")
        for line in by_reason(reasons):
            log.warning("%s: left out: %s", self.store.label, line)
        self.sites = remaining
        return reasons


def _select_tokens(store: Store, site: SiteSpec, words: Sequence[str]) -> SiteTokens:
    """Return the tokens of a site that --tokens selects, the class token first.

    Raises:
        SiteError: it has no such tokens.
        MissingInput: they are not stored.
    """
    layout = store.layout(site.name)
    assert layout is not None and layout.grid is not None
    selections = [TokenSelection.parse(word, WORDS) for word in words]
    distinct_cells: dict[int, None] = {}  # in the order of their first mention
    for selection in selections:
        if selection != "cls":
            members = selection.require(layout, f"{store.label}: {site.name}")
            # "each" names prefix tokens, too; here it means the grid.
            for token in members:
                if token >= layout.n_prefix:
                    distinct_cells[token - layout.n_prefix] = None
    grid_cells = list(distinct_cells)
    stacks: list[Stack] = []
    names: list[str] = []
    cells: list[int] = []
    if "cls" in selections:
        stacks.append(TokenStack(choose_features(store, site, "cls")))
        names.append("cls")
        cells.append(-1)
    if grid_cells:
        features = choose_features(store, site, "patches")
        stacks.append(TokenStack(features, np.array(grid_cells)))
        names += [features.tokens[cell].name for cell in grid_cells]
        cells += grid_cells
    return SiteTokens(site, layout, stacks, names, np.array(cells))


def _thin_to_fit(site: SiteTokens, estimator: Estimator, memory: int) -> SiteTokens:
    """Return the site with all tokens of its grid, or with those of every s-th row and column for
    the smallest s whose maps fit; with a single token if none does."""
    assert site.layout.grid is not None
    thinned = site
    for step in range(1, max(site.layout.grid) + 1):
        if step > 1:
            thinned = _every_nth_token(site, step)
        n_pairs = len(thinned.names) * site.layout.n_body
        if n_pairs <= MAX_PAIRS and thinned.map_bytes(estimator) <= memory // 4:
            break
    return thinned if len(thinned.names) < len(site.names) else site


def _every_nth_token(site: SiteTokens, step: int) -> SiteTokens:
    """Return a site that has all tokens of its grid with every `step`-th row and column of them."""
    assert site.layout.grid is not None
    n_rows, n_cols = site.layout.grid
    rows = every_nth(n_rows, step)
    cols = every_nth(n_cols, step)
    cells = (rows[:, np.newaxis] * n_cols + cols).ravel()
    grid = site.stacks[-1]
    assert isinstance(grid, TokenStack)
    return SiteTokens(
        site=site.site,
        layout=site.layout,
        stacks=[TokenStack(grid.features, cells)],
        names=[grid.features.tokens[cell].name for cell in cells],
        cells=cells,
        thinned={
            "every": step,
            "rows": rows.tolist(),
            "cols": cols.tolist(),
            "n_tokens": len(cells),
            "of": site.layout.n_body,
        },
    )


def _select_rows(h: Hsic, rows: slice) -> Hsic:
    """Return `h` and its replicates restricted to some of the rows."""
    replicates = None if h.replicates is None else _select_rows(h.replicates, rows)
    return replace(
        h, cross=h.cross[..., rows, :], rows=h.rows[..., rows], replicates=replicates
    )


def _with_grid(store: Store, sites: Sequence[SiteSpec]) -> list[SiteSpec]:
    """Return the sites with a grid of the image; others are logged.

    Raises:
        SiteError: no site has one.
    """
    with_grid = [s for s in sites if s.layout is not None and s.layout.grid is not None]
    others = ", ".join(s.name for s in sites if s not in with_grid)
    if not with_grid:
        raise SiteError(
            f"{store.label}: {others} has no tokens on a grid of the image; choose other "
            f"--sites (vitsee info {store.place} -f sites lists them)"
        )
    if others:
        log.warning("%s: left out, as no grid of the image: %s", store.label, others)
    return with_grid
