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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

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

# A self-HSIC below this fraction of its sum of squares is rounding. Its exact value is 0 where
# features are the same in all images but one, whose pairs cancel.
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
MIN_THREADED_WORK = 1 << 24


@dataclass(frozen=True)
class Hsic:
    """HSIC between R representations (rows) and C representations (columns)."""

    cross: Float  # (R, C)
    rows: Float  # (R,) HSIC of each row with itself
    cols: Float  # (C,) HSIC of each column with itself
    # The same arrays with a leading axis: without one block of images each, or one per repeat.
    replicates: Hsic | None = None
    # Kind of the replicates: "jackknife", "slabs", "repeats", or "" if there are none.
    spread: str = ""
    n_images: int = 0  # images counted
    notes: dict[str, Any] = field(default_factory=dict)  # for a table's sidecar


@dataclass(frozen=True)
class Similarity:
    """CKA between R rows and C columns with its spread; arrays are (R, C)."""

    cka: Float
    std: Float  # the jackknife's standard error, or the standard deviation over repeats
    low: Float  # 95 % interval, NaN unless from a jackknife
    high: Float
    # (blocks, R, C) CKA without each block of images, None unless from a jackknife
    without: Float | None = None

    def cells(self, i: int, j: int) -> dict[str, float]:
        """Return the table cells of row i with column j: value, std, low, high."""
        return {
            "value": float(self.cka[i, j]),
            "std": float(self.std[i, j]),
            "low": float(self.low[i, j]),
            "high": float(self.high[i, j]),
        }

    def replicates_of(self, i: int, j: int) -> Float | None:
        """Return row i's CKA with column j without each block of images, (blocks,), or None."""
        if self.without is None:
            return None
        return self.without[:, i, j]


def centred_alignment(cross: Float, rows: Float, cols: Float) -> Float:
    """Return CKA from HSICs (Kornblith et al. 2019, Eq. 4).

    It is NaN where a self-HSIC is not positive, as for constant features (and, for the unbiased
    estimator, by chance for noise of few images).

    Args:
        cross: (..., R, C) HSIC of rows with columns.
        rows: (..., R) HSIC of each row with itself.
        cols: (..., C) HSIC of each column with itself.
    """
    self_rows = np.where(rows > 0, rows, np.nan)
    self_cols = np.where(cols > 0, cols, np.nan)
    # One root of the product, so that a representation with itself gives exactly 1; in place, as
    # new memory takes longer than the arithmetic.
    out = self_rows[..., :, np.newaxis] * self_cols[..., np.newaxis, :]
    np.sqrt(out, out=out)
    return np.divide(cross, out, out=out)


def without_value(names: Sequence[str], self_hsics: Float) -> list[str]:
    """Return a remark on the representations that have no CKA with anything, if there are any.

    Args:
        names: what the remark calls each of R representations.
        self_hsics: (R,) the HSIC of each with itself.
    """
    undefined = [
        name
        for name, value in zip(names, self_hsics, strict=True)
        if not value > 0  # NaN, too
    ]
    if not undefined:
        return []
    sites = abbreviate(undefined)
    if len(undefined) == len(names) > 1:
        sites = "every site"
    return [
        f"no CKA for {sites}: the HSIC with itself is not positive (the features of all images, or "
        "of all but one, are the same, or too small beside those of one for float32; or noise of "
        "too few images)"
    ]


def summarise(h: Hsic) -> Similarity:
    """Return CKA with its spread.

    Over repeats of the minibatch estimator the value is the mean of their CKAs (Raghu et al. 2021,
    appendix A), each a ratio of means over its batches; otherwise it is that of all images.
    """
    value = centred_alignment(h.cross, h.rows, h.cols)
    missing = np.full_like(value, np.nan)
    if h.replicates is None:
        return Similarity(value, std=missing, low=missing, high=missing)
    replicates = centred_alignment(
        h.replicates.cross, h.replicates.rows, h.replicates.cols
    )  # (replicates, R, C)
    if h.spread == "repeats":
        return Similarity(
            replicates.mean(0), std=replicates.std(0, ddof=1), low=missing, high=missing
        )
    std, low, high = interval(value, np.moveaxis(replicates, 0, -1), (-1.0, 1.0))
    return Similarity(value, std=std, low=low, high=high, without=replicates)


def assemble_groups(grid: Sequence[Sequence[Sequence[Hsic]]]) -> list[Hsic]:
    """Return the HSICs of all rows with all columns, from those of groups of rows and columns.

    Args:
        grid: grid[i][j] holds the results of the i-th group of rows with the j-th group of columns,
            as many for each.
    """
    if len(grid) == len(grid[0]) == 1:
        return list(grid[0][0])
    n_results = len(grid[0][0])
    return [_assemble_result(grid, k) for k in range(n_results)]


def _assemble_result(grid: Sequence[Sequence[Sequence[Hsic]]], k: int) -> Hsic:
    """Return the k-th HSIC of all groups as one."""
    blocks = [[results[k].cross for results in grid_row] for grid_row in grid]
    return Hsic(
        cross=np.block(blocks),
        rows=np.concatenate([grid_row[0][k].rows for grid_row in grid]),
        cols=np.concatenate([results[k].cols for results in grid[0]]),
    )


@dataclass(frozen=True)
class PairSums:
    """Sums over pairs of different images for every representation against every other.

    K~ is a Gram matrix without its diagonal.
    """

    products: Float  # (R, C) <K~, L~>
    self_rows: Float  # (R,) <K~, K~>
    self_cols: Float  # (C,)
    sums_rows: Float  # (R, n) row sums of K~
    sums_cols: Float  # (C, n)
    diag_rows: Float  # (R, n) diagonals
    diag_cols: Float  # (C, n)
    n_images: int  # how many of the n count; entries of the others are 0

    def unbiased(self) -> Hsic:
        """Return HSIC_1, for 4 images or more."""
        n = self.n_images

        def hsic_1(products: Float, row_sums: Float, totals: Float) -> Float:
            """Return [<K~, L~> - 2/(n-2) r_K . r_L + s_K s_L / ((n-1)(n-2))] / (n (n-3))."""
            # In place: these arrays have an entry for each pair of representations.
            row_sums *= 2 / (n - 2)
            totals /= (n - 1) * (n - 2)
            np.subtract(products, row_sums, out=row_sums)
            row_sums += totals
            row_sums /= n * (n - 3)
            return row_sums

        return _hsic_of_sums(
            hsic_1,
            products=self.products,
            self_rows=self.self_rows,
            self_cols=self.self_cols,
            sums_rows=self.sums_rows,
            sums_cols=self.sums_cols,
            n_images=n,
        )

    def biased(self) -> Hsic:
        """Return HSIC_0, diagonals included, for 2 images or more."""
        n = self.n_images

        def hsic_0(products: Float, row_sums: Float, totals: Float) -> Float:
            """Return tr(K H L H) / (n-1)^2 = [<K, L> - 2/n r_K . r_L + s_K s_L / n^2] / (n-1)^2."""
            centred: Float = products - 2 / n * row_sums + totals / n**2
            return centred / (n - 1) ** 2

        # K = K~ + its diagonal, in products and in row sums
        return _hsic_of_sums(
            hsic_0,
            products=self.products + self.diag_rows @ self.diag_cols.T,
            self_rows=self.self_rows + (self.diag_rows * self.diag_rows).sum(1),
            self_cols=self.self_cols + (self.diag_cols * self.diag_cols).sum(1),
            sums_rows=self.sums_rows + self.diag_rows,
            sums_cols=self.sums_cols + self.diag_cols,
            n_images=n,
        )


def _hsic_of_sums(
    estimate: Callable[[Float, Float, Float], Float],
    *,
    products: Float,
    self_rows: Float,
    self_cols: Float,
    sums_rows: Float,
    sums_cols: Float,
    n_images: int,
) -> Hsic:
    """Return the HSIC that an estimator's formula gives for all pairs and for each with itself.

    Args:
        estimate: <K, L>, r_K . r_L and s_K s_L -> HSIC(K, L); it may overwrite the last two.
        products: (R, C) <K, L>.
        self_rows: (R,) <K, K>.
        self_cols: (C,) <L, L>.
        sums_rows: (R, n) row sums r_K.
        sums_cols: (C, n) row sums r_L.
        n_images: how many of the n images count.
    """
    total_rows = sums_rows.sum(1)
    total_cols = sums_cols.sum(1)
    cross = estimate(products, sums_rows @ sums_cols.T, np.outer(total_rows, total_cols))
    rows = estimate(self_rows, (sums_rows * sums_rows).sum(1), total_rows * total_rows)
    cols = estimate(self_cols, (sums_cols * sums_cols).sum(1), total_cols * total_cols)
    return Hsic(
        cross=cross,
        rows=zero_if_rounding(rows, self_rows, n_images),
        cols=zero_if_rounding(cols, self_cols, n_images),
    )


def zero_if_rounding(self_hsics: Float, products: Float, n: int) -> Float:
    """Return self-HSICs with 0 for those that are rounding.

    Args:
        self_hsics: (R,) HSIC(K, K).
        products: (R,) <K~, K~> over n images.
        n: images.
    """
    return np.where(self_hsics * n**2 > ROUNDING * products, self_hsics, 0.0)


def weighted_sum(parts: Sequence[Hsic], weights: Sequence[float] | None = None) -> Hsic:
    """Return the weighted sum of HSICs; without weights the plain sum."""
    if weights is None:
        weights = [1.0] * len(parts)
    factors = np.asarray(weights, np.float64)

    def total(arrays: Sequence[Float]) -> Float:
        """Return the sum of factor times array."""
        return np.tensordot(factors, np.stack(arrays), 1)

    return Hsic(
        cross=total([h.cross for h in parts]),
        rows=total([h.rows for h in parts]),
        cols=total([h.cols for h in parts]),
    )


def symmetric(h: Hsic) -> Hsic:
    """Return HSIC among the same representations, made symmetric to the last bit."""
    replicates = None if h.replicates is None else symmetric(h.replicates)
    cross = (h.cross + h.cross.swapaxes(-1, -2)) / 2
    return replace(h, cross=cross, replicates=replicates)


def set_to_nan(h: Hsic, rows: Sequence[int], cols: Sequence[int]) -> Hsic:
    """Return a copy of `h`, and of its replicates, with NaN for these rows and columns."""
    replicates = None if h.replicates is None else set_to_nan(h.replicates, rows, cols)
    cross = h.cross.copy()
    self_rows = h.rows.copy()
    self_cols = h.cols.copy()
    cross[..., list(rows), :] = np.nan
    cross[..., :, list(cols)] = np.nan
    self_rows[..., list(rows)] = np.nan
    self_cols[..., list(cols)] = np.nan
    return replace(h, cross=cross, rows=self_rows, cols=self_cols, replicates=replicates)


def stacked(parts: Sequence[Hsic]) -> Hsic:
    """Return replicates as one `Hsic`, whose arrays have them along a new first axis."""
    return Hsic(
        cross=np.stack([h.cross for h in parts]),
        rows=np.stack([h.rows for h in parts]),
        cols=np.stack([h.cols for h in parts]),
    )


class CellProducts(NamedTuple):
    """Products over the pairs of images with at least one in a cell, for each of G cells."""

    products: Float  # (G, R, C) <K~, L~>
    self_rows: Float  # (G, R) <K~, K~>
    self_cols: Float  # (G, C)


@dataclass
class Totals:
    """Sums over pairs of different images for one partition of the images into G cells.

    If the partition is crossing, all pairs count, else those within a cell.
    """

    products: Float  # (R, C) <K~, L~>
    self_rows: Float  # (R,) <K~, K~>
    self_cols: Float  # (C,)
    # Row sums: (R, n, G) over each cell if crossing, else (R, n, 1) over the image's own cell.
    sums_rows: Float
    sums_cols: Float  # likewise for the columns
    touching: CellProducts | None  # None unless crossing


def pair_totals(
    rows: Sequence[Matrix],
    cols: Sequence[Matrix] | None,
    partitions: Sequence[Partition],
    *,
    device: str,
    tile: int,
) -> tuple[list[Totals], tuple[Float, Float]]:
    """Return the totals of each partition, and the diagonals, (R, n) and (C, n).

    Sums are added in the same order whatever the number of threads. Each matrix takes the memory of
    `bytes_per_matrix`.

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
    tiles = WholeTiles(device, matrices, n_rows, first_col, side)
    diagonals = np.empty((len(matrices), n))
    running = [
        _RunningTotals(
            n_all=len(matrices),
            n_rows=n_rows,
            n_cols=n_cols,
            first_col=first_col,
            n=n,
            partition=partition,
        )
        for partition in partitions
    ]
    # Multiplications of a tile: each pair of matrices, each pair of images.
    work = n_rows * n_cols * side * side
    lanes = 1 if work < MIN_THREADED_WORK else n_lanes(max(1, side * side // TERMS))
    with lane_pool(lanes) as pool:
        edges = [slice(at, min(at + tile, n)) for at in range(0, n, tile)]
        # Tiles of the upper triangle: a pair of images is read once, and counts both ways.
        for i, j in combinations_with_replacement(edges, 2):
            # The cells of the partitions cut the tile into pieces.
            cut = [
                (total, piece)
                for total in running
                for piece in pieces(total.partition, i, j)
            ]
            tile_diagonals, sums = tiles.sums(i, j, [piece for _, piece in cut], pool)
            if tile_diagonals is not None:
                diagonals[:, i] = tile_diagonals
            for (total, piece), piece_sums in zip(cut, sums, strict=True):
                total.add(piece, piece_sums, i.start, j.start)
    totals = [total.finish() for total in running]
    return totals, (diagonals[:n_rows], diagonals[first_col:])


def bytes_per_matrix(n: int, partitions: Sequence[Partition], tile: int) -> int:
    """Return the memory that `pair_totals` takes per matrix, in bytes: a tile and as much again in
    pieces (float32); row sums by cell, and eight more numbers per image (float64)."""
    side = min(tile, n)
    sums = sum(n * (p.n_cells if p.crossing else 1) for p in partitions) + 8 * n
    return 2 * side * side * 4 + 8 * sums


class _RunningTotals:
    """Running totals of one partition, in float64 on the host.

    Args:
        n_all: matrices, rows and columns together.
        n_rows: how many of them are rows; they come first.
        n_cols: how many are columns.
        first_col: the first column's index among all; 0 if columns are the rows.
        n: images.
        partition: of the images into cells.
    """

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
        # Of pairs within a cell
        self.within_products = np.zeros((n_rows, n_cols))
        self.within_self = np.zeros(n_all)
        self.sums = np.zeros((n_all, cells, n))
        # Of pairs with an image in a cell
        self.touch_products = np.zeros((cells, n_rows, n_cols))
        self.touch_self = np.zeros((cells, n_all))

    def add(self, piece: Piece, sums: BlockSums, first_row: int, first_col: int) -> None:
        """Add the sums of a piece of a tile whose first row and column are these images."""
        crossing = self.partition.crossing
        if piece.g == piece.h:
            self.within_products += sums.products
            self.within_self += sums.self_products
        # Without crossing there is a single array of row sums: over the image's own cell.
        cell_of_rows = piece.g if crossing else 0
        cell_of_cols = piece.h if crossing else 0
        if piece.h != OTHERS:  # else their sums over the rows say the same
            images = as_run(first_row + piece.rows)
            self.sums[:, cell_of_cols][:, images] += sums.over_cols
        if sums.over_rows is not None:
            images = as_run(first_col + piece.cols)
            self.sums[:, cell_of_rows][:, images] += sums.over_rows
        if crossing:
            for cell in {piece.g, piece.h} - {OTHERS}:
                self.touch_products[cell] += sums.products
                self.touch_self[cell] += sums.self_products

    def finish(self) -> Totals:
        """Return the totals, once all pieces of all tiles are added."""
        products = self.within_products
        self_products = self.within_self
        touch_self = self.touch_self
        if self.partition.crossing:
            # Pairs of two cells touch both, and pairs within a cell touch one and count again.
            products = (products + self.touch_products.sum(0)) / 2
            self_products = (self_products + touch_self.sum(0)) / 2
        if self.first_col == 0:
            # Same order of sums as for different matrices, so that CKA with itself is 1.
            self_products = np.diagonal(products).copy()
            touch_self = np.diagonal(self.touch_products, axis1=1, axis2=2).copy()
        touching = None
        if self.partition.crossing:
            touching = CellProducts(
                products=self.touch_products,
                self_rows=touch_self[:, : self.n_rows],
                self_cols=touch_self[:, self.first_col :],
            )
        sums = self.sums.swapaxes(1, 2)  # (matrices, n, cells)
        return Totals(
            products=products,
            self_rows=self_products[: self.n_rows],
            self_cols=self_products[self.first_col :],
            sums_rows=sums[: self.n_rows],
            sums_cols=sums[self.first_col :],
            touching=touching,
        )


def as_one_batch(total: Totals, diagonals: tuple[Float, Float]) -> PairSums:
    """Return the sums over pairs of all images.

    Args:
        total: totals of a crossing partition, or of one cell.
        diagonals: (R, n) and (C, n).
    """
    diag_rows, diag_cols = diagonals
    return PairSums(
        products=total.products,
        self_rows=total.self_rows,
        self_cols=total.self_cols,
        sums_rows=total.sums_rows.sum(2),
        sums_cols=total.sums_cols.sum(2),
        diag_rows=diag_rows,
        diag_cols=diag_cols,
        n_images=total.sums_rows.shape[1],
    )


def without_cell(
    all_sums: PairSums, total: Totals, labels: Labels, cell: int
) -> PairSums:
    """Return the sums over pairs of the images outside of one cell.

    Args:
        all_sums: sums over pairs of all images.
        total: totals of a crossing partition.
        labels: (n,) each image's cell.
        cell: the cell to leave out.
    """
    assert total.touching is not None
    remaining = labels != cell
    # Row sums lose the cell's columns, and its rows are set to 0.
    sums_rows = all_sums.sums_rows - total.sums_rows[:, :, cell]
    sums_rows *= remaining
    sums_cols = all_sums.sums_cols - total.sums_cols[:, :, cell]
    sums_cols *= remaining
    return PairSums(
        products=all_sums.products - total.touching.products[cell],
        self_rows=all_sums.self_rows - total.touching.self_rows[cell],
        self_cols=all_sums.self_cols - total.touching.self_cols[cell],
        sums_rows=sums_rows,
        sums_cols=sums_cols,
        diag_rows=all_sums.diag_rows * remaining,
        diag_cols=all_sums.diag_cols * remaining,
        n_images=int(remaining.sum()),
    )


def sum_over_cells(total: Totals, partition: Partition, size: int) -> Hsic:
    """Return the sum over cells of the cells' HSIC_1.

    Args:
        total: totals of a partition that is not crossing.
        partition: its cells, of `size` images each.
        size: images in a cell.
    """
    row_sums_a = total.sums_rows[:, :, 0]  # (R, n)
    row_sums_b = total.sums_cols[:, :, 0]  # (C, n)
    cells = [partition.labels == g for g in range(partition.n_cells)]
    cell_totals_a = np.stack([row_sums_a[:, cell].sum(1) for cell in cells], 1)  # (R, G)
    cell_totals_b = np.stack([row_sums_b[:, cell].sum(1) for cell in cells], 1)  # (C, G)

    def hsic_1(products: Float, row_sums: Float, totals: Float) -> Float:
        """Return HSIC_1 summed over cells; it is linear in these sums, which may be over cells."""
        numerator: Float = (
            products - 2 / (size - 2) * row_sums + totals / ((size - 1) * (size - 2))
        )
        return numerator / (size * (size - 3))

    cross = hsic_1(
        total.products, row_sums_a @ row_sums_b.T, cell_totals_a @ cell_totals_b.T
    )
    rows = hsic_1(
        total.self_rows, (row_sums_a * row_sums_a).sum(1), (cell_totals_a**2).sum(1)
    )
    cols = hsic_1(
        total.self_cols, (row_sums_b * row_sums_b).sum(1), (cell_totals_b**2).sum(1)
    )
    return Hsic(
        cross=cross,
        rows=zero_if_rounding(rows, total.self_rows, size),
        cols=zero_if_rounding(cols, total.self_cols, size),
    )
