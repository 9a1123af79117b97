"""Attention sinks over depth. From the columns of the table of `vitsee attn-map --kind sink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.attn_map.head_numbers import (
    beside_each_other,
    draw_layer_means,
    layer_means,
)
from vitsee_core.analyses.attn_map.sinks import PATCHES, THRESHOLD
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.log_ticks import plain_log_ticks
from vitsee_core.figures.panels import em, handles_of, legend_below, note_count, panels
from vitsee_core.figures.plotting import COLOURS, GREY, integer_ticks, reference_line
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLS = "cls"
COLOUR_OF = {PATCHES: COLOURS[1], CLS: COLOURS[0]}
OTHERS = (COLOURS[2], COLOURS[3], COLOURS[4], COLOURS[5])
MOST_STORES = 6  # with panels of their own
MEANS = ("sink_max", "sink_share", "qk_nmi")


def draw_sinks(table: Table) -> Figure:
    """One line of panels per store, against depth: the largest score of every head with its 95 %
    interval, on a logarithmic scale, in the colour of the token that it mostly lies at where it is
    a sink; the share of heads and images that have a sink, by kind of token; and the normalised
    mutual information of queries and keys of every head, with the layers' means. For more than
    `MOST_STORES` stores, or groups of them, only the means of each layer's heads. Call it inside a
    function decorated with `styled`."""
    labels = table.unique("store")
    if len(labels) > MOST_STORES or len(groups_of(labels)) > 1:
        return draw_depth_panels(_layer_means(table), MEANS)
    stores = [rows for _, rows in table.groups("store")]
    figure, every = panels(3 * len(stores), most=3)
    lines = [every[i : i + 3] for i in range(0, len(every), 3)]
    colours = _colours(table)
    for line, rows in zip(lines, stores, strict=True):
        _draw_scores(line[0], rows, colours)
        _draw_shares(line[1], rows, colours)
        _draw_information(line[2], rows)
        for axes in line:
            integer_ticks(axes, rows["depth"])
            axes.set_xlabel("block")
            axes.set_title(shorten(str(rows["store"][0]), 28))
            note_count(axes, rows)
    top = max(line[2].get_ylim()[1] for line in lines)
    for line in lines:
        line[0].set_ylim(*_limits(table))
        line[1].set_ylim(0, 1)
        line[2].set_ylim(-0.03 * top, top)
    _add_legend(figure, lines, colours)
    return figure


def _layer_means(table: Table) -> Table:
    """What is drawn of many stores, or of groups: each layer's mean over heads, of `MEANS`; of
    shares those of all kinds of tokens."""
    drawn = table.where(metric=list(MEANS))
    drawn = drawn.take(~drawn.given("token"))
    names = ("store", "site", "depth", "rel_depth", "metric")
    cells: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(zip(*(drawn[name].tolist() for name in names), strict=True)):
        cells.setdefault(key, []).append(i)
    values, counts = drawn["value"].astype(float), drawn["n_images"]
    return Table.from_rows(
        [
            dict(zip(names, key, strict=True))
            | {"value": float(np.mean(values[rows])), "n_images": counts[rows[0]]}
            for key, rows in cells.items()
        ],
        (*names, "value", "n_images"),
    )


def _colours(table: Table) -> dict[str, str]:
    """Kind of token -> colour, for those with a sink; registers take the remaining ones in turn."""
    shares = table.where(metric="sink_share")
    most = {
        kind: np.nanmax(rows["value"].astype(float), initial=0)
        for kind, rows in shares.groups("token")
    }
    kinds = [kind for kind in most if kind and most[kind] > 0]
    rest = [kind for kind in kinds if kind not in COLOUR_OF]
    return {kind: COLOUR_OF.get(kind) or OTHERS[rest.index(kind) % len(OTHERS)] for kind in kinds}


def _limits(table: Table) -> tuple[float, float]:
    """From even attention (or below, for medians) to above the threshold."""
    rows = table.where(metric="sink_max")
    high = np.nanmax(np.append(rows["high"].astype(float), rows["value"].astype(float)), initial=0)
    return 0.85, 1.25 * max(float(high), THRESHOLD)


def _draw_scores(axes: Axes, rows: Table, colours: dict[str, str]) -> None:
    of_heads = rows.where(metric="sink_max")
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    reference_line(axes, THRESHOLD, "ten times its share")
    tints = _tints(rows, of_heads, colours)
    x, y = beside_each_other(of_heads), of_heads["value"].astype(float)
    for tint in dict.fromkeys(tints):
        own = np.array([other == tint for other in tints], bool)
        low, high = (of_heads[name][own].astype(float) for name in ("low", "high"))
        error = np.nan_to_num(np.abs(np.stack([y[own] - low, high - y[own]])))
        look: dict[str, Any] = {"fmt": "o", "color": tint, "elinewidth": 0.8, "alpha": 0.85}
        axes.errorbar(x[own], y[own], yerr=error, **look)
    axes.set_ylabel(metric_words("sink_max"))


def _tints(rows: Table, of_heads: Table, colours: dict[str, str]) -> list[str]:
    """A head's colour: that of the kind of token with most of its sinks; grey if fewer than half of
    its images have one."""
    shares = rows.where(metric="sink_share")
    by_head: dict[tuple[Any, Any], dict[str, float]] = {}
    for site, head, token, value in zip(
        *(shares[name].tolist() for name in ("site", "head", "token", "value")), strict=True
    ):
        by_head.setdefault((site, int(head)), {})[token] = float(value)
    found = []
    for site, head in zip(of_heads["site"].tolist(), of_heads["head"].tolist(), strict=True):
        own = dict(by_head.get((site, int(head)), {}))
        total = own.pop("", 0.0)
        found.append(colours[max(own, key=lambda kind: own[kind])] if total >= 0.5 else GREY)
    return found


def _draw_shares(axes: Axes, rows: Table, colours: dict[str, str]) -> None:
    shares = rows.where(metric="sink_share")
    depths = np.unique(rows["depth"])
    base = np.zeros(len(depths))
    for kind, tint in colours.items():
        heights = layer_means(shares.where(token=kind), depths, empty=0.0)
        axes.bar(depths, heights, bottom=base, width=0.7, color=tint, linewidth=0)
        base = base + heights
    if not len(shares):
        axes.text(0.5, 0.5, "ten tokens or fewer", transform=axes.transAxes, ha="center")
    axes.set_ylabel(metric_words("sink_share"))


def _draw_information(axes: Axes, rows: Table) -> None:
    own = rows.where(metric="qk_nmi")
    look: dict[str, Any] = {"color": GREY, "alpha": 0.6, "linewidth": 0, "label": "head"}
    axes.scatter(beside_each_other(own), own["value"].astype(float), em(72) ** 2 * 0.13, **look)
    draw_layer_means(axes, own)
    axes.set_ylabel(metric_words("qk_nmi"))


def _add_legend(figure: Figure, lines: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    words = {PATCHES: "a patch", CLS: "the class token"}
    handles: list[Any] = [
        Patch(color=tint, label=f"sink at {words.get(kind, kind)}")
        for kind, tint in colours.items()
    ]
    handles.append(Patch(color=GREY, label="no sink in most images"))
    found = {handle.get_label(): handle for handle in handles}
    legend_below(figure, found | handles_of([lines[0][0], lines[0][2]]))
