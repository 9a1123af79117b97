"""A finding as one number with an interval, computed from rows of tables.

Every function takes the rows of an analysis and returns an `Estimate`: the number from all images,
and the same number without each block of the images. Differences of two estimates over the same
blocks are paired: what both have in common cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.statistics.jackknife import interval
from vitsee_core.tables.replicates import replicates_array
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl

Rows = pl.Expr | NDArray[np.bool_]  # selects rows of a table
ALL_ROWS = pl.lit(True)
# Relative depth of a row's layer, 0 to 1; of tables of pairs, that of either model's layer.
DEPTH = pl.col("rel_depth")
DEPTH_A = pl.col("rel_depth_a")
DEPTH_B = pl.col("rel_depth_b")
MIN_BLOCKS = 2  # blocks of images that an interval takes


@dataclass(frozen=True)
class Estimate:
    """A number with its replicates.

    Differences and quotients are taken replicate by replicate, so that what both numbers have in
    common cancels.

    Attributes:
        value: the number, from all images.
        without: (blocks,) the same number, each without one block of the images.
    """

    value: float
    without: Float

    def __sub__(self, other: Estimate) -> Estimate:
        self._check_paired(other)
        return Estimate(self.value - other.value, self.without - other.without)

    def __truediv__(self, other: Estimate) -> Estimate:
        self._check_paired(other)
        return Estimate(self.value / other.value, self.without / other.without)

    def _check_paired(self, other: Estimate) -> None:
        """Refuse an estimate over other blocks of images.

        Raises:
            ValueError: the numbers of blocks differ.
        """
        if len(self.without) != len(other.without):
            raise ValueError(
                f"{len(self.without)} and {len(other.without)} blocks of images"
            )

    def interval(self) -> tuple[float, float, float]:
        """Return the standard error, and low and high of the 95 % interval of the jackknife."""
        std, low, high = interval(np.asarray(self.value), self.without)
        return float(std), float(low), float(high)


def above(limit: float, estimate: Estimate) -> Estimate:
    """Return the estimate less a fixed number."""
    return Estimate(estimate.value - limit, estimate.without - limit)


def below(limit: float, estimate: Estimate) -> Estimate:
    """Return a fixed number less the estimate."""
    return Estimate(limit - estimate.value, limit - estimate.without)


def negative(estimate: Estimate) -> Estimate:
    """Return the estimate with the other sign."""
    return Estimate(-estimate.value, -estimate.without)


def combined(table: Table, rows: Rows, reduce: Callable[[Float], Float]) -> Estimate:
    """Reduce the selected rows to one number, and their replicates alike.

    Args:
        table: of an analysis, with replicates.
        rows: selects them.
        reduce: (rows, 1 + blocks) values and replicates -> (1 + blocks,).

    Raises:
        ValueError: no row is selected, or one has no value, or no replicates.
    """
    selected = table.frame.filter(rows)
    if not len(selected):
        raise ValueError("no row is of the layers or heads that it is about")
    without = replicates_array(selected)
    if without is None:
        raise ValueError(
            "no interval: there are too few images, or too few slabs of them"
        )
    # (rows, 1 + blocks)
    values = np.column_stack([selected["value"].to_numpy(), without])
    # Trailing blocks that no row has: the table was made of stores with more of them.
    values = values[:, ~np.isnan(values).all(0)]
    if np.isnan(values).any() or values.shape[1] < 1 + MIN_BLOCKS:
        raise ValueError("a row without a value, or without one of its replicates")
    numbers = reduce(values)
    return Estimate(float(numbers[0]), numbers[1:])


def mean(table: Table, rows: Rows) -> Estimate:
    """Return the mean of the selected rows."""
    return combined(table, rows, lambda values: values.mean(0))


def minimum(table: Table, rows: Rows) -> Estimate:
    """Return the smallest of the selected rows; each replicate has its own smallest."""
    return combined(table, rows, lambda values: values.min(0))


def maximum(table: Table, rows: Rows) -> Estimate:
    """Return the largest of the selected rows; each replicate has its own largest."""
    return combined(table, rows, lambda values: values.max(0))


def mean_log(table: Table, rows: Rows) -> Estimate:
    """Return the mean of the natural logarithms of the selected rows."""
    return combined(table, rows, lambda values: np.log(values).mean(0))


def blocks(table: Table) -> list[str]:
    """Return the names of the table's blocks, from input to output."""
    return table.frame["block"].unique(maintain_order=True).to_list()


def lowest(table: Table, n: int) -> pl.Expr:
    """Return the expression for rows of the n lowest blocks."""
    return pl.col("block").is_in(blocks(table)[:n])


def highest(table: Table, n: int) -> pl.Expr:
    """Return the expression for rows of the n highest blocks."""
    return pl.col("block").is_in(blocks(table)[-n:])


# ------------------------------------------------------------ CKA


def ends(cka: Table) -> Estimate:
    """Return the mean CKA between a model's lowest third of layers and its highest third."""
    return mean(cka, (DEPTH_A <= 1 / 3) & (DEPTH_B >= 2 / 3))


def second_quarter(cka: Table) -> Estimate:
    """Return how much more the CNN's layers (b) between a quarter and a half of its depth resemble
    the ViT's lowest quarter (a) than its second one."""
    cnn_layers = (DEPTH_B > 0.25) & (DEPTH_B <= 0.5)
    first = DEPTH_A <= 0.25
    second = ~first & (DEPTH_A <= 0.5)
    return mean(cka, cnn_layers & first) - mean(cka, cnn_layers & second)


def final_third(cka: Table) -> Estimate:
    """Return how much less the ViT's highest third (a) resembles the CNN's layers (b) than its
    other layers do."""
    last = DEPTH_A > 2 / 3
    return mean(cka, ~last) - mean(cka, last)


def across(cka: Table, block: str) -> Estimate:
    """Return the mean CKA between layers before a block and layers from its output on."""
    side_a = _side_of_block(cka, block, "a")
    side_b = _side_of_block(cka, block, "b")
    return mean(cka, (side_a == -1) & (side_b == 1))


def within(cka: Table, block: str) -> Estimate:
    """Return the mean CKA between different layers on the same side of a block."""
    side_a = _side_of_block(cka, block, "a")
    side_b = _side_of_block(cka, block, "b")
    is_same_side = side_a * side_b == 1
    return mean(cka, is_same_side & (pl.col("site_a") != pl.col("site_b")))


def _side_of_block(cka: Table, block: str, column: str) -> pl.Expr:
    """Return the expression for the side of a block on which a row's layer is.

    Args:
        cka: table of pairs of layers.
        block: name of the block.
        column: "a" or "b", the layer of the pair.

    Returns:
        -1 before the block, 1 from its output on, 0 inside it.
    """
    is_output = pl.col(f"site_{column}") == f"{block}.out"
    depth = pl.col(f"depth_{column}")
    (output_depth,) = cka.frame.filter(is_output)[f"depth_{column}"].unique()
    # Layers without a block, as the stem, are not inside: null counts as another block.
    is_inside = pl.col(f"block_{column}").eq_missing(block) & ~is_output
    return pl.when(is_inside).then(0).when(depth >= output_depth).then(1).otherwise(-1)


def lower_less_upper(cka: Table) -> Estimate:
    """Return the mean CKA of layers of the same depth, lower half less upper half."""
    low = DEPTH_A <= 0.5
    return mean(cka, low) - mean(cka, ~low)


def local_less_global(heads: Table) -> Estimate:
    """Return the mean CKA of the most local group of heads with the other model, less that of the
    most global group."""
    distance = pl.col("distance_px")
    local = mean(heads, distance == distance.min())
    return local - mean(heads, distance == distance.max())


def own_contrast(maps: Table) -> Estimate:
    """Return the mean CKA of tokens with the patch at their position, less that with all other
    patches.

    Args:
        maps: rows of localize, one per token and patch; patches that are equal in all images have
            no value and are left out.
    """
    is_same = pl.col("token").cast(pl.String) == pl.format("{},{}", "row", "col")
    has_value = pl.col("value").is_not_null()
    return mean(maps, is_same & has_value) - mean(maps, ~is_same & has_value)


# ------------------------------------------------------------ attention


def nearest_head(heads: Table, n: int = 2) -> Estimate:
    """Return the distance of the most local head of the n lowest blocks."""
    return minimum(heads, lowest(heads, n))


def head_range(heads: Table, n: int = 2) -> Estimate:
    """Return farthest less nearest head in the n lowest blocks, less the same in the n highest."""
    low = lowest(heads, n)
    high = highest(heads, n)
    range_low = maximum(heads, low) - minimum(heads, low)
    return range_low - (maximum(heads, high) - minimum(heads, high))


def upper_is_global(heads: Table, n: int = 2) -> Estimate:
    """Return the most local head of the n highest blocks less that of the n lowest."""
    return minimum(heads, highest(heads, n)) - minimum(heads, lowest(heads, n))


def rise(table: Table) -> Estimate:
    """Return the mean of the upper half of the blocks less that of the lower half."""
    upper = highest(table, len(blocks(table)) // 2)
    return mean(table, upper) - mean(table, ~upper)


def offset_focus(heads: Table, offset: float = 0.5) -> Estimate:
    """Return the largest share of a head's attention in a focus beside the query's cell.

    Args:
        heads: rows `offset_cells` and `focus_mass` of head-types, both in the heads' order.
        offset: minimum distance of the focus from the query, in cells.
    """
    focus = heads.filter(metric="focus_mass")
    offsets = heads.filter(metric="offset_cells")
    return maximum(focus, offsets["value"] >= offset)


# ------------------------------------------------------------ norms and fields


def log_fall(ratios: Table) -> Estimate:
    """Return the mean log of a ratio in the lower half of the blocks less that in the upper."""
    upper = highest(ratios, len(blocks(ratios)) // 2)
    return mean_log(ratios, ~upper) - mean_log(ratios, upper)


def share_by_middle(radii: Table) -> Estimate:
    """Return the radius at the middle of the depth over that at the end."""
    middle = DEPTH.get((DEPTH - 0.5).abs().arg_min()) == DEPTH
    return mean(radii, middle) / mean(radii, DEPTH.max() == DEPTH)


def first(table: Table) -> Estimate:
    """Return the only row.

    Raises:
        ValueError: there are several.
    """
    if len(table) != 1:
        raise ValueError(f"{len(table)} rows in place of one")
    return mean(table, ALL_ROWS)


def last_less_best(table: Table) -> Estimate:
    """Return the last row less the largest of the others."""
    last = DEPTH == 1
    return mean(table, last) - maximum(table, ~last)


def at_depth(table: Table, depth: float) -> Estimate:
    """Return the row nearest to a relative depth; the lower one of two."""
    # arg_min returns the first of equals, and rows go from input to output.
    nearest = (DEPTH - depth).abs().arg_min()
    return mean(table, pl.int_range(pl.len()) == nearest)
