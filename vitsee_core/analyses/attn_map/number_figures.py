"""The figures of numbers of heads against depth: shares and entropies, and attention sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.attn_map.sinks import PATCHES, THRESHOLD
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.head_tiles import NOT_FROM_ZERO, colour_range
from vitsee_core.figures.panels import (
    colour_bar,
    em,
    handles_of,
    legend_below,
    note_count,
    panels,
)
from vitsee_core.figures.plotting import (
    COLOURS,
    GREY,
    colour,
    ink,
    plain_log_ticks,
    reference_line,
)
from vitsee_core.figures.site_axes import layer_ticks, one_place_a_layer
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLS = "cls"
COLOUR_OF = {PATCHES: COLOURS[1], CLS: COLOURS[0]}
OTHER_COLOURS = (COLOURS[2], COLOURS[3], COLOURS[4], COLOURS[5])  # of registers
MAX_STORES = 6  # with panels of their own
MAX_TICKS = 14  # along an axis of the map by layer and head
MEANS = ("sink_max", "sink_share", "qk_nmi")  # drawn of many stores


def draw_numbers(all_rows: pl.DataFrame) -> Figure:
    """Draw one line of panels per store, from rows of one metric.

    Left: every head with its 95 % interval against depth, the layers' means as a line. Right: the
    same by layer and head. Both start at 0, or at the least value where all are nearly equal. Call
    it inside a function decorated with `styled`.
    """
    stores = all_rows.partition_by("store", maintain_order=True)
    figure, all_axes = panels(2 * len(stores), most=2, width=18, widest=28, height=16)
    for left, right, rows in zip(all_axes[::2], all_axes[1::2], stores, strict=True):
        _draw_store(left, right, rows)
    legend_below(figure, handles_of(all_axes))
    return figure


def _draw_store(left: Axes, right: Axes, rows: pl.DataFrame) -> None:
    """Draw one store's heads against depth, and as a map by layer and head."""
    words = metric_words(rows["metric"][0])
    rows, names = one_place_a_layer(rows)
    depths = rows["depth"].unique().sort().to_numpy()
    n_heads = rows["head"].to_numpy().max() + 1
    values = np.full((len(depths), n_heads), np.nan)
    values[np.searchsorted(depths, rows["depth"]), rows["head"]] = rows[
        "value"
    ].to_numpy()
    lowest, highest = colour_range(values)

    left.errorbar(
        beside_each_other(rows),
        rows["value"].to_numpy(),
        yerr=np.nan_to_num(_interval_lengths(rows)),
        fmt="o",
        color=colour(0),
        elinewidth=0.8,
        alpha=0.7,
        label="head, 95 % interval",
    )
    draw_layer_means(left, rows)
    layer_ticks(left, names)
    left.set_ylabel(words)
    left.set_title(shorten(rows["store"][0], 24))
    note_count(left, rows)
    if lowest == 0:
        left.set_ylim(bottom=0)

    image = right.imshow(values, vmin=lowest, vmax=highest, origin="upper", aspect="auto")
    right.grid(False)
    ticks = range(0, len(depths), math.ceil(len(depths) / MAX_TICKS))
    right.set_yticks(ticks, [names[depths[i]] for i in ticks])
    right.set_xticks(range(0, n_heads, math.ceil(n_heads / MAX_TICKS)))
    right.set_xlabel("head")
    right.set_ylabel("block")
    note_count(right, rows)
    label = f"{words} ({NOT_FROM_ZERO})" if lowest > 0 else words
    colour_bar(right, image, label)


def _interval_lengths(rows: pl.DataFrame) -> Float:
    """Return (2, rows) how far each interval reaches below and above its value."""
    value = rows["value"].to_numpy()
    below = value - rows["low"].to_numpy()
    above = rows["high"].to_numpy() - value
    lengths: Float = np.abs(np.stack([below, above]))
    return lengths


def beside_each_other(rows: pl.DataFrame) -> pl.Series:
    """Return x of every row: the heads of a block stand side by side around its depth."""
    n = rows["head"].to_numpy().max(initial=0) + 1
    # 0.6 of the distance between two blocks, so that a gap stays.
    return rows["depth"] + (rows["head"] - (n - 1) / 2) * 0.6 / n


def layer_means(rows: pl.DataFrame, depths: Any) -> pl.Series:
    """Return (depths,) the mean value of the heads of each layer; null where none has a value."""
    means = rows.group_by("depth").agg(pl.col("value").mean())
    layers = pl.DataFrame({"depth": depths})
    return layers.join(means, on="depth", how="left", maintain_order="left")["value"]


def draw_layer_means(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw the mean of each layer's heads as a line."""
    depths = rows["depth"].unique().sort()
    axes.plot(depths, layer_means(rows, depths), color=ink(), label="layer mean")


def draw_sinks(all_rows: pl.DataFrame) -> Figure:
    """Draw one line of three panels per store, against depth.

    - The largest score of every head with its 95 % interval, on a logarithmic scale, in the colour
      of the token that it mostly lies at where it is a sink.
    - The share of heads and images that have a sink, by kind of token.
    - The normalised mutual information of queries and keys of every head, with the layers' means.

    For more than `MAX_STORES` stores, or groups of them, only the means of each layer's heads. Call
    it inside a function decorated with `styled`.
    """
    stores = all_rows.partition_by("store", maintain_order=True)
    if len(stores) > MAX_STORES or len(groups_of(all_rows["store"].unique())) > 1:
        return draw_depth_panels(_layer_means(all_rows), MEANS)
    figure, all_axes = panels(3 * len(stores), most=3)
    lines = [all_axes[i : i + 3] for i in range(0, len(all_axes), 3)]
    colours = _choose_colours(all_rows)
    for line, store_rows in zip(lines, stores, strict=True):
        rows, names = one_place_a_layer(store_rows)
        score_axes, share_axes, nmi_axes = line
        _draw_scores(score_axes, rows, colours)
        _draw_shares(share_axes, rows, colours)
        _draw_nmi(nmi_axes, rows.filter(metric="qk_nmi"))
        for axes in line:
            layer_ticks(axes, names)
            axes.set_title(shorten(rows["store"][0], 28))
            note_count(axes, rows)
    # One y axis for each kind of panel, so that stores compare.
    top_nmi = max(line[2].get_ylim()[1] for line in lines)
    scores = all_rows.filter(metric="sink_max")
    top_score = scores.select(pl.max_horizontal("high", "value").max()).item() or 0
    for score_axes, share_axes, nmi_axes in lines:
        # From just below even attention to above the threshold and all scores.
        score_axes.set_ylim(0.85, 1.25 * max(top_score, THRESHOLD))
        share_axes.set_ylim(0, 1)
        nmi_axes.set_ylim(-0.03 * top_nmi, top_nmi)
    _add_legend(figure, lines, colours)
    return figure


def _layer_means(rows: pl.DataFrame) -> pl.DataFrame:
    """Return each layer's mean over heads of the metrics `MEANS`.

    A share is that of all kinds of tokens together. A layer has no value if one of its heads has
    none.
    """
    head_rows = rows.filter(pl.col("metric").is_in(MEANS), pl.col("token").is_null())
    names = ("store", "site", "depth", "rel_depth", "metric")
    layers = head_rows.group_by(names, maintain_order=True)
    mean = pl.when(pl.col("value").null_count() == 0).then(pl.col("value").mean())
    return layers.agg(mean.alias("value"), pl.col("n_images").first())


def _choose_colours(rows: pl.DataFrame) -> dict[str, str]:
    """Return kind of token -> its colour, for the kinds that have a sink in some image.

    Registers take the remaining colours in turn.
    """
    sinks = rows.filter(
        pl.col("value") > 0, pl.col("token").is_not_null(), metric="sink_share"
    )
    # In the table's order of tokens, the class token first.
    named = rows.filter(pl.col("token").is_in([*sinks["token"]]))
    kinds = named["token"].unique(maintain_order=True).to_list()
    n_others = 0
    colours = {}
    for kind in kinds:
        if kind in COLOUR_OF:
            colours[kind] = COLOUR_OF[kind]
        else:
            colours[kind] = OTHER_COLOURS[n_others % len(OTHER_COLOURS)]
            n_others += 1
    return colours


def _draw_scores(axes: Axes, rows: pl.DataFrame, colours: dict[str, str]) -> None:
    """Draw the largest score of every head, in the colour of the token that its sinks lie at."""
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    reference_line(axes, THRESHOLD, "ten times its share")
    heads = rows.filter(metric="sink_max")
    heads = heads.with_columns(
        x=beside_each_other(heads), tint=_head_tints(rows, heads, colours)
    )
    for (tint,), tinted in heads.group_by("tint", maintain_order=True):
        axes.errorbar(
            tinted["x"],
            tinted["value"],
            yerr=np.nan_to_num(_interval_lengths(tinted)),
            fmt="o",
            color=str(tint),
            elinewidth=0.8,
            alpha=0.85,
        )
    axes.set_ylabel(metric_words("sink_max"))


def _head_tints(
    rows: pl.DataFrame, heads: pl.DataFrame, colours: dict[str, str]
) -> pl.Series:
    """Return the colour of each head: that of the kind of token with most of its sinks.

    A head is grey if fewer than half of its images have a sink.

    Args:
        rows: one store's rows, among them those of `sink_share`.
        heads: the rows to colour, one per head.
        colours: kind of token -> its colour.
    """
    shares = rows.filter(metric="sink_share").select("site", "head", "token", "value")
    # Without a token the share is that of all kinds together.
    often = shares.filter(pl.col("token").is_null(), pl.col("value") >= 0.5)
    by_kind = shares.filter(pl.col("token").is_not_null()).sort(
        "value", descending=True, maintain_order=True, nulls_last=True
    )
    main_kind = by_kind.unique(["site", "head"], keep="first", maintain_order=True)
    main_kind = main_kind.join(often, on=["site", "head"], how="semi")
    tint = pl.col("token").cast(pl.String).replace_strict(colours, default=GREY)
    tinted = heads.select("site", "head").join(
        main_kind.with_columns(tint=tint),
        on=["site", "head"],
        how="left",
        maintain_order="left",
    )
    return tinted["tint"].fill_null(GREY)


def _draw_shares(axes: Axes, rows: pl.DataFrame, colours: dict[str, str]) -> None:
    """Draw the share of heads and images with a sink as bars, kinds of token on one another."""
    shares = rows.filter(metric="sink_share")
    depths = rows["depth"].unique().sort()
    base = np.zeros(len(depths))
    for kind, tint in colours.items():
        # A layer without this kind of token has none of its sinks.
        heights = layer_means(shares.filter(token=kind), depths).fill_null(0.0).to_numpy()
        axes.bar(depths, heights, bottom=base, width=0.7, color=tint, linewidth=0)
        base = base + heights
    if not len(shares):
        axes.text(0.5, 0.5, "ten tokens or fewer", transform=axes.transAxes, ha="center")
    axes.set_ylabel(metric_words("sink_share"))


def _draw_nmi(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw the mutual information of queries and keys of every head, and the layers' means."""
    axes.scatter(
        beside_each_other(rows),
        rows["value"],
        s=em(72) ** 2 * 0.13,
        color=GREY,
        alpha=0.6,
        linewidth=0,
        label="head",
    )
    draw_layer_means(axes, rows)
    axes.set_ylabel(metric_words("qk_nmi"))


def _add_legend(
    figure: Figure, lines: Sequence[Sequence[Axes]], colours: dict[str, str]
) -> None:
    """Draw the legend of all panels: the colours, and what lines and dots are."""
    from matplotlib.patches import Patch

    words = {PATCHES: "a patch", CLS: "the class token"}
    handles: dict[str, Any] = {}
    for kind, tint in colours.items():
        handles[f"sink at {words.get(kind, kind)}"] = Patch(color=tint)
    handles["no sink in most images"] = Patch(color=GREY)
    # Panels of the first store have all lines; bars differ by their colours.
    score_axes, _, nmi_axes = lines[0]
    legend_below(figure, handles | handles_of([score_axes, nmi_axes]))
