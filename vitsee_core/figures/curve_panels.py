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

# A panel, its metric, and the metric's rows (those of one group where there are several).
Panel = tuple["Axes", str, "pl.DataFrame"]
GROUP_LETTERS = 24  # to which a group's name is shortened


@dataclass(frozen=True)
class CurveGrid:
    """The room for curves of n metrics in a figure.

    Panels are side by side; with several groups of stores each metric has lines of its own, with a
    panel per group.

    Attributes:
        n: number of metrics.
        groups: names of the groups of stores; [""] where they are not grouped.
        height: ems of a panel's height.
    """

    n: int
    groups: Sequence[str]
    height: float = 14.0

    @classmethod
    def of(cls, n: int, rows: pl.DataFrame) -> CurveGrid:
        """Return the grid for n metrics of these rows.

        Panels are taller where sites outside the blocks are named, upright, below the axis.
        """
        outside = (site for site in rows["site"].unique() if site_kind(site) == "head")
        longest_name = max((len(head_words(site)) for site in outside), default=0)
        return cls(
            n=n,
            groups=groups_of(rows["store"].unique(maintain_order=True)),
            height=14 + 0.5 * longest_name,
        )

    @property
    def grids(self) -> list[PanelGrid]:
        """One grid for all metrics, or one per metric where stores have groups."""
        if len(self.groups) == 1:
            return [PanelGrid(self.n, height=self.height)]
        return [PanelGrid(len(self.groups), height=self.height)] * self.n

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all panels in inches."""
        sizes = [grid.size for grid in self.grids]
        return max(wide for wide, _ in sizes), sum(tall for _, tall in sizes)

    def panels(self, box: Any, metrics: Sequence[tuple[str, Any]]) -> list[Panel]:
        """Make the panels.

        Args:
            box: a figure or a subfigure.
            metrics: each metric with its rows; `of_metrics` gives them.
        """
        if len(self.groups) == 1:
            # strict=False: a command may draw fewer metrics than it has made room for.
            pairs = zip(self.grids[0].axes(box), metrics, strict=False)
            return [(axes, metric, rows) for axes, (metric, rows) in pairs]
        boxes = [box] if self.n == 1 else box.subfigures(self.n, 1)
        panels: list[Panel] = []
        for metric_box, grid, (metric, rows) in zip(
            boxes, self.grids, metrics, strict=True
        ):
            labels = rows["store"].unique()
            for axes, group in zip(grid.axes(metric_box), self.groups, strict=True):
                stores = [label for label in labels if split_label(label)[0] == group]
                if stores:
                    group_rows = rows.filter(pl.col("store").is_in(stores))
                    panels.append((axes, metric, group_rows))
                else:  # a group without a value of this metric
                    axes.set_visible(False)
        return panels

    def finish(self, panels: Sequence[Panel]) -> None:
        """Name each panel's group, and give the panels of a metric one y axis.

        Does nothing where stores have no groups.
        """
        if len(self.groups) == 1:
            return
        of_metric: dict[str, list[Axes]] = {}
        for axes, metric, rows in panels:
            of_metric.setdefault(metric, []).append(axes)
            group = split_label(str(rows["store"][0]))[0]
            title = axes.get_title(loc="left")
            name = shorten(group or "no group", GROUP_LETTERS)
            axes.set_title(f"{name}, {title}" if title else name)
        for metric_axes in of_metric.values():
            limits = [axes.get_ylim() for axes in metric_axes]
            low = min(low for low, _ in limits)
            high = max(high for _, high in limits)
            for axes in metric_axes:
                axes.set_ylim(low, high)


def of_metrics(rows: pl.DataFrame, metrics: Sequence[str]) -> list[tuple[str, Any]]:
    """Return each metric with its rows."""
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
    """Return a figure of curves over depth: a panel per metric and group of stores, one legend.

    Args:
        rows: a table's rows; those of other metrics are left out.
        metrics: metrics in the order of the panels.
        finish: called with each panel, its rows and its metric, before the legend is made.
        by: further columns whose values make curves of their own (`k`, `shots`).
        spread: words for what `low` and `high` are.
        counts: the column whose number stands at the upper right, and the plural of what it
            counts.

    Raises:
        DeclarationError: no row has one of the metrics, so that its panel would be empty.
    """
    metrics_in_rows = rows["metric"].unique(maintain_order=True).to_list()
    for metric in metrics:
        if metric not in metrics_in_rows:
            raise DeclarationError(
                f"the figure is to show the metric {metric!r}, which no row has; "
                f"expected some of {', '.join(metrics_in_rows)}"
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
