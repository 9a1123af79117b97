"""Rows about the principal axes of a layer: shares of variance, agreement between halves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vitsee_core.runtime.streaming import thread_map
from vitsee_core.statistics.covariance import CovarianceSums, PrincipalAxes, principal_axes, total
from vitsee_core.statistics.jackknife import SHARE, jackknife_cells
from vitsee_core.types import Mask

OF_AXES = ("explained_variance", "axis_agreement")


def axis_rows(
    sums: Sequence[CovarianceSums], axes: PrincipalAxes, n_images: int, jobs: int
) -> list[dict[str, Any]]:
    """For each axis its share of the variance, with the jackknife's interval and the value of two
    halves; then for each the absolute cosine between the halves' axes. sums: of each block of
    images, axes and n_images: of all of them."""
    m, k = len(sums), len(axes.shares)
    even = np.arange(m) % 2 == 0
    subsets = [even, ~even, *(np.arange(m) != b for b in range(m))]
    first, second, *left = thread_map(jobs)(partial(_axes_of, sums, k), subsets)
    shares: list[dict[str, Any]] = []
    agreements: list[dict[str, Any]] = []
    for i in range(k):
        about = {"component": i + 1, "n_examples": axes.n}
        without = np.array([np.nan if one is None else one.shares[i] for one in left])
        a, b = (np.nan if one is None else float(one.shares[i]) for one in (first, second))
        cells = jackknife_cells(
            float(axes.shares[i]), without if m > 1 else without[:0], n_images, SHARE
        )
        shares.append({**about, "metric": OF_AXES[0], "half_a": a, "half_b": b, **cells})
        agreement = np.nan
        if first is not None and second is not None and np.isfinite(axes.shares[i]):
            agreement = abs(float(first.axes[i] @ second.axes[i]))
        numbers = {"value": agreement, "n_images": n_images}
        agreements.append({**about, "metric": OF_AXES[1], **numbers})
    return shares + agreements


def _axes_of(sums: Sequence[CovarianceSums], k: int, among: Mask) -> PrincipalAxes | None:
    """Axes of the blocks in `among`; None if these have too few patches."""
    chosen = [part for part, use in zip(sums, among, strict=True) if use]
    if sum(part.n for part in chosen) < 2:
        return None
    return principal_axes(total(chosen), k)
