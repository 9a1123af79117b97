"""Figures of a quantity of tokens in sublayers: tokens by sublayers, and means against depth.

They are drawn from the columns of `vitsee normratio`'s table: store, site, depth, rel_depth, token,
row, col, metric, value, low, high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import with_kinds
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.patch_sheets import places_in
from vitsee_core.figures.plotting import (
    COLOURS,
    MARKERS,
    colour,
    integer_ticks,
    reference_line,
    store_order,
    styled,
)
from vitsee_core.figures.token_maps import (
    NO_VALUE,
    MapPanel,
    colour_scale,
    draw_map,
    value_ticks,
)
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import BLOCK_PARTS, metric_words, token_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HANDLE_LENGTH = 3.2  # font sizes: dashes are seen beside the marker
RATIO_METRICS = ("norm_ratio", "norm_ratio_median", "norm_ratio_geomean")
NORM_METRICS = ("skip_norm", "branch_norm")
METRICS = (*RATIO_METRICS, "cos_branch", "cos_out", *NORM_METRICS)
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
NO_VALUE_TEXT = "no value: f(z) = 0"
SYMBOLS = "z: skip connection; f(z): the branch that a sublayer adds to it"
MAX_STORES = 6  # in one panel, with all their tokens and sublayers
FEW_CELLS = 6  # up to this many patches are drawn as curves, more as a map


class Curve(NamedTuple):
    """The columns that name a curve.

    Attributes:
        store: label of the store.
        curve: token, or kind of token.
        kind: kind of sublayer.
    """

    store: str
    curve: str
    kind: str


@styled
def draw_norm_ratios(table: Table) -> Figure:
    """Draw maps of each metric, and its curves, from the table alone.

    If the table has a store's tokens one by one, maps have tokens against sublayers, one panel per
    store and kind of sublayer, with prefix tokens named and drawn large on top (Raghu et al. 2021,
    Figs. 7 left, E.1). Of a CNN, whose grids differ, each block's locations fill the height. All
    panels of a metric have one colour scale, logarithmic if a ratio spans more than a factor of 10.

    Curves have class token, registers and the mean over patches against depth, all stores together,
    with the 95 % interval as a band if the table has it (Figs. 7 right, E.2). More than
    `MAX_STORES` stores, or groups of stores, have curves alone, of the first metric, a panel per
    kind of token and sublayer. The legend says what z and f(z) are.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = _with_curve_columns(table.frame)
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    if "norm_ratio" in metrics:
        # Three means of one ratio look alike: the first stands for them.
        repeated = RATIO_METRICS[1:]
        metrics = [metric for metric in metrics if metric not in repeated]
    stores = rows.partition_by("store", maintain_order=True)
    groups = groups_of(store_rows["store"][0] for store_rows in stores)
    if len(stores) > MAX_STORES or len(groups) > 1:
        return _draw_many(rows.filter(metric=metrics[0]), metrics[0])
    maps: dict[str, list[MapPanel]] = {}  # of the metrics that have any
    for metric in metrics:
        panels = []
        for store_rows in stores:
            panels += _map_panels(store_rows, metric)
        if panels:
            maps[metric] = panels
    # The room that each part needs, then the figure, then what is drawn in it.
    map_grids = [
        PanelGrid(len(panels), width=15, height=18, widest=22) for panels in maps.values()
    ]
    curve_grid = PanelGrid(len(metrics))
    figure, boxes = stack(*map_grids, curve_grid)
    legend: dict[str, Any] = {SYMBOLS: Line2D([], [], linestyle="none")}
    for (metric, panels), grid, box in zip(
        maps.items(), map_grids, boxes[:-1], strict=True
    ):
        map_axes = grid.axes(box)
        scale = colour_scale(metric, _scale_values(rows, metric))
        for axes, panel in zip(map_axes, panels, strict=True):
            image = draw_map(axes, panel, scale)
        is_missing = [np.isnan(panel.all_values()) for panel in panels]
        if any(missing.any() for missing in is_missing):
            legend[NO_VALUE_TEXT] = Patch(facecolor=NO_VALUE)
        if not all(missing.all() for missing in is_missing):
            bars_at_ends(grid, map_axes, image, metric_words(metric))
            for axes in map_axes:
                for bar in axes.child_axes:
                    value_ticks(bar.yaxis, scale)
    curve_axes = curve_grid.axes(boxes[-1])
    for axes, metric in zip(curve_axes, metrics, strict=True):
        _draw_curves(axes, rows, metric)
        note_count(axes, rows)
    legend_below(figure, handles_of(curve_axes) | legend, handlelength=HANDLE_LENGTH)
    return figure


def _with_curve_columns(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with the columns `name`, `curve`, `kind` and `cell`.

    `name` is that of the token (`0,4` of a cell), `curve` the token or kind of token whose curve a
    row belongs to, `kind` that of the sublayer, and `cell` whether the token is one of a grid.
    """
    token = pl.col("token").cast(pl.String)
    rows = with_kinds(rows).with_columns(
        name=pl.coalesce(token, pl.concat_str(places_in(rows), separator=",")),
        # Tokens without a grid have their number in place of a name.
        cell=token.is_null() | token.str.contains(r"^\d+$"),
    )
    n_cells = pl.col("name").filter("cell").n_unique().over("store")
    in_patches = pl.col("cell") & (n_cells > FEW_CELLS)
    is_register = token.str.starts_with("reg")
    curve = (
        pl.when(in_patches)
        .then(pl.lit("patches"))
        .when(is_register)
        .then(pl.lit("registers"))
        .otherwise("name")
    )
    return rows.with_columns(curve=curve)


def _draw_many(rows: pl.DataFrame, metric: str) -> Figure:
    """Draw the curves of one metric, a panel per kind of token and sublayer.

    For more than `MAX_STORES` stores, or for groups of stores.
    """
    curves_by_title: dict[str, list[pl.DataFrame]] = {}
    for (store, token, kind), curve_rows in rows.group_by(
        "store", "curve", "kind", maintain_order=True
    ):
        # Sublayers become blocks, which is all that curves over depth need.
        points = _curve_points(curve_rows, "rel_depth").with_columns(
            site=pl.format("blocks.{}.out", pl.int_range(pl.len())),
            store=pl.lit(store),
            metric=pl.lit(metric),
            n_images=pl.lit(curve_rows["n_images"][0]),
        )
        title = f"{token_words(token)}, {BLOCK_PARTS.get(kind, kind)}"
        curves_by_title.setdefault(title, []).append(points)
    contents = [(title, pl.concat(curves)) for title, curves in curves_by_title.items()]
    all_curves = pl.concat([curves for _, curves in contents])
    grid = CurveGrid.of(len(contents), all_curves)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, contents)
    for axes, title, curves in panels:
        draw_depth_curves(axes, curves, among=all_curves)
        axes.set_title(title)
        if metric.startswith("norm_ratio"):
            reference_line(axes, 1, "skip = branch")
    panels[-1][0].plot([], [], linestyle="none", label=SYMBOLS)
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, _, _ in panels])
    return figure


# ---------------------------------------------------------------- tokens against sublayers


def _map_panels(store_rows: pl.DataFrame, metric: str) -> list[MapPanel]:
    """Return the maps of one store and metric, one per kind of sublayer.

    None if the table has only a few individual tokens.
    """
    rows = store_rows.filter(metric=metric)
    store = str(store_rows["store"][0])
    count: Any = store_rows["n_images"].max()
    if rows.filter(pl.col("token").is_null())["name"].n_unique() <= FEW_CELLS:
        return []
    rows = rows.with_columns(pl.col("value").fill_null(np.nan))
    panels = []
    for (kind,), kind_rows in rows.group_by("kind", maintain_order=True):
        columns = []
        for (site,), site_rows in kind_rows.group_by("site", maintain_order=True):
            values: dict[Any, float] = {}
            for token, value, *cell in site_rows.select(
                "token", "value", *places_in(rows)
            ).rows():
                # Prefix tokens by name, patches by (row, col).
                values[token or tuple(cell)] = value
            columns.append((site, values))
        title = f"{shorten(store, 20)}, {BLOCK_PARTS.get(kind, kind)} (n = {count})"
        panels.append(MapPanel.of(title, store, columns))
    return panels


def _scale_values(rows: pl.DataFrame, metric: str) -> Float:
    """Return the values that share the scale of a metric: all ratios, all norms, or its own."""
    alike: tuple[str, ...] = (metric,)
    if metric in RATIO_METRICS:
        alike = RATIO_METRICS
    elif metric in NORM_METRICS:
        alike = NORM_METRICS
    return rows.filter(pl.col("metric").is_in(alike))["value"].to_numpy()


# ---------------------------------------------------------------- means against depth


def _draw_curves(axes: Axes, all_rows: pl.DataFrame, metric: str) -> None:
    """Draw the curves of one metric, with intervals as bands.

    Args:
        axes: where to draw.
        all_rows: rows of all metrics, which decide the looks of curves.
        metric: the metric.
    """
    from matplotlib.colors import LogNorm

    rows = all_rows.filter(metric=metric)
    names = all_rows.select(Curve._fields).unique(maintain_order=True).rows()
    curves = [Curve(*name) for name in names]
    by_curve = rows.partition_by(Curve._fields, as_dict=True)
    has_stores = len({curve.store for curve in curves}) > 1
    has_kinds = len({curve.kind for curve in curves}) > 1
    # Depths of stores differ: only relative ones compare.
    depth = "rel_depth" if has_stores else "depth"
    looks = _curve_looks(curves, store_order(all_rows) if has_stores else [])
    for curve, look in looks.items():
        points = _curve_points(by_curve.get(curve, rows.clear()), depth)
        x, y, low, high = points.select(depth, "value", "low", "high").to_numpy().T
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        label = _curve_label(curve, with_store=has_stores, with_kind=has_kinds)
        axes.plot(x, y, label=label, **look)
    scale = colour_scale(metric, _scale_values(all_rows, metric))
    if isinstance(scale, LogNorm):
        axes.set_yscale("log")
        value_ticks(axes.yaxis, scale)
    if metric.startswith("norm_ratio"):
        reference_line(axes, 1, "skip = branch")
    elif metric == "cos_branch":
        reference_line(axes, 0, "")
    if not metric.startswith("cos") and not isinstance(scale, LogNorm):
        axes.set_ylim(bottom=0)
    if not rows["value"].count():
        axes.set_yticks([])
        # Beside the line of `skip = branch` or of 0, which lies in the middle or at an end.
        axes.text(0.5, 0.25, NO_VALUE_TEXT, transform=axes.transAxes, ha="center")
    if has_stores:
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        axes.set_xlabel("relative depth")
    else:
        integer_ticks(axes, rows["depth"].to_numpy())
        axes.set_xlabel("sublayer")
    axes.set_ylabel(metric_words(metric))


def _curve_looks(
    curves: Sequence[Curve], stores: Sequence[str]
) -> dict[Curve, dict[str, Any]]:
    """Return the style of each curve, all distinct.

    With several stores the colour stands for the store and the marker for the tokens; with one
    store the colour stands for the tokens and the marker for the kind of sublayer. Dashes stand for
    the kind of sublayer.

    Args:
        curves: the curves.
        stores: labels of the stores in order; none if there is a single one.
    """
    tokens = list(dict.fromkeys(curve.curve for curve in curves))
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    looks = {}
    for curve in curves:
        if stores:
            colour_index = stores.index(curve.store)
            marker_index = tokens.index(curve.curve)
            n_markers = len(tokens)
        else:
            colour_index = tokens.index(curve.curve)
            marker_index = kinds.index(curve.kind)
            n_markers = len(kinds)
        # A colour that is reused has other markers.
        n_reuses = colour_index // len(COLOURS)
        marker = MARKERS[(marker_index + n_markers * n_reuses) % len(MARKERS)]
        look = {
            "color": colour(colour_index),
            "marker": marker,
            "linestyle": DASHES[kinds.index(curve.kind) % len(DASHES)],
        }
        # Patches, which every model has, are drawn below the others and hollow.
        if stores and curve.curve == "patches":
            look["markerfacecolor"] = "white"
            look["zorder"] = 1.9
        looks[curve] = look
    return looks


def _curve_points(rows: pl.DataFrame, depth: str) -> pl.DataFrame:
    """Return the sites of one curve from input to output, with depth, value and interval.

    They are of the row about the kind of token itself, or else the means of its tokens, which are
    the same numbers without an interval.

    Args:
        rows: rows of one curve and metric.
        depth: the column of depth.
    """
    is_kind = pl.col("name") == pl.col("curve")
    rows = rows.filter(is_kind | ~is_kind.any().over("site"))
    interval = pl.when(pl.len() == 1).then(pl.col("low", "high").first())
    by_site = rows.group_by("site", maintain_order=True)
    points = by_site.agg(pl.col(depth).first(), pl.col("value").mean(), interval)
    return points.sort(depth)


def _curve_label(curve: Curve, *, with_store: bool, with_kind: bool) -> str:
    """Return a curve's entry of the legend: the token, with what tells curves of a panel apart."""
    label = token_words(curve.curve)
    if with_store:
        label = f"{shorten(curve.store, 24)} {label}"
    if with_kind:
        label += f", {BLOCK_PARTS.get(curve.kind, curve.kind)}"
    return label
