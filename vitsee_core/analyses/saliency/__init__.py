"""Saliency: does attention cover the objects in the image?

Per image, block and head, over spatial keys k (prefix tokens dropped, the rest renormalised):

    p_k = a_k / sum a,  a = A[cls, k] (token `cls`) or mean_q A[q, k] over patches q (`mean`)
    keep = the smallest set of top tokens with 60 % of the mass: sorted ascending, cumsum p > 0.4
    iou = |keep & truth| / |keep | truth|,  truth = the union of all ground-truth masks, by tokens

as in Walmer et al. 2023 (Figs. 5, 16). The table has its mean over images for each head. In the
paper the best head of a block is the one with the highest such mean (`best` = `head`). The released
code takes the best head of every image before averaging: an oracle, which is far higher (0.50
instead of 0.30 for 12 equal heads); `best="image"` adds rows for it. The released code calls a
token foreground if a mask touches it at all (`foreground="any"`); `half` requires half of its
pixels.

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
from typing import Annotated, Any

import numpy as np

from vitsee_core.analyses.saliency.figure import plot
from vitsee_core.analyses.saliency.scoring import (
    BASELINES,
    TOKENS,
    Overlaps,
    ScoredAttention,
    blind_overlaps,
    overlaps,
)
from vitsee_core.attention.head_maps import blocks_of_each, check_class_token
from vitsee_core.attention.heads import StoredAttention
from vitsee_core.declaration import Analysis
from vitsee_core.models.provenance import Provenance
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import ATTENTION, Gather, Offers, Option, blocks_option
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.statistics.moments import INTERVAL_METHOD, Moments, Summary
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured, number
from vitsee_core.tables.results import Table
from vitsee_core.truth.masks import RULES, MaskTruth, ground_truth, open_masks
from vitsee_core.truth.masks.sources import (
    BACKGROUND_OPTION,
    PANOPTIC,
    VOID_OPTION,
    objects,
)
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

log = logging.getLogger(__name__)


COLUMNS = (
    *(*SITE, "token", "head", "best"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
BESTS = ("head", "image")
# Walmer et al. 2023, as Caron et al. 2021 before them.
MASS = 0.6
BEST_METHOD = (
    "best = head: the block's head with the highest mean over images; the choice is not "
    "corrected for in its interval. best = image: of each image the best head of the "
    "block, then the mean"
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
            "head: flag each block's head with the highest mean over images. image: also "
            "add the mean of each image's best head, as the released code does; an "
            "oracle.",
            choices=BESTS,
        ),
    ] = "head",
    sites: Annotated[Sequence[str], blocks_option()] = ("blocks",),
    origin: Annotated[Provenance | None, Gather(Provenance)] = None,
    execution: Annotated[
        Execution, Offers("images seed device jobs memory", dask="masks and slabs")
    ] = DEFAULT,
) -> Table:
    """Return a table of how well each head's attention covers the objects.

    It has a row per store, block, token and head, and one per block and baseline. The columns are
    `COLUMNS`. `token` says whose attention it is, that of the class token (`cls`) or the mean over
    patches (`mean`). `best` is `head` in the row of the block's best head, and `image` in the rows
    about each image's best head. `value` is the intersection over union, 0 to 1; it is NaN if no
    image is used, and `std`, `low` and `high` are NaN with fewer than two. Images without a mask or
    a foreground token are left out, and for a head those in which it attends to prefix tokens only.

    Args:
        stores: stores with attention summaries. Where a store has no rows of attention
            (extract --attention rows), the attention is computed again with its model.
        masks: the ground truth: a folder of PNG masks or COCO files.
        tokens: whose attention, some of "cls" and "mean"; by default all that a store has.
        mass: keep the most attended tokens with this share of the attention.
        foreground: "half" or "any", the part of a token's pixels that makes it foreground.
        background: numbers of PNG masks that are background.
        void: the number of PNG masks that is void.
        panoptic: folder of the PNG files of a COCO panoptic file.
        best: "image" adds the mean of each image's best head.
        sites: patterns of the blocks.
        origin: where images and weights are now.
        execution: images, seed, device and parallel work.

    Raises:
        MissingInput: no store has attention summaries, or the class token that was asked for.
        SiteError: a pattern matches no block.
        VitseeError: an option has an unknown value, masks cannot be read or belong to none of the
            images, or images or weights are gone.

    Examples:
        >>> import vitsee
        >>> table = vitsee.saliency(
        ...     "scenes.zarr", masks="scenes/annotations/instances_val2017.json"
        ... )
        >>> sorted(set(table["metric"])), sorted(set(table["baseline"]))
        (['iou'], ['', 'centre', 'random', 'uniform'])
    """
    validate_options(tokens, mass, foreground, best)
    selected = blocks_of_each(stores, sites)
    # Before masks are read: whether a store has a class token takes no time to find out.
    plans = [
        attention_to_score(store, blocks, tokens) for store, blocks in selected.members
    ]
    # Opened once for all stores: a COCO file takes seconds to parse.
    source = open_masks(masks, background, void, panoptic)
    origin = origin or Provenance()
    rows: list[dict[str, Any]] = []
    counts: dict[str, Any] = {}
    partitions: dict[str, Any] = {}
    for store, scored in zip(selected.stores, plans, strict=True):
        chosen = execution.rows(store)
        # Masks become labels of tokens, once for each grid that the blocks have.
        layouts = {block.group: block.layout for block, _ in scored}
        mask_truth = ground_truth(
            store,
            source,
            chosen,
            layouts,
            foreground=foreground,
            execution=execution,
        )
        counts[store.label] = {**chosen.describe(), **mask_truth.counts}
        # Images with masks, and a foreground token in them.
        used = Rows(mask_truth.mask, chosen.n_invalid, chosen.how)
        blocks = Blocks.of(store, mask_truth.mask, execution.seed)
        scores = overlaps(
            store,
            scored,
            labels=mask_truth.labels,
            rows=used,
            mass=mass,
            blocks=blocks,
            execution=execution,
            origin=origin,
        )
        # Says which images each replicate leaves out.
        partitions[store.label] = blocks.describe()
        rows += _overlap_rows(
            store,
            scored,
            scores,
            mask_truth,
            mass=mass,
            adds_oracle=best == "image",
            seed=execution.seed,
        )
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
        REPLICATES: partitions,
    }
    return Table.from_rows(rows, COLUMNS, notes)


def validate_options(
    tokens: Sequence[str], mass: float, foreground: str, best: str
) -> None:
    """Refuse values of options that do not exist.

    Raises:
        VitseeError: names the option, the value and what was expected.
    """
    for token in tokens:
        _require_choice("token", token, TOKENS)
    _require_choice("foreground", foreground, RULES)
    _require_choice("best", best, BESTS)
    if not 0 < mass < 1:
        raise VitseeError(
            f"a mass of {mass:g} was asked for; expected one between 0 and 1"
        )


def _require_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise a VitseeError if the value is not one of the choices."""
    if value not in choices:
        raise VitseeError(f"no {option} {value!r}; expected one of: {', '.join(choices)}")


def attention_to_score(
    store: Store, blocks: Sequence[StoredAttention], tokens: Sequence[str]
) -> ScoredAttention:
    """Return each block with the tokens whose attention is scored there.

    Args:
        store: the store, for messages.
        blocks: its blocks.
        tokens: some of `TOKENS`; empty for all that a block has.

    Raises:
        MissingInput: the class token is asked for and the store does not have one.
    """
    if "cls" in tokens:
        check_class_token(store, blocks, "--tokens mean takes the mean over patches")
    # In the order of TOKENS, whatever the order of the option.
    requested = tuple(token for token in TOKENS if token in (tokens or TOKENS))
    without_cls = tuple(token for token in requested if token != "cls")
    if any(block.layout.cls is None for block in blocks) and not tokens:
        log.info("%s has no class token: only the mean over patches", store.label)
    scored = []
    for block in blocks:
        has_cls = block.layout.cls is not None
        scored.append((block, requested if has_cls else without_cls))
    return tuple(scored)


def _overlap_rows(
    store: Store,
    scored: ScoredAttention,
    scores: Overlaps,
    truth: MaskTruth,
    *,
    mass: float,
    adds_oracle: bool,
    seed: int,
) -> list[dict[str, Any]]:
    """Return one store's rows, block by block: heads, the oracle, then baselines.

    Args:
        store: the store.
        scored: its blocks, with the tokens whose attention was scored.
        scores: the overlaps of all images.
        truth: the masks by tokens, for the baselines.
        mass: the share of the attention that is kept.
        adds_oracle: whether to add a row about each image's best head.
        seed: the seed of the baselines.
    """
    # Blocks of one group have one grid of tokens, and so the same baselines.
    block_of_group = {block.group: block for block, _ in scored}
    baselines = {
        group: _baseline_summaries(store, block, truth, mass, seed)
        for group, block in block_of_group.items()
    }
    rows = []
    for block, tokens in scored:
        for token in tokens:
            summary = scores.heads[block.site, token].summary()
            # NaN loses against every value; if all are NaN, no head is the best.
            means = np.where(np.isnan(summary.mean), -1, summary.mean)
            best_head = int(means.argmax()) if means.max() >= 0 else None
            # (heads, blocks of images)
            replicates = scores.without("heads", block.site, token)
            for head in range(block.n_heads):
                row = _overlap_row(store, block, summary, head)
                row.update(token=token, head=head)
                # Chosen by the mean over images, as in the paper.
                if head == best_head:
                    row["best"] = "head"
                row[REPLICATES] = None if replicates is None else replicates[head]
                rows.append(row)
            if adds_oracle:
                # The best head of each image, as in the released code.
                oracle = scores.oracle[block.site, token].summary()
                row = _overlap_row(store, block, oracle, ())
                row.update(token=token, best="image")
                row[REPLICATES] = scores.without("oracle", block.site, token)
                rows.append(row)
        for name in BASELINES:
            row = _overlap_row(store, block, baselines[block.group][name], ())
            row["baseline"] = name
            rows.append(row)
    return rows


def _baseline_summaries(
    store: Store, block: StoredAttention, truth: MaskTruth, mass: float, seed: int
) -> dict[str, Summary]:
    """Return baseline -> its mean over images, on the block's grid of tokens.

    Args:
        store: the store.
        block: any block of that grid.
        truth: the masks by tokens.
        mass: the share of each map that is kept.
        seed: with an image's index it decides the image's draws.
    """
    assert block.layout.grid is not None
    labels = truth.labels[block.group][truth.mask]
    # An image's index in its data set seeds its noise, so that it is the same in every store.
    index = store.samples.index[truth.mask]
    ious = blind_overlaps(labels, block.layout.grid, index, mass, seed)
    summaries = {}
    for name, iou in ious.items():
        moments = Moments()
        moments.add(iou)
        summaries[name] = moments.summary()
    return summaries


def _overlap_row(
    store: Store, block: StoredAttention, summary: Summary, index: int | tuple[()]
) -> dict[str, Any]:
    """Return a row about a block; its token, baseline and best are "".

    Args:
        store: the store.
        block: the block.
        summary: means over images.
        index: the head in the summary; () if it is of a single number.
    """
    row = site_columns(store, block)
    row.update(token="", metric="iou", baseline="", best="")
    row.update(summary.cells(index))
    return row


def headline(table: Table) -> list[Answer]:
    """Return per store the IoU of its best head, beside that of the best map without the image.

    The best head is the best of the blocks' best heads.
    """
    answers = []
    for store, rows in by_store(table, metric="iou", best="head", baseline=None):
        # The second extreme is the row with the highest value.
        i = extremes(rows)[1]
        iou = measured(rows, i)
        text = f"the best head covers them to an IoU of {iou}, in {rows['site'][i]}"
        # A store has several grids at most: the best baseline of any is named.
        baselines = []
        baseline_groups = by_store(table, store=store, metric="iou", baseline=BASELINES)
        for _, baseline_rows in baseline_groups:
            values = baseline_rows.select("value", "baseline").rows()
            baselines += [(float(value), str(name)) for value, name in values]
        if baselines:
            value, name = max(baselines)
            text += f"; without looking ({name}) {number(value)}"
        answers.append((store, text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    question=ATTENTION,
    help="""
    Measure how well each head's attention covers objects.

    The most attended tokens that hold 60 % of a head's attention are compared with the
    union of the ground-truth masks, as intersection over union, averaged over images
    (Walmer et al. 2023, Figs. 5, 16). Masks are resized and cropped as the images were.
    Images without a mask or without a foreground token are left out and counted. Reads
    stores of extract --attention rows; for others the attention is recomputed with the
    store's model.

      $ vitsee extract vit_base_patch16_224 --data voc/JPEGImages --attention rows -o b16.zarr
      $ vitsee saliency b16.zarr --masks voc/SegmentationClass -o iou.csv --png iou.png
      $ vitsee saliency b16.zarr dino.zarr --masks instances_val2017.json --png both.png > both.csv
      $ vitsee saliency b16.zarr --masks train.json --masks val.json -o parts.csv
      $ vitsee saliency b16.zarr --masks saliency/ --void none --tokens cls --best image

    Attention is read in float16, as it is stored: compared with float32, nearly equal
    tokens at the cut swap places, which changes a head's mean by up to 6e-4.

    PNG masks have one number per pixel: 0 is background, 255 void, all else foreground.
    Of a COCO file every annotation is foreground, crowd regions are void; of a panoptic
    one things are foreground, stuff is background. Tokens of which more than half is void
    are left out.

    Rows with a baseline give what maps that ignore the image reach: uniform (chance
    decides among equal tokens), centre (a Gaussian about the middle), random.
    """,
    needs=("attention", "images"),
    reading=(
        "How well the most attended tokens of each block's best head cover the objects. "
        "The dashed lines are maps that ignore the image (uniform, its centre, noise): "
        "only what lies above them has to do with the objects."
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
