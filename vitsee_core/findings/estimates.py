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
from vitsee_core.tables.results import Table
from vitsee_core.types import Float

Rows = NDArray[np.bool_]


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
            raise ValueError(f"{len(self.without)} and {len(other.without)} blocks of images")
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
    chosen = table.take(np.flatnonzero(rows))
    if not len(chosen):
        raise ValueError("no row is of the layers or heads that it is about")
    if chosen.replicates is None:
        raise ValueError("no interval: there are too few images, or too few slabs of them")
    values = np.column_stack([chosen["value"].astype(np.float64), chosen.replicates])
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


def depths(table: Table, side: str = "") -> Float:
    """(rows,) relative depth of each row's site, 0 to 1."""
    return table[f"rel_depth{side}"].astype(np.float64)


def blocks(table: Table) -> tuple[NDArray[np.int64], int]:
    """(rows,) the number of each row's block among the table's, and how many there are."""
    names = table.unique("block")
    return np.array([names.index(name) for name in table["block"].tolist()]), len(names)


def lowest(table: Table, n: int) -> Rows:
    """(rows,) which are of the n lowest blocks."""
    number, _ = blocks(table)
    return number < n


def highest(table: Table, n: int) -> Rows:
    """(rows,) which are of the n highest blocks."""
    number, n_blocks = blocks(table)
    return number >= n_blocks - n


# ------------------------------------------------------------ CKA


def ends(cka: Table) -> Estimate:
    """Mean CKA between a model's lowest third of layers and its highest third."""
    return mean(cka, (depths(cka, "_a") <= 1 / 3) & (depths(cka, "_b") >= 2 / 3))


def second_quarter(cka: Table) -> Estimate:
    """For the CNN's layers (b) between a quarter and a half of its depth: how much more they
    resemble the ViT's lowest quarter (a) than its second one."""
    of_cnn = (depths(cka, "_b") > 0.25) & (depths(cka, "_b") <= 0.5)
    first = depths(cka, "_a") <= 0.25
    second = ~first & (depths(cka, "_a") <= 0.5)
    return mean(cka, of_cnn & first) - mean(cka, of_cnn & second)


def final_third(cka: Table) -> Estimate:
    """How much less the ViT's highest third (a) resembles the CNN's layers (b) than the rest."""
    last = depths(cka, "_a") > 2 / 3
    return mean(cka, ~last) - mean(cka, last)


def across(cka: Table, block: str) -> Estimate:
    """Mean CKA between layers before a block and layers from its output on."""
    after = _after(cka, block)
    return mean(cka, (after["a"] == -1) & (after["b"] == 1))


def within(cka: Table, block: str) -> Estimate:
    """Mean CKA between different layers on the same side of a block."""
    after = _after(cka, block)
    different = cka["site_a"] != cka["site_b"]
    return mean(cka, (after["a"] * after["b"] == 1) & different)


def _after(cka: Table, block: str) -> dict[str, NDArray[np.int64]]:
    """(rows,) for each side: -1 before the block, 1 from its output on, 0 inside it."""
    found = {}
    for side in "ab":
        sites, depth = cka[f"site_{side}"], cka[f"depth_{side}"].astype(np.int64)
        (at,) = set(depth[sites == f"{block}.out"].tolist())
        inside = (cka[f"block_{side}"] == block) & (sites != f"{block}.out")
        found[side] = np.where(inside, 0, np.where(depth >= at, 1, -1))
    return found


def lower_less_upper(cka: Table) -> Estimate:
    """Mean CKA of layers of the same depth in the lower half less that in the upper half."""
    low = depths(cka, "_a") <= 0.5
    return mean(cka, low) - mean(cka, ~low)


def local_less_global(heads: Table) -> Estimate:
    """Mean CKA of the most local group of heads with the other model, less the most global's."""
    distance = heads["distance_px"].astype(np.float64)
    return mean(heads, distance == distance.min()) - mean(heads, distance == distance.max())


def own_contrast(maps: Table) -> Estimate:
    """Mean CKA of tokens with the patch in their own place, minus that with all other patches.

    maps: rows of localize, one per token and patch; patches that are equal in all images have no
    value and are left out.
    """
    places = [f"{row},{col}" for row, col in zip(maps["row"], maps["col"], strict=True)]
    own = maps["token"] == np.array(places)
    there = ~np.isnan(maps["value"].astype(np.float64))
    return mean(maps, own & there) - mean(maps, ~own & there)


# ------------------------------------------------------------ attention


def nearest_head(heads: Table, n: int = 2) -> Estimate:
    """The distance of the most local head of the n lowest blocks."""
    return least(heads, lowest(heads, n))


def head_range(heads: Table, n: int = 2) -> Estimate:
    """Farthest less nearest head in the n lowest blocks, less the same in the n highest."""
    low, high = lowest(heads, n), highest(heads, n)
    range_low = most(heads, low) - least(heads, low)
    return range_low - (most(heads, high) - least(heads, high))


def upper_is_global(heads: Table, n: int = 2) -> Estimate:
    """The most local head of the n highest blocks less that of the n lowest."""
    return least(heads, highest(heads, n)) - least(heads, lowest(heads, n))


def rise(table: Table) -> Estimate:
    """Mean of the upper half of the blocks less that of the lower half."""
    number, n = blocks(table)
    upper = number >= n / 2
    return mean(table, upper) - mean(table, ~upper)


def offset_focus(heads: Table, offset: float = 0.5) -> Estimate:
    """The largest share of a head's attention in a focus off the query's own cell.

    heads: rows `offset_cells` and `focus_mass` of head-types; offset: minimum, in cells.
    """
    focus, offsets = heads.where(metric="focus_mass"), heads.where(metric="offset_cells")
    return most(focus, offsets["value"].astype(np.float64) >= offset)


# ------------------------------------------------------------ norms and fields


def log_fall(ratios: Table) -> Estimate:
    """Mean log of a ratio in the lower half of the sublayers' blocks less that in the upper."""
    number, n = blocks(ratios)
    upper = number >= n / 2
    return mean_log(ratios, ~upper) - mean_log(ratios, upper)


def share_by_middle(radii: Table) -> Estimate:
    """The radius at the middle of the depth over that at the end."""
    depth = depths(radii)
    middle = depth == depth[np.argmin(np.abs(depth - 0.5))]
    return mean(radii, middle) / mean(radii, depth == depth.max())


def first(table: Table) -> Estimate:
    """The only row. Raises ValueError: there are several."""
    if len(table) != 1:
        raise ValueError(f"{len(table)} rows in place of one")
    return mean(table, np.ones(1, bool))


def last_less_best(table: Table) -> Estimate:
    """The last row less the largest of the others."""
    last = depths(table) == 1
    return mean(table, last) - most(table, ~last)


def at_depth(table: Table, depth: float) -> Estimate:
    """The row nearest to a relative depth; the lower one of two."""
    found = np.abs(depths(table) - depth)
    return mean(table, np.arange(len(table)) == int(np.argmin(found)))
