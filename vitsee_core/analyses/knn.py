"""k-nearest-neighbour classification: are images of a class neighbours?

A test image is given the class that its k nearest training images vote for, nearest by the cosine
of one vector per image (Walmer et al. 2023, Figs. 9 left, 28, with k = 20 and the class token;
the protocol of DINO, Caron et al. 2021):

    softmax    a neighbour's vote is exp(cos / temperature)
    majority   a neighbour's vote is 1

`top1` is the share of test images whose class gets the most votes, `top5` that of images whose
class is among the five most voted; equal votes go to the lower class. A class that no neighbour
has is never among the five, so that `top5` needs k >= 5; with five classes or fewer it would carry
no information. Otherwise it is left out. Neighbours are exact (`neighbours`): equal cosines go to
the lower row of the training store.

With masks, segments vote for segments: the vectors are those of `cluster --masks`, the classes are
the masks' categories, and intervals are over images.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.declaration import Analysis
from vitsee_core.features import SiteFeatures, check_alike, compared, require_comparable
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
    Gather,
    Offers,
    Option,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import (
    ALLOW_SHARED,
    PER_CLASS,
    RANDOM_BASELINE,
    TRAIN_IMAGES,
    LabelledRows,
    accuracy_interval,
    check_disjoint,
    random_pieces,
    shared_ids,
    training_execution,
)
from vitsee_core.truth.labels.neighbours import Nearest, nearest
from vitsee_core.truth.masks.segments import (
    Examples,
    Segmentation,
    as_segmentation,
    examples_of,
)
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)

headline = partial(
    best_layers, units={"top1": "of the images right", "top5": "with it among five"}
)

VOTES = ("softmax", "majority")
BASELINES = ("random",)
TOP = 5
COLUMNS = (
    *(*SITE, "class", "k"),
    *("metric", "value", "std", "low", "high", "n_images", "baseline"),
)
SEGMENT_COLUMNS = (*COLUMNS[:-1], "n_segments", "baseline")
METRICS = ("top1", "top5")
VOTED_AT_ONCE = 4096


@analysis
def run(
    train: Store,
    *tests: Store,
    masks: Annotated[
        Segmentation | Path | str | Sequence[Path] | None, Gather(Segmentation)
    ] = None,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[str | None, tokens_option(VECTOR_WORDS, CLS_OR_MEAN)] = None,
    ks: Annotated[
        Sequence[int], Option("Number of neighbours.", "--k", metavar="K", least=1)
    ] = (20,),
    vote: Annotated[
        str, Option("A neighbour's vote: exp(cosine / temperature), or 1.", choices=VOTES)
    ] = "softmax",
    temperature: Annotated[
        float,
        Option(
            "Of the softmax vote.", metavar="T", above=0, only_with=("vote", "softmax")
        ),
    ] = 0.07,
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
    """One row per site, k and metric: the accuracy on the test images and its 95 % interval.

    Columns: see `COLUMNS`, with masks `SEGMENT_COLUMNS`; `class` only with `per_class`; `store` is
    the test store; `baseline` is empty in the rows about the model.

    Memory: the test vectors in float64 and float32, as many of them at a time as fit; the training
    vectors are streamed.

    Args:
        train: its labelled images vote.
        tests: their labelled images are classified, store by store; all hold activations of the
            same model.
        masks: classify segments in place of images; a `Segmentation`, or the paths of the masks
            of all stores.

    Raises:
        MissingInput: no labels, or a store lacks a site.
        StoreMismatch: other models, other classes, or images that are in both.
        VitseeError: k larger than the number of training images, an unknown choice, or masks that
            cannot be used (see `Segmentation.open`, `find_segments`).
    """
    if not tests:
        raise VitseeError("no store to test on; expected one or more")
    seed = execution.seed
    choice = as_segmentation(masks)
    read = [] if choice is None else [(s, s.select(list(sites))) for s in (train, *tests)]
    of_train = {
        train.manifest.store_id: training_execution(execution, tests, train_images)
    }
    examples = examples_of(choice, read, execution, training=of_train)
    a = examples.rows(train)
    # Everything is checked before any work.
    require_comparable(train, tests, trains="knn")
    queries = [
        _query(examples, a, tests, number, sites, tokens, seed, allow_shared)
        for number in range(len(tests))
    ]
    ks = _checked(a, ks, vote, temperature, baselines)
    wanted = asked_for(metrics or METRICS, METRICS, "knn")
    n_top = [k for k in ks if k >= TOP and a.n_classes > TOP]
    if wanted == ["top5"] and not n_top and not per_class:
        raise VitseeError(
            f"no top5: it needs --k of {TOP} and more, and more than {TOP} classes"
        )
    if not n_top and "top5" in wanted:
        log.info("top5 is left out: it needs k >= %d and more than %d classes", TOP, TOP)
    work = _Search(a, tuple(queries), tuple(ks), vote, temperature, per_class, wanted)
    items: list[_Item] = [
        (q, s.name) for q, query in enumerate(queries) for s in query.sites
    ]
    drawn = [
        (q, dim) for q, query in enumerate(queries) for dim in query.dims if baselines
    ]
    rows: list[dict[str, Any]] = []
    random_rows: list[dict[str, Any]] = []
    words = {
        name: str(ours.selection) for q in queries for name, (ours, _) in q.read.items()
    }
    remarks = [remark for query in queries for remark in query.remarks]
    found: dict[_Item, list[dict[str, Any]]] = {}
    n_rows = len(a) * (len(items) + len(drawn))
    with counting(execution.progress, n_rows, SITE_IMAGES):
        some = [*items, *drawn]
        for item, (scores, remark) in zip(
            some, execution.spread(work, some), strict=True
        ):
            found[item] = scores
            if remark and remark not in remarks:
                remarks.append(remark)
                log.info("%s", remark)
    for q, query in enumerate(queries):
        for site in query.sites:
            place = site_columns(query.data.store, site)
            rows += [place | score | {"baseline": ""} for score in found[q, site.name]]
            for name in dict.fromkeys(baselines):
                random_rows += [
                    place | score | {"baseline": name} for score in found[q, site.dim]
                ]
    notes = {
        "interval": a.INTERVAL,
        "train": {"store": train.label, **a.describe()},
        "tests": [query.describe() for query in queries],
        "compared": compared((train, *tests), words, asked=tokens),
        "seed": seed,
        WORD: {query.data.store.label: query.blocks.describe() for query in queries},
        "remarks": [*remarks, *other_precision((train, *tests))],
    }
    columns = COLUMNS if choice is None else SEGMENT_COLUMNS
    names = [name for name in columns if name != "class" or per_class]
    return Table.from_rows(rows + random_rows, names, notes)


# Of a query's number: one of its sites, or as many channels of random features.
_Item = tuple[int, str | int]


@dataclass(frozen=True)
class _Query:
    """The images of one store that are classified, at some sites. read: site -> features of the
    training and of the test images; n_shared: how many images are trained on, too."""

    data: LabelledRows
    sites: list[SiteSpec]
    read: dict[str, tuple[SiteFeatures, SiteFeatures]]
    n_shared: int
    remarks: list[str]
    blocks: Blocks

    @property
    def dims(self) -> list[int]:
        """Numbers of channels that its sites have."""
        return list(dict.fromkeys(site.dim for site in self.sites))

    def describe(self) -> dict[str, Any]:
        """The entry of the sidecar."""
        about = {"store": self.data.store.label, **self.data.describe()}
        return about | {"also_in_train": self.n_shared}


@dataclass(frozen=True)
class _Search:
    """The scores of a site, or of random features, and what is to be said of it."""

    train: LabelledRows
    queries: tuple[_Query, ...]
    ks: tuple[int, ...]
    vote: str
    temperature: float
    per_class: bool
    metrics: Sequence[str]

    def __call__(
        self, execution: Execution, item: _Item
    ) -> tuple[list[dict[str, Any]], str]:
        a = self.train
        query = self.queries[item[0]]
        site = item[1]
        b = query.data
        budget = execution.budget
        if isinstance(site, int):
            dim = site
            selection = ""
            pieces = [
                partial(random_pieces, len(data), dim, (execution.seed, i))
                for i, data in enumerate((a, b))
            ]
        else:
            ours, theirs = query.read[site]
            dim = ours.dim
            selection = (
                "" if ours.site.layout is None or b.NOUN != "image" else ours.selection
            )
            pieces = [
                partial(data.vectors, features, jobs=execution.jobs, memory=budget // 4)
                for data, features in ((a, ours), (b, theirs))
            ]
        found = nearest(
            *(pieces[0], pieces[1], (len(b), len(a), dim)),
            k=max(self.ks),
            device=execution.device,
            memory=3 * budget // 4,
            progress=execution.progress,
        )
        remark = ""
        if found.constant and isinstance(site, str):
            which = f"{selection} " if selection else ""
            remark = (
                f"{site}: the {which}vector of every training {a.NOUN} is the same; its value is "
                "the vote of the first rows"
            )
        return list(self._scores(found, b, query.blocks)), remark

    def _scores(
        self, found: Nearest, test: LabelledRows, blocks: Blocks
    ) -> Iterator[dict[str, Any]]:
        train = self.train
        neighbours = self.train.labels[found.rows]
        how = train.n_classes, self.vote, self.temperature
        for k in self.ks:
            rank = ranks(found.cosines[:, :k], neighbours[:, :k], test.labels, *how)
            for metric in self.metrics:
                if metric == "top5" and (k < TOP or train.n_classes <= TOP):
                    continue
                right = rank < (1 if metric == "top1" else TOP)
                yield {"k": k, "metric": metric} | _accuracy(right, test, blocks)
            for number, name in enumerate(train.classes if self.per_class else ()):
                of_class = _accuracy(rank == 0, test, blocks, test.labels == number)
                yield {"k": k, "metric": "top1_class", "class": name} | of_class


def _query(
    examples: Examples,
    train: LabelledRows,
    tests: Sequence[Store],
    number: int,
    sites: Sequence[str],
    tokens: str | None,
    seed: int,
    allow_shared: bool,
) -> _Query:
    """One of the stores that test; refuses what does not fit the training images."""
    data = examples.rows(tests[number])
    remarks = examples.check_classes(train, data)
    n_shared = check_disjoint(train, data, allow_shared)
    remarks += shared_ids(train.store, train.rows, data.store, data.rows)
    for remark in remarks:
        log.info("%s", remark)
    chosen = tests[number].select(list(sites))
    read = {}
    for site in chosen:
        ours, theirs = (
            examples.features(
                own, site, tokens, among=(train.store, *tests), one_vector=True
            )
            for own in (train, data)
        )
        check_alike(ours, theirs)
        read[site.name] = (ours, theirs)
    return _Query(data, chosen, read, n_shared, remarks, data.jackknife(seed))


def _checked(
    train: LabelledRows,
    ks: Sequence[int],
    vote: str,
    temperature: float,
    baselines: Sequence[str],
) -> list[int]:
    """The numbers of neighbours, each once, in ascending order."""
    if vote not in VOTES:
        raise VitseeError(f"no vote {vote!r}; expected {' or '.join(VOTES)}")
    if not temperature > 0:
        raise VitseeError(f"the temperature is {temperature}; expected a number above 0")
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {', '.join(BASELINES)}")
    if not ks or min(ks) < 1:
        raise VitseeError(f"k is {min(ks, default='not given')}; expected at least 1")
    if max(ks) > len(train):
        raise VitseeError(
            f"{max(ks)} neighbours were asked for, but {train.store.label} has "
            f"{plural(len(train), train.WHAT)}; expected --k of at most {len(train)}"
        )
    return sorted(set(ks))


def _accuracy(
    right: Mask, data: LabelledRows, blocks: Blocks, among: Mask | None = None
) -> dict[str, Any]:
    own = right if among is None else right[among]
    value, std, _, _ = accuracy_interval(own)
    without = blocks.means_without(right, among)
    low, high = data.ends(value, len(own), int(own.sum()), without)
    spread = {"std": std, "low": low, "high": high, WORD: without}
    return {"value": value, **spread, **data.counted(among)}


def ranks(
    cosines: Float32,
    neighbours: Integers,
    labels: Integers,
    n_classes: int,
    vote: str = "softmax",
    temperature: float = 0.07,
) -> Integers:
    """(m,) how many classes come before each test image's own, `labels` (m,); `n_classes` if nobody
    votes for it. cosines, neighbours: (m, k) of each with its neighbours, and their classes."""
    out = np.empty(len(labels), np.int64)
    for start in range(0, len(labels), VOTED_AT_ONCE):
        part = slice(start, start + VOTED_AT_ONCE)
        own = labels[part]
        voters = neighbours[part]
        votes = np.ones(voters.shape)
        if vote == "softmax":
            # Only ratios count: divided by the nearest one's, small temperatures stay finite.
            with np.errstate(over="ignore"):  # to -inf: a vote of 0
                votes = np.exp(
                    (cosines[part] - cosines[part, :1].astype(float)) / temperature
                )
        cells = np.arange(len(own))[:, np.newaxis] * n_classes + voters
        sums = np.bincount(cells.ravel(), votes.ravel(), len(own) * n_classes)
        scores = sums.reshape(len(own), n_classes)
        mine = scores[np.arange(len(own)), own][:, np.newaxis]
        lower = np.arange(n_classes) < own[:, np.newaxis]
        before = ((scores > mine) | ((scores == mine) & lower)).sum(1)
        voted = (voters == own[:, np.newaxis]).any(1)
        out[part] = np.where(voted, before, n_classes)
    return out


@styled
def plot(table: Table) -> Figure:
    """Accuracy against relative depth, one panel per metric and one curve per store and k, with the
    95 % interval as a band and the baseline dashed (Walmer et al. 2023, Figs. 9 left, 28)."""
    metrics = [metric for metric in METRICS if metric in table.frame["metric"]]
    segments = "n_segments" in table.frame.columns
    counts = ("n_segments", "segments") if segments else ("n_images", "")
    return draw_depth_panels(table.frame, metrics, by=["k"], counts=counts)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Classify images or segments by their nearest neighbours.

    A test image gets the class that the k training images nearest by cosine vote for (Walmer et
    al. 2023, Figs. 9 left, 28; Caron et al. 2021). TRAIN and each TEST are stores of the same
    model over different images of the same classes. Neighbours are exact; memory stays bounded.

      $ vitsee extract vit_base_patch16_224 --data imagenet/train --tokens pooled -o train.zarr
      $ vitsee extract vit_base_patch16_224 --data imagenet/val -o b16.zarr
      $ vitsee knn train.zarr b16.zarr -o knn.csv --png knn.png
      $ vitsee knn train.zarr b16.zarr --k 10 --k 100 --sites pooled --baseline random
      $ vitsee knn train.zarr val.zarr --masks instances_train.json --masks instances_val.json

    With --masks segments vote for segments, the vectors of cluster --masks; intervals are over
    images, and the column n_segments counts.

    top5 needs k >= 5 and more than 5 classes, and counts only classes that a neighbour has. The
    figure shows accuracy against depth.
    """,
    needs=("sites",),
    reading=(
        "The share of test images whose class their nearest training images vote for, against "
        "depth. It shows how far a layer has sorted images by class without any training; a "
        "late rise says that the class is made in the last blocks."
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
