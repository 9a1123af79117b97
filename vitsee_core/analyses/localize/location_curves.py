"""Curves of localisation over depth, from a table of summaries or from the maps of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.analyses.localize.localisation import (
    OWN_METRICS,
    SITE_METRICS,
    every_nth,
    own_patch,
)
from vitsee_core.figures.curve_panels import CurveGrid, draw_depth_panels, of_metrics
from vitsee_core.figures.depth_curves import draw_depth_curves
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words
from vitsee_core.types import Float
from vitsee_stores.token_selection import parse_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CURVES = ("own_top1", "own_margin", "peak_distance_px")


@dataclass(frozen=True)
class TokenMaps:
    """The maps of one site."""

    store: str
    site: str
    rel_depth: float
    tokens: list[str]  # their names
    maps: Float  # (tokens, rows, cols)

    @property
    def title(self) -> str:
        return f"{shorten(self.store, 22)}, {site_words(self.site)}"

    @property
    def complete(self) -> bool:
        """Whether every cell of the grid is among the tokens, or those of every s-th row and
        column (see `every_nth`)."""
        return self.apart > 0

    @property
    def apart(self) -> int:
        """The step in cells from one token to the next: 1 for every cell of the grid, 0 for tokens
        as chosen."""
        rows, cols = (np.array(of) for of in self.lattice())
        if len(self.placed()) < len(rows) * len(cols):
            return 0
        step = int(np.diff(rows)[0]) if len(rows) > 1 else 1
        grid = zip((rows, cols), self.maps.shape[1:], strict=True)
        return step if all(np.array_equal(of, every_nth(n, step)) for of, n in grid) else 0

    def placed(self) -> dict[int, tuple[int, int]]:
        """The indices and places of the tokens on the grid."""
        cells = enumerate(map(parse_cell, self.tokens))
        return {k: cell for k, cell in cells if cell is not None}

    def lattice(self) -> tuple[list[int], list[int]]:
        """The rows and the columns that its tokens are in: all, unless they are every s-th."""
        places = [*self.placed().values()]
        rows, cols = (sorted({place[axis] for place in places}) for axis in (0, 1))
        if len(rows) * len(cols) == len(places) > 0:
            return rows, cols
        n_rows, n_cols = self.maps.shape[1:]
        return list(range(n_rows)), list(range(n_cols))


def derived_curves(panels: Sequence[TokenMaps]) -> pl.DataFrame | None:
    """The summaries computed from maps of all tokens, or of evenly spaced ones; None unless a store
    has several sites."""
    complete = [panel for panel in panels if panel.complete]
    stores = [panel.store for panel in complete]
    if len(set(stores)) == len(stores):
        return None
    rows = []
    for panel in complete:
        places = panel.placed()
        maps = panel.maps[list(places)].reshape(len(places), -1)
        own = [row * panel.maps.shape[2] + col for row, col in places.values()]
        metrics = own_patch(maps, own)
        known = metrics[:, ~np.isnan(metrics[0])]
        if not known.size:
            continue
        n_patches = int((~np.isnan(maps)).any(0).sum())
        rank, margin = (known[OWN_METRICS.index(name)] for name in ("own_rank", "own_margin"))
        where = {"store": panel.store, "site": panel.site, "rel_depth": panel.rel_depth}
        for metric, value, baseline in (
            ("own_top1", (rank == 1).mean(), ""),
            ("own_top1", 1 / n_patches, "chance"),
            ("own_margin", margin.mean(), ""),
        ):
            rows.append(where | {"metric": metric, "value": float(value), "baseline": baseline})
    return Table.from_rows(rows).frame if rows else None


def draw_curves(table: Table) -> Figure:
    """One panel per metric: its mean over tokens against relative depth, one curve per store. Call
    it inside a function decorated with `styled`."""
    rows = table.frame
    there = [metric for metric in SITE_METRICS if metric in rows["metric"]]
    return draw_depth_panels(rows, [m for m in there if m in CURVES] or there, _draw_zero)


def _draw_zero(axes: Axes, rows: Any, metric: str) -> None:
    axes.axhline(0, color=GREY, linewidth=0.6)


def draw_curve_panels(box: Any, rows: pl.DataFrame, metrics: Sequence[str]) -> list[Axes]:
    """Draw these metrics like `draw_curves`, into a part of a larger figure, and return the
    panels."""
    grid = CurveGrid.of(len(metrics), rows)
    panels = grid.panels(box, of_metrics(rows, metrics))
    for axes, metric, own in panels:
        draw_depth_curves(axes, own, among=rows)
        _draw_zero(axes, own, metric)
    grid.finish(panels)
    return [axes for axes, *_ in panels]
