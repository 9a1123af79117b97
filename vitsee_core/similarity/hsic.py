"""HSIC and CKA from sums over pairs of images.

With K~ the Gram matrix K without its diagonal, r its row sums and s its total, for n images

    HSIC_1(K, L) = [<K~, L~> - 2/(n-2) r_K . r_L + s_K s_L / ((n-1)(n-2))] / (n (n-3))

(Song et al. 2012; Nguyen et al. 2021; Walmer et al. 2023, D.1) is unbiased: independent
representations have 0 on average at any n. The biased HSIC_0 = tr(K H L H) / (n-1)^2 of Kornblith
et al. 2019 follows from the same sums and the diagonals. Both are inner products, hence bilinear:
HSIC of a sum of kernels is the sum of their HSICs.

    CKA(K, L) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitsee_core.statistics.jackknife import interval
from vitsee_core.types import Float
from vitsee_stores.manifest import few

# A self-HSIC below this part of its sum of squares is rounding. It is 0 where features are the same
# in all images but one, whose pairs cancel.
ROUNDING = 1e-6
JACKKNIFE = (
    "delete-a-block jackknife over images: std its standard error, low and high cka -+ t(0.975, "
    "blocks - 1) * std, cut at -1 and 1"
)
REPEATS = (
    "std over the repeats of the minibatch estimator: its own noise on these images, no sampling "
    "error; no interval"
)
SLABS = "as jackknife, a slab of images left out at a time"
METHODS = {"jackknife": JACKKNIFE, "repeats": REPEATS, "slabs": SLABS, "": "none"}


@dataclass(frozen=True)
class Hsic:
    """HSIC between representations R (rows) and C (cols)."""

    cross: Float  # (R, C)
    rows: Float  # (R,) of each row with itself
    cols: Float  # (C,) of each column with itself
    # the same with a leading axis: leaving out one block of images each, or one per repeat
    replicates: Hsic | None = None
    spread: str = ""  # kind of the replicates: "jackknife", "slabs", "repeats", or "" for none
    n_images: int = 0  # images counted
    notes: dict[str, Any] = field(default_factory=dict)  # for a sidecar


@dataclass(frozen=True)
class Similarity:
    """CKA and its spread, (R, C) each."""

    cka: Float
    std: Float  # the jackknife's standard error, or the standard deviation over repeats
    low: Float  # 95 % interval, NaN unless from a jackknife
    high: Float
    without: Float | None = None  # (blocks, R, C) the jackknife's replicates, None unless from one


def centred_alignment(cross: Float, rows: Float, cols: Float) -> Float:
    """CKA (..., R, C) from HSICs; NaN where a self-HSIC is not positive, as for constant features
    (and, for the unbiased estimator, by chance for noise of few images)."""
    own_rows, own_cols = (np.where(own > 0, own, np.nan) for own in (rows, cols))
    # One root of the product, so that a representation with itself gives exactly 1; in place, as
    # new memory takes longer than the arithmetic.
    found = own_rows[..., :, np.newaxis] * own_cols[..., np.newaxis, :]
    return np.divide(cross, np.sqrt(found, out=found), out=found)


def without_value(names: Sequence[str], own: Float) -> list[str]:
    """Remarks on representations that have no CKA with anything. own: (R,) the HSIC of each with
    itself."""
    lost = [name for name, value in zip(names, own, strict=True) if not value > 0]
    if not lost:
        return []
    some = "every site" if len(lost) == len(names) > 1 else few(lost)
    return [
        f"no CKA for {some}: the HSIC with itself is not positive (the features of all images, or "
        "of all but one, are the same, or noise of too few images)"
    ]


def summarise(h: Hsic) -> Similarity:
    """CKA with its spread.

    Over repeats of the minibatch estimator the value is the mean of their CKAs (Raghu et al. 2021,
    appendix A), each a ratio of means over its batches; otherwise it is that of all images.
    """
    value = centred_alignment(h.cross, h.rows, h.cols)
    nothing = np.full_like(value, np.nan)
    if h.replicates is None:
        return Similarity(value, nothing, nothing, nothing)
    each = centred_alignment(h.replicates.cross, h.replicates.rows, h.replicates.cols)
    if h.spread == "repeats":
        return Similarity(each.mean(0), each.std(0, ddof=1), nothing, nothing)
    return Similarity(value, *interval(value, np.moveaxis(each, 0, -1), (-1.0, 1.0)), each)


def assembled(grid: Sequence[Sequence[Sequence[Hsic]]]) -> list[Hsic]:
    """The values of sites compared group by group: grid[i][j] holds those of the i-th group of rows
    with the j-th group of columns."""
    if len(grid) == len(grid[0]) == 1:
        return list(grid[0][0])
    return [
        Hsic(
            np.block([[part[k].cross for part in line] for line in grid]),
            np.concatenate([line[0][k].rows for line in grid]),
            np.concatenate([part[k].cols for part in grid[0]]),
        )
        for k in range(len(grid[0][0]))
    ]


@dataclass(frozen=True)
class PairSums:
    """Sums over pairs of different images for every representation against every other."""

    products: Float  # (R, C) <K~, L~>
    own_rows: Float  # (R,) <K~, K~>
    own_cols: Float  # (C,)
    sums_rows: Float  # (R, n) row sums of K~
    sums_cols: Float  # (C, n)
    diag_rows: Float  # (R, n) diagonals
    diag_cols: Float  # (C, n)
    n_images: int  # how many of the n count; entries of the others are 0

    def unbiased(self) -> Hsic:
        """HSIC_1, for 4 images or more."""
        n = self.n_images

        def value(products: Float, a: Float, b: Float, outer: bool) -> Float:
            q, s = _joint(a, b, outer)
            q *= 2 / (n - 2)  # in place: there are as many as pairs of representations
            s /= (n - 1) * (n - 2)
            np.subtract(products, q, out=q)
            q += s
            q /= n * (n - 3)
            return q

        return self._all(value, self.sums_rows, self.sums_cols, self)

    def biased(self) -> Hsic:
        """HSIC_0, diagonals included, for 2 images or more."""
        n = self.n_images
        d, e = self.diag_rows, self.diag_cols
        whole = PairSums(
            self.products + d @ e.T,
            self.own_rows + (d * d).sum(1),
            self.own_cols + (e * e).sum(1),
            *(self.sums_rows, self.sums_cols, d, e, n),
        )

        def value(products: Float, a: Float, b: Float, outer: bool) -> Float:
            q, s = _joint(a, b, outer)
            centred: Float = products - 2 / n * q + s / n**2
            return centred / (n - 1) ** 2

        return self._all(value, self.sums_rows + d, self.sums_cols + e, whole)

    @staticmethod
    def _all(value: Any, a: Float, b: Float, sums: PairSums) -> Hsic:
        return Hsic(
            value(sums.products, a, b, True),
            self_hsic(value(sums.own_rows, a, a, False), sums.own_rows, sums.n_images),
            self_hsic(value(sums.own_cols, b, b, False), sums.own_cols, sums.n_images),
        )


def self_hsic(own: Float, products: Float, n: int) -> Float:
    """Self-HSICs `own`, 0 where they are rounding; products: <K~, K~> over n images."""
    return np.where(own * n**2 > ROUNDING * products, own, 0.0)


def _joint(a: Float, b: Float, outer: bool) -> tuple[Float, Float]:
    """r_K . r_L and s_K s_L of all pairs (outer), or of each with its own."""
    s, t = a.sum(1), b.sum(1)
    return (a @ b.T, np.outer(s, t)) if outer else ((a * b).sum(1), s * t)


def weighted_sum(parts: Sequence[Hsic], weights: Sequence[float] | None = None) -> Hsic:
    """The weighted sum of HSICs; weights sum to 1."""
    by = np.ones(len(parts)) if weights is None else np.asarray(weights, np.float64)

    def total(name: str) -> Float:
        return np.tensordot(by, np.stack([getattr(part, name) for part in parts]), 1)

    return Hsic(total("cross"), total("rows"), total("cols"))


def symmetric(h: Hsic) -> Hsic:
    """HSIC among the same representations, made symmetric to the last bit."""
    again = None if h.replicates is None else symmetric(h.replicates)
    return replace(h, cross=(h.cross + h.cross.swapaxes(-1, -2)) / 2, replicates=again)


def without(h: Hsic, rows: Sequence[int], cols: Sequence[int]) -> Hsic:
    """`h` with NaN for these rows and columns."""
    again = None if h.replicates is None else without(h.replicates, rows, cols)
    cross, own_rows, own_cols = h.cross.copy(), h.rows.copy(), h.cols.copy()
    cross[..., list(rows), :] = np.nan
    cross[..., :, list(cols)] = np.nan
    own_rows[..., list(rows)] = np.nan
    own_cols[..., list(cols)] = np.nan
    return replace(h, cross=cross, rows=own_rows, cols=own_cols, replicates=again)


def stacked(parts: Sequence[Hsic]) -> Hsic:
    """Replicates along a new first axis."""
    cross, rows, cols = (
        np.stack([getattr(part, name) for part in parts]) for name in ("cross", "rows", "cols")
    )
    return Hsic(cross, rows, cols)
