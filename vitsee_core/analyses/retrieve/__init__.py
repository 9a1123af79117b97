"""Image retrieval: do the nearest images show the same thing?

The images of a store are ranked by the cosine of one vector per image with that of a
query; the value is the mean over queries of the average precision (Walmer et al. 2023,
Figs. 9 right, 29, with the class token of each block on ROxford and RParis, Radenovic et
al. 2018). `retrieve.truth` says what is right, `retrieve.scoring` has the formulas of
`map` and `mp@K`, and `retrieve.passes` counts ranks without a ranking of all images.

As the benchmark demands, and other than in the code of Walmer et al. and of DINO (Caron et
al. 2021), a query can be cropped to its box: extracted from the list of
`--export-queries`, it comes as a store of its own.

Where the vectors of all images are equal (a class token before the first block), their
order says nothing, and the value is that of chance, which is remarked on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.retrieve.scoring import Plan, Scores, rank_right_images
from vitsee_core.analyses.retrieve.search import (
    Features,
    check_search,
    search_by_labels,
    search_by_truth,
)
from vitsee_core.analyses.retrieve.truth import (
    FORMS,
    LABELS,
    RetrievalTruth,
    Setting,
    digest,
    read_truth,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import model_key
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import count, stack
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.progress import counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch, VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.analyses.retrieve.passes import QueryBlock


log = logging.getLogger(__name__)

headline = partial(best_layers, units={"map": "mAP", "map_medium": "mAP (medium)"})

COLUMNS = (
    *SITE,
    "query",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_queries",
    "n_images",
    "baseline",
)
CHANCE = "chance"
RANDOM = "random"
BASELINES = (RANDOM,)
AT = (1, 5, 10)
INTERVAL_METHOD = (
    "std: standard deviation over queries (n - 1). Where every image is a query, low and "
    "high are "
    "value -+ t(0.975, blocks - 1) * standard error of a jackknife that leaves a block "
    "of images "
    "out of queries and database alike; with queries apart value -+ t(0.975, n - 1) * "
    "std / "
    f"sqrt(n), over queries, the database held fixed. Of mp@K with that error: {SHARES}"
)


@analysis
def run(
    *stores: Store,
    truth: str | os.PathLike[str] | RetrievalTruth = LABELS,
    queries: Sequence[Store] = (),
    distractors: Sequence[Store] = (),
    sites: Sequence[str] = ("blocks",),
    tokens: str | None = None,
    form: str | None = None,
    cutoffs: Sequence[int] = AT,
    metrics: Sequence[str] = (),
    baselines: Sequence[str] = (),
    per_query: bool = False,
    execution: Execution = DEFAULT,
) -> Table:
    """Return one row per site and metric, then those of chance; with `per_query` one per
    query too.

    Columns: `COLUMNS`; `query` only with `per_query`, whose rows have the metrics `ap...`;
    `n_images` are those searched, distractors among them; `baseline` is empty in the rows
    about the model.

    Memory: the queries' vectors and lists, and a tile of cosines; queries are worked on so
    many at a time as fit. The images are streamed, and there may be any number.

    Args:
        stores: the images that are searched, and without `queries` the queries too.
        truth: "labels" (each image is a query, itself left out; right are those of its
            class), the path of a ground truth (.pkl or .json of ROxford's form, .csv of
            GLDv2's), or one that was read.
        queries: stores of the queries, one of each model in `stores`.
        distractors: stores of images that are wrong for every query; of each model in
            `stores`.
        sites: names, globs and groups.
        tokens: which token stands for an image, as in `features.choose_features`.
        form: of the average precision, "trapezoid" or "plain"; by default that of the
            ground truth: trapezoid for ROxford, RParis and Oxford5k, plain for the rest.
        cutoffs: the K of mp@K.
        metrics: some of those that the ground truth gives, by default all.
        baselines: `random`: standard normal vectors in place of the features (Walmer et
            al. 2023, B.3), one draw for each number of channels.
        per_query: add the average precision of each query.
        execution: which images (with labels only), and what the work may use; see
            `Execution`.

    Raises:
        MissingInput: no labels, an image of the ground truth that is not in a store, or a
            store lacks a site.
        StoreMismatch: other models, transforms or classes; a query among the images; a
            distractor that is a right image.
        VitseeError: a ground truth that is none, a query that could not be read, none with
            a right image, or an unknown choice.

    Examples:
        >>> import vitsee
        >>> table = vitsee.retrieve("vit.zarr", sites="blocks.-1.out")
        >>> means = table.filter(metric="map")
        >>> list(zip(means["baseline"].tolist(), means["value"].round(2).tolist()))
        [('', 0.81), ('chance', 0.12)]
    """
    parsed_truth, truth_description = _read_truth_option(truth)
    form = _average_precision_form(parsed_truth, form)
    if min(cutoffs, default=1) < 1:
        raise VitseeError(
            f"precision at {min(cutoffs)} was asked for; expected 1 or more"
        )
    if parsed_truth is not None and execution.images is not None:
        raise VitseeError(
            f"--images would leave out images that {parsed_truth.source} names; it goes "
            "with "
            "labels only"
        )
    seed = execution.seed
    unknown_baselines = {*baselines} - {*BASELINES}
    if unknown_baselines:
        raise VitseeError(
            f"no baseline {min(unknown_baselines)!r}; expected {', '.join(BASELINES)}"
        )

    # One search per store, then what is scored at which of its sites.
    selected = select_each(stores, sites, sites_of)
    searches = []
    for inputs in _stores_by_model(selected.stores, queries, distractors):
        if parsed_truth is None:
            search = search_by_labels(
                inputs.images, inputs.queries, images=execution.images, seed=seed
            )
        else:
            search = search_by_truth(parsed_truth, inputs.images, inputs.queries)
        search = replace(search, distractors=inputs.distractors)
        remarks_on_ids = check_search(search)
        search = replace(search, remarks=(*search.remarks, *remarks_on_ids))
        searches.append(search)
    plans = [
        Plan.from_search(search, chosen_sites, tokens, form=form, ks=cutoffs, seed=seed)
        for search, chosen_sites in zip(searches, selected.chosen, strict=True)
    ]
    if metrics:
        choices = dict.fromkeys(metric for plan in plans for metric in plan.metrics)
        chosen_metrics = select_metrics(metrics, choices, "retrieve")
        plans = [plan.with_metrics(chosen_metrics) for plan in plans]
    remarks = [remark for plan in plans for remark in plan.remarks]
    for remark in remarks:
        log.info("%s", remark)

    # Rows about the model first, then those of the baselines.
    rows: list[dict[str, Any]] = []
    baseline_rows: list[dict[str, Any]] = []
    with_random = RANDOM in baselines
    n_passes = [
        len(plan.features) + (len(_channel_counts(plan)) if with_random else 0)
        for plan in plans
    ]
    n_total = sum(
        plan.search.n_images * n for plan, n in zip(plans, n_passes, strict=True)
    )
    with counting(execution.progress, n_total):
        for plan in plans:
            site_scores, random_scores = _score_plan(
                plan, seed, execution, with_random=with_random
            )
            for (site, features), scores in zip(
                plan.features.values(), site_scores, strict=True
            ):
                if scores.remark:
                    remarks.append(scores.remark)
                    log.info("%s", scores.remark)
                about = site_columns(plan.search.store, site)
                for row in plan.rows(scores.values, scores.without, per_query=per_query):
                    rows.append(about | row)
                for row in plan.chance_rows():
                    baseline_rows.append(about | row | {"baseline": CHANCE})
                if with_random:
                    scores = random_scores[features.images.dim]
                    for row in plan.rows(scores.values, scores.without, per_query=False):
                        baseline_rows.append(about | row | {"baseline": RANDOM})
    notes = {
        "interval": INTERVAL_METHOD,
        "truth": truth_description,
        "average_precision": form,
        "searched": {plan.search.store.label: plan.describe() for plan in plans},
        "compared": [plan.describe_compared(tokens) for plan in plans],
        "seed": seed,
        REPLICATES: {plan.search.store.label: plan.blocks.describe() for plan in plans},
        "remarks": remarks,
        **selected.notes(),
    }
    columns = [name for name in COLUMNS if name != "query" or per_query]
    return Table.from_rows(rows + baseline_rows, columns, notes)


def _read_truth_option(
    truth: str | os.PathLike[str] | RetrievalTruth,
) -> tuple[RetrievalTruth | None, dict[str, Any]]:
    """Return the ground truth, None for labels, and its description for a sidecar."""
    if isinstance(truth, RetrievalTruth):
        return truth, {"source": truth.source}
    if str(truth) == LABELS:
        return None, {"source": LABELS}
    path = Path(truth)
    return read_truth(path), {"source": str(path), "sha256": digest(path)}


def _average_precision_form(truth: RetrievalTruth | None, form: str | None) -> str:
    """Return the form of the average precision: the option, or else that of the ground truth."""
    if form is None:
        form = "plain" if truth is None else truth.form
    if form not in FORMS:
        raise VitseeError(f"no average precision {form!r}; expected {' or '.join(FORMS)}")
    has_top = truth is not None and any(setting.top for setting in truth.settings)
    if form == "trapezoid" and has_top:
        raise VitseeError(
            "map@100 is defined for the plain average precision only; use --ap plain"
        )
    return form


class StoresOfModel(NamedTuple):
    """The stores of one search: the searched images, the queries, the distractors."""

    images: Store
    queries: Store | None
    distractors: tuple[Store, ...]


def _stores_by_model(
    stores: Sequence[Store], queries: Sequence[Store], distractors: Sequence[Store]
) -> Iterator[StoresOfModel]:
    """Yield each store with the stores of queries and of distractors of its model."""
    models = {model_key(store) for store in stores}
    _require_known_models(queries, models, "queries")
    _require_known_models(distractors, models, "distractors")
    for store in stores:
        model = model_key(store)
        own_queries = [query for query in queries if model_key(query) == model]
        own_distractors = [other for other in distractors if model_key(other) == model]
        if queries and len(own_queries) != 1:
            labels = " and ".join(query.label for query in own_queries) or "none"
            raise StoreMismatch(
                f"{store.label} has {labels} of the stores of queries; expected one of "
                "its model"
            )
        if distractors and not own_distractors:
            raise StoreMismatch(
                f"none of the stores of distractors is of the model of {store.label}"
            )
        yield StoresOfModel(
            images=store,
            queries=own_queries[0] if own_queries else None,
            distractors=tuple(own_distractors),
        )


def _require_known_models(stores: Sequence[Store], models: set[Any], what: str) -> None:
    """Refuse stores of models that are not searched with; what: "queries" or "distractors"."""
    for store in stores:
        if model_key(store) not in models:
            name = store.manifest.model.get("name")
            raise StoreMismatch(
                f"{store.label} ({name}) is of none of the models that are searched with; "
                f"extract the {what} with the same model and weights"
            )


class SiteScores(NamedTuple):
    """The scores of one site.

    Attributes:
        values: setting -> metric -> (queries,).
        without: the same as (blocks, queries) without each block of images, if the images
            are the queries; (0, queries) otherwise.
        remark: for the user; "" if there is none.
    """

    values: Scores
    without: Scores
    remark: str


def _channel_counts(plan: Plan) -> list[int]:
    """Return the distinct numbers of channels of a plan's sites: one random draw for each."""
    return list(
        dict.fromkeys(features.images.dim for _, features in plan.features.values())
    )


def _score_plan(
    plan: Plan, seed: int, execution: Execution, *, with_random: bool
) -> tuple[list[SiteScores], dict[int, SiteScores]]:
    """Return the scores of each site, and of random vectors by their number of channels."""
    site_features = [features for _, features in plan.features.values()]
    dims = _channel_counts(plan) if with_random else []
    random_features = [Features.random(plan.search, dim, seed) for dim in dims]
    results = list(
        execution.spread(partial(_score_site, plan), site_features + random_features)
    )
    random_results = results[len(site_features) :]
    return results[: len(site_features)], dict(zip(dims, random_results, strict=True))


def _score_site(plan: Plan, execution: Execution, features: Features) -> SiteScores:
    """Return the scores of one site or of random vectors."""
    from vitsee_core.analyses.retrieve.passes import count_in_two_passes

    # Setting -> metric -> one array (1 + blocks, queries) per block of queries.
    scored: dict[Setting, dict[str, list[Float]]] = {
        setting: {metric: [] for metric in plan.chance[setting]}
        for setting in plan.scored_queries
    }
    is_blank_parts = []
    is_constant = False
    for query_block in count_in_two_passes(plan.search, features, execution):
        for setting in plan.scored_queries:
            for metric, values in _score_query_block(plan, setting, query_block).items():
                scored[setting][metric].append(values)
        is_blank_parts.append(query_block.is_blank)
        is_constant = query_block.is_constant
    is_blank = np.concatenate(is_blank_parts)

    values_of_all = Scores()
    without = Scores()
    for setting, parts_by_metric in scored.items():
        values_of_all[setting] = {}
        without[setting] = {}
        for metric, parts in parts_by_metric.items():
            # Equal cosines are in the store's order, which says nothing: chance in its
            # place.
            chance = plan.chance[setting][metric]
            values = np.where(is_blank, chance, np.concatenate(parts, axis=1))
            values_of_all[setting][metric] = values[0]
            without[setting][metric] = values[1:]
    name = f"{plan.search.store.label} {features.name}"
    remark = ""
    if is_constant:
        remark = (
            f"{name}: the vector of every image is the same; its value is that of chance"
        )
    elif is_blank.any():
        remark = (
            f"{name}: {int(is_blank.sum())} of {len(is_blank)} queries are zero, with "
            "the same "
            "cosine to every image; their values are those of chance"
        )
    return SiteScores(values_of_all, without, remark)


def _score_query_block(
    plan: Plan, setting: Setting, query_block: QueryBlock
) -> dict[str, Float]:
    """Return metric -> (1 + blocks, queries): of all images, then without each block of
    images.

    There are such blocks if the queries are the images.
    """
    pairs = query_block.pairs
    counts = query_block.counts
    is_right = pairs.in_lists(setting.positives)
    # Which pairs count, and how many wrong images are above each.
    selections = [(is_right, counts.n_above)]
    if plan.search.image_blocks is not None:
        block_of_image = plan.search.image_blocks.labels[pairs.image]
        for b in range(plan.search.image_blocks.n):
            n_above = counts.n_above - counts.n_above_by_block[:, b]
            selections.append((is_right & (block_of_image != b), n_above))
    scores = []
    for mask, n_above in selections:
        ranks = rank_right_images(
            query_block.n_queries, pairs.query[mask], counts.keys[mask], n_above[mask]
        )
        scores.append(plan.score(setting, ranks))
    return {
        metric: np.stack([values[metric] for values in scores]) for metric in scores[0]
    }


@styled
def plot(table: Table) -> Figure:
    """Draw mean average precision, and precision at the largest K, against relative depth.

    A panel per metric, a curve per store with its interval as a band, chance dashed
    (Walmer et al. 2023, Figs. 9 right, 29).
    """
    frame = table.frame
    if "query" in frame.columns:
        frame = frame.filter(pl.col("query").is_null())
    lines = _lines_of_panels(frame["metric"].unique(maintain_order=True).to_list())
    drawn_metrics = [metric for line in lines for metric in line]
    drawn_rows = frame.filter(pl.col("metric").is_in(drawn_metrics))
    grids = [CurveGrid.of(len(line), drawn_rows) for line in lines]
    figure, boxes = stack(*grids)
    all_axes: list[Axes] = []
    for line, grid, box in zip(lines, grids, boxes, strict=True):
        panels = grid.panels(box, of_metrics(frame, line))
        line_axes = [axes for axes, *_ in panels]
        for axes, _, rows in panels:
            draw_depth_curves(
                axes,
                rows,
                among=drawn_rows,
                spread="95 % interval over queries",
                counts=("n_queries", f"queries, {count(rows)} images"),
            )
        # Panels of a line have one scale, to be compared.
        limits = [axes.get_ylim() for axes in line_axes]
        for axes in line_axes:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        grid.finish(panels)
        all_axes += line_axes
    add_curve_legend(figure, all_axes)
    return figure


def _lines_of_panels(metrics: Sequence[str]) -> list[list[str]]:
    """Return the metrics of each line of panels: mean average precisions, then mp@K,
    largest K.

    One panel of each shares a line.
    """
    maps = [metric for metric in metrics if metric.startswith("map")]
    precisions = [metric for metric in metrics if metric.startswith("mp@")]
    ks = {int(metric.removeprefix("mp@").partition("_")[0]) for metric in precisions}
    at_largest_k = [
        metric for metric in precisions if metric.partition("_")[0] == f"mp@{max(ks)}"
    ]
    if len(maps) == 1:
        return [maps + at_largest_k]
    return [line for line in (maps, at_largest_k) if line]


ANALYSIS = Analysis(
    module=__name__,
    needs=("sites",),
    reading=(
        "Whether the images nearest to a query show the same thing: mean average "
        "precision "
        "against depth. The dashed line is what an order by chance gets; intervals are "
        "over "
        "queries."
    ),
    source="Radenovic et al. 2018; Walmer et al. 2023, Figs. 9 right, 29",
    columns=COLUMNS,
    metrics=("map*", "ap*", "mp@*"),
    run=run,
    plot=plot,
    headline=headline,
)
