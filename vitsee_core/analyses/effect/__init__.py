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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from vitsee_core.analyses.effect.figure import plot
from vitsee_core.declaration import Analysis
from vitsee_core.features.compared import other_precision, require_same_transform
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.options import FLOW, SITES, Offers, Option, metrics_option
from vitsee_core.runtime.progress import counting
from vitsee_core.similarity import Estimator, GramOptions
from vitsee_core.similarity import options as pairwise
from vitsee_core.statistics.jackknife import Blocks, Cells
from vitsee_core.statistics.shares import PAIRED_TEST
from vitsee_core.tables.columns import REPLICATES, SITE, VALUES, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.changed_outputs import (
    AGREEMENT,
    OUTPUT_INTERVALS,
    RIGHT_BASE,
    BlockMean,
    BlockMeans,
    output_rows,
    top1_cells,
)
from vitsee_core.truth.labels.labelled_rows import why_not_own
from vitsee_core.types import Mask
from vitsee_stores import Store, require_paired
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

__all__ = ["COLUMNS", "METRICS", "plot", "run"]

log = logging.getLogger(__name__)

# (metric, site) -> mean over images; metrics of the outputs have the site "".
Means = Mapping[tuple[str, str], BlockMean]

COLUMNS = (
    *(*SITE, "base", *VALUES, "p"),
    *("n_images", "n_only_base", "n_only_changed"),
)
METRICS = ("top1", "top1_difference", AGREEMENT, "kl", "cka", COSINE)
COSINES = (-1.0, 1.0)  # limits of a mean cosine


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

    Examples:
        >>> import vitsee
        >>> table = vitsee.effect("vit.zarr", "no-skip.zarr", metrics="agreement")
        >>> table["store"].tolist(), table["value"].tolist()
        (['no-skip'], [0.07])
    """
    if not changed:
        raise VitseeError(
            "no changed store to compare with the base; expected one or more"
        )
    stores = (base, *changed)
    _require_distinct_stores(stores)
    row_metrics = select_metrics(metrics or METRICS, METRICS, "effect")
    compares_outputs = any(metric not in ("cka", COSINE) for metric in row_metrics)
    compares_sites = "cka" in row_metrics or COSINE in row_metrics

    # Only images that all stores could read count, so that all rows are about the same ones.
    image_rows = execution.rows(base)
    mask = image_rows.mask & base.valid
    for store in changed:
        mask = mask & require_paired(base, store)
    images = replace(image_rows, mask=mask)
    blocks = Blocks.of(base, mask, execution.seed)

    # Each step adds its remarks in this order, in which they are also logged.
    remarks = _remarks_on_base(base)
    remarks += require_same_transform(base, changed, other_transform, "--other-transform")
    pairs = pairs_of_sites(stores, sites if compares_sites else ())
    # With CKA the comparison of Gram matrices says it.
    if not pairs or "cka" not in row_metrics:
        remarks += other_precision(stores)
    readers = _make_readers(
        base,
        changed,
        mask,
        compares_outputs=compares_outputs,
        has_sites=bool(pairs),
        cosine_sites=pairs if COSINE in row_metrics else {},
        tokens=tokens,
        remarks=remarks,
    )
    cka, cka_notes = cka_rows(
        base,
        changed,
        pairs if "cka" in row_metrics else {},
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
            # Every comparison measures the base's accuracy again: one row of it is enough.
            if not rows:
                rows += _base_rows(base, means)
            rows += _change_rows(base, store, means, cka.get(store.label, ()))
    rows = [row for row in rows if row["metric"] in row_metrics]
    if not rows:
        raise MissingInput(
            f"no {' or '.join(row_metrics)}: {'; '.join(remarks) or 'no sites'}"
        )
    # A cosine is a mean over images, as KL is.
    intervals = {**OUTPUT_INTERVALS, "cosine": OUTPUT_INTERVALS["kl"]}
    if cka_notes:
        intervals["cka"] = cka_notes["spread"]
    notes = {
        "base": base.label,
        "interval": intervals,
        "p": PAIRED_TEST,
        "tokens": tokens,
        "seed": execution.seed,
        "images": {"rows": int(mask.sum()), "chosen": image_rows.how},
        REPLICATES: {store.label: blocks.describe() for store in stores},
    }
    if cka_notes:
        notes["cka"] = cka_notes
    notes["remarks"] = remarks
    return Table.from_rows(rows, COLUMNS, notes)


def _make_readers(
    base: Store,
    changed: Sequence[Store],
    mask: Mask,
    *,
    compares_outputs: bool,
    has_sites: bool,
    cosine_sites: dict[str, list[SiteSpec]],
    tokens: str,
    remarks: list[str],
) -> list[ReadChange]:
    """Return the reader of each changed store beside the base.

    Args:
        base: store of the unchanged model.
        changed: stores of the changed models.
        mask: (images,) which of them count.
        compares_outputs: whether the logits are compared, where both stores keep them.
        has_sites: whether there are sites to compare.
        cosine_sites: label of a changed store -> sites whose tokens are compared.
        tokens: which tokens of a site are compared.
        remarks: the list that remarks on what cannot be compared are added to.

    Raises:
        MissingInput: there are neither logits nor sites to compare.
    """
    outputs: dict[str, LogitsOfBoth | None] = {store.label: None for store in changed}
    if compares_outputs:
        for store in changed:
            outputs[store.label] = outputs_of_both(base, store, remarks)
    logits_pairs = [pair for pair in outputs.values() if pair is not None]
    if not has_sites and not logits_pairs:
        raise MissingInput(f"nothing to compare: {'; '.join(remarks) or 'no sites'}")
    no_top1_reason = ""
    if logits_pairs:
        # All of them have the base's classes.
        no_top1_reason = why_not_own(base, mask, logits_pairs[0].base.dim)
    if no_top1_reason:
        remarks.append(f"no top1: {no_top1_reason}")
    return [
        ReadChange(
            outputs[store.label],
            labelled=not no_top1_reason,
            sites=alike_sites(base, store, cosine_sites, tokens, remarks),
        )
        for store in changed
    ]


def _output_means(means: Means) -> dict[str, BlockMean]:
    """Return metric -> mean of the metrics of the outputs, to which readers give no site."""
    return {metric: mean for (metric, site), mean in means.items() if not site}


def _base_rows(base: Store, means: Means) -> list[Cells]:
    """Return the row about the accuracy of the base, if it was measured."""
    output_means = _output_means(means)
    if RIGHT_BASE not in output_means:
        return []
    # Its `base` stays empty: it is compared with nothing.
    columns = site_columns(base, base.sites[LOGITS])
    return [{**columns, **top1_cells(output_means[RIGHT_BASE])}]


def _change_rows(
    base: Store, changed: Store, means: Means, cka: Iterable[Cells]
) -> list[Cells]:
    """Return the rows about one changed store: of its outputs, then CKA, then cosines.

    Args:
        base: store of the unchanged model.
        changed: store of a changed model.
        means: (metric, site) -> mean over images, as `ReadChange` names them.
        cka: rows of CKA, without the base.
    """
    rows: list[Cells] = []
    output_means = _output_means(means)
    if output_means:
        logit_columns = site_columns(changed, changed.sites[LOGITS])
        rows += [{**logit_columns, **cells} for cells in output_rows(output_means)]
    rows += cka
    for (metric, site), mean in means.items():
        if metric == COSINE:
            columns = site_columns(changed, changed.sites[site])
            rows.append({**columns, "metric": COSINE, **mean.cells(COSINES)})
    # Every row says what it was compared with.
    return [{"base": base.label, **row} for row in rows]


def _require_distinct_stores(stores: Sequence[Store]) -> None:
    """Refuse a store that is given twice, be it as a copy at another address.

    Raises:
        VitseeError: two stores have the same id; the message names both addresses.
    """
    seen: dict[str, Store] = {}
    for store in stores:
        earlier = seen.setdefault(store.manifest.store_id, store)
        if earlier is not store:
            raise VitseeError(
                f"{earlier.place} and {store.place} are one store, so nothing changed "
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
    """Return a sentence for each changed store.

    It has its loss of accuracy, the share of unchanged answers, the divergence, and the site that
    changed most, as far as the table has them.
    """
    phrases: dict[str, list[str]] = {}  # store -> parts of its sentence
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
