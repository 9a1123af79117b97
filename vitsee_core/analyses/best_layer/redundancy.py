"""Layers that resemble the last one: their CKA with it beside their scores.

Kornblith et al. 2019 draw the CKA of each layer with the last of the same network and the
accuracy of a linear probe against depth: where both are flat, layers could be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.depth_curves import DEPTH_LABEL
from vitsee_core.figures.plotting import (
    colour,
    ink,
    marker,
)
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, task_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS = ("store_a", "site_a", "depth_a", "store_b", "site_b", "depth_b", "metric", "value")


def to_last(table: Table) -> Iterator[tuple[str, str, Table]]:
    """(store, last site, rows) of a CKA self-comparison: each site's CKA with the last one of its
    kind, as columns store, site, rel_depth, value (and low, high)."""
    for store in table.unique("store_a"):
        own = table.where(store_a=store, store_b=store, metric="cka")
        sides = [("site_a", "depth_a", "site_b"), ("site_b", "depth_b", "site_a")]
        depths = {
            site: depth
            for name, depth_name, _ in sides
            for site, depth in zip(own[name].tolist(), own[depth_name].tolist(), strict=True)
        }
        kinds = [site_kind(site) for site in depths]
        kind = "out" if "out" in kinds else kinds[0]
        layers = {site: d for site, d in depths.items() if site_kind(site) == kind}
        last = max(layers, key=layers.__getitem__)
        found: dict[str, dict[str, Any]] = {}
        # Comparisons may contain each pair once, in either order.
        for name, _, other in sides:
            part = own.where(**{other: last})
            kept = [end for end in ("value", "low", "high") if end in part.columns]
            for i, site in enumerate(part[name].tolist()):
                if site in layers:
                    found[site] = {end: part[end][i] for end in kept}
        top = max(layers[last], 1)
        rows = (
            {"store": store, "site": site, "rel_depth": layers[site] / top, **found[site]}
            for site in sorted(found, key=layers.__getitem__)
        )
        yield store, last, Table.from_rows(rows)


def draw_redundancy(
    axes: Axes, store: str, last: str, cka: Table, scores: Mapping[str, Table]
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
        own = rows.take(np.array([site_kind(s) == "out" for s in rows["site"].tolist()], bool))
        if len(own) == 0:
            continue
        axes.plot(
            own["rel_depth"], own["value"].astype(float), color=colour(7 + i), marker=marker(i + 1),
            label=shorten(task_words(task), 44),
        )  # fmt: skip
    axes.set_ylim(min(0.0, axes.dataLim.y0), max(1.02, axes.dataLim.y1))
    axes.set_xlabel(DEPTH_LABEL)
    axes.set_ylabel("CKA; score")
    axes.set_title(f"{shorten(store, 28)}: CKA with {site_words(last)}")
