"""Figures of a quantity of tokens in sublayers: tokens against sublayers, and means against depth.

Drawn from the columns of `vitsee normratio`'s table: store, site, depth, rel_depth, token, row,
col, metric, value, low, high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.plotting import (
    COLOURS,
    MARKERS,
    colour,
    integer_ticks,
    reference_line,
    store_order,
    styled,
)
from vitsee_core.figures.token_maps import NO_VALUE, MapPanel, colour_scale, draw_map, value_ticks
from vitsee_core.tables.columns import is_given
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, metric_words, token_words
from vitsee_core.types import Float

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
MOST_STORES = 6  # in one panel, with all their tokens and sublayers
FEW_CELLS = 6  # up to this many patches are drawn as curves, more as a map
Curve = tuple[str, str, str]  # store, token or kind of token, kind of sublayer


@styled
def draw_norm_ratios(table: Table) -> Figure:
    """Maps of each metric, and its curves, from the table alone.

    Where the table has a store's tokens one by one: tokens against sublayers, one panel per store
    and kind of sublayer, prefix tokens named and drawn large on top (Raghu et al. 2021, Figs. 7
    left, E.1). Of a CNN, whose grids differ, each block's locations fill the height. All panels of
    a metric have one colour scale, logarithmic where a ratio spans more than a factor of 10.

    Then class token, registers and the mean over patches against depth, all stores together, with
    the 95 % interval as a band where the table has it (Figs. 7 right, E.2); of more than
    `MOST_STORES` stores, or of groups, these alone, of the first metric, a panel per kind of token
    and sublayer. The legend says what z and f(z) are.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    metrics = [m for m in METRICS if m in table.unique("metric")]
    # Three means of one ratio look alike: the first stands for them.
    metrics = [m for m in metrics if m not in METRICS[1:3] or METRICS[0] not in metrics]
    labels = table.unique("store")
    if len(labels) > MOST_STORES or len(groups_of(labels)) > 1:
        return _draw_many(table, metrics[0])
    stores = [rows for _, rows in table.groups("store")]
    maps = {metric: [p for rows in stores for p in _map_panels(rows, metric)] for metric in metrics}
    lines = [metric for metric in metrics if maps[metric]]
    grids = [Grid(len(maps[metric]), width=15, height=18, widest=22) for metric in lines]
    figure, parts = stack(*grids, Grid(len(metrics)))
    found: dict[str, Any] = {SYMBOLS: Line2D([], [], linestyle="none")}
    for metric, grid, part in zip(lines, grids, parts, strict=False):
        panels, every = maps[metric], grid.axes(part)
        scale = colour_scale(metric, _on_one_scale(table, metric))
        images = [draw_map(axes, panel, scale) for axes, panel in zip(every, panels, strict=True)]
        if any(np.isnan(panel.all_values()).any() for panel in panels):
            found[NOTHING] = Patch(facecolor=NO_VALUE)
        if not all(np.isnan(panel.all_values()).all() for panel in panels):
            bars_at_ends(grid, every, images[-1], metric_words(metric))
            for bar in [bar for axes in every for bar in axes.child_axes]:
                value_ticks(bar.yaxis, scale)
    every = Grid(len(metrics)).axes(parts[-1])
    curves = _curves(table)
    for axes, metric in zip(every, metrics, strict=True):
        _draw_curves(axes, table, metric, curves)
        note_count(axes, table)
    legend_below(figure, handles_of(every) | found, handlelength=HANDLE)
    return figure


def _draw_many(table: Table, metric: str) -> Figure:
    """The curves of one metric, a panel per kind of token and sublayer: of more than `MOST_STORES`
    stores, or of groups."""
    rows = table.where(metric=metric)
    own = _curve_of_rows(rows)
    n_images = rows["n_images"] if "n_images" in rows.columns else np.zeros(len(rows))
    parts: dict[str, list[dict[str, Any]]] = {}
    for curve in dict.fromkeys(own):
        store, token, kind = curve
        picked = np.array([other == curve for other in own], bool)
        found = _curve(rows.take(picked), "rel_depth", token)
        name = f"{token_words(token)}, {PARTS.get(kind, kind)}"
        parts.setdefault(name, []).extend(
            {"store": store, "site": f"blocks.{i}.out", "metric": metric, "rel_depth": x,
             "value": y, "low": low, "high": high, "n_images": n_images[picked][0]}
            for i, (x, y, low, high) in enumerate(zip(*found, strict=True))
        )  # fmt: skip
    tables = [(name, Table.from_rows(lines)) for name, lines in parts.items()]
    among = Table.concat([one for _, one in tables])
    grid = CurveGrid.of(len(tables), among)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, tables)
    for axes, name, lines in panels:
        draw_depth_curves(axes, lines, among=among)
        axes.set_title(name)
        if metric.startswith("norm_ratio"):
            reference_line(axes, 1, "skip = branch")
    panels[-1][0].plot([], [], linestyle="none", label=SYMBOLS)
    grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


# ---------------------------------------------------------------- tokens against sublayers


def _map_panels(of_store: Table, metric: str) -> list[MapPanel]:
    """The maps of one store and metric, one per kind of sublayer; none if the table has only a few
    individual tokens."""
    rows, store = of_store.where(metric=metric), str(of_store["store"][0])
    count = max(of_store["n_images"].tolist())
    tokens = _tokens(rows)
    cells = [k for k, token in enumerate(tokens) if isinstance(token, tuple)]
    if len({tokens[k] for k in cells}) <= FEW_CELLS:
        return []
    kinds = np.array([site_kind(site) for site in rows["site"].tolist()])
    panels = []
    for kind in dict.fromkeys(kinds.tolist()):
        of_kind = rows.take(kinds == kind)
        title = f"{shorten(store, 20)}, {PARTS.get(kind, kind)} (n = {count})"
        columns = [
            (site, dict(zip(_tokens(one), one["value"].astype(float).tolist(), strict=True)))
            for site, one in of_kind.groups("site")
        ]
        panels.append(MapPanel.of(title, store, columns))
    return panels


def _tokens(rows: Table) -> list[Any]:
    """For each row, (row, col) of a cell, or the token's name."""
    places = zip(rows["token"].tolist(), rows["row"].tolist(), rows["col"].tolist(), strict=True)
    return [str(t) if is_given(t) else (int(float(r)), int(float(c))) for t, r, c in places]


def _on_one_scale(table: Table, metric: str) -> Float:
    """The values that share the scale of a metric's panels: all ratios, all norms, or its own."""
    alike = (
        ("norm_ratio", "norm_ratio_median", "norm_ratio_geomean"),
        ("skip_norm", "branch_norm"),
    )
    rows = table.where(metric=next((of for of in alike if metric in of), metric))
    return rows["value"].astype(np.float64)


# ---------------------------------------------------------------- means against depth


def _kind_of(token: Any, several_cells: bool) -> str:
    """The curve that a token's row belongs to: its own, or that of all patches or registers."""
    if isinstance(token, tuple):
        return "patches" if several_cells else f"{token[0]},{token[1]}"
    if token.startswith("reg"):
        return "registers"
    return "patches" if token.isdigit() and several_cells else token


def _curve_of_rows(rows: Table) -> list[Curve]:
    tokens = _tokens(rows)
    cells: dict[str, set[Any]] = {}
    for store, token in zip(rows["store"].tolist(), tokens, strict=True):
        if isinstance(token, tuple) or token.isdigit():
            cells.setdefault(store, set()).add(token)
    return [
        (store, _kind_of(token, len(cells.get(store, ())) > FEW_CELLS), site_kind(site))
        for store, token, site in zip(
            rows["store"].tolist(), tokens, rows["site"].tolist(), strict=True
        )
    ]


def _curves(table: Table) -> list[Curve]:
    return list(dict.fromkeys(_curve_of_rows(table)))


def _draw_curves(axes: Axes, table: Table, metric: str, curves: Sequence[Curve]) -> None:
    from matplotlib.colors import LogNorm

    rows = table.where(metric=metric)
    own = _curve_of_rows(rows)
    several = len({store for store, *_ in curves}) > 1
    depth = "rel_depth" if several else "depth"
    looks = _looks(curves, store_order(table) if several else [])
    for curve in curves:
        picked = rows.take(np.array([other == curve for other in own], bool))
        look = looks[curve]
        x, y, low, high = _curve(picked, depth, curve[1])
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        label = _label(curve, several, len({kind for *_, kind in curves}) > 1)
        axes.plot(x, y, label=label, **look)
    scale = colour_scale(metric, _on_one_scale(table, metric))
    if isinstance(scale, LogNorm):
        axes.set_yscale("log")
        value_ticks(axes.yaxis, scale)
    if metric.startswith("norm_ratio"):
        reference_line(axes, 1, "skip = branch")
    elif metric == "cos_branch":
        reference_line(axes, 0, "")
    if not metric.startswith("cos") and not isinstance(scale, LogNorm):
        axes.set_ylim(bottom=0)
    if np.isnan(rows["value"].astype(float)).all():
        axes.set_yticks([])
        # Beside the line of `skip = branch` or of 0, which lies in the middle or at an end.
        axes.text(0.5, 0.25, NOTHING, transform=axes.transAxes, ha="center")
    if several:
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    else:
        integer_ticks(axes, rows["depth"])
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
        i, stroke = colours.index(tint), DASHES[kinds.index(kind) % len(DASHES)]
        # A colour that is reused has other markers.
        shape = MARKERS[(marks.index(mark) + len(marks) * (i // len(COLOURS))) % len(MARKERS)]
        look = {"color": colour(i), "marker": shape, "linestyle": stroke}
        # Patches, which every model has, are drawn below the others and hollow.
        if several and token == "patches":
            look |= {"markerfacecolor": "white", "zorder": 1.9}
        looks[curve] = look
    return looks


def _curve(rows: Table, depth: str, kind: str) -> tuple[Float, Float, Float, Float]:
    """Depths, values and intervals of one curve: the rows about the kind itself, or the means of
    its tokens (then without an interval), which are the same numbers."""
    tokens = _tokens(rows)
    names = [f"{t[0]},{t[1]}" if isinstance(t, tuple) else t for t in tokens]
    exact = np.array([name == kind for name in names], bool)
    points = []
    for _, of_site in _by_site(rows, exact):
        value = of_site["value"].astype(float)
        bounds = [of_site[name].astype(float) for name in ("low", "high")]
        ends = [float(b[0]) if len(value) == 1 else np.nan for b in bounds]
        there = value[~np.isnan(value)]
        mean = float(there.mean()) if len(there) else np.nan
        points.append((float(of_site[depth][0]), mean, *ends))
    points.sort()
    x, y, low, high = np.array(points).reshape(-1, 4).T
    return x, y, low, high


def _by_site(rows: Table, exact: NDArray[np.bool_]) -> list[tuple[str, Table]]:
    """Each site's rows: those about the kind itself if there are any."""
    found = []
    sites = rows["site"]
    for site in rows.unique("site"):
        here = sites == site
        found.append((site, rows.take(here & exact if (here & exact).any() else here)))
    return found


def _label(curve: Curve, several: bool, kinds: bool) -> str:
    store, token, kind = curve
    name = token_words(token)
    return (
        (f"{shorten(store, 24)} " if several else "")
        + name
        + (f", {PARTS.get(kind, kind)}" if kinds else "")
    )
