"""Attention sinks over depth. From the columns of the table of `vitsee attn-map --kind sink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

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


def draw_sinks(every_row: pl.DataFrame) -> Figure:
    """One line of panels per store, against depth: the largest score of every head with its 95 %
    interval, on a logarithmic scale, in the colour of the token that it mostly lies at where it is
    a sink; the share of heads and images that have a sink, by kind of token; and the normalised
    mutual information of queries and keys of every head, with the layers' means. For more than
    `MOST_STORES` stores, or groups of them, only the means of each layer's heads. Call it inside a
    function decorated with `styled`."""
    stores = every_row.partition_by("store", maintain_order=True)
    if len(stores) > MOST_STORES or len(groups_of(every_row["store"].unique())) > 1:
        return draw_depth_panels(_layer_means(every_row), MEANS)
    figure, every = panels(3 * len(stores), most=3)
    lines = [every[i : i + 3] for i in range(0, len(every), 3)]
    colours = _colours(every_row)
    for line, rows in zip(lines, stores, strict=True):
        _draw_scores(line[0], rows, colours)
        _draw_shares(line[1], rows, colours)
        _draw_information(line[2], rows)
        for axes in line:
            integer_ticks(axes, rows["depth"].to_numpy())
            axes.set_xlabel("block")
            axes.set_title(shorten(rows["store"][0], 28))
            note_count(axes, rows)
    top = max(line[2].get_ylim()[1] for line in lines)
    for line in lines:
        line[0].set_ylim(*_limits(every_row))
        line[1].set_ylim(0, 1)
        line[2].set_ylim(-0.03 * top, top)
    _add_legend(figure, lines, colours)
    return figure


def _layer_means(rows: pl.DataFrame) -> pl.DataFrame:
    """What is drawn of many stores, or of groups: each layer's mean over heads, of `MEANS`; of
    shares those of all kinds of tokens."""
    drawn = rows.filter(pl.col("metric").is_in(MEANS), pl.col("token").is_null())
    names = ("store", "site", "depth", "rel_depth", "metric")
    means = drawn.group_by(names, maintain_order=True)
    # A layer with a head that has no value has none.
    whole = pl.when(pl.col("value").null_count() == 0).then(pl.col("value").mean())
    return means.agg(whole.alias("value"), pl.col("n_images").first())


def _colours(rows: pl.DataFrame) -> dict[str, str]:
    """Kind of token -> colour, for those with a sink; registers take the remaining ones in turn."""
    there = rows.filter(pl.col("value") > 0, pl.col("token").is_not_null(), metric="sink_share")
    named = rows.filter(pl.col("token").is_in([*there["token"]]))
    kinds = named["token"].unique(maintain_order=True).to_list()
    rest = [kind for kind in kinds if kind not in COLOUR_OF]
    return {kind: COLOUR_OF.get(kind) or OTHERS[rest.index(kind) % len(OTHERS)] for kind in kinds}


def _limits(rows: pl.DataFrame) -> tuple[float, float]:
    """From even attention (or below, for medians) to above the threshold."""
    scores = rows.filter(metric="sink_max").select(pl.max_horizontal("high", "value").max())
    return 0.85, 1.25 * max(scores.item() or 0, THRESHOLD)


def _draw_scores(axes: Axes, rows: pl.DataFrame, colours: dict[str, str]) -> None:
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    reference_line(axes, THRESHOLD, "ten times its share")
    of_heads = rows.filter(metric="sink_max")
    tinted = of_heads.with_columns(
        x=beside_each_other(of_heads), tint=_tints(rows, of_heads, colours)
    )
    for (tint,), own in tinted.group_by("tint", maintain_order=True):
        y = own["value"]
        error = np.nan_to_num(np.abs([(y - own["low"]).to_numpy(), (own["high"] - y).to_numpy()]))
        look: dict[str, Any] = {"fmt": "o", "color": tint, "elinewidth": 0.8, "alpha": 0.85}
        axes.errorbar(own["x"], y, yerr=error, **look)
    axes.set_ylabel(metric_words("sink_max"))


def _tints(rows: pl.DataFrame, of_heads: pl.DataFrame, colours: dict[str, str]) -> pl.Series:
    """A head's colour: that of the kind of token with most of its sinks; grey if fewer than half of
    its images have one."""
    shares = rows.filter(metric="sink_share").select("site", "head", "token", "value")
    often = shares.filter(pl.col("token").is_null(), pl.col("value") >= 0.5)
    kinds = shares.filter(pl.col("token").is_not_null()).sort(
        "value", descending=True, maintain_order=True, nulls_last=True
    )
    most = kinds.unique(["site", "head"], keep="first", maintain_order=True)
    sinking = most.join(often, on=["site", "head"], how="semi")
    tint = pl.col("token").cast(pl.String).replace_strict(colours, default=GREY)
    found = of_heads.select("site", "head").join(
        sinking.with_columns(tint=tint), on=["site", "head"], how="left", maintain_order="left"
    )
    return found["tint"].fill_null(GREY)


def _draw_shares(axes: Axes, rows: pl.DataFrame, colours: dict[str, str]) -> None:
    shares = rows.filter(metric="sink_share")
    depths = rows["depth"].unique().sort()
    base = np.zeros(len(depths))
    for kind, tint in colours.items():
        heights = layer_means(shares.filter(token=kind), depths).fill_null(0.0).to_numpy()
        axes.bar(depths, heights, bottom=base, width=0.7, color=tint, linewidth=0)
        base = base + heights
    if not len(shares):
        axes.text(0.5, 0.5, "ten tokens or fewer", transform=axes.transAxes, ha="center")
    axes.set_ylabel(metric_words("sink_share"))


def _draw_information(axes: Axes, rows: pl.DataFrame) -> None:
    own = rows.filter(metric="qk_nmi")
    look: dict[str, Any] = {"color": GREY, "alpha": 0.6, "linewidth": 0, "label": "head"}
    axes.scatter(beside_each_other(own), own["value"], em(72) ** 2 * 0.13, **look)
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
