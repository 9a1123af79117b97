"""Figures of curves over depth: a panel per metric, and per group where stores have groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.depth_curves import (
    INTERVAL,
    add_curve_legend,
    draw_depth_curves,
    head_words,
)
from vitsee_core.figures.panels import PanelGrid, stack
from vitsee_core.runtime.parameters import DeclarationError
from vitsee_core.tables.groups import groups_of, split_label
from vitsee_core.tables.text import shorten
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a metric: its rows, of one group where there are several.
Panel = tuple["Axes", str, "pl.DataFrame"]
GROUP_LETTERS = 24


@dataclass(frozen=True)
class CurveGrid:
    """The room of the curves of n metrics: panels side by side; of several groups of stores, each
    metric's panels on lines of their own.

    Attributes:
        n: metrics.
        groups: of the stores, [""] without several.
        height: of a panel, in ems.
    """

    n: int
    groups: Sequence[str]
    height: float = 14.0

    @classmethod
    def of(cls, n: int, rows: pl.DataFrame) -> CurveGrid:
        """The grid for n metrics of these rows: panels are taller where sites outside the blocks
        are named below the axis."""
        outside = (site for site in rows["site"].unique() if site_kind(site) == "head")
        names = max((len(head_words(site)) for site in outside), default=0)
        return cls(
            n, groups_of(rows["store"].unique(maintain_order=True)), 14 + 0.5 * names
        )

    @property
    def grids(self) -> list[PanelGrid]:
        if len(self.groups) == 1:
            return [PanelGrid(self.n, height=self.height)]
        return [PanelGrid(len(self.groups), height=self.height)] * self.n

    @property
    def size(self) -> tuple[float, float]:
        sizes = [grid.size for grid in self.grids]
        return max(wide for wide, _ in sizes), sum(tall for _, tall in sizes)

    def panels(self, box: Any, parts: Sequence[tuple[str, Any]]) -> list[Panel]:
        """The panels in a figure or a part of one, for these metrics with their rows."""
        if len(self.groups) == 1:
            every = self.grids[0].axes(box)
            return [(axes, *own) for axes, own in zip(every, parts, strict=False)]
        boxes = [box] if self.n == 1 else box.subfigures(self.n, 1)
        found: list[Panel] = []
        for part, grid, (metric, own) in zip(boxes, self.grids, parts, strict=True):
            labels = own["store"].unique()
            for axes, group in zip(grid.axes(part), self.groups, strict=True):
                stores = [label for label in labels if split_label(label)[0] == group]
                if stores:
                    found.append(
                        (axes, metric, own.filter(pl.col("store").is_in(stores)))
                    )
                else:
                    axes.set_visible(False)
        return found

    def finish(self, panels: Sequence[Panel]) -> None:
        """With several groups: name each panel's, and give the panels of a metric one y axis."""
        if len(self.groups) == 1:
            return
        of_metric: dict[str, list[Axes]] = {}
        for axes, metric, rows in panels:
            of_metric.setdefault(metric, []).append(axes)
            group = split_label(str(rows["store"][0]))[0]
            title = axes.get_title(loc="left")
            name = shorten(group or "no group", GROUP_LETTERS)
            axes.set_title(f"{name}, {title}" if title else name)
        for every in of_metric.values():
            limits = [axes.get_ylim() for axes in every]
            for axes in every:
                axes.set_ylim(
                    min(low for low, _ in limits), max(high for _, high in limits)
                )


def of_metrics(rows: pl.DataFrame, metrics: Sequence[str]) -> list[tuple[str, Any]]:
    return [(metric, rows.filter(metric=metric)) for metric in metrics]


def draw_depth_panels(
    rows: pl.DataFrame,
    metrics: Sequence[str],
    finish: Callable[[Axes, Any, str], None] | None = None,
    *,
    by: Sequence[str] = (),
    spread: str = INTERVAL,
    counts: tuple[str, str] = ("n_images", ""),
) -> Figure:
    """A figure of a panel per metric (and group of stores), of curves over depth with one legend.

    Args:
        rows: of these metrics.
        metrics: in order.
        finish: called with each panel, its rows and metric; before the legend is made.
        by: see `draw_depth_curves`.
        spread: see there.
        counts: the column whose number stands at the upper right, and what it counts.

    Raises:
        DeclarationError: a metric that no row has, whose panel would be empty.
    """
    there = rows["metric"].unique(maintain_order=True).to_list()
    for metric in metrics:
        if metric not in there:
            raise DeclarationError(
                f"the figure is to show the metric {metric!r}, which no row has; expected some of "
                f"{', '.join(there)}"
            )
    among = rows.filter(pl.col("metric").is_in(metrics))
    grid = CurveGrid.of(len(metrics), among)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, of_metrics(among, metrics))
    for axes, metric, rows in panels:
        draw_depth_curves(axes, rows, by=by, among=among, spread=spread, counts=counts)
        if finish is not None:
            finish(axes, rows, metric)
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure
