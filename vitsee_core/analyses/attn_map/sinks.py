"""Attention sinks and collapse: keys that take far more than their share, and queries that all
attend alike; their rows, then their figure.

For A (queries by keys) of one image and one head, T tokens, over spatial queries q and all keys k:

    received_k = mean_q A[q, k]          score_k = T received_k

so that a score is 1 on average over keys, 1 everywhere for even attention, and at most T. Where
queries see a window of patches and the class token (TimeSformer), even attention gives that token
far more than 1 / T: score_k is then received_k over what even attention gives k, which needs
`received_rows`.

- `sink_max`: the largest score; `sink_median`: the median score over keys, what is left for an
  ordinary token (of stores that keep `received_rows`: extract --attention rows). Means over images.
- `sink_share`: images in which the largest score is above 10; with `token`, those in which it is
  and lies at that prefix token, or at some patch (`patches`). Its mean over a block's heads is the
  share of heads that have a sink. Of ten tokens or fewer none can have such a score: no value.
- `qk_nmi`: normalised mutual information of queries and keys, [H(mean_q A') - mean_q H(A'_q)] /
  sqrt(ln Q H(mean_q A')), with A' the Q rows renormalised over spatial keys: 0 where all queries
  attend alike (attention has collapsed), 1 where each attends to a key of its own (Park et al.
  2023). NaN where all attend to one and the same key.

Sinks at one token: Xiao et al. 2024 (language models), at patches of low information in ViTs:
Darcet et al. 2024. The factor 10 is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.heads import StoredAttention, even_shares
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
from vitsee_core.runtime.progress import counting
from vitsee_core.statistics.moments import SlabMoments, Summary
from vitsee_core.statistics.shares import as_share
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.runtime.execution import Execution
    from vitsee_core.runtime.streaming import Rows
    from vitsee_stores import Slab, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

THRESHOLD = 10.0
ROWS = "received_rows"
PATCHES = "patches"
COLUMNS = (
    *(*SITE, "token", "head"),
    *("metric", "value", "std", "low", "high", "n_images"),
)
Key = tuple[str, str, str]  # metric, group, token
CLS = "cls"
COLOUR_OF = {PATCHES: COLOURS[1], CLS: COLOURS[0]}
OTHERS = (COLOURS[2], COLOURS[3], COLOURS[4], COLOURS[5])
MOST_STORES = 6  # with panels of their own
MEANS = ("sink_max", "sink_share", "qk_nmi")


def draw_numbers(every_row: pl.DataFrame) -> Figure:
    """One line of panels per store. Left: every head with its 95 % interval against depth, the
    layers' means as a line. Right: the same by layer and head. Both start at 0, or at the least
    value where all are nearly equal. Call it inside a function decorated with `styled`."""
    stores = every_row.partition_by("store", maintain_order=True)
    figure, every = panels(2 * len(stores), most=2, width=18, widest=28, height=16)
    for left, right, rows in zip(every[::2], every[1::2], stores, strict=True):
        _draw_store(left, right, rows)
    legend_below(figure, handles_of(every))
    return figure


def _draw_store(left: Axes, right: Axes, rows: pl.DataFrame) -> None:
    metric = rows["metric"][0]
    rows, names = one_place_a_layer(rows)
    depths = rows["depth"].unique().sort().to_numpy()
    y = rows["value"].to_numpy()
    error = np.abs(np.stack([y - rows["low"].to_numpy(), rows["high"].to_numpy() - y]))
    look: dict[str, Any] = {
        "color": colour(0),
        "elinewidth": 0.8,
        "alpha": 0.7,
        "label": "head, 95 % interval",
    }
    left.errorbar(beside_each_other(rows), y, yerr=np.nan_to_num(error), fmt="o", **look)
    draw_layer_means(left, rows)
    layer_ticks(left, names)
    left.set_ylabel(metric_words(metric))
    left.set_title(shorten(rows["store"][0], 24))
    note_count(left, rows)
    n_heads = rows["head"].to_numpy().max() + 1
    values = np.full((len(depths), n_heads), np.nan)
    values[np.searchsorted(depths, rows["depth"]), rows["head"]] = y
    lowest, highest = colour_range(values)
    if lowest == 0:
        left.set_ylim(bottom=0)
    image = right.imshow(values, vmin=lowest, vmax=highest, origin="upper", aspect="auto")
    right.grid(False)
    most = 14
    shown = range(0, len(depths), -(-len(depths) // most))
    right.set_yticks(shown, [names[depths[i]] for i in shown])
    right.set_xticks(range(0, n_heads, -(-n_heads // most)))
    right.set_xlabel("head")
    right.set_ylabel("block")
    note_count(right, rows)
    unit = metric_words(metric)
    colour_bar(right, image, f"{unit} ({NOT_FROM_ZERO})" if lowest > 0 else unit)


def beside_each_other(rows: pl.DataFrame) -> pl.Series:
    """The x of every row, so that the heads of a block stand side by side around its depth."""
    n = rows["head"].to_numpy().max(initial=0) + 1
    return rows["depth"] + (rows["head"] - (n - 1) / 2) * 0.6 / n


def layer_means(rows: pl.DataFrame, depths: Any) -> pl.Series:
    """The mean value of the heads of each layer, (depths,); null where none has a value."""
    means = rows.group_by("depth").agg(pl.col("value").mean())
    every = pl.DataFrame({"depth": depths})
    return every.join(means, on="depth", how="left", maintain_order="left")["value"]


def draw_layer_means(axes: Axes, rows: pl.DataFrame) -> None:
    depths = rows["depth"].unique().sort()
    axes.plot(depths, layer_means(rows, depths), color=ink(), label="layer mean")


def sink_rows(
    store: Store,
    blocks: Sequence[StoredAttention],
    heads_by_block: Sequence[NDArray[np.int64]],
    rows: Rows,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Return the rows of one store: one per block, head and metric, and for `sink_share` another
    per kind of token.

    Args:
        store: with attention summaries.
        blocks: of the store.
        heads_by_block: the chosen heads of each block.
        rows: the chosen images.
        execution: resources.
    """
    layouts = {block.group: block.layout for block in blocks}
    by_frame = store.plan.clip is not None and store.plan.clip.by_frame
    even = {
        block.group: even_shares(block)
        for block in blocks
        if block.window_text is not None and block.layout.n_prefix and not by_frame
    }
    make = partial(SlabMoments, partial(_read_sinks, layouts, even))
    with counting(execution.progress, rows.n):
        summaries: dict[Key, Summary] = execution.fold(store, make, rows).result()
    for block in blocks:
        if not _can_sink(block.layout):
            log.info(
                "%s: no sink_share for %s: of %d tokens none can get more than %g "
                "times its share",
                store.label,
                block.site,
                block.layout.n_tokens,
                THRESHOLD,
            )
    if not any(metric == "sink_median" for metric, *_ in summaries):
        log.info("%s: no sink_median (extract it with --attention rows)", store.label)
        for block in blocks:
            if block.group in even:
                log.info(
                    "%s: no scores of %s, whose windows all see the prefix tokens "
                    "(extract it with --attention rows)",
                    store.label,
                    block.site,
                )
    # By metric, then all tokens together, then the kinds of token.
    metrics = ("sink_max", "sink_median", "sink_share", "qk_nmi")
    kinds = {group: ["", *layout.prefix, PATCHES] for group, layout in layouts.items()}
    keys = sorted(
        summaries, key=lambda key: (metrics.index(key[0]), kinds[key[1]].index(key[2]))
    )
    table_rows = []
    for block, heads in zip(blocks, heads_by_block, strict=True):
        for metric, group, token in keys:
            if group != block.group:
                continue
            summary = summaries[metric, group, token]
            for head in heads.tolist():
                row = site_columns(store, block)
                row["token"] = token
                row["head"] = head
                row["metric"] = metric
                row.update(_within_limits(metric, summary.cells((block.row, head))))
                table_rows.append(row)
    return table_rows


def _read_sinks(
    layouts: dict[str, TokenLayout], even: dict[str, Float], slab: Slab
) -> dict[Key, Float]:
    """Return the numbers of a slab's valid images, key -> (images, blocks, heads).

    Args:
        layouts: group of blocks -> layout.
        even: for groups where it is not 1 / T, the share that even attention gives each token.
        slab: of a store with attention summaries.
    """
    values: dict[Key, Float] = {}
    for group, layout in layouts.items():
        largest = slab.attention("received_max", group)[slab.valid]
        token_index = slab.attention("received_argmax", group)[slab.valid]
        values["qk_nmi", group, ""] = slab.attention("qk_nmi", group)[slab.valid]
        score = layout.n_tokens * largest.astype(np.float64)
        folder = f"attention/{group}/" if group else "attention/"
        if slab.store.has(folder + ROWS):
            received = slab.attention(ROWS, group)[slab.valid].astype(np.float64)
            scores = received / even.get(group, 1 / layout.n_tokens)
            values["sink_median", group, ""] = np.median(scores, -1)
            if group in even:
                # The largest score need not be where most attention is received.
                score = scores.max(-1)
                token_index = scores.argmax(-1)
        elif group in even:
            continue  # scores need `received_rows`
        values["sink_max", group, ""] = score
        if _can_sink(layout):
            values.update(_sink_shares(group, layout, score, token_index))
    return values


def _sink_shares(
    group: str, layout: TokenLayout, score: Float, token_index: NDArray[Any]
) -> dict[Key, Float]:
    """Return whether each head of each image has a sink, by kind of token.

    Args:
        group: of blocks.
        layout: of its tokens.
        score: (images, blocks, heads) the largest score.
        token_index: which token has it.

    Returns:
        Key -> (images, blocks, heads), 1 or 0, NaN without a score.
    """
    is_sink = score > THRESHOLD
    sinks_at = {"": is_sink}
    for i, name in enumerate(layout.prefix):
        sinks_at[name] = is_sink & (token_index == i)
    sinks_at[PATCHES] = is_sink & (token_index >= layout.n_prefix)
    return {
        ("sink_share", group, token): np.where(np.isnan(score), np.nan, is_sink_here)
        for token, is_sink_here in sinks_at.items()
    }


def _can_sink(layout: TokenLayout) -> bool:
    """Return whether a score, which is at most the number of tokens, can be above the threshold."""
    return layout.n_tokens > THRESHOLD


def _within_limits(metric: str, cells: dict[str, float | int]) -> dict[str, float | int]:
    """Return the cells with their interval inside the metric's limits: a share's by its own method,
    an NMI's clipped to 0 to 1, a score's to 0 and above."""
    if metric == "sink_share":
        return as_share(cells)
    top = np.inf if metric in ("sink_max", "sink_median") else 1.0
    low = float(np.clip(cells["low"], 0.0, top))
    high = float(np.clip(cells["high"], 0.0, top))
    return {**cells, "low": low, "high": high}


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
    for line, every_layer in zip(lines, stores, strict=True):
        rows, names = one_place_a_layer(every_layer)
        _draw_scores(line[0], rows, colours)
        _draw_shares(line[1], rows, colours)
        own = rows.filter(metric="qk_nmi")
        look: dict[str, Any] = {
            "color": GREY,
            "alpha": 0.6,
            "linewidth": 0,
            "label": "head",
        }
        line[2].scatter(beside_each_other(own), own["value"], em(72) ** 2 * 0.13, **look)
        draw_layer_means(line[2], own)
        line[2].set_ylabel(metric_words("qk_nmi"))
        for axes in line:
            layer_ticks(axes, names)
            axes.set_title(shorten(rows["store"][0], 28))
            note_count(axes, rows)
    top = max(line[2].get_ylim()[1] for line in lines)
    scores = every_row.filter(metric="sink_max").select(
        pl.max_horizontal("high", "value").max()
    )
    for line in lines:
        # From just below even attention to above the threshold and all scores.
        line[0].set_ylim(0.85, 1.25 * max(scores.item() or 0, THRESHOLD))
        line[1].set_ylim(0, 1)
        line[2].set_ylim(-0.03 * top, top)
    _add_legend(figure, lines, colours)
    return figure


def _layer_means(rows: pl.DataFrame) -> pl.DataFrame:
    """Each layer's mean over heads of the metrics `MEANS`, which are drawn of many stores or
    groups; a share is that of all kinds of tokens together."""
    drawn = rows.filter(pl.col("metric").is_in(MEANS), pl.col("token").is_null())
    names = ("store", "site", "depth", "rel_depth", "metric")
    means = drawn.group_by(names, maintain_order=True)
    # A layer with a head that has no value has none.
    whole = pl.when(pl.col("value").null_count() == 0).then(pl.col("value").mean())
    return means.agg(whole.alias("value"), pl.col("n_images").first())


def _colours(rows: pl.DataFrame) -> dict[str, str]:
    """The colour of each kind of token that has a sink; registers take the remaining ones in
    turn."""
    there = rows.filter(
        pl.col("value") > 0, pl.col("token").is_not_null(), metric="sink_share"
    )
    named = rows.filter(pl.col("token").is_in([*there["token"]]))
    kinds = named["token"].unique(maintain_order=True).to_list()
    rest = [kind for kind in kinds if kind not in COLOUR_OF]
    return {
        kind: COLOUR_OF.get(kind) or OTHERS[rest.index(kind) % len(OTHERS)]
        for kind in kinds
    }


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
        error = np.nan_to_num(
            np.abs([(y - own["low"]).to_numpy(), (own["high"] - y).to_numpy()])
        )
        look: dict[str, Any] = {
            "fmt": "o",
            "color": tint,
            "elinewidth": 0.8,
            "alpha": 0.85,
        }
        axes.errorbar(own["x"], y, yerr=error, **look)
    axes.set_ylabel(metric_words("sink_max"))


def _tints(
    rows: pl.DataFrame, of_heads: pl.DataFrame, colours: dict[str, str]
) -> pl.Series:
    """The colour of each row of `of_heads`: that of the kind of token with most of the head's
    sinks; grey if fewer than half of its images have one."""
    shares = rows.filter(metric="sink_share").select("site", "head", "token", "value")
    often = shares.filter(pl.col("token").is_null(), pl.col("value") >= 0.5)
    kinds = shares.filter(pl.col("token").is_not_null()).sort(
        "value", descending=True, maintain_order=True, nulls_last=True
    )
    most = kinds.unique(["site", "head"], keep="first", maintain_order=True)
    sinking = most.join(often, on=["site", "head"], how="semi")
    tint = pl.col("token").cast(pl.String).replace_strict(colours, default=GREY)
    found = of_heads.select("site", "head").join(
        sinking.with_columns(tint=tint),
        on=["site", "head"],
        how="left",
        maintain_order="left",
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
