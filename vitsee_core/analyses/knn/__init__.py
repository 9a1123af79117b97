"""k-nearest-neighbour classification: are images of a class neighbours?

A test image is given the class that its k nearest training images vote for, nearest by the cosine
of one vector per image (Walmer et al. 2023, Figs. 9 left, 28, with k = 20 and the class token;
the protocol of DINO, Caron et al. 2021):

    softmax    a neighbour's vote is exp(cos / temperature)
    majority   a neighbour's vote is 1

`top1` is the share of test images whose class gets the most votes, `top5` that of images whose
class is among the five most voted; equal votes go to the lower class. A class that no neighbour
has is never among the five, so that `top5` needs k >= 5; with five classes or fewer it would carry
no information. In both cases it is left out. Neighbours are exact: every test image is compared
with every training image, and equal cosines go to the lower row of the training store.

With masks, segments vote for segments: the vectors are those of `cluster --masks`, the classes are
the masks' categories, and intervals are over images.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitsee_core.analyses.knn.voting import (
    TOP,
    VOTES,
    Item,
    NeighbourVotes,
    Query,
    prepare_query,
)
from vitsee_core.declaration import Analysis
from vitsee_core.features import compared, require_comparable
from vitsee_core.features.compared import other_precision
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.options import (
    CLS_OR_MEAN,
    KNOWLEDGE,
    SITES,
    Fields,
    Gather,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    ALLOW_SHARED,
    PER_CLASS,
    RANDOM_BASELINE,
    TRAIN_IMAGES,
    LabelledRows,
    training_execution,
)
from vitsee_core.truth.masks.segments import (
    Segmentation,
    as_segmentation,
    examples_of,
)
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["COLUMNS", "SEGMENT_COLUMNS", "VOTES", "plot", "run"]

log = logging.getLogger(__name__)

headline = partial(
    best_layers, units={"top1": "of the images right", "top5": "with it among five"}
)

BASELINES = ("random",)
SHARED_COLUMNS = (
    *SITE,
    "class",
    "k",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "n_images",
)
COLUMNS = (*SHARED_COLUMNS, "baseline")
SEGMENT_COLUMNS = (*SHARED_COLUMNS, "n_segments", "baseline")
METRICS = ("top1", "top5")


@dataclass(frozen=True)
class VoteOptions:
    """The options on votes: numbers of neighbours, and the weight of each.

    Attributes:
        ks: numbers of neighbours.
        vote: one of `VOTES`.
        temperature: temperature of the softmax vote.
    """

    ks: Annotated[
        Sequence[int], Option("Number of neighbours.", "--k", metavar="K", least=1)
    ] = (20,)
    vote: Annotated[
        str, Option("A neighbour's vote: exp(cosine / temperature), or 1.", choices=VOTES)
    ] = "softmax"
    temperature: Annotated[
        float,
        Option(
            "Of the softmax vote.", metavar="T", above=0, only_with=("vote", "softmax")
        ),
    ] = 0.07


@analysis
def run(
    train: Store,
    *tests: Store,
    masks: Annotated[
        Segmentation | Path | str | Sequence[Path] | None, Gather(Segmentation)
    ] = None,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[str | None, tokens_option(VECTOR_WORDS, CLS_OR_MEAN)] = None,
    votes: Annotated[VoteOptions, Fields()],
    metrics: Annotated[
        Sequence[str], metrics_option(METRICS, "all that can be had")
    ] = (),
    baselines: Annotated[Sequence[str], RANDOM_BASELINE] = (),
    per_class: Annotated[bool, PER_CLASS] = False,
    train_images: Annotated[int | None, TRAIN_IMAGES] = None,
    allow_shared: Annotated[bool, ALLOW_SHARED] = False,
    execution: Annotated[
        Execution,
        Offers("images seed device jobs memory", dask="sites, and the masks of --masks,"),
    ] = DEFAULT,
) -> Table:
    """Return the accuracy on the test images: one row per site, k and metric.

    The columns are `COLUMNS`, with masks `SEGMENT_COLUMNS`; `class` only with `per_class`. `store`
    is the test store; `baseline` is empty in the rows about the model; `low` and `high` are the
    95 % interval over test images.

    The test vectors are in memory in float64 and float32, as many of them at a time as fit; the
    training vectors are streamed.

    Args:
        train: store whose labelled images vote.
        tests: stores whose labelled images are classified, store by store; all hold activations of
            the same model.
        masks: classify segments in place of images; a `Segmentation`, or the paths of the masks
            of all stores.
        sites: patterns of site names.
        tokens: word for the vector of a site with tokens; None for its default.
        votes: how many neighbours vote, and how.
        metrics: some of `METRICS`; () for all that can be had.
        baselines: "random" adds rows of random features with as many channels.
        per_class: add a row for every class.
        train_images: use only this many of the training images.
        allow_shared: let images both train and test.
        execution: images, seed, device, threads and memory.

    Raises:
        MissingInput: no labels, or a store lacks a site.
        StoreMismatch: other models, other classes, or images that are in both.
        VitseeError: k larger than the number of training images, an unknown choice, or masks that
            cannot be used (see `Segmentation.open`, `find_segments`).

    Examples:
        >>> import vitsee
        >>> table = vitsee.knn("train.zarr", "vit.zarr", sites="blocks.-1.out", ks=(5, 20))
        >>> table["k"].tolist(), table["metric"].tolist(), table["value"].round(2).tolist()
        ([5, 5, 20, 20], ['top1', 'top5', 'top1', 'top5'], [0.86, 0.95, 0.86, 0.98])
    """
    if not tests:
        raise VitseeError("no store to test on; expected one or more")
    stores = (train, *tests)
    segmentation = as_segmentation(masks)
    sites_of_stores = []
    if segmentation is not None:
        for store in stores:
            sites_of_stores.append((store, store.select(list(sites))))
    # --images limits the test images; the training store has a limit of its own.
    for_train = training_execution(execution, tests, train_images)
    examples = examples_of(
        segmentation,
        sites_of_stores,
        execution,
        training={train.manifest.store_id: for_train},
    )
    train_rows = examples.rows(train)

    # Everything is checked before any work.
    require_comparable(train, tests, trains="knn")
    # A query per test store: its labelled images and their features.
    queries = [
        prepare_query(
            examples,
            train_rows,
            test,
            among=stores,
            sites=sites,
            tokens=tokens,
            seed=execution.seed,
            allow_shared=allow_shared,
        )
        for test in tests
    ]
    ks = _validate_ks(train_rows, votes, baselines)
    selected_metrics = select_metrics(metrics or METRICS, METRICS, "knn")
    has_top5 = max(ks) >= TOP and train_rows.n_classes > TOP
    if selected_metrics == ["top5"] and not has_top5 and not per_class:
        raise VitseeError(
            f"no top5: it needs --k of {TOP} and more, and more than {TOP} classes"
        )
    if not has_top5 and "top5" in selected_metrics:
        log.info("top5 is left out: it needs k >= %d and more than %d classes", TOP, TOP)

    search = NeighbourVotes(
        train=train_rows,
        queries=tuple(queries),
        ks=tuple(ks),
        vote=votes.vote,
        temperature=votes.temperature,
        per_class=per_class,
        metrics=selected_metrics,
    )
    items = list_items(queries, with_random=len(baselines) > 0)
    remarks = [remark for query in queries for remark in query.remarks]
    scores_of_items: dict[Item, list[dict[str, Any]]] = {}
    # The progress bar counts training images, which each item streams once.
    n_votes = len(train_rows) * len(items)
    with counting(execution.progress, n_votes, SITE_IMAGES):
        results = execution.spread(search, items)
        for item, (scores, remark) in zip(items, results, strict=True):
            scores_of_items[item] = scores
            if remark and remark not in remarks:
                remarks.append(remark)
                log.info("%s", remark)

    # Which vector each site has, for the notes.
    selections = {}
    for query in queries:
        for site_name, (train_features, _) in query.features.items():
            selections[site_name] = str(train_features.selection)
    notes = {
        "interval": train_rows.INTERVAL,
        "train": {"store": train.label, **train_rows.describe()},
        "tests": [query.describe() for query in queries],
        "compared": compared(stores, selections, asked=tokens),
        "seed": execution.seed,
        REPLICATES: {
            query.data.store.label: query.blocks.describe() for query in queries
        },
        "remarks": [*remarks, *other_precision(stores)],
    }
    columns = COLUMNS if segmentation is None else SEGMENT_COLUMNS
    names = [name for name in columns if name != "class" or per_class]
    rows = _table_rows(queries, scores_of_items, baselines)
    return Table.from_rows(rows, names, notes)


def list_items(queries: Sequence[Query], with_random: bool) -> list[Item]:
    """Return the work on all sites, then that on random features.

    Args:
        queries: the test stores.
        with_random: whether random features are classified, too, once per number of channels.
    """
    items = []
    for q, query in enumerate(queries):
        for site in query.sites:
            items.append(Item(q, site.name, site.dim))
    if with_random:
        # Random features depend on their number of channels alone.
        for q, query in enumerate(queries):
            for dim in dict.fromkeys(site.dim for site in query.sites):
                items.append(Item(q, None, dim))
    return items


def _table_rows(
    queries: Sequence[Query],
    scores_of_items: Mapping[Item, list[dict[str, Any]]],
    baselines: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the rows about the model, then those of the baselines.

    Args:
        queries: the test stores.
        scores_of_items: the scores of each piece of work.
        baselines: names of the baselines.
    """
    rows = []
    baseline_rows = []
    for q, query in enumerate(queries):
        for site in query.sites:
            site_cells = site_columns(query.data.store, site)
            for scores in scores_of_items[Item(q, site.name, site.dim)]:
                rows.append({**site_cells, **scores, "baseline": ""})
            # A baseline that was named twice has its rows once.
            for name in dict.fromkeys(baselines):
                for scores in scores_of_items[Item(q, None, site.dim)]:
                    baseline_rows.append({**site_cells, **scores, "baseline": name})
    return rows + baseline_rows


def _validate_ks(
    train_rows: LabelledRows, votes: VoteOptions, baselines: Sequence[str]
) -> list[int]:
    """Return the numbers of neighbours, each once, in ascending order.

    Raises:
        VitseeError: they, or other choices, are not possible.
    """
    if votes.vote not in VOTES:
        raise VitseeError(f"no vote {votes.vote!r}; expected {' or '.join(VOTES)}")
    if not votes.temperature > 0:
        raise VitseeError(
            f"the temperature is {votes.temperature}; expected a number above 0"
        )
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    ks = votes.ks
    if not ks or min(ks) < 1:
        raise VitseeError(f"k is {min(ks, default='not given')}; expected at least 1")
    if max(ks) > len(train_rows):
        raise VitseeError(
            f"{max(ks)} neighbours were asked for, but {train_rows.store.label} has "
            f"{plural(len(train_rows), train_rows.WHAT)}; expected --k of at most "
            f"{len(train_rows)}"
        )
    return sorted(set(ks))


@styled
def plot(table: Table) -> Figure:
    """Draw accuracy against relative depth (Walmer et al. 2023, Figs. 9 left, 28).

    There is one panel per metric and one curve per store and k, with the 95 % interval as a band
    and the baseline dashed.
    """
    # `top1_class`, a curve per class, is in the table alone.
    metrics = [metric for metric in METRICS if metric in table.frame["metric"]]
    counts = ("n_images", "")
    if "n_segments" in table.frame.columns:
        counts = ("n_segments", "segments")
    return draw_depth_panels(table.frame, metrics, by=["k"], counts=counts)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Classify images or segments by their nearest neighbours.

    A test image gets the class that the k training images nearest by cosine vote for
    (Walmer et al. 2023, Figs. 9 left, 28; Caron et al. 2021). TRAIN and each TEST are
    stores of the same model over different images of the same classes. Neighbours are
    exact; memory stays bounded.

      $ vitsee extract vit_base_patch16_224 --data imagenet/train --tokens pooled -o train.zarr
      $ vitsee extract vit_base_patch16_224 --data imagenet/val -o b16.zarr
      $ vitsee knn train.zarr b16.zarr -o knn.csv --png knn.png
      $ vitsee knn train.zarr b16.zarr --k 10 --k 100 --sites pooled --baseline random
      $ vitsee knn train.zarr val.zarr --masks instances_train.json --masks instances_val.json

    With --masks segments vote for segments, the vectors of cluster --masks; intervals
    are over images, and the column n_segments counts.

    top5 needs k >= 5 and more than 5 classes, and counts only classes that a neighbour
    has. The figure shows accuracy against depth.
    """,
    needs=("sites",),
    reading=(
        "The share of test images whose class their nearest training images vote for, "
        "against depth. It shows how far a layer has sorted images by class without any "
        "training; a late rise says that the class is made in the last blocks."
    ),
    source="Walmer et al. 2023, Figs. 9 left, 28; Caron et al. 2021",
    columns=COLUMNS,
    other_columns=(SEGMENT_COLUMNS,),
    meanings={
        "store": "TEST",
        "class": "with --per-class",
        "high": "95 % interval over test images",
    },
    metrics=(*METRICS, "top1_class"),
    run=run,
    plot=plot,
    headline=headline,
)
