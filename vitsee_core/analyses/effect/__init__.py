"""Effect: what changed, against the same model unchanged?

The base is a store of the unchanged model; changed stores hold the same images, seen by the model
with an ablation, an intervention or other weights. Each changed store is compared with the base.

The outputs are compared by four metrics, with logits u of the base and v of the changed model:

- `top1`: the share of images whose label has the largest logit, if the labels are the head's
  classes; `top1_difference`: changed less base, with McNemar's exact test of the images that only
  one of the two models has right (McNemar 1947);
- `agreement`: the share of images with the same largest logit;
- `kl`: KL(softmax u || softmax v) = sum_c p_c log(p_c / q_c) in nats, mean over images.

Two metrics compare each site that both stores hold:

- `cka`: debiased linear CKA, as in `vitsee cka`;
- `cosine`: the cosine of each token with the same token in the base, mean over tokens, then over
  images. A token that is 0 in one of the two stores counts 0, in both 1. Sites whose tokens or
  channels differ have none.

CKA compares similarities between images, which a rotation of the features does not change. The
cosine compares each image's own features; a rotation and an added constant both change it.
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
    LogitsOfBoth,
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
            "Measure what other preprocessing does (size, crop, frames, time), where "
            "nothing else differs.  [default: refuse]"
        ),
    ] = False,
    cache: Annotated[Path | None, pairwise.CACHE] = None,
    no_cache: Annotated[bool, pairwise.NO_CACHE] = False,
    execution: Annotated[
        Execution,
        Offers("images seed device jobs memory", dask="slabs and Gram matrices"),
    ] = DEFAULT,
) -> Table:
    """Return a table with one row per changed store and metric of the outputs, and per site for
    `cka` and `cosine`.

    The columns are `COLUMNS`. `top1` has a row for the base, too, whose `base` is empty. Shares are
    from 0 to 1, `kl` is in nats. `std` is the jackknife's standard error over blocks of images,
    `low` and `high` are the 95 % interval over images. Only rows of `top1_difference` have `p`,
    `n_only_base` and `n_only_changed`. Only images that all stores could read count.

    Memory: a slab of both stores at one site, and the Gram matrices of CKA (`similarity.hsic`).

    Args:
        base: store of the unchanged model.
        changed: stores of changed models, of the same images in the same order.
        sites: patterns of the sites where `cka` and `cosine` are measured; empty for none.
        metrics: names out of `METRICS`; empty for all that the stores allow.
        tokens: which tokens of a site are compared.
        estimator: estimator of CKA; by default the one that fits the number of images.
        other_transform: the change that is measured is the preprocessing, and nothing else.
        cache: folder for Gram matrices; by default beside each store.
        no_cache: do not keep Gram matrices.
        execution: images, seed, device and parallel work.

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
    _require_distinct_stores((base, *changed))
    requested = asked_for(metrics or METRICS, METRICS, "effect")
    compares_outputs = any(metric not in ("cka", COSINE) for metric in requested)
    compares_sites = "cka" in requested or COSINE in requested
    chosen = execution.rows(base)
    mask = chosen.mask & base.valid
    for store in changed:
        mask = mask & require_paired(base, store)
    images = replace(chosen, mask=mask)
    blocks = Blocks.of(base, mask, execution.seed)
    # Each step adds its remarks in this order, in which they are also logged.
    remarks = _remarks_on_base(base)
    remarks += require_same_transform(base, changed, other_transform, "--other-transform")
    pairs = pairs_of_sites((base, *changed), sites if compares_sites else ())
    outputs: dict[str, LogitsOfBoth | None] = {store.label: None for store in changed}
    if compares_outputs:
        for store in changed:
            outputs[store.label] = outputs_of_both(base, store, remarks)
    logits_pairs = [pair for pair in outputs.values() if pair is not None]
    if not pairs and not logits_pairs:
        raise MissingInput(f"nothing to compare: {'; '.join(remarks) or 'no sites'}")
    no_top1_reason = ""
    if logits_pairs:
        no_top1_reason = why_not_own(base, mask, logits_pairs[0].base.dim)
    if no_top1_reason:
        remarks.append(f"no top1: {no_top1_reason}")
    cosine_pairs = pairs if COSINE in requested else {}
    readers = [
        ReadChange(
            outputs[store.label],
            labelled=not no_top1_reason,
            sites=alike_sites(base, store, cosine_pairs, tokens, remarks),
        )
        for store in changed
    ]
    cka, cka_notes = cka_rows(
        base,
        changed,
        pairs if "cka" in requested else {},
        tokens=tokens,
        execution=execution,
        remarks=remarks,
        estimator=Estimator(estimator or "auto"),
        options=GramOptions(
            cache=cache,
            use_cache=not no_cache,
            device=execution.device,
            memory=execution.memory,
            map=execution.map,
        ),
    )
    for remark in remarks:
        log.info("%s", remark)
    rows: list[Cells] = []
    with counting(execution.progress, images.n * len(changed)):
        for store, reader in zip(changed, readers, strict=True):
            means = execution.fold(
                (base, store),
                partial(BlockMeans, reader, blocks),
                images,
                slab_bytes=reader.slab_bytes,
            ).result()
            # `ReadChange` gives the outputs' metrics an empty site.
            output_means = {
                metric: mean for (metric, site), mean in means.items() if not site
            }
            # Every comparison measures the base's accuracy again: one row of it is enough.
            if RIGHT_BASE in output_means and not rows:
                base_row = site_columns(base, base.sites[LOGITS])
                base_row.update(top1_cells(output_means[RIGHT_BASE]))
                rows.append(base_row)
            about_store = {"base": base.label}
            if output_means:
                about_logits = site_columns(store, store.sites[LOGITS])
                for cells in output_rows(output_means):
                    rows.append({**about_store, **about_logits, **cells})
            for cells in cka.get(store.label, ()):
                rows.append({**about_store, **cells})
            for (metric, site), mean in means.items():
                if metric == COSINE:
                    about_site = site_columns(store, store.sites[site])
                    cells = mean.cells(COSINES)
                    rows.append({**about_store, **about_site, "metric": COSINE, **cells})
    rows = [row for row in rows if row["metric"] in requested]
    if not rows:
        raise MissingInput(
            f"no {' or '.join(requested)}: {'; '.join(remarks) or 'no sites'}"
        )
    intervals = {**OUTPUT_INTERVALS, "cosine": OUTPUT_INTERVALS["kl"]}
    if cka_notes:
        intervals["cka"] = cka_notes["spread"]
    notes = {
        "base": base.label,
        "interval": intervals,
        "p": PAIRED_TEST,
        "tokens": tokens,
        "seed": execution.seed,
        "images": {"rows": int(mask.sum()), "chosen": chosen.how},
        WORD: {store.label: blocks.describe() for store in (base, *changed)},
    }
    if cka_notes:
        notes["cka"] = cka_notes
    notes["remarks"] = remarks
    return Table.from_rows(rows, COLUMNS, notes)


def _require_distinct_stores(stores: Sequence[Store]) -> None:
    """Refuse a store that is given twice, be it as a copy at another address.

    Raises:
        VitseeError: two stores have the same id; the message names both addresses.
    """
    seen: dict[str, Store] = {}
    for store in stores:
        other = seen.setdefault(store.manifest.store_id, store)
        if other is not store:
            raise VitseeError(
                f"{other.place} and {store.place} are one store, so nothing changed "
                "between them; expected a store of the unchanged model, then stores of "
                "changed ones"
            )


def _remarks_on_base(base: Store) -> list[str]:
    """Return a remark if the base is itself a changed model: without skips, or intervened on."""
    record = base.manifest.model
    if not record.get("ablate_skip") and not record.get("interventions"):
        return []
    return [
        f"the base {base.label} is itself a changed model ({weights_name(record)}): "
        "effects are differences from it, not from the whole model"
    ]


def headline(table: Table) -> list[Answer]:
    """Return per changed store its loss of accuracy, the share of unchanged answers, the
    divergence, and the site that changed most."""
    phrases: dict[str, list[str]] = {}
    templates = {
        "top1_difference": "top-1 changed by {}",
        AGREEMENT: "the same class in {}",
        "kl": "KL {} nats",
    }
    for metric, template in templates.items():
        for store, rows in by_store(table, metric=metric):
            phrases.setdefault(store, []).append(template.format(measured(rows)))
    for store, rows in by_store(table, metric="cka"):
        lowest = extremes(rows)[0]
        phrases.setdefault(store, []).append(
            f"lowest CKA {measured(rows, lowest)} at {rows['site'][lowest]}"
        )
    return [(store, ", ".join(texts)) for store, texts in phrases.items()]


OUTPUTS = ("top1_difference", "agreement", "kl")
LAYERS = ("cka", "cosine")
UNCHANGED = {"top1_difference": 0.0, "agreement": 1.0, "kl": 0.0}
# Heights in ems: one store's line, and what stands above and below all lines.
LINE = 1.7
MARGINS = 5.5
MAX_LETTERS = 22
# Below this value of CKA or cosine the axis begins at 0.
FAR = 0.5


@styled
def plot(table: Table) -> Figure:
    """Draw the outputs' metrics above and CKA and cosine over depth below.

    Each metric of the outputs has a panel with a line per changed store and its 95 % interval, and
    the unchanged model dashed. CKA and cosine have a panel each, with a curve per changed store.
    Metrics that the table does not contain are left out.
    """
    rows = table.frame.filter(pl.col("base").is_not_null())
    output_metrics = [metric for metric in OUTPUTS if metric in rows["metric"]]
    layer_metrics = [metric for metric in LAYERS if metric in rows["metric"]]
    outputs_frame = rows.filter(pl.col("metric").is_in(output_metrics))
    layer_rows = rows.filter(pl.col("metric").is_in(layer_metrics))
    n_stores = outputs_frame["store"].n_unique()
    output_grid = PanelGrid(len(output_metrics), height=LINE * n_stores + MARGINS)
    layer_grid = CurveGrid.of(len(layer_metrics), layer_rows)
    grids: list[PanelGrid | CurveGrid] = []
    if output_metrics:
        grids.append(output_grid)
    if layer_metrics:
        grids.append(layer_grid)
    figure, boxes = stack(*grids)
    all_axes: list[Axes] = []
    if output_metrics:
        looks = store_looks(rows)
        output_axes = output_grid.axes(boxes[0])
        for axes, metric in zip(output_axes, output_metrics, strict=True):
            _draw_output_metric(axes, rows.filter(metric=metric), metric, looks)
            all_axes.append(axes)
        # Only the first panel of each line names the stores.
        for number, axes in enumerate(output_axes):
            if number % output_grid.across:
                axes.tick_params(axis="y", labelleft=False)
    if layer_metrics:
        panels = layer_grid.panels(boxes[-1], of_metrics(layer_rows, layer_metrics))
        for axes, _, metric_rows in panels:
            draw_depth_curves(axes, metric_rows, among=layer_rows)
            lowest = min(axes.dataLim.y0, 0.98)
            # From 0 on, unless all curves are so near 1 that their differences would be hidden.
            bottom = lowest - 0.1 * (1 - lowest)
            if lowest < FAR:
                bottom = min(0.0, lowest)
            axes.set_ylim(bottom, 1 + 0.04 * (1 - lowest))
            all_axes.append(axes)
        layer_grid.finish(panels)
    legend_below(figure, handles_of(all_axes))
    return figure


def _draw_output_metric(
    axes: Axes, rows: pl.DataFrame, metric: str, looks: dict[str, dict[str, object]]
) -> None:
    """Draw one metric of the outputs: a line per store with its value and 95 % interval."""
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
    # An empty line, so that the legend explains the bars once and in grey.
    axes.plot([], [], color=GREY, solid_capstyle="butt", label=f"bars: {INTERVAL}")
    for y, store in enumerate(stores):
        look = looks[store]
        axes.plot([low[y], high[y]], [y, y], color=look["color"], solid_capstyle="butt")
        axes.plot(
            [value[y]], [y], color=look["color"], marker=look["marker"], linestyle="none"
        )
    axes.set_yticks(np.arange(len(stores)), [shorten(s, MAX_LETTERS) for s in stores])
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
    without a layer, with an intervention, or with other weights. What it costs: top-1 of
    the model's own head, with McNemar's exact test of the paired difference; images with
    the same answer; KL(base || changed) of the outputs. Where it shows: at each site CKA
    and the mean cosine of tokens with the base.

      $ vitsee extract vit_base_patch16_224 --data val --images 2000 -o b16.zarr
      $ vitsee extract vit_base_patch16_224 --data val --images 2000 --ablate-skip 5 -o skip5.zarr
      $ vitsee effect b16.zarr skip5.zarr -o effect.csv --png effect.png
      $ vitsee effect b16.zarr skip*.zarr --sites none > outputs.csv

    --sites none: outputs alone. All stores must have the base's preprocessing;
    --other-transform measures what another one does. Top-1 is left out where labels are
    not the classes of the head.
    """,
    needs=("sites",),
    reading=(
        "What each change does, beside each other. Above, the outputs: accuracy lost "
        "or gained, images with the same answer, divergence of the predicted "
        "probabilities. Below, how far each layer still resembles the unchanged "
        "model's: layers before the change have 1, and a curve that recovers says that "
        "later layers repair it. A large effect needs a control of the same size."
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
