"""Layers that resemble the last one: their CKA with it beside their scores.

Kornblith et al. 2019 draw the CKA of each layer with the last of the same network and the
accuracy of a linear probe against depth: where both are flat, layers could be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import polars as pl

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.depth_curves import DEPTH_LABEL
from vitsee_core.figures.plotting import (
    colour,
    ink,
    marker,
)
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, task_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS = ("store_a", "site_a", "depth_a", "store_b", "site_b", "depth_b", "metric", "value")


def to_last(rows: pl.DataFrame) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """(store, last site, rows) of a CKA self-comparison: each site's CKA with the last one of its
    kind, as columns store, site, rel_depth, value (and low, high)."""
    numbers = [name for name in ("value", "low", "high") if name in rows.columns]
    selves = rows.filter(pl.col("store_a") == pl.col("store_b"), metric="cka")
    for (store,), own in selves.group_by(store="store_a", maintain_order=True):
        # Comparisons may contain each pair once, in either order.
        pairs = pl.concat(
            own.select(*numbers, site=f"site_{x}", depth=f"depth_{x}", other=f"site_{y}")
            for x, y in ("ab", "ba")
        )
        kinds = {site: site_kind(site) for site in pairs["site"].unique(maintain_order=True)}
        kind = "out" if "out" in kinds.values() else next(iter(kinds.values()))
        pairs = pairs.filter(pl.col("site").is_in([site for site in kinds if kinds[site] == kind]))
        at = pairs["depth"].arg_max() or 0
        last, top = pairs["site"][at], max(pairs["depth"][at], 1)
        found = pairs.filter(other=last).unique("site", keep="last", maintain_order=True)
        place = {"store": pl.lit(store), "rel_depth": pl.col("depth") / top}
        layers = found.sort("depth", maintain_order=True).with_columns(**place)
        yield store, last, layers.select("store", "site", "rel_depth", *numbers)


def draw_redundancy(
    axes: Axes, store: str, last: str, cka: pl.DataFrame, scores: Mapping[str, pl.DataFrame]
) -> None:
    """Draw one store's CKA to its last layer (from `to_last`), and its scores: task -> columns
    site, rel_depth, value."""
    label = "CKA with the last layer"
    axes.plot(cka["rel_depth"], cka["value"], color=ink(), marker="o", label=label)
    if "low" in cka.columns:
        axes.fill_between(
            cka["rel_depth"], cka["low"], cka["high"], color=ink(), alpha=0.15, linewidth=0
        )
    for i, (task, rows) in enumerate(scores.items()):
        outs = [site for site in rows["site"].unique() if site_kind(site) == "out"]
        own = rows.filter(pl.col("site").is_in(outs))
        if len(own) == 0:
            continue
        axes.plot(
            own["rel_depth"], own["value"], color=colour(7 + i), marker=marker(i + 1),
            label=shorten(task_words(task), 44),
        )  # fmt: skip
    axes.set_ylim(min(0.0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel("CKA; score")
    axes.set_title(f"{shorten(store, 28)}: CKA with {site_words(last)}")
