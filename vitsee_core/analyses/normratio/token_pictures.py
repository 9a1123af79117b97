"""The figures of a quantity of tokens in sublayers: tokens against sublayers, and means against
depth.

Drawn from the columns of `vitsee normratio`'s table: store, site, depth, rel_depth, token, row,
col, metric, value, low, high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


HANDLE = 3.2  # font sizes: dashes are seen beside the marker
METRICS = (
    *("norm_ratio", "norm_ratio_median", "norm_ratio_geomean"),
    *("cos_branch", "cos_out", "skip_norm", "branch_norm"),
)
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
NOTHING = "no value: f(z) = 0"
SYMBOLS = "z: skip connection; f(z): the branch that a sublayer adds to it"
MAX_STORES = 6  # in one panel, with all their tokens and sublayers
FEW_CELLS = 6  # up to this many patches are drawn as curves, more as a map
Curve = tuple[str, str, str]  # store, token or kind of token, kind of sublayer
CURVE = ("store", "curve", "kind")  # its columns


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
        repeated = ("norm_ratio_median", "norm_ratio_geomean")
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
        scale = colour_scale(metric, _on_one_scale(rows, metric))
        for axes, panel in zip(map_axes, panels, strict=True):
            image = draw_map(axes, panel, scale)
        is_missing = [np.isnan(panel.all_values()) for panel in panels]
        if any(missing.any() for missing in is_missing):
            legend[NOTHING] = Patch(facecolor=NO_VALUE)
        if not all(missing.all() for missing in is_missing):
            bars_at_ends(grid, map_axes, image, metric_words(metric))
            for axes in map_axes:
                for bar in axes.child_axes:
                    value_ticks(bar.yaxis, scale)
    curve_axes = curve_grid.axes(boxes[-1])
    for axes, metric in zip(curve_axes, metrics, strict=True):
        _draw_curves(axes, rows, metric)
        note_count(axes, rows)
    legend_below(figure, handles_of(curve_axes) | legend, handlelength=HANDLE)
    return figure


def _with_curve_columns(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with three more columns: `name`, of the token (`0,4` of a cell); `curve`, the
    token or kind of token whose curve it belongs to; and `kind`, of its sublayer."""
    token = pl.col("token").cast(pl.String)
    rows = with_kinds(rows).with_columns(
        name=pl.coalesce(token, pl.concat_str(places_in(rows), separator=",")),
        cell=token.is_null() | token.str.contains(r"^\d+$"),
    )
    several = pl.col("name").filter("cell").n_unique().over("store") > FEW_CELLS
    registers = (
        pl.when(token.str.starts_with("reg")).then(pl.lit("registers")).otherwise("name")
    )
    patches = pl.when(pl.col("cell") & several).then(pl.lit("patches"))
    return rows.with_columns(curve=patches.otherwise(registers))


def _draw_many(rows: pl.DataFrame, metric: str) -> Figure:
    """Draw the curves of one metric, a panel per kind of token and sublayer, for more than
    `MAX_STORES` stores or for groups."""
    curves_by_title: dict[str, list[pl.DataFrame]] = {}
    for (store, token, kind), curve_rows in rows.group_by(
        "store", "curve", "kind", maintain_order=True
    ):
        points = _curve(curve_rows, "rel_depth").with_columns(
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
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


# ---------------------------------------------------------------- tokens against sublayers


def _map_panels(of_store: pl.DataFrame, metric: str) -> list[MapPanel]:
    """The maps of one store and metric, one per kind of sublayer; none if the table has only a few
    individual tokens."""
    rows = of_store.filter(metric=metric)
    store = str(of_store["store"][0])
    count: Any = of_store["n_images"].max()
    if rows.filter(pl.col("token").is_null())["name"].n_unique() <= FEW_CELLS:
        return []
    rows = rows.with_columns(pl.col("value").fill_null(np.nan))
    panels = []
    for (kind,), of_kind in rows.group_by("kind", maintain_order=True):
        columns = []
        for (site,), one in of_kind.group_by("site", maintain_order=True):
            cells = one.select("token", "value", *places_in(rows)).rows()
            columns.append(
                (site, {token or tuple(at): value for token, value, *at in cells})
            )
        title = f"{shorten(store, 20)}, {BLOCK_PARTS.get(kind, kind)} (n = {count})"
        panels.append(MapPanel.of(title, store, columns))
    return panels


def _on_one_scale(rows: pl.DataFrame, metric: str) -> Float:
    """The values that share the scale of a metric's panels: all ratios, all norms, or its own."""
    alike = (
        ("norm_ratio", "norm_ratio_median", "norm_ratio_geomean"),
        ("skip_norm", "branch_norm"),
    )
    of = pl.col("metric").is_in(next((of for of in alike if metric in of), (metric,)))
    return rows.filter(of)["value"].to_numpy()


# ---------------------------------------------------------------- means against depth


def _draw_curves(axes: Axes, every_row: pl.DataFrame, metric: str) -> None:
    from matplotlib.colors import LogNorm

    rows = every_row.filter(metric=metric)
    curves = every_row.select(CURVE).unique(maintain_order=True).rows()
    by_curve = rows.partition_by(CURVE, as_dict=True)
    several = len({store for store, *_ in curves}) > 1
    depth = "rel_depth" if several else "depth"
    looks = _looks(curves, store_order(every_row) if several else [])
    for curve, look in looks.items():
        points = _curve(by_curve.get(curve, rows.clear()), depth)
        x, y, low, high = points.select(depth, "value", "low", "high").to_numpy().T
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        label = _label(curve, several, len({kind for *_, kind in curves}) > 1)
        axes.plot(x, y, label=label, **look)
    scale = colour_scale(metric, _on_one_scale(every_row, metric))
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
        axes.text(0.5, 0.25, NOTHING, transform=axes.transAxes, ha="center")
    if several:
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    else:
        integer_ticks(axes, rows["depth"].to_numpy())
    axes.set_xlabel("relative depth" if several else "sublayer")
    axes.set_ylabel(metric_words(metric))


def _looks(curves: Sequence[Curve], stores: Sequence[str]) -> dict[Curve, dict[str, Any]]:
    """The style of each curve, all distinct. With several stores the colour stands for the store
    and the marker for the tokens; with one store the colour stands for the tokens. Dashes stand for
    the kind of sublayer."""
    several = bool(stores)
    tokens = list(dict.fromkeys(token for _, token, _ in curves))
    kinds = list(dict.fromkeys(kind for *_, kind in curves))
    colours, marks = (stores, tokens) if several else (tokens, kinds)
    looks = {}
    for curve in curves:
        store, token, kind = curve
        tint, mark = (store, token) if several else (token, kind)
        i = colours.index(tint)
        stroke = DASHES[kinds.index(kind) % len(DASHES)]
        # A colour that is reused has other markers.
        shape = MARKERS[
            (marks.index(mark) + len(marks) * (i // len(COLOURS))) % len(MARKERS)
        ]
        look = {"color": colour(i), "marker": shape, "linestyle": stroke}
        # Patches, which every model has, are drawn below the others and hollow.
        if several and token == "patches":
            look |= {"markerfacecolor": "white", "zorder": 1.9}
        looks[curve] = look
    return looks


def _curve(rows: pl.DataFrame, depth: str) -> pl.DataFrame:
    """The sites of one curve from input to output, with depth, value and interval: of the row about
    the kind itself, or the means of its tokens (then without an interval), which are the same
    numbers."""
    exact = pl.col("name") == pl.col("curve")
    rows = rows.filter(exact | ~exact.any().over("site"))
    alone = pl.when(pl.len() == 1).then(pl.col("low", "high").first())
    of_sites = rows.group_by("site", maintain_order=True)
    return of_sites.agg(pl.col(depth).first(), pl.col("value").mean(), alone).sort(depth)


def _label(curve: Curve, several: bool, kinds: bool) -> str:
    store, token, kind = curve
    name = token_words(token)
    return (
        (f"{shorten(store, 24)} " if several else "")
        + name
        + (f", {BLOCK_PARTS.get(kind, kind)}" if kinds else "")
    )
