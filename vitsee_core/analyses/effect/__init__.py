"""Effect: what changed, against the same model unchanged?

A base and changed stores of the same images (ablated, with an intervention, of other weights), each
compared with the base. Of the outputs, for logits u of the base and v of the changed model:

- `top1`: images whose label has the largest logit, where the labels are the head's classes;
  `top1_difference`: changed less base, with McNemar's exact test of the images that only one of
  both has right (McNemar 1947);
- `agreement`: images with the same largest logit;
- `kl`: KL(softmax u || softmax v) = sum_c p_c log(p_c / q_c) in nats, mean over images.

Of each site that both hold:

- `cka`: debiased linear CKA, as in `vitsee cka`;
- `cosine`: mean over tokens of the cosine of a token with the same token in the base, mean over
  images. A token that is 0 in one of both counts 0, in both 1. None where the tokens or channels
  are not the same.

CKA is of the similarities between images, which survive a rotation of the features; the cosine is
of each image's own features and survives neither that nor an added constant.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from vitsee_core.analyses.effect.changes import (
    COSINE,
    LOGITS,
    ReadChange,
    alike_sites,
    cka_rows,
    outputs_of_both,
    pairs_of_sites,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features.compared import require_same_transform
from vitsee_core.figures.curve_looks import store_looks
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import INTERVAL, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    handles_of,
    legend_below,
    note_count,
    stack,
)
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import FLOW, SITES, Offers, Option, metrics_option
from vitsee_core.runtime.progress import counting
from vitsee_core.similarity import Estimator, GramOptions
from vitsee_core.similarity import options as pairwise
from vitsee_core.statistics.jackknife import Blocks, Cells
from vitsee_core.statistics.shares import PAIRED_TEST
from vitsee_core.tables.columns import SITE, VALUES, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.truth.labels.changed_outputs import (
    AGREEMENT,
    OUTPUT_INTERVALS,
    RIGHT_BASE,
    BlockMeans,
    output_rows,
    top1_cells,
)
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import pl
from vitsee_stores import Store, require_paired
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.manifest import weights_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

COLUMNS = (
    *(*SITE, "base", *VALUES, "p"),
    *("n_images", "n_only_base", "n_only_changed"),
)
METRICS = ("top1", "top1_difference", AGREEMENT, "kl", "cka", COSINE)
COSINES = (-1.0, 1.0)


@analysis
def run(
    base: Store,
    *changed: Store,
    sites: Annotated[
        Sequence[str],
        replace(SITES, help=f"{SITES.help} none: outputs alone.", or_none=True),
    ] = ("blocks",),
    metrics: Annotated[
        Sequence[str], metrics_option(METRICS, "all that can be had", "What is compared.")
    ] = (),
    tokens: Annotated[str, pairwise.TOKENS] = "all",
    estimator: Annotated[str | None, pairwise.ESTIMATOR] = None,
    other_transform: Annotated[
        bool,
        Option(
            "Measure what other preprocessing does (size, crop, frames, time), where nothing else "
            "differs.  [default: refuse]"
        ),
    ] = False,
    cache: Annotated[Path | None, pairwise.CACHE] = None,
    no_cache: Annotated[bool, pairwise.NO_CACHE] = False,
    execution: Annotated[
        Execution,
        Offers("images seed device jobs memory", dask="slabs and Gram matrices"),
    ] = DEFAULT,
) -> Table:
    """One row per changed store and metric of the outputs, and per site for `cka` and `cosine`.

    Columns: see `COLUMNS`. `top1` has a row for the base, too, whose `base` is empty. Shares from 0
    to 1, `kl` in nats. `std` is the jackknife's standard error over blocks of images; `low`, `high`
    the 95 % interval over images. `p`, `n_only_base`, `n_only_changed`: of `top1_difference` alone.
    Only images that all stores could read count.

    Memory: a slab of both stores at one site; of CKA see `similarity.hsic`.

    Args:
        base: the unchanged model's.
        changed: of the same images in the same order.
        other_transform: other preprocessing is the change, and nothing else.

    Raises:
        StoreMismatch: other preprocessing, other images, another order, or outputs of another
            number of classes.
        MissingInput: a store lacks the tokens, or nothing can be compared.
        SiteError: no such site, or none that both stores hold.
        VitseeError: no changed store, one store twice, or too few images.
    """
    if not changed:
        raise VitseeError(
            "no changed store to compare with the base; expected one or more"
        )
    _check_distinct((base, *changed))
    wanted = asked_for(metrics or METRICS, METRICS, "effect")
    of_outputs = [metric for metric in wanted if metric not in ("cka", COSINE)]
    chosen = execution.rows(base)
    mask = chosen.mask & base.valid
    for store in changed:
        mask = mask & require_paired(base, store)
    images = replace(chosen, mask=mask)
    blocks = Blocks.of(base, mask, execution.seed)
    remarks = _changed_base(base)
    remarks += require_same_transform(base, changed, other_transform, "--other-transform")
    pairs = pairs_of_sites(
        (base, *changed), sites if len(wanted) > len(of_outputs) else ()
    )
    outputs = {
        store.label: outputs_of_both(base, store, remarks) if of_outputs else None
        for store in changed
    }
    if not pairs and not any(outputs.values()):
        raise MissingInput(f"nothing to compare: {'; '.join(remarks) or 'no sites'}")
    reason = next(
        (why_not_own(base, mask, own[0].dim) for own in outputs.values() if own), ""
    )
    if reason:
        remarks.append(f"no top1: {reason}")
    works = [
        ReadChange(
            outputs[store.label],
            not reason,
            alike_sites(base, store, pairs if COSINE in wanted else {}, tokens, remarks),
        )
        for store in changed
    ]
    grams = GramOptions(
        cache, not no_cache, execution.device, execution.memory, execution.map
    )
    how = Estimator(estimator or "auto")
    of_cka = pairs if "cka" in wanted else {}
    cka, notes = cka_rows(base, changed, of_cka, tokens, execution, remarks, how, grams)
    for remark in remarks:
        log.info("%s", remark)
    rows: list[Cells] = []
    with counting(execution.progress, images.n * len(changed)):
        for store, work in zip(changed, works, strict=True):
            make = partial(BlockMeans, work, blocks)
            total = execution.fold(
                (base, store), make, images, slab_bytes=work.slab_bytes
            )
            found = total.result()
            about = {"base": base.label}
            answers = {metric: mean for (metric, site), mean in found.items() if not site}
            if RIGHT_BASE in answers and not rows:
                place = site_columns(base, base.sites[LOGITS])
                rows.append(place | top1_cells(answers[RIGHT_BASE]))
            if answers:
                place = site_columns(store, store.sites[LOGITS])
                rows += [about | place | row for row in output_rows(answers)]
            rows += [about | row for row in cka.get(store.label, ())]
            rows += [
                about
                | site_columns(store, store.sites[site])
                | {"metric": COSINE}
                | mean.cells(COSINES)
                for (metric, site), mean in found.items()
                if metric == COSINE
            ]
    rows = [row for row in rows if row["metric"] in wanted]
    if not rows:
        raise MissingInput(
            f"no {' or '.join(wanted)}: {'; '.join(remarks) or 'no sites'}"
        )
    notes = {
        "base": base.label,
        "interval": {
            **OUTPUT_INTERVALS,
            "cosine": OUTPUT_INTERVALS["kl"],
            **({"cka": notes["spread"]} if notes else {}),
        },
        "p": PAIRED_TEST,
        "tokens": tokens,
        "seed": execution.seed,
        "images": {"rows": int(mask.sum()), "chosen": chosen.how},
        WORD: {store.label: blocks.describe() for store in (base, *changed)},
        **({"cka": notes} if notes else {}),
        "remarks": remarks,
    }
    return Table.from_rows(rows, COLUMNS, notes)


def _check_distinct(stores: Sequence[Store]) -> None:
    """Refuse one store, or a copy of it, twice. Raises VitseeError: names both places."""
    seen: dict[str, Store] = {}
    for store in stores:
        other = seen.setdefault(store.manifest.store_id, store)
        if other is not store:
            raise VitseeError(
                f"{other.place} and {store.place} are one store, so nothing changed between them; "
                "expected a store of the unchanged model, then stores of changed ones"
            )


def _changed_base(base: Store) -> list[str]:
    """A remark on a base without some skips or with interventions."""
    record = base.manifest.model
    if not record.get("ablate_skip") and not record.get("interventions"):
        return []
    return [
        f"the base {base.label} is itself a changed model ({weights_name(record)}): effects are "
        "differences from it, not from the whole model"
    ]


def headline(table: Table) -> list[Answer]:
    """An answer per changed store: its loss of accuracy, the share of unchanged answers, the
    divergence, and the site that changed most."""
    said: dict[str, list[str]] = {}
    texts = {
        "top1_difference": "top-1 changed by {}",
        AGREEMENT: "the same class in {}",
        "kl": "KL {} nats",
    }
    for metric, text in texts.items():
        for store, rows in by_store(table, metric=metric):
            said.setdefault(store, []).append(text.format(measured(rows)))
    for store, rows in by_store(table, metric="cka"):
        i = extremes(rows)[0]
        said.setdefault(store, []).append(
            f"lowest CKA {measured(rows, i)} at {rows['site'][i]}"
        )
    return [(store, ", ".join(parts)) for store, parts in said.items()]


OUTPUTS = ("top1_difference", "agreement", "kl")
LAYERS = ("cka", "cosine")
UNCHANGED = {"top1_difference": 0.0, "agreement": 1.0, "kl": 0.0}
# ems: of a store's line, and above and below all
LINE = 1.7
MARGINS = 5.5
MOST_LETTERS = 22
FAR = 0.5


@styled
def plot(table: Table) -> Figure:
    """One panel per metric of the outputs, a line for each changed store with its 95 % interval,
    the unchanged model dashed; below, one panel each for CKA and cosine over depth, one curve per
    changed store. What the table does not contain is left out."""
    rows = table.frame.filter(pl.col("base").is_not_null())
    outputs = [metric for metric in OUTPUTS if metric in rows["metric"]]
    layers = [metric for metric in LAYERS if metric in rows["metric"]]
    of_outputs, of_layers = (
        rows.filter(pl.col("metric").is_in(m)) for m in (outputs, layers)
    )
    n_stores = of_outputs["store"].n_unique()
    beside = PanelGrid(len(outputs), height=LINE * n_stores + MARGINS)
    below = CurveGrid.of(len(layers), of_layers)
    figure, parts = stack(*([beside] if outputs else []), *([below] if layers else []))
    every: list[Axes] = []
    if outputs:
        looks = store_looks(rows)
        for axes, metric in zip(beside.axes(parts[0]), outputs, strict=True):
            _draw_outputs(axes, rows.filter(metric=metric), metric, looks)
            every.append(axes)
        for number, axes in enumerate(every):
            if number % beside.across:
                axes.tick_params(axis="y", labelleft=False)
    if layers:
        panels = below.panels(parts[-1], of_metrics(of_layers, layers))
        for axes, _, own in panels:
            draw_depth_curves(axes, own, among=of_layers)
            low = min(axes.dataLim.y0, 0.98)
            # From 0 on, unless that would hide what there is to see.
            axes.set_ylim(
                min(0.0, low) if low < FAR else low - 0.1 * (1 - low),
                1 + 0.04 * (1 - low),
            )
            every.append(axes)
        below.finish(panels)
    legend_below(figure, handles_of(every))
    return figure


def _draw_outputs(
    axes: Axes, rows: pl.DataFrame, metric: str, looks: dict[str, dict[str, object]]
) -> None:
    stores = rows["store"].unique(maintain_order=True)
    value, low, high = rows.select("value", "low", "high").to_numpy().T
    axes.axvline(
        UNCHANGED[metric],
        color=GREY,
        linestyle=(0, (5, 3)),
        linewidth=1,
        zorder=1,
        label="unchanged",
    )
    axes.plot([], [], color=GREY, solid_capstyle="butt", label=f"bars: {INTERVAL}")
    for y, store in enumerate(stores):
        look = looks[store]
        axes.plot([low[y], high[y]], [y, y], color=look["color"], solid_capstyle="butt")
        axes.plot(
            [value[y]], [y], color=look["color"], marker=look["marker"], linestyle="none"
        )
    axes.set_yticks(np.arange(len(stores)), [shorten(s, MOST_LETTERS) for s in stores])
    axes.set_ylim(len(stores) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(metric_words(metric))
    note_count(axes, rows)


ANALYSIS = Analysis(
    module=__name__,
    question=FLOW,
    help="""
    Measure what a change does to a model, over all images.

    BASE and each CHANGED are stores of the same images: of a model, and of the same model
    without a layer, with an intervention, or with other weights. What it costs: top-1 of the
    model's own head, with McNemar's exact test of the paired difference; images with the same
    answer; KL(base || changed) of the outputs. Where it shows: at each site CKA and the mean
    cosine of tokens with the base.

      $ vitsee extract vit_base_patch16_224 --data val --images 2000 -o b16.zarr
      $ vitsee extract vit_base_patch16_224 --data val --images 2000 --ablate-skip 5 -o skip5.zarr
      $ vitsee effect b16.zarr skip5.zarr -o effect.csv --png effect.png
      $ vitsee effect b16.zarr skip*.zarr --sites none > outputs.csv

    --sites none: outputs alone. All stores must have the base's preprocessing; --other-transform
    measures what another one does. Top-1 is left out where labels are not the classes of the head.
    """,
    needs=("sites",),
    reading=(
        "What each change does, beside each other. Above, the outputs: accuracy lost or gained, "
        "images with the same answer, divergence of the predicted probabilities. Below, how far "
        "each layer still resembles the unchanged model's: layers before the change have 1, and "
        "a curve that recovers says that later layers repair it. A large effect needs a control "
        "of the same size."
    ),
    source="McNemar 1947; Kornblith et al. 2019",
    columns=COLUMNS,
    meanings={
        "store": "CHANGED; BASE in its own row of top1",
        "base": "what store is compared with",
        "p": "of top1_difference: McNemar's exact test",
        "n_only_base": "images that the base alone has right",
        "n_only_changed": "that the changed model alone has right",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    glance_metric="cka",
)
