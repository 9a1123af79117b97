"""The maps of patches of one site, and measures of each token's own patch from its map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.similarity import Hsic, Similarity, centred_alignment, summarise
from vitsee_core.statistics.jackknife import standard_error
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.types import Float, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec
    from vitsee_stores.layout import TokenLayout

OWN_METRICS = ("own_cka", "own_rank", "own_rank_relative", "own_margin")
TOKEN_METRICS = (*OWN_METRICS, "peak_distance_px")
# A jackknife says nothing about ranks, positions and counts, which leaving a few images out seldom
# changes.
SMOOTH_METRICS = ("own_cka", "own_margin")
SITE_METRICS = ("own_top1", *TOKEN_METRICS)


@dataclass(frozen=True)
class Maps:
    """One site's maps.

    Attributes:
        h: HSICs of the site's tokens (rows) with the patches (cols), which go row by row of the
            grid.
        site: the site.
        tokens: names of the tokens.
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
        """Return CKA and its spread; arrays are (tokens, patches)."""
        return summarise(self.h)

    @cached_property
    def cka(self) -> Float:
        """Return CKA, (tokens, patches), without computing a spread as `similarity` does."""
        if self.h.spread == "repeats":
            return self.replicates.mean(0)
        return centred_alignment(self.h.cross, self.h.rows, self.h.cols)

    @cached_property
    def replicates(self) -> Float:
        """Return CKA of each replicate, (m, tokens, patches), m = 0 without a spread."""
        replicates = self.h.replicates
        if replicates is None:
            return np.zeros((0, *self.h.cross.shape))
        return centred_alignment(replicates.cross, replicates.rows, replicates.cols)

    @cached_property
    def metrics(self) -> tuple[Float, Float]:
        """Return `TOKEN_METRICS` of the maps and of the m replicates.

        The first is (metrics, tokens), the second (metrics, m, tokens).
        """
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
            # (tokens, patches)
            cka = centred_alignment(cross, rows, cols)
            metrics_of_replicates.append(_token_metrics(self, cka, buffer))
        return metrics, np.stack(metrics_of_replicates, 1)

    @property
    def n_replicates(self) -> int:
        """Return the number of replicates; 0 without a spread."""
        if self.h.replicates is None:
            return 0
        return len(self.h.replicates.cross)

    @property
    def n_cols(self) -> int:
        """Return the number of columns of the grid."""
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
    # Indices along the last axis: (..., tokens, 1).
    indices = np.broadcast_to(np.asarray(own_patches), cka.shape[:-1])[..., np.newaxis]
    value = np.take_along_axis(cka, indices, -1)  # (..., tokens, 1)
    np.put_along_axis(others, indices, -np.inf, -1)  # the own patch is not another
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
    # From (metrics, m, tokens) to replicates first: (m, metrics, tokens).
    value, replicates = maps.metrics
    numbers = _with_spread(value, replicates.swapaxes(0, 1), maps.h.spread, TOKEN_METRICS)
    return {name: array.T for name, array in numbers.items()}


def site_summary(maps: Maps) -> tuple[int, dict[str, Float]]:
    """Return the number of tokens with a value, and the means over them.

    The means are value, std, low and high of `SITE_METRICS`, (metrics,) each.
    """
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
    metrics[[name not in SMOOTH_METRICS for name in names]] = np.nan
    # Rows of the table are tokens, and metrics within them: (tokens * metrics, m).
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
    """Return `SITE_METRICS`, means over the tokens with a value: (metrics, ...).

    Args:
        metrics: `TOKEN_METRICS`, (metrics, ..., tokens).
    """
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
    std[[name not in SMOOTH_METRICS for name in metrics]] = np.nan
    half = t_quantile(m - 1) * std
    return {"value": value, "std": std, "low": value - half, "high": value + half}
