"""Saliency: does attention cover the objects in the image?

Per image, block and head, over spatial keys k (prefix tokens dropped, the rest renormalised):

    p_k = a_k / sum a,  a = A[cls, k] (token `cls`) or mean_q A[q, k] over patches q (`mean`)
    keep = the smallest set of top tokens with 60 % of the mass: sorted ascending, cumsum p > 0.4
    iou = |keep & truth| / |keep | truth|,  truth = the union of all ground-truth masks, by tokens

as Walmer et al. 2023 do (Figs. 5, 16). The table has its mean over images, per head. Their
best head of a block is the one with the highest such mean (`best` = `head`). Their released code
takes the best head of every image before averaging: an oracle, which is far higher (0.50 instead of
0.30 for 12 equal heads); `best="image"` adds rows for it. Their code calls a token foreground that
a mask touches at all (`foreground="any"`); `half` requires half of its pixels.

Attention is read in float16, as it is stored; recomputed attention is rounded to it, so that both
agree. Rounded to 11 bits, nearly equal tokens at the cut may swap places: compared with float32 the
mean IoU of a head moves by up to 6e-4, which the sidecar records.

The value of chance depends on the objects' size: rows with a `baseline` give what maps that ignore
the image reach.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.saliency.scoring import (
    BASELINES,
    TOKENS,
    Overlaps,
    Wanted,
    blind_overlaps,
    overlaps,
)
from vitsee_core.attention.head_maps import blocks_of_each, check_class_token
from vitsee_core.attention.heads import StoredAttention
from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_looks import DASHES, baselines_of, of_models, store_looks
from vitsee_core.figures.curve_panels import CurveGrid
from vitsee_core.figures.depth_curves import (
    DEPTH_LABEL,
    add_curve_legend,
    draw_depth_curves,
)
from vitsee_core.figures.panels import em, note_count, panels, stack
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Gather, Offers, Option, blocks_option
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.statistics.moments import INTERVAL_METHOD, Moments, Summary
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.groups import groups_of
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured, number
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import baseline_words
from vitsee_core.truth.masks import RULES, MaskTruth, ground_truth, open_masks
from vitsee_core.truth.masks.sources import (
    BACKGROUND_OPTION,
    PANOPTIC,
    VOID_OPTION,
    objects,
)
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)


COLUMNS = (
    *(*SITE, "token", "head", "best"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
BESTS = ("head", "image")
MASS = 0.6
BEST_METHOD = (
    "best = head: the block's head with the highest mean over images; the choice is not corrected "
    "for in its interval. best = image: of each image the best head of the block, then the mean"
)


@analysis
def run(
    *stores: Store,
    masks: Annotated[Path | Sequence[Path], objects()],
    tokens: Annotated[
        Sequence[str],
        Option(
            "Whose attention: the class token's, or the mean over patches.",
            choices=TOKENS,
            default="both, mean without a class token",
        ),
    ] = (),
    mass: Annotated[
        float,
        Option(
            "Keep the most attended tokens with this share of the attention.",
            metavar="SHARE",
            above=0,
            below=1,
        ),
    ] = MASS,
    foreground: Annotated[
        str,
        Option(
            "Which tokens are foreground: half of their pixels are, or any.",
            choices=RULES,
        ),
    ] = "half",
    background: Annotated[Sequence[int], BACKGROUND_OPTION] = (),
    void: Annotated[int | str | None, VOID_OPTION] = None,
    panoptic: Annotated[Path | None, PANOPTIC] = None,
    best: Annotated[
        str,
        Option(
            "head: flag each block's head with the highest mean over images. image: also add the "
            "mean of each image's best head, as the released code does; an oracle.",
            choices=BESTS,
        ),
    ] = "head",
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    origin: Annotated[Provenance | None, Gather(Provenance)] = None,
    execution: Annotated[
        Execution, Offers("images seed device jobs memory", dask="masks and slabs")
    ] = DEFAULT,
) -> Table:
    """One row per store, block, token and head, and one per block and baseline.

    Columns: `COLUMNS`. `token`: whose attention, `cls` or `mean` (over patches). `best`: `head` in
    the row of the block's best head, `image` in rows without a head (see `best` below). `value`:
    intersection over union, 0 to 1; NaN where no image is used, `std`, `low`, `high` where fewer
    than two are. An image is left out without a mask or a foreground token, and for a head that
    attends to prefix tokens only.

    Args:
        stores: with attention summaries; rows of attention (extract --attention rows) are
            recomputed where a store has none.
        origin: where data and weights are now.

    Raises:
        MissingInput: no store has attention summaries, or the class token that was asked for.
        SiteError: a pattern matches no block.
        VitseeError: see `open_masks`, `ground_truth`; images or weights are gone.
    """
    _check(tokens, mass, foreground, best)
    selected = blocks_of_each(stores, sites)
    plans = [_wanted(store, blocks, tokens) for store, blocks in selected.members]
    source = open_masks(masks, background, void, panoptic)
    origin = origin or Provenance()
    rows: list[dict[str, Any]] = []
    counts: dict[str, Any] = {}
    partitions: dict[str, Any] = {}
    for store, wanted in zip(selected.stores, plans, strict=True):
        chosen = execution.rows(store)
        layouts = {block.group: block.layout for block, _ in wanted}
        truth = ground_truth(
            store,
            source,
            chosen,
            layouts,
            foreground=foreground,
            execution=execution,
        )
        counts[store.label] = {**chosen.describe(), **truth.counts}
        used = Rows(truth.mask, chosen.n_invalid, chosen.how)
        blocks = Blocks.of(store, truth.mask, execution.seed)
        found = overlaps(
            store, wanted, truth.labels, used, mass, blocks, execution, origin=origin
        )
        partitions[store.label] = blocks.describe()
        rows += _rows(store, wanted, found, truth, mass, best, execution.seed)
    least = "at least half" if foreground == "half" else "any"
    notes = {
        "interval": INTERVAL_METHOD,
        "best": BEST_METHOD,
        "seed": execution.seed,
        "images": counts,
        **selected.notes(),
        "masks": {
            **{"source": source.name, **source.rules},
            "foreground token": f"{least} of its pixels that are not void",
            "void token": "more than half of its pixels; left out on both sides",
        },
        "attention": "in float16, as stored or recomputed",
        WORD: partitions,
    }
    return Table.from_rows(rows, COLUMNS, notes)


def _check(tokens: Sequence[str], mass: float, foreground: str, best: str) -> None:
    for what, values, known in (
        ("token", tokens, TOKENS),
        ("foreground", [foreground], RULES),
        ("best", [best], BESTS),
    ):
        for value in values:
            if value not in known:
                raise VitseeError(
                    f"no {what} {value!r}; expected one of: {', '.join(known)}"
                )
    if not 0 < mass < 1:
        raise VitseeError(
            f"a mass of {mass:g} was asked for; expected one between 0 and 1"
        )


def _wanted(
    store: Store, blocks: Sequence[StoredAttention], tokens: Sequence[str]
) -> Wanted:
    """The blocks, and the tokens whose attention is scored in each."""
    if "cls" in tokens:
        check_class_token(store, blocks, "--tokens mean takes the mean over patches")
    asked = [token for token in TOKENS if token in (tokens or TOKENS)]
    if any(block.layout.cls is None for block in blocks) and not tokens:
        log.info("%s has no class token: only the mean over patches", store.label)
    return tuple(
        (block, tuple(t for t in asked if t != "cls" or block.layout.cls is not None))
        for block in blocks
    )


def _rows(
    store: Store,
    wanted: Wanted,
    found: Overlaps,
    truth: MaskTruth,
    mass: float,
    best: str,
    seed: int,
) -> list[dict[str, Any]]:
    blind = {
        block.group: _blind(store, block, truth, mass, seed)
        for block in {block.group: block for block, _ in wanted}.values()
    }
    out = []
    for block, tokens in wanted:
        for token in tokens:
            summary = found.heads[block.site, token].summary()
            known = np.where(np.isnan(summary.mean), -1, summary.mean)
            top = int(known.argmax()) if known.max() >= 0 else None
            without = found.without("heads", block.site, token)
            for head in range(block.n_heads):
                own = {
                    "token": token,
                    "head": head,
                    "best": "head" if head == top else "",
                }
                own[WORD] = None if without is None else without[head]
                out.append(_row(store, block, summary, head, **own))
            if best == "image":
                oracle = found.oracle[block.site, token].summary()
                own = {"token": token, "best": "image"}
                own[WORD] = found.without("oracle", block.site, token)
                out.append(_row(store, block, oracle, (), **own))
        for name in BASELINES:
            out.append(_row(store, block, blind[block.group][name], (), baseline=name))
    return out


def _blind(
    store: Store, block: StoredAttention, truth: MaskTruth, mass: float, seed: int
) -> dict[str, Summary]:
    assert block.layout.grid is not None
    labels = truth.labels[block.group][truth.mask]
    index = store.samples.index[truth.mask]
    found = {}
    for name, iou in blind_overlaps(labels, block.layout.grid, index, mass, seed).items():
        moments = Moments()
        moments.add(iou)
        found[name] = moments.summary()
    return found


def _row(
    store: Store,
    block: StoredAttention,
    summary: Summary,
    at: int | tuple[()],
    **own: Any,
) -> dict[str, Any]:
    plain = {"token": "", "metric": "iou", "baseline": "", "best": ""}
    return site_columns(store, block) | plain | summary.cells(at) | own


def headline(table: Table) -> list[Answer]:
    """The best of the blocks' best heads, beside the best map that ignores the image."""
    found = []
    for store, rows in by_store(table, metric="iou", best="head", baseline=None):
        i = extremes(rows)[1]
        text = f"the best head covers them to an IoU of {measured(rows, i)}, in {rows['site'][i]}"
        blind = [
            (float(own["value"][at]), str(own["baseline"][at]))
            for _, own in by_store(table, store=store, metric="iou", baseline=BASELINES)
            for at in range(len(own))
        ]
        if blind:
            value, name = max(blind)
            text += f"; without looking ({name}) {number(value)}"
        found.append((store, text))
    return found


WHOSE = {"cls": "class token", "mean": "mean over patches"}
ORACLE = "each image's best head (oracle)"
SPREAD = 0.03  # of the x axis, over which the stores' heads lie beside each other
ALIKE = 0.01  # baselines this near to one another are drawn once, for all stores


@styled
def plot(table: Table) -> Figure:
    """Two panels for the class token and two for the mean over patches: each store's best heads
    against relative depth, with the 95 % interval as a band and baselines dashed (Walmer et al.
    2023, Figs. 5, 16), and all heads."""
    every_row = table.frame
    tokens = [token for token in WHOSE if token in every_row["token"]]
    if len(groups_of(every_row["store"].unique())) > 1:
        return _draw_groups(every_row, tokens)
    figure, every = panels(2 * len(tokens), most=2, widest=26)
    heads = of_models(every_row)
    for left, right, token in zip(every[::2], every[1::2], tokens, strict=True):
        rows = heads.filter(token=token)
        _draw_best(left, rows, every_row)
        _draw_heads(right, rows, every_row)
        left.set_title(f"{WHOSE[token]}: best head")
        right.set_title(f"{WHOSE[token]}: all heads")
    if "image" in heads["best"]:
        every[-2].plot(
            [],
            [],
            color=GREY,
            marker="o",
            markerfacecolor="white",
            linewidth=0.8,
            label=ORACLE,
        )
    top = 1.06 * max(axes.dataLim.y1 for axes in every)
    for axes in every:
        axes.set_ylim(0, top)
    add_curve_legend(figure, every[::2])
    return figure


def _draw_groups(every_row: pl.DataFrame, tokens: Sequence[str]) -> Figure:
    """The best heads alone, a panel per group of stores and token."""
    heads = of_models(every_row)
    grid = CurveGrid.of(len(tokens), every_row)
    figure, (box,) = stack(grid)
    panels = grid.panels(box, [(token, heads.filter(token=token)) for token in tokens])
    for axes, token, rows in panels:
        _draw_best(axes, rows, every_row)
        axes.set_title(WHOSE[token])
    every = [axes for axes, *_ in panels]
    grid.finish(panels)
    add_curve_legend(figure, every)
    return figure


def _draw_best(axes: Axes, rows: pl.DataFrame, every_row: pl.DataFrame) -> None:
    best = every_row.filter(best="head")
    looks = _looks(every_row)
    draw_depth_curves(axes, rows.filter(best="head"), among=best)
    for oracle in rows.filter(best="image").partition_by("store", maintain_order=True):
        axes.plot(
            oracle["rel_depth"],
            oracle["value"],
            **looks[oracle["store"][0]],
            markerfacecolor="white",
            linewidth=0.8,
        )
    _draw_blind(axes, rows, every_row)


def _draw_heads(axes: Axes, rows: pl.DataFrame, every_row: pl.DataFrame) -> None:
    n = every_row["store"].n_unique()
    looks = _looks(every_row)
    heads = rows.filter(pl.col("best").is_null() | (pl.col("best") == "head"))
    for i, own in enumerate(heads.partition_by("store", maintain_order=True)):
        axes.scatter(
            own["rel_depth"] + SPREAD * (i - (n - 1) / 2) / n,
            own["value"],
            s=em(72) ** 2 * 0.2,
            **looks[own["store"][0]],
            alpha=0.5,
            linewidth=0,
        )
    _draw_blind(axes, rows, every_row)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel(DEPTH_LABEL)
    note_count(axes, rows)


def _draw_blind(axes: Axes, drawn: pl.DataFrame, every_row: pl.DataFrame) -> None:
    """Each baseline of the stores that are drawn, in grey where it is the same for all of them,
    else in their colours."""
    looks = _looks(every_row)
    blind = baselines_of(every_row.filter(pl.col("store").is_in([*drawn["store"]])))
    for (name, rows), dashes in zip(blind.items(), DASHES, strict=False):
        values = rows["value"].drop_nulls().to_numpy()
        shared = np.ptp(values) < ALIKE if len(values) else True
        for own in rows.partition_by("store", maintain_order=True):
            own = own.sort("rel_depth", maintain_order=True)
            tint = GREY if shared else looks[own["store"][0]]["color"]
            axes.plot(
                own["rel_depth"],
                own["value"],
                color=tint,
                linestyle=dashes,
                linewidth=1,
                zorder=1,
            )
            if shared:
                break
        axes.plot(
            [],
            [],
            color=GREY,
            linestyle=dashes,
            linewidth=1,
            label=baseline_words(name, "iou"),
        )


def _looks(every_row: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Store -> colour and marker, those of its best heads' curve."""
    found = store_looks(every_row.filter(best="head"))
    return {
        store: {name: look[name] for name in ("color", "marker")}
        for store, look in found.items()
    }


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure how well each head's attention covers objects.

    The most attended tokens that hold 60 % of a head's attention are compared with the union of
    the ground-truth masks, as intersection over union, averaged over images (Walmer et al.
    2023, Figs. 5, 16). Masks are resized and cropped as the images were. Images without a mask
    or without a foreground token are left out and counted. Reads stores of extract --attention
    rows; for others the attention is recomputed with the store's model.

      $ vitsee extract vit_base_patch16_224 --data voc/JPEGImages --attention rows -o b16.zarr
      $ vitsee saliency b16.zarr --masks voc/SegmentationClass -o iou.csv --png iou.png
      $ vitsee saliency b16.zarr dino.zarr --masks instances_val2017.json --png both.png > both.csv
      $ vitsee saliency b16.zarr --masks train.json --masks val.json -o parts.csv
      $ vitsee saliency b16.zarr --masks saliency/ --void none --tokens cls --best image

    Attention is read in float16, as it is stored: compared with float32, nearly equal tokens at
    the cut swap places, which changes a head's mean by up to 6e-4.

    PNG masks have one number per pixel: 0 is background, 255 void, all else foreground. Of a COCO
    file every annotation is foreground, crowd regions are void; of a panoptic one things are
    foreground, stuff is background. Tokens of which more than half is void are left out.

    Rows with a baseline give what maps that ignore the image reach: uniform (chance decides
    among equal tokens), centre (a Gaussian about the middle), random.
    """,
    needs=("attention", "images"),
    reading=(
        "How well the most attended tokens of each block's best head cover the objects. The "
        "dashed lines are maps that ignore the image (uniform, its centre, noise): only what "
        "lies above them has to do with the objects."
    ),
    source="Walmer et al. 2023, Figs. 5, 16; Caron et al. 2021",
    columns=COLUMNS,
    meanings={
        "token": "cls or mean: whose attention",
        "best": "head: the block's best one",
    },
    metrics=("iou",),
    run=run,
    plot=plot,
    headline=headline,
)
