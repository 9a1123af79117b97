"""Measures of each token's own patch from maps of patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.similarity import Hsic, Similarity, centred_alignment, summarise
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.types import Float, Integers

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout


OWN_METRICS = ("own_cka", "own_rank", "own_rank_relative", "own_margin")
TOKEN_METRICS = (*OWN_METRICS, "peak_distance_px")
# A jackknife says nothing of ranks, places and counts: leaving some images out seldom changes them.
SMOOTH = ("own_cka", "own_margin")
SITE_METRICS = ("own_top1", *TOKEN_METRICS)


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
            return (own := _all_metrics(self, self.cka)), np.zeros((len(own), 0, own.shape[-1]))
        parts = zip(each.cross, each.rows, each.cols, strict=True)
        of_each = [_all_metrics(self, centred_alignment(*part)) for part in parts]
        return _all_metrics(self, self.cka), np.stack(of_each, 1)

    @property
    def n_replicates(self) -> int:
        """m, 0 without a spread."""
        return 0 if self.h.replicates is None else len(self.h.replicates.cross)

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


def known_or_less(cka: Float) -> Float:
    """The similarities with -inf in place of NaN, so that what is not known is never the
    largest."""
    return np.where(np.isnan(cka), -np.inf, cka)  # a fifth of the time of np.fmax


def own_patch(cka: Float, own: Integers | Sequence[int]) -> Float:
    """(metrics, ..., tokens): `OWN_METRICS` of maps (..., tokens, patches), `own` (tokens,) the own
    patches. NaN if a token has no value at its own patch, or at no other. Equally similar patches
    do not rank before each other."""
    places = np.broadcast_to(np.asarray(own), cka.shape[:-1])[..., np.newaxis]
    value = np.take_along_axis(cka, places, -1)
    others = known_or_less(cka)
    np.put_along_axis(others, places, -np.inf, -1)
    n_others = np.count_nonzero(others > -np.inf, axis=-1)
    best = others.max(-1)
    before = np.count_nonzero(others > value, axis=-1)
    value = value[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        metrics = np.stack([value, 1.0 + before, before / n_others, value - best])
    return np.where(np.isnan(value) | (n_others == 0), np.nan, metrics)


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
        names, metrics = SITE_METRICS, _over_tokens(metrics)[..., np.newaxis]
    metrics[[name not in SMOOTH for name in names]] = np.nan
    return metrics.transpose(2, 0, 1).reshape(-1, m)


def _all_metrics(maps: Maps, cka: Float) -> Float:
    """(TOKEN_METRICS, ..., tokens) of maps (..., tokens, patches)."""
    own = own_patch(cka, maps.cells)
    peak = known_or_less(cka).argmax(-1)
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
    """For (metrics, ...), like `similarity.hsic.summarise`: replicates, (m, metrics, ...), without
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
