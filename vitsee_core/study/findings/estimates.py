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

Rows = pl.Expr | NDArray[np.bool_]  # which rows
EVERY = pl.lit(True)
DEPTH, DEPTH_A, DEPTH_B = (
    pl.col(f"rel_depth{side}") for side in ("", "_a", "_b")
)  # 0 to 1


@dataclass(frozen=True)
class Estimate:
    """An estimate with its replicates."""

    value: float  # from all images
    without: Float  # (blocks,) the same without one block of the images each

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self._paired(other) - other.without)

    def __truediv__(self, other: Estimate) -> Estimate:
        return Estimate(self.value / other.value, self._paired(other) / other.without)

    def _paired(self, other: Estimate) -> Float:
        if len(self.without) != len(other.without):
            raise ValueError(
                f"{len(self.without)} and {len(other.without)} blocks of images"
            )
        return self.without

    def interval(self) -> tuple[float, float, float]:
        """Standard error, low and high of the 95 % interval, as `jackknife.interval`."""
        std, low, high = interval(np.asarray(self.value), self.without)
        return float(std), float(low), float(high)


def above(limit: float, estimate: Estimate) -> Estimate:
    """How much an estimate exceeds a fixed number."""
    return Estimate(estimate.value - limit, estimate.without - limit)


def below(limit: float, estimate: Estimate) -> Estimate:
    """How much an estimate falls short of a fixed number."""
    return Estimate(limit - estimate.value, limit - estimate.without)


def negative(estimate: Estimate) -> Estimate:
    return Estimate(-estimate.value, -estimate.without)


def combined(table: Table, rows: Rows, how: Callable[[Float], Float]) -> Estimate:
    """`how` of the chosen rows' values (rows, 1), and of their replicates (rows, blocks). Raises
    ValueError: no row is chosen, or one has no value, or no replicates."""
    chosen = table.frame.filter(rows)
    if not len(chosen):
        raise ValueError("no row is of the layers or heads that it is about")
    without = replicates_array(chosen)
    if without is None:
        raise ValueError(
            "no interval: there are too few images, or too few slabs of them"
        )
    values = np.column_stack([chosen["value"].to_numpy(), without])
    # Trailing blocks that no row has: the table was made of stores with more of them.
    values = values[:, ~np.isnan(values).all(0)]
    if np.isnan(values).any() or values.shape[1] < 3:
        raise ValueError("a row without a value, or without one of its replicates")
    found = how(values)
    return Estimate(float(found[0]), found[1:])


def mean(table: Table, rows: Rows) -> Estimate:
    return combined(table, rows, lambda values: values.mean(0))


def least(table: Table, rows: Rows) -> Estimate:
    return combined(table, rows, lambda values: values.min(0))


def most(table: Table, rows: Rows) -> Estimate:
    return combined(table, rows, lambda values: values.max(0))


def mean_log(table: Table, rows: Rows) -> Estimate:
    """The mean of the natural logarithms of the chosen rows."""
    return combined(table, rows, lambda values: np.log(values).mean(0))


def blocks(table: Table) -> list[str]:
    """The table's blocks, from input to output."""
    return table.frame["block"].unique(maintain_order=True).to_list()


def lowest(table: Table, n: int) -> pl.Expr:
    """Rows of the n lowest blocks."""
    return pl.col("block").is_in(blocks(table)[:n])


def highest(table: Table, n: int) -> pl.Expr:
    """Rows of the n highest blocks."""
    return pl.col("block").is_in(blocks(table)[-n:])


# ------------------------------------------------------------ CKA


def ends(cka: Table) -> Estimate:
    """Mean CKA between a model's lowest third of layers and its highest third."""
    return mean(cka, (DEPTH_A <= 1 / 3) & (DEPTH_B >= 2 / 3))


def second_quarter(cka: Table) -> Estimate:
    """The CNN's layers (b) between a quarter and a half of its depth: how much more they resemble
    the ViT's lowest quarter (a) than its second one."""
    of_cnn = (DEPTH_B > 0.25) & (DEPTH_B <= 0.5)
    first = DEPTH_A <= 0.25
    second = ~first & (DEPTH_A <= 0.5)
    return mean(cka, of_cnn & first) - mean(cka, of_cnn & second)


def final_third(cka: Table) -> Estimate:
    """How much less the ViT's highest third (a) resembles the CNN's layers (b) than the rest."""
    last = DEPTH_A > 2 / 3
    return mean(cka, ~last) - mean(cka, last)


def across(cka: Table, block: str) -> Estimate:
    """Mean CKA between layers before a block and layers from its output on."""
    a, b = _after(cka, block)
    return mean(cka, (a == -1) & (b == 1))


def within(cka: Table, block: str) -> Estimate:
    """Mean CKA between different layers on the same side of a block."""
    a, b = _after(cka, block)
    return mean(cka, (a * b == 1) & (pl.col("site_a") != pl.col("site_b")))


def _after(cka: Table, block: str) -> list[pl.Expr]:
    """An expression for each side: -1 before the block, 1 from its output on, 0 inside it."""
    found = []
    for side in "ab":
        output = pl.col(f"site_{side}") == f"{block}.out"
        depth = pl.col(f"depth_{side}")
        (at,) = cka.frame.filter(output)[f"depth_{side}"].unique()
        inside = pl.col(f"block_{side}").eq_missing(block) & ~output
        found.append(pl.when(inside).then(0).when(depth >= at).then(1).otherwise(-1))
    return found


def lower_less_upper(cka: Table) -> Estimate:
    """Mean CKA of layers of the same depth in the lower half less that in the upper half."""
    low = DEPTH_A <= 0.5
    return mean(cka, low) - mean(cka, ~low)


def local_less_global(heads: Table) -> Estimate:
    """Mean CKA of the most local group of heads with the other model, less the most global's."""
    distance = pl.col("distance_px")
    return mean(heads, distance == distance.min()) - mean(
        heads, distance == distance.max()
    )


def own_contrast(maps: Table) -> Estimate:
    """Mean CKA of tokens with the patch in their own place, minus that with all other patches.

    maps: rows of localize, one per token and patch; patches that are equal in all images have no
    value and are left out.
    """
    own = pl.col("token").cast(pl.String) == pl.format("{},{}", "row", "col")
    there = pl.col("value").is_not_null()
    return mean(maps, own & there) - mean(maps, ~own & there)


# ------------------------------------------------------------ attention


def nearest_head(heads: Table, n: int = 2) -> Estimate:
    """The distance of the most local head of the n lowest blocks."""
    return least(heads, lowest(heads, n))


def head_range(heads: Table, n: int = 2) -> Estimate:
    """Farthest less nearest head in the n lowest blocks, less the same in the n highest."""
    low = lowest(heads, n)
    high = highest(heads, n)
    range_low = most(heads, low) - least(heads, low)
    return range_low - (most(heads, high) - least(heads, high))


def upper_is_global(heads: Table, n: int = 2) -> Estimate:
    """The most local head of the n highest blocks less that of the n lowest."""
    return least(heads, highest(heads, n)) - least(heads, lowest(heads, n))


def rise(table: Table) -> Estimate:
    """Mean of the upper half of the blocks less that of the lower half."""
    upper = highest(table, len(blocks(table)) // 2)
    return mean(table, upper) - mean(table, ~upper)


def offset_focus(heads: Table, offset: float = 0.5) -> Estimate:
    """The largest share of a head's attention in a focus off the query's own cell.

    heads: rows `offset_cells` and `focus_mass` of head-types; offset: minimum, in cells.
    """
    focus = heads.filter(metric="focus_mass")
    offsets = heads.filter(metric="offset_cells")
    return most(focus, offsets["value"] >= offset)


# ------------------------------------------------------------ norms and fields


def log_fall(ratios: Table) -> Estimate:
    """Mean log of a ratio in the lower half of the sublayers' blocks less that in the upper."""
    upper = highest(ratios, len(blocks(ratios)) // 2)
    return mean_log(ratios, ~upper) - mean_log(ratios, upper)


def share_by_middle(radii: Table) -> Estimate:
    """The radius at the middle of the depth over that at the end."""
    middle = DEPTH.get((DEPTH - 0.5).abs().arg_min()) == DEPTH
    return mean(radii, middle) / mean(radii, DEPTH.max() == DEPTH)


def first(table: Table) -> Estimate:
    """The only row. Raises ValueError: there are several."""
    if len(table) != 1:
        raise ValueError(f"{len(table)} rows in place of one")
    return mean(table, EVERY)


def last_less_best(table: Table) -> Estimate:
    """The last row less the largest of the others."""
    last = DEPTH == 1
    return mean(table, last) - most(table, ~last)


def at_depth(table: Table, depth: float) -> Estimate:
    """The row nearest to a relative depth; the lower one of two."""
    return mean(table, pl.int_range(pl.len()) == (DEPTH - depth).abs().arg_min())
