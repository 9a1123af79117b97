"""The maps of a store's sites (checked before any work, then computed together where possible), and
measures of each token's own patch from maps of patches."""

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
# A jackknife says nothing of ranks, places and counts: leaving some images out seldom changes them.
SMOOTH = ("own_cka", "own_margin")
SITE_METRICS = ("own_top1", *TOKEN_METRICS)
WORDS = ("each", "cls")
# Tokens times patches of a site of which all tokens are compared unless they are asked for: grids
# of up to 38 x 38. Not the memory alone, so that machines give the same table.
MOST_PAIRS = 1 << 21


@dataclass(frozen=True)
class Maps:
    """One site's maps.

    Attributes:
        h: HSICs of the site's tokens (rows) with the patches (cols), these row by row of the grid.
        cells: each token's place among the patches, -1 for none.
        patch_px: (channels, rows, cols).
    """

    h: Hsic
    site: SiteSpec
    tokens: list[str]
    cells: Integers
    layout: TokenLayout
    patch_px: tuple[int, ...]

    @cached_property
    def similarity(self) -> Similarity:
        """CKA and its spread, (tokens, patches) each."""
        return summarise(self.h)

    @cached_property
    def cka(self) -> Float:
        """(tokens, patches), as in `similarity`."""
        if self.h.spread == "repeats":
            return self.replicates.mean(0)
        return centred_alignment(self.h.cross, self.h.rows, self.h.cols)

    @cached_property
    def replicates(self) -> Float:
        """(m, tokens, patches) CKA, m = 0 without a spread."""
        if (each := self.h.replicates) is None:
            return np.zeros((0, *self.h.cross.shape))
        return centred_alignment(each.cross, each.rows, each.cols)

    @cached_property
    def metrics(self) -> tuple[Float, Float]:
        """`_all_metrics` of the maps, and of their replicates: of one after the other, as all
        replicates of a large grid take much longer to go through memory than to compute."""
        if (each := self.h.replicates) is None:
            return (own := _all_metrics(self, self.cka)), np.zeros(
                (len(own), 0, own.shape[-1])
            )
        parts = zip(each.cross, each.rows, each.cols, strict=True)
        room = np.empty_like(self.cka)
        of_each = [_all_metrics(self, centred_alignment(*part), room) for part in parts]
        return _all_metrics(self, self.cka), np.stack(of_each, 1)

    @property
    def n_replicates(self) -> int:
        """m, 0 without a spread."""
        if self.h.replicates is None:
            return 0
        return len(self.h.replicates.cross)

    @property
    def n_cols(self) -> int:
        """Columns of the grid."""
        assert self.layout.grid is not None
        return self.layout.grid[1]


def every_nth(n: int, every: int) -> Integers:
    """Every so many of n rows, n // every of them (at least one), as far from the first as from
    the last: the middle of each part, so that the border counts neither more nor less."""
    count = max(1, n // every)
    return (n - 1 - (count - 1) * every) // 2 + every * np.arange(count)


def known_or_less(cka: Float, out: Float | None = None) -> Float:
    """The similarities with -inf in place of NaN, so that what is not known is never the largest;
    in `out`, as new memory takes longer than the arithmetic."""
    found = np.empty_like(cka) if out is None else out
    np.copyto(found, cka)
    np.copyto(found, -np.inf, where=np.isnan(cka))
    return found


def own_patch(cka: Float, own: Integers | Sequence[int]) -> Float:
    """(metrics, ..., tokens): `OWN_METRICS` of maps (..., tokens, patches), `own` (tokens,) the own
    patches. NaN if a token has no value at its own patch, or at no other. Equally similar patches
    do not rank before each other."""
    return _own_patch(cka, known_or_less(cka), own)


def _own_patch(cka: Float, others: Float, own: Integers | Sequence[int]) -> Float:
    """`own_patch`, which overwrites others, the maps as `known_or_less` has them."""
    places = np.broadcast_to(np.asarray(own), cka.shape[:-1])[..., np.newaxis]
    value = np.take_along_axis(cka, places, -1)
    np.put_along_axis(others, places, -np.inf, -1)
    n_others = _count(others > -np.inf)
    best = others.max(-1)
    before = _count(others > value)
    value = value[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        metrics = np.stack([value, 1.0 + before, before / n_others, value - best])
    return np.where(np.isnan(value) | (n_others == 0), np.nan, metrics)


def _count(true: Mask) -> Integers:
    """How many are true, along the last axis: row by row, in a fifth of the time that numpy takes
    along an axis."""
    rows = true.reshape(-1, true.shape[-1])
    return np.array([np.count_nonzero(row) for row in rows]).reshape(true.shape[:-1])


def token_summary(maps: Maps) -> dict[str, Float]:
    """value, std, low, high, (tokens, TOKEN_METRICS) each."""
    value, replicates = maps.metrics
    numbers = _with_spread(value, replicates.swapaxes(0, 1), maps.h.spread, TOKEN_METRICS)
    return {name: array.T for name, array in numbers.items()}


def site_summary(maps: Maps) -> tuple[int, dict[str, Float]]:
    """Number of tokens that count, and value, std, low, high over them, (SITE_METRICS,) each."""
    value, replicates = maps.metrics
    over_tokens = _over_tokens(value), _over_tokens(replicates).T
    numbers = _with_spread(*over_tokens, maps.h.spread, SITE_METRICS)
    return int((~np.isnan(value[0])).sum()), numbers


def replicates_of(maps: Maps, summary: str | None) -> Float | None:
    """(rows, blocks) the jackknife's, of the rows that `localize` makes of these maps: tokens by
    patches, tokens by TOKEN_METRICS, or SITE_METRICS. NaN without a jackknife."""
    m = maps.n_replicates
    if m < 2 or maps.h.spread == "repeats":
        return None
    if summary is None:
        return np.moveaxis(maps.replicates, 0, -1).reshape(-1, m)
    metrics = maps.metrics[1].copy()  # (metrics, m, tokens)
    names: Sequence[str] = TOKEN_METRICS
    if summary == "site":
        names = SITE_METRICS
        metrics = _over_tokens(metrics)[..., np.newaxis]
    metrics[[name not in SMOOTH for name in names]] = np.nan
    return metrics.transpose(2, 0, 1).reshape(-1, m)


def _all_metrics(maps: Maps, cka: Float, room: Float | None = None) -> Float:
    """(TOKEN_METRICS, ..., tokens) of maps (..., tokens, patches). room: of that shape, written."""
    known = known_or_less(cka, room)
    peak = known.argmax(-1)
    own = _own_patch(cka, known, maps.cells)
    places = (np.divmod(at, maps.n_cols) for at in (peak, maps.cells))
    steps = maps.layout.stride_px or (np.nan, np.nan)
    between = [(a - b) * step for a, b, step in zip(*places, steps, strict=True)]
    distance = np.where(np.isnan(own[0]), np.nan, np.hypot(*between))
    return np.concatenate([own, distance[np.newaxis]])


def chance(maps: Maps) -> float:
    """`own_top1` of uninformative tokens."""
    n_patches = int((~np.isnan(maps.cka)).any(0).sum())
    return 1 / n_patches if n_patches > 1 else np.nan


def _over_tokens(metrics: Float) -> Float:
    """(SITE_METRICS, ...) of (TOKEN_METRICS, ..., tokens): means over the tokens with a value."""
    rank = metrics[TOKEN_METRICS.index("own_rank")]
    known = ~np.isnan(rank)
    n = known.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        first = np.where(known, rank == 1, 0.0).sum(-1) / n
        means = np.where(known, metrics, 0.0).sum(-1) / n
    return np.concatenate([first[np.newaxis], means])


def _with_spread(
    value: Float, replicates: Float, spread: str, metrics: Sequence[str]
) -> dict[str, Float]:
    """For (metrics, ...), like `similarity.summarise`: replicates, (m, metrics, ...), without
    a block of images each, or one per repeat."""
    nothing = np.full_like(value, np.nan)
    m = len(replicates)
    if m < 2:
        return {"value": value, "std": nothing, "low": nothing, "high": nothing}
    if spread == "repeats":
        std = replicates.std(0, ddof=1)
        return {"value": value, "std": std, "low": nothing, "high": nothing}
    std = standard_error(replicates, 0)
    std[[name not in SMOOTH for name in metrics]] = np.nan
    half = t_quantile(m - 1) * std
    return {"value": value, "std": std, "low": value - half, "high": value + half}


@dataclass(frozen=True)
class _Tokens:
    """The selected tokens of a site: the stack they are read from, their names, their cells of the
    grid (-1 for the class token)."""

    site: SiteSpec
    layout: TokenLayout
    stacks: list[Stack]
    names: list[str]
    cells: Integers
    thinned: dict[str, Any] = field(
        default_factory=dict
    )  # which tokens, where not as asked

    def map_bytes(self, how: Estimator) -> int:
        """Bytes of its maps and their replicates."""
        copies = 3 * 21 if how.kind != "minibatch" else 3 * ((how.repeats or 20) + 1)
        return 8 * copies * len(self.names) * self.layout.n_body


class SiteMaps:
    """The sites of a store, checked before any work."""

    def __init__(
        self,
        store: Store,
        sites: Sequence[SiteSpec],
        tokens: Sequence[str],
        summary: str | None,
    ) -> None:
        words = [word for word in tokens or ("each",) if word != "cls" or not summary]
        self.store = store
        self.thins = not tokens
        self.sites = [_tokens(store, site, words) for site in _with_grid(store, sites)]

    def say_cost(self, n_images: int) -> None:
        pixels = pixels_shape(self.store)
        total = 0.0
        if pixels is None:
            return
        for sites in self._alike():
            layout = sites[0].layout
            tokens = shapes([stack for site in sites for stack in site.stacks])
            patches = layout.n_body, math.prod(patch_shape(layout, pixels))
            total += multiplications(tokens, [patches], n_images)
        say_cost(self.store.label, n_images, total)

    def _alike(self) -> list[list[_Tokens]]:
        """The sites, grouped by their patches."""
        groups: dict[Any, list[_Tokens]] = {}
        for site in self.sites:
            layout = site.layout
            key = layout.grid, layout.stride_px, layout.offset_px
            groups.setdefault(key, []).append(site)
        return list(groups.values())

    def maps(
        self,
        together: Sequence[int],
        pixels: Any,
        images: Integers,
        how: Estimator,
        seed: int,
        execution: Execution,
    ) -> list[Maps]:
        """The maps of some of the sites, which share their patches."""
        sites = [self.sites[k] for k in together]
        patches = PatchPixels(self.store, pixels, sites[0].layout)
        h = hsic_on_the_fly(
            [stack for site in sites for stack in site.stacks],
            [patches],
            images,
            estimator=how,
            shuffled=self.store.shuffled,
            seed=seed,
            device=execution.device,
            memory=execution.budget - execution.budget // 4,
            progress=execution.progress,
        )
        of_sites = []
        at = 0
        for site in sites:
            of_site = slice(at, at + len(site.names))
            about = site.site, site.names, site.cells, site.layout, patches.shape[1:]
            of_sites.append(Maps(_some_rows(h, of_site), *about))
            at = of_site.stop
        return of_sites

    def together(self, how: Estimator, memory: int) -> list[list[int]]:
        """Groups of sites with the same patches, as many as have room for their maps and
        replicates."""
        place = {site.site.name: k for k, site in enumerate(self.sites)}
        together: list[list[int]] = []
        for alike in self._alike():
            left = 0
            for site in alike:
                size = site.map_bytes(how)
                if size > left:
                    together.append([])
                    left = memory // 4
                together[-1].append(place[site.site.name])
                left -= size
        return together

    def thin(self, how: Estimator, memory: int) -> dict[str, Any]:
        """Without tokens asked for, compare only every s-th row and column of grids that are too
        fine, s the least for which tokens times patches are `MOST_PAIRS` at most and the maps fit
        into a quarter of the memory; returns which of what was thinned."""
        for k, site in enumerate(self.sites if self.thins else ()):
            assert site.layout.grid is not None
            whole = len(site.names)
            for every in range(1, max(site.layout.grid) + 1):
                if every > 1:
                    site = _every(site, every)
                n_pairs = len(site.names) * site.layout.n_body
                if n_pairs <= MOST_PAIRS and site.map_bytes(how) <= memory // 4:
                    break
            if len(site.names) < whole:
                self.sites[k] = site
        found = {site.site.name: site.thinned for site in self.sites if site.thinned}
        texts = {
            name: "{n_tokens} of its {of} tokens are compared, every {every}th row and column; "
            "--tokens each takes all".format(**which)
            for name, which in found.items()
        }
        for line in by_reason(texts):
            log.warning("%s: %s", self.store.label, line)
        return found

    def leave_out_large(self, how: Estimator, memory: int) -> dict[str, str]:
        """Leave out the sites whose maps exceed the memory; returns the reason for each. Raises
        VitseeError: all are too large."""
        reasons = {
            site.site.name: (
                f"its maps of {len(site.names)} tokens take {human_bytes(size)}; choose some with "
                f"--tokens ROW,COL, or give --memory {math.ceil(4 * size / 1e6)}M"
            )
            for site in self.sites
            if (size := site.map_bytes(how)) > memory // 4
        }
        kept = [site for site in self.sites if site.site.name not in reasons]
        if not kept:
            smallest = min(self.sites, key=lambda site: site.map_bytes(how)).site.name
            raise VitseeError(f"{self.store.label}: {smallest}: {reasons[smallest]}")
        for line in by_reason(reasons):
            log.warning("%s: left out: %s", self.store.label, line)
        self.sites = kept
        return reasons


def _tokens(store: Store, site: SiteSpec, words: Sequence[str]) -> _Tokens:
    """The tokens of a site that --tokens selects, the class token first.

    Raises:
        SiteError: it has no such tokens.
        MissingInput: they are not stored.
    """
    layout = store.layout(site.name)
    assert layout is not None and layout.grid is not None
    chosen = [TokenSelection.parse(word, WORDS) for word in words]
    cells: dict[int, None] = {}
    for selection in chosen:
        if selection != "cls":  # `each` is of the grid here
            members = selection.require(layout, f"{store.label}: {site.name}")
            cells |= dict.fromkeys(
                i - layout.n_prefix for i in members if i >= layout.n_prefix
            )
    stacks: list[Stack] = []
    names: list[str] = []
    if "cls" in chosen:
        stacks.append(TokenStack(choose_features(store, site, "cls")))
        names.append("cls")
    if cells:
        grid = TokenStack(choose_features(store, site, "patches"), np.array(list(cells)))
        stacks.append(grid)
        names += [grid.features.tokens[cell].name for cell in cells]
    places = [-1] * ("cls" in chosen) + list(cells)
    return _Tokens(site, layout, stacks, names, np.array(places))


def _every(site: _Tokens, every: int) -> _Tokens:
    """A site with all tokens of its grid, reduced to those of every `every`-th row and column."""
    assert site.layout.grid is not None
    rows, cols = (every_nth(n, every) for n in site.layout.grid)
    cells = (rows[:, np.newaxis] * site.layout.grid[1] + cols).ravel()
    grid = site.stacks[-1]
    assert isinstance(grid, TokenStack)
    names = [grid.features.tokens[cell].name for cell in cells]
    which = {
        "every": every,
        "rows": rows.tolist(),
        "cols": cols.tolist(),
        "n_tokens": len(cells),
        "of": site.layout.n_body,
    }
    return _Tokens(
        site.site, site.layout, [TokenStack(grid.features, cells)], names, cells, which
    )


def _some_rows(h: Hsic, rows: slice) -> Hsic:
    """`h` restricted to some of the rows."""
    inner = h.replicates and _some_rows(h.replicates, rows)
    return replace(
        h, cross=h.cross[..., rows, :], rows=h.rows[..., rows], replicates=inner
    )


def _with_grid(store: Store, sites: Sequence[SiteSpec]) -> list[SiteSpec]:
    """The sites with a grid; others are logged. Raises SiteError: none of them."""
    kept = [s for s in sites if s.layout is not None and s.layout.grid is not None]
    others = ", ".join(s.name for s in sites if s not in kept)
    if not kept:
        raise SiteError(
            f"{store.label}: {others} has no tokens on a grid of the image; choose other --sites "
            f"(vitsee info {store.place} -f sites lists them)"
        )
    if others:
        log.warning("%s: left out, as no grid of the image: %s", store.label, others)
    return kept
