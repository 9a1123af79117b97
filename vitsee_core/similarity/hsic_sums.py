"""HSIC and CKA from sums over pairs of images, and these sums from Gram matrices.

With K~ the Gram matrix K without its diagonal, r its row sums and s its total, for n images

    HSIC_1(K, L) = [<K~, L~> - 2/(n-2) r_K . r_L + s_K s_L / ((n-1)(n-2))] / (n (n-3))

(Song et al. 2012; Nguyen et al. 2021; Walmer et al. 2023, D.1) is unbiased: independent
representations have 0 on average at any n. The biased HSIC_0 = tr(K H L H) / (n-1)^2 of Kornblith
et al. 2019 follows from the same sums and the diagonals. Both are inner products, hence bilinear:
HSIC of a sum of kernels is the sum of their HSICs.

    CKA(K, L) = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))

The sums are made of all representations at once, tile by tile: one tile of every matrix is in
memory at a time, (representations, t, t), and all pairs are one product (Nguyen et al. 2021).
Sub-blocks of a tile give the jackknife and the minibatches from the same numbers; features are not
read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from vitsee_core.runtime.lanes import lane_pool, n_lanes
from vitsee_core.similarity.whole_tiles import (
    OTHERS,
    TERMS,
    BlockSums,
    Labels,
    Matrix,
    Partition,
    Piece,
    WholeTiles,
    as_run,
    pieces,
)
from vitsee_core.statistics.jackknife import interval
from vitsee_core.types import Float
from vitsee_stores.manifest import abbreviate

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
# Multiplications of a tile below which threads cost more than they save.
FEW = 1 << 24


@dataclass(frozen=True)
class Hsic:
    """HSIC between representations R (rows) and C (cols)."""

    cross: Float  # (R, C)
    rows: Float  # (R,) of each row with itself
    cols: Float  # (C,) of each column with itself
    # the same with a leading axis: leaving out one block of images each, or one per repeat
    replicates: Hsic | None = None
    spread: str = (
        ""  # kind of the replicates: "jackknife", "slabs", "repeats", or "" for none
    )
    n_images: int = 0  # images counted
    notes: dict[str, Any] = field(default_factory=dict)  # for a sidecar


@dataclass(frozen=True)
class Similarity:
    """CKA and its spread, (R, C) each."""

    cka: Float
    std: Float  # the jackknife's standard error, or the standard deviation over repeats
    low: Float  # 95 % interval, NaN unless from a jackknife
    high: Float
    without: Float | None = (
        None  # (blocks, R, C) the jackknife's replicates, None unless from one
    )


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
    some = "every site" if len(lost) == len(names) > 1 else abbreviate(lost)
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
    return Similarity(
        value, *interval(value, np.moveaxis(each, 0, -1), (-1.0, 1.0)), each
    )


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
        d = self.diag_rows
        e = self.diag_cols
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
    s = a.sum(1)
    t = b.sum(1)
    if outer:
        return (a @ b.T, np.outer(s, t))
    return ((a * b).sum(1), s * t)


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
    cross = h.cross.copy()
    own_rows = h.rows.copy()
    own_cols = h.cols.copy()
    cross[..., list(rows), :] = np.nan
    cross[..., :, list(cols)] = np.nan
    own_rows[..., list(rows)] = np.nan
    own_cols[..., list(cols)] = np.nan
    return replace(h, cross=cross, rows=own_rows, cols=own_cols, replicates=again)


def stacked(parts: Sequence[Hsic]) -> Hsic:
    """Replicates along a new first axis."""
    cross, rows, cols = (
        np.stack([getattr(part, name) for part in parts])
        for name in ("cross", "rows", "cols")
    )
    return Hsic(cross, rows, cols)


@dataclass
class Totals:
    """Sums of one partition over pairs of different images that count."""

    products: Float  # (R, C) of all pairs
    own_rows: Float  # (R,)
    own_cols: Float  # (C,)
    # (R, n, G) row sums over each cell if crossing, else (R, n, 1) over the image's own cell
    rows: Float
    cols: Float  # likewise
    # with `crossing`, the same sums for the pairs with an image in a cell, by cell (leading axis)
    touching: tuple[Float, Float, Float] = field(
        default_factory=lambda: (np.zeros(0), np.zeros(0), np.zeros(0))
    )


def pair_totals(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    partitions: Sequence[Partition],
    *,
    device: str,
    tile: int,
) -> tuple[list[Totals], tuple[Float, Float]]:
    """The totals of each partition, and the diagonals, (R, n) and (C, n).

    Sums are added in the same order whatever the number of threads. Memory: see `bytes_each`.

    Tiles are not distributed over processes. To be added in this order, the sums of every piece
    would have to be sent, R C products and R row and column sums for each TERMS pairs of images:
    with 50 matrices of 16,384 images 0.9 GB, 1/30 of the matrices. Added per tile where they are
    computed, they are few, but differ in the last digits.

    Args:
        rows: R matrices of the same n images.
        cols: C more; None for the same as `rows`.
        partitions: of the n images.
        device: where to multiply: cpu, cuda or cuda:1.
        tile: side of the tiles.
    """
    n = rows[0].n
    n_rows = len(rows)
    matrices = list(rows) if cols is None else [*rows, *cols]
    first_col = 0 if cols is None else n_rows
    n_cols = len(matrices) - first_col
    side = min(tile, n)
    made = WholeTiles(device, matrices, n_rows, first_col, side)
    diagonals = np.empty((len(matrices), n))
    totals = [
        _Running(len(matrices), n_rows, n_cols, first_col, n, p) for p in partitions
    ]
    work = n_rows * n_cols * side * side
    lanes = 1 if work < FEW else n_lanes(max(1, side * side // TERMS))
    with lane_pool(lanes) as pool:
        edges = [slice(at, min(at + tile, n)) for at in range(0, n, tile)]
        for i, j in combinations_with_replacement(edges, 2):
            cut = [
                (total, piece)
                for total in totals
                for piece in pieces(total.partition, i, j)
            ]
            of_tile, sums = made.sums(i, j, [piece for _, piece in cut], pool)
            if of_tile is not None:
                diagonals[:, i] = of_tile
            for (total, piece), of_piece in zip(cut, sums, strict=True):
                total.add(piece, of_piece, i.start, j.start)
    return [r.finish() for r in totals], (diagonals[:n_rows], diagonals[first_col:])


def bytes_each(n: int, partitions: Sequence[Partition], tile: int) -> int:
    """Memory of `pair_totals` per matrix: a tile and as much again in pieces; row sums by cell, and
    eight more numbers per image."""
    side = min(tile, n)
    sums = sum(n * (p.n_cells if p.crossing else 1) for p in partitions) + 8 * n
    return 2 * side * side * 4 + 8 * sums


class _Running:
    """Running totals, in float64 on the host; products and own count pairs within a cell."""

    def __init__(
        self,
        n_all: int,
        n_rows: int,
        n_cols: int,
        first_col: int,
        n: int,
        partition: Partition,
    ) -> None:
        self.partition = partition
        self.n_rows = n_rows
        self.first_col = first_col
        cells = partition.n_cells if partition.crossing else 1
        self.products = np.zeros((n_rows, n_cols))
        self.own = np.zeros(n_all)
        self.sums = np.zeros((n_all, cells, n))
        self.touch_products = np.zeros((cells, n_rows, n_cols))
        self.touch_own = np.zeros((cells, n_all))

    def add(self, piece: Piece, sums: BlockSums, first_row: int, first_col: int) -> None:
        """Add a piece of a tile that begins at these images."""
        crossing = self.partition.crossing
        if piece.g == piece.h:
            self.products += sums.products
            self.own += sums.own
        at_g, at_h = (piece.g, piece.h) if crossing else (0, 0)
        if piece.h != OTHERS:  # else their sums over the rows say the same
            self.sums[:, at_h][:, as_run(first_row + piece.rows)] += sums.over_cols
        if sums.over_rows is not None:
            self.sums[:, at_g][:, as_run(first_col + piece.cols)] += sums.over_rows
        if crossing:
            for cell in {piece.g, piece.h} - {OTHERS}:
                self.touch_products[cell] += sums.products
                self.touch_own[cell] += sums.own

    def finish(self) -> Totals:
        r = slice(0, self.n_rows)
        c = slice(self.first_col, None)
        if self.partition.crossing:  # a pair of two cells touches both
            self.products = (self.products + self.touch_products.sum(0)) / 2
            self.own = (self.own + self.touch_own.sum(0)) / 2
        if self.first_col == 0:
            # Same order of sums as for different matrices, so that CKA with itself is 1.
            self.own = np.diagonal(self.products).copy()
            self.touch_own = np.diagonal(self.touch_products, axis1=1, axis2=2).copy()
        sums = self.sums.swapaxes(1, 2)
        return Totals(
            self.products,
            self.own[r],
            self.own[c],
            sums[r],
            sums[c],
            (self.touch_products, self.touch_own[:, r], self.touch_own[:, c]),
        )


def as_one_batch(total: Totals, diagonals: tuple[Float, Float]) -> PairSums:
    """All images as one batch."""
    sums = total.rows.sum(2), total.cols.sum(2)
    n = total.rows.shape[1]
    return PairSums(total.products, total.own_rows, total.own_cols, *sums, *diagonals, n)


def without_cell(whole: PairSums, total: Totals, labels: Labels, cell: int) -> PairSums:
    """`whole` without the images of one cell."""
    keep = labels != cell
    products, own_rows, own_cols = (part[cell] for part in total.touching)
    sums = (
        whole.sums_rows - total.rows[:, :, cell],
        whole.sums_cols - total.cols[:, :, cell],
    )
    for of_cell in sums:
        of_cell *= keep
    return PairSums(
        whole.products - products,
        whole.own_rows - own_rows,
        whole.own_cols - own_cols,
        *sums,
        *(whole.diag_rows * keep, whole.diag_cols * keep),
        int(keep.sum()),
    )


def sum_over_cells(total: Totals, partition: Partition, size: int) -> Hsic:
    """The sum over cells of `size` images each of the cells' HSIC_1."""
    cells = [partition.labels == g for g in range(partition.n_cells)]

    def value(products: Float, a: Float, b: Float, outer: bool) -> Float:
        s, t = (np.stack([x[:, cell].sum(1) for cell in cells], 1) for x in (a, b))
        q, st = (a @ b.T, s @ t.T) if outer else ((a * b).sum(1), (s * t).sum(1))
        numerator: Float = products - 2 / (size - 2) * q + st / ((size - 1) * (size - 2))
        return numerator / (size * (size - 3))

    a = total.rows[:, :, 0]
    b = total.cols[:, :, 0]
    return Hsic(
        value(total.products, a, b, True),
        self_hsic(value(total.own_rows, a, a, False), total.own_rows, size),
        self_hsic(value(total.own_cols, b, b, False), total.own_cols, size),
    )
