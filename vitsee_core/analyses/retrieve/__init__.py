"""Image retrieval: do the nearest images show the same thing?

The images of a store are ranked by the cosine of one vector per image with that of a query; the
value is the mean over queries of the average precision (Walmer et al. 2023, Figs. 9 right, 29, with
the class token of each block on ROxford and RParis, Radenovic et al. 2018). `retrieve.truth` says
what is right, `retrieve.scoring` has the formulas of `map` and `mp@K`, and `retrieve.passes` counts
ranks without a ranking of all images.

As the benchmark demands, and other than in the code of Walmer et al. and of DINO (Caron et al.
2021), a query can be cropped to its box: extracted from the list of `--export-queries`, it comes as
a store of its own.

Where the vectors of all images are equal (a class token before the first block), their order says
nothing, and the value is that of chance, which is remarked on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.retrieve.scoring import Plan, Scores, ranked
from vitsee_core.analyses.retrieve.search import (
    Features,
    by_labels,
    by_truth,
    check_search,
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
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import StoreMismatch, VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

headline = partial(best_layers, units={"map": "mAP", "map_medium": "mAP (medium)"})

COLUMNS = (
    *(*SITE, "query"),
    *("metric", "value", "std", "low", "high", "n_queries", "n_images", "baseline"),
)
CHANCE = "chance"
RANDOM = "random"
BASELINES = (RANDOM,)
AT = (1, 5, 10)
INTERVAL_METHOD = (
    "std: standard deviation over queries (n - 1). Where every image is a query, low and high are "
    "value -+ t(0.975, blocks - 1) * standard error of a jackknife that leaves a block of images "
    "out of queries and database alike; with queries apart value -+ t(0.975, n - 1) * std / "
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
    at: Sequence[int] = AT,
    metrics: Sequence[str] = (),
    baselines: Sequence[str] = (),
    per_query: bool = False,
    execution: Execution = DEFAULT,
) -> Table:
    """One row per site and metric, then those of chance; with `per_query` one per query too.

    Columns: see `COLUMNS`; `query` only with `per_query`, whose rows have the metrics `ap...`;
    `n_images` are those searched, distractors among them; `baseline` is empty in the rows about the
    model.

    Memory: the queries' vectors and lists, and a tile of cosines; queries are worked on so many at
    a time as fit. The images are streamed, and there may be any number.

    Args:
        stores: the images that are searched, and without `queries` the queries too.
        truth: "labels" (each image is a query, itself left out; right are those of its class), the
            path of a ground truth (.pkl or .json of ROxford's form, .csv of GLDv2's), or one that
            was read.
        queries: stores of the queries, one of each model in `stores`.
        distractors: stores of images that are wrong for every query; of each model in `stores`.
        sites: names, globs and groups.
        tokens: which token stands for an image; see `features.choose_features`.
        form: of the average precision, "trapezoid" or "plain"; by default that of the ground truth:
            trapezoid for ROxford, RParis and Oxford5k, plain for the rest.
        at: the K of mp@K.
        metrics: some of those that the ground truth gives, by default all.
        baselines: `random`: standard normal vectors in place of the features (Walmer et al. 2023,
            B.3), one draw for each number of channels.
        per_query: add the average precision of each query.
        execution: which images (with labels only), and what the work may use; see `Execution`.

    Raises:
        MissingInput: no labels, an image of the ground truth that is not in a store, or a store
            lacks a site.
        StoreMismatch: other models, transforms or classes; a query among the images; a distractor
            that is a right image.
        VitseeError: a ground truth that is none, a query that could not be read, none with a right
            image, or an unknown choice.

    Examples:
        >>> import vitsee
        >>> table = vitsee.retrieve("vit.zarr", sites="blocks.-1.out")
        >>> means = table.filter(metric="map")
        >>> list(zip(means["baseline"].tolist(), means["value"].round(2).tolist()))
        [('', 0.81), ('chance', 0.12)]
    """
    known, source = _opened(truth)
    form = _checked(known, form, at, execution.images)
    seed = execution.seed
    if unknown := {*baselines} - {*BASELINES}:
        raise VitseeError(
            f"no baseline {min(unknown)!r}; expected {', '.join(BASELINES)}"
        )
    selected = select_each(stores, sites, sites_of)
    searches = []
    for store, own, more in _by_model(selected.stores, queries, distractors):
        if known is None:
            search = by_labels(store, own, execution.images, seed)
        else:
            search = by_truth(known, store, own)
        search = replace(search, distractors=tuple(more))
        remarks_on_ids = check_search(search)
        search = replace(search, remarks=(*search.remarks, *remarks_on_ids))
        searches.append(search)
    plans = [
        Plan.of(search, chosen, tokens, form, at, seed)
        for search, chosen in zip(searches, selected.chosen, strict=True)
    ]
    if metrics:
        known_ = dict.fromkeys(metric for plan in plans for metric in plan.metrics)
        wanted = select_metrics(metrics, known_, "retrieve")
        plans = [plan.only(wanted) for plan in plans]
    remarks = [remark for plan in plans for remark in plan.remarks]
    for remark in remarks:
        log.info("%s", remark)
    rows: list[dict[str, Any]] = []
    chance_rows: list[dict[str, Any]] = []
    drawn = [
        dict.fromkeys(of.images.dim for _, of in plan.read.values() if baselines)
        for plan in plans
    ]
    total = sum(
        plan.search.n_images * (len(plan.read) + len(dims))
        for plan, dims in zip(plans, drawn, strict=True)
    )
    with counting(execution.progress, total):
        for plan, dims in zip(plans, drawn, strict=True):
            read = list(plan.read.values())
            noises = [Features.random(plan.search, dim, seed) for dim in dims]
            items = [*(features for _, features in read), *noises]
            results = list(execution.spread(partial(_scores, plan), items))
            of_noise = dict(zip(dims, results[len(read) :], strict=True))
            for (site, features), (scores, without, remark) in zip(
                read, results, strict=False
            ):
                if remark:
                    remarks.append(remark)
                    log.info("%s", remark)
                place = site_columns(plan.search.store, site)
                rows += [place | row for row in plan.rows(scores, without, per_query)]
                chance_rows += [
                    place | row | {"baseline": CHANCE} for row in plan.chance_rows()
                ]
                if baselines:
                    noise = of_noise[features.images.dim][:2]
                    chance_rows += [
                        place | row | {"baseline": RANDOM}
                        for row in plan.rows(*noise, False)
                    ]
    notes = {
        "interval": INTERVAL_METHOD,
        "truth": source,
        "average_precision": form,
        "searched": {plan.search.store.label: plan.describe() for plan in plans},
        "compared": [plan.compared(tokens) for plan in plans],
        "seed": seed,
        WORD: {plan.search.store.label: plan.blocks.describe() for plan in plans},
        "remarks": remarks,
        **selected.notes(),
    }
    names = [name for name in COLUMNS if name != "query" or per_query]
    return Table.from_rows(rows + chance_rows, names, notes)


def _opened(
    truth: str | os.PathLike[str] | RetrievalTruth,
) -> tuple[RetrievalTruth | None, dict[str, Any]]:
    """The ground truth, None for labels, and its description for a sidecar."""
    if isinstance(truth, RetrievalTruth):
        return truth, {"source": truth.source}
    if str(truth) == LABELS:
        return None, {"source": LABELS}
    path = Path(truth)
    return read_truth(path), {"source": str(path), "sha256": digest(path)}


def _checked(
    truth: RetrievalTruth | None, form: str | None, at: Sequence[int], images: int | None
) -> str:
    """The form of the average precision."""
    own = "plain" if truth is None else truth.form
    form = own if form is None else form
    if form not in FORMS:
        raise VitseeError(f"no average precision {form!r}; expected {' or '.join(FORMS)}")
    if form == "trapezoid" and truth is not None and any(s.top for s in truth.settings):
        raise VitseeError(
            "map@100 is defined for the plain average precision only; use --ap plain"
        )
    if min(at, default=1) < 1:
        raise VitseeError(f"precision at {min(at)} was asked for; expected 1 or more")
    if truth is not None and images is not None:
        raise VitseeError(
            f"--images would leave out images that {truth.source} names; it goes with labels only"
        )
    return form


def _by_model(
    stores: Sequence[Store], queries: Sequence[Store], distractors: Sequence[Store]
) -> Iterator[tuple[Store, Store | None, list[Store]]]:
    """Each store with the stores of queries and of distractors of its model."""
    models = {model_key(store) for store in stores}
    for given, what in ((queries, "queries"), (distractors, "distractors")):
        for other in given:
            if model_key(other) not in models:
                name = other.manifest.model.get("name")
                raise StoreMismatch(
                    f"{other.label} ({name}) is of none of the models that are searched with; "
                    f"extract the {what} with the same model and weights"
                )
    for store in stores:
        own, more = (
            [other for other in given if model_key(other) == model_key(store)]
            for given in (queries, distractors)
        )
        if queries and len(own) != 1:
            labels = " and ".join(other.label for other in own) or "none"
            raise StoreMismatch(
                f"{store.label} has {labels} of the stores of queries; expected one of its model"
            )
        if distractors and not more:
            raise StoreMismatch(
                f"none of the stores of distractors is of the model of {store.label}"
            )
        yield store, own[0] if own else None, more


def _scores(
    plan: Plan, execution: Execution, features: Features
) -> tuple[Scores, Scores, str]:
    """The scores of one site: setting -> metric -> (queries,); the same as (blocks, queries)
    without each block of images, if these are the queries; and remarks."""
    from vitsee_core.analyses.retrieve.passes import passes

    parts: dict[Setting, list[list[dict[str, Float]]]] = {
        one: [] for one, _ in plan.scored
    }
    itself = plan.search.itself
    blank = []
    constant = False
    for block in passes(plan.search, features, execution):
        listed = block.listed
        for setting, _ in plan.scored:
            right = listed.among(setting.positives)
            of = [(right, block.above)]
            if itself is not None:
                label = itself.labels[listed.place]
                of += [
                    (right & (label != b), block.above - block.in_block[:, b])
                    for b in range(itself.n)
                ]
            found = [
                plan.scores(
                    setting,
                    ranked(block.n, listed.query[keep], block.keys[keep], above[keep]),
                )
                for keep, above in of
            ]
            parts[setting].append(found)
        blank.append(block.blank)
        constant = block.constant
    equal = np.concatenate(blank)
    scores = Scores()
    without = Scores()
    for setting, some in parts.items():
        whole = {
            metric: np.where(
                equal,
                values,
                np.stack(
                    [
                        np.concatenate([one[k][metric] for one in some])
                        for k in range(len(some[0]))
                    ]
                ),
            )
            for metric, values in plan.chance[setting].items()
        }
        scores[setting] = {metric: values[0] for metric, values in whole.items()}
        without[setting] = {metric: values[1:] for metric, values in whole.items()}
    name = f"{plan.search.store.label} {features.name}"
    remark = ""
    if constant:
        remark = (
            f"{name}: the vector of every image is the same; its value is that of chance"
        )
    elif equal.any():
        remark = (
            f"{name}: {int(equal.sum())} of {len(equal)} queries are zero, with the same "
            "cosine to every image; their values are those of chance"
        )
    return scores, without, remark


@styled
def plot(table: Table) -> Figure:
    """Mean average precision, and precision at the largest K, against relative depth: a panel per
    metric, a curve per store with its interval as a band, chance dashed (Walmer et al. 2023, Figs.
    9 right, 29)."""
    drawn = table.frame
    if "query" in drawn.columns:
        drawn = drawn.filter(pl.col("query").is_null())
    metrics = [*drawn["metric"].unique(maintain_order=True)]
    metrics = [m for m in metrics if m.startswith(("map", "mp@"))]
    lines = [[m for m in metrics if m.startswith("map")]]
    ats = sorted({int(m[3:].partition("_")[0]) for m in metrics if m.startswith("mp@")})
    if ats:
        last = [m for m in metrics if m.partition("_")[0] == f"mp@{ats[-1]}"]
        lines = [[*lines[0], *last]] if len(lines[0]) == 1 else [*lines, last]
    lines = [line for line in lines if line]
    among = drawn.filter(
        pl.col("metric").is_in([metric for line in lines for metric in line])
    )
    grids = [CurveGrid.of(len(line), among) for line in lines]
    figure, parts = stack(*grids)
    every: list[Axes] = []
    for line, grid, part in zip(lines, grids, parts, strict=True):
        panels = grid.panels(part, of_metrics(drawn, line))
        row = [axes for axes, *_ in panels]
        for axes, _, rows in panels:
            spread = "95 % interval over queries"
            queries = ("n_queries", f"queries, {count(rows)} images")
            draw_depth_curves(axes, rows, among=among, spread=spread, counts=queries)
        limits = [axes.get_ylim() for axes in row]
        for axes in row:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        grid.finish(panels)
        every += row
    add_curve_legend(figure, every)
    return figure


ANALYSIS = Analysis(
    module=__name__,
    needs=("sites",),
    reading=(
        "Whether the images nearest to a query show the same thing: mean average precision "
        "against depth. The dashed line is what an order by chance gets; intervals are over "
        "queries."
    ),
    source="Radenovic et al. 2018; Walmer et al. 2023, Figs. 9 right, 29",
    columns=COLUMNS,
    metrics=("map*", "ap*", "mp@*"),
    run=run,
    plot=plot,
    headline=headline,
)
