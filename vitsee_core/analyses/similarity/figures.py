"""Draw the table of `vitsee similarity`: a heatmap or a panel of curves per measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitsee_core.figures.heatmaps import (
    Panel,
    describe_scope,
    draw_curves,
    draw_heatmaps,
    one_to_one,
    panels_of,
)
from vitsee_core.figures.panels import handles_of, legend_below, panels
from vitsee_core.figures.plotting import reference_line, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = (
    "mutual_knn",
    "cknna",
    "rsa",
    "procrustes",
    "svcca",
    "gulp",
    "ridge_r2",
    "cka",
)
NEIGHBOURS = ("mutual_knn", "cknna")
LABELS = {name: metric_words(name) for name in MEASURES}
NAMES = {"gulp": "GULP", "procrustes": "Procrustes", "rsa": "RSA"}


@styled
def plot(table: Table) -> Figure:
    """Draw a heatmap per measure, and one of its calibrated values; or curves where each site has
    one partner, with the null's mean (dashed) and its 5 % threshold (dotted).

    Each has a scale of its own, which spans its values.
    """
    by_measure = [
        table.with_frame(rows)
        for rows in table.frame.partition_by("metric", maintain_order=True)
    ]
    if all(one_to_one(measure_table) for measure_table in by_measure):
        return _draw_measure_curves(by_measure)
    heatmaps: list[Panel] = []
    for measure_table in by_measure:
        heatmaps += _measure_heatmaps(measure_table)
    return draw_heatmaps(heatmaps, absent="features that are the same for all images")


def _measure_heatmaps(table: Table) -> list[Panel]:
    """Return the panels of one measure: its values, and its calibrated values if it has any."""
    scope = describe_scope(table)
    metric = str(table["metric"][0])
    label = _measure_label(metric, table).replace("a from b", "rows from columns")
    heatmaps = [replace(panel, label=label) for panel in panels_of(table, about=scope)]
    if table.frame["calibrated"].is_finite().any():
        name = NAMES.get(metric, LABELS[metric])
        label = f"{name}, calibrated (0: chance)"
        for panel in panels_of(table, "calibrated", scope):
            heatmaps.append(replace(panel, label=label))
    return heatmaps


def _measure_label(metric: str, table: Table) -> str:
    """Return the words for a measure's values; of neighbours with their number and chance."""
    if metric not in NEIGHBOURS:
        return LABELS[metric]
    label = f"{LABELS[metric]}, k = {table['k'][0]:g}"
    if metric == "mutual_knn":
        label += f" (chance {_chance_of_neighbours(table):.2g})"
    return label


def _chance_of_neighbours(rows: Table) -> float:
    """Return the mean of mutual k-NN over unrelated features: k of n - 1 others are neighbours."""
    return float(rows["k"][0]) / max(int(rows["n_images"].max()) - 1, 1)


def _draw_measure_curves(by_measure: Sequence[Table]) -> Figure:
    """Draw a panel per measure, with a curve for each store that the first is compared with."""
    figure, all_axes = panels(len(by_measure), width=24, widest=48, height=18)
    handles: dict[str, Any] = {}
    for axes, table in zip(all_axes, by_measure, strict=True):
        metric = str(table["metric"][0])
        handles.update(draw_curves(axes, table.frame))
        axes.set_ylabel(_measure_label(metric, table))
        axes.set_title(describe_scope(table))
        if metric == "mutual_knn":
            reference_line(axes, _chance_of_neighbours(table), "chance")
        if metric != "gulp":  # a distance, whose 0 says nothing about the scale
            axes.set_ylim(min(0, axes.dataLim.y0), 1.05 * axes.dataLim.y1)
    legend_below(figure, handles | handles_of(all_axes))
    return figure
