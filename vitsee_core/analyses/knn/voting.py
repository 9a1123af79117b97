"""Nearest training images of the test images, their votes, and the accuracy that these give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.features import SiteFeatures, check_alike
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.truth.labels.labelled_rows import (
    LabelledRows,
    accuracy_interval,
    check_disjoint,
    random_pieces,
    shared_ids,
)
from vitsee_core.truth.labels.neighbours import Nearest, nearest
from vitsee_core.truth.masks.segments import Examples
from vitsee_core.types import Float32, Integers, Mask
from vitsee_stores import Store

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec


log = logging.getLogger(__name__)

VOTES = ("softmax", "majority")
TOP = 5  # classes among which `top5` looks

# Test images that vote at a time: their votes for every class are in memory.
IMAGES_AT_ONCE = 4096


class Item(NamedTuple):
    """A piece of work: one site of a test store, or random features with as many channels.

    Attributes:
        query: number of the test store.
        site: name of the site; None for random features.
        dim: number of channels.
    """

    query: int
    site: str | None
    dim: int


@dataclass(frozen=True)
class Query:
    """The images of one test store that are classified.

    Attributes:
        data: the labelled test images.
        sites: the sites of the store.
        features: site name -> features of the training and of the test images.
        n_shared: number of test images that vote too.
        remarks: sentences about the images.
        blocks: jackknife blocks of the test images.
    """

    data: LabelledRows
    sites: list[SiteSpec]
    features: dict[str, tuple[SiteFeatures, SiteFeatures]]
    n_shared: int
    remarks: list[str]
    blocks: Blocks

    def describe(self) -> dict[str, Any]:
        """Return the table's note on this test store."""
        return {
            "store": self.data.store.label,
            **self.data.describe(),
            "also_in_train": self.n_shared,
        }


def prepare_query(
    examples: Examples,
    train_rows: LabelledRows,
    test: Store,
    *,
    among: Sequence[Store],
    sites: Sequence[str],
    tokens: str | None,
    seed: int,
    allow_shared: bool,
) -> Query:
    """Return the images of a test store, after a check that they fit the training images.

    Args:
        examples: reads labels and features of images, or of segments.
        train_rows: the labelled training images.
        test: store of the test images.
        among: all stores of the run, whose default tokens have to agree.
        sites: patterns of site names.
        tokens: word for the vector of a site with tokens; None for its default.
        seed: seed of the jackknife blocks.
        allow_shared: let images both train and test.

    Raises:
        MissingInput: no labels, or the store lacks a site.
        StoreMismatch: other classes or tokens, or images that are in both stores.
    """
    test_rows = examples.rows(test)
    remarks = examples.check_classes(train_rows, test_rows)
    n_shared = check_disjoint(train_rows, test_rows, allow_shared)
    remarks += shared_ids(
        train_rows.store, train_rows.rows, test_rows.store, test_rows.rows
    )
    for remark in remarks:
        log.info("%s", remark)
    selected_sites = test.select(list(sites))
    features = {}
    for site in selected_sites:
        train_features = examples.features(
            train_rows, site, tokens, among=among, one_vector=True
        )
        test_features = examples.features(
            test_rows, site, tokens, among=among, one_vector=True
        )
        check_alike(train_features, test_features)
        features[site.name] = (train_features, test_features)
    return Query(
        data=test_rows,
        sites=selected_sites,
        features=features,
        n_shared=n_shared,
        remarks=remarks,
        blocks=test_rows.jackknife(seed),
    )


@dataclass(frozen=True)
class NeighbourVotes:
    """Finds the neighbours of test images at one site, and scores their votes; runs in any process.

    Attributes:
        train: the labelled training images.
        queries: the test stores.
        ks: numbers of neighbours, ascending.
        vote: one of `VOTES`.
        temperature: temperature of the softmax vote.
        per_class: whether every class has a score, too.
        metrics: some of `METRICS`.
    """

    train: LabelledRows
    queries: tuple[Query, ...]
    ks: tuple[int, ...]
    vote: str
    temperature: float
    per_class: bool
    metrics: Sequence[str]

    def __call__(
        self, execution: Execution, item: Item
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the scores of a site or of random features, and a remark; "" for none."""
        query = self.queries[item.query]
        test = query.data
        read_train: Callable[[], Iterator[Float32]]
        read_test: Callable[[], Iterator[Float32]]
        selection = ""  # words for the tokens, in a remark
        if item.site is None:
            # Two streams of one seed, so that training and test images differ.
            seed = execution.seed
            read_train = partial(random_pieces, len(self.train), item.dim, (seed, 0))
            read_test = partial(random_pieces, len(test), item.dim, (seed, 1))
        else:
            train_features, test_features = query.features[item.site]
            has_tokens = train_features.site.layout is not None
            if has_tokens and test.NOUN == "image":
                selection = train_features.selection
            # A quarter of the memory is for reading, three quarters for the search.
            limits = {"jobs": execution.jobs, "memory": execution.budget // 4}
            read_train = partial(self.train.vectors, train_features, **limits)
            read_test = partial(test.vectors, test_features, **limits)
        # Neighbours of the largest k include those of every smaller one.
        neighbours = nearest(
            read_train,
            read_test,
            (len(test), len(self.train), item.dim),
            k=max(self.ks),
            device=execution.device,
            memory=3 * execution.budget // 4,
            progress=execution.progress,
        )
        remark = ""
        if neighbours.constant and item.site is not None:
            # All cosines are equal, as at the input of a class token.
            token_words = f"{selection} " if selection else ""
            remark = (
                f"{item.site}: the {token_words}vector of every training "
                f"{self.train.NOUN} is the same; its value is the vote of the first rows"
            )
        return list(self._scores(neighbours, test, query.blocks)), remark

    def _scores(
        self, neighbours: Nearest, test: LabelledRows, blocks: Blocks
    ) -> Iterator[dict[str, Any]]:
        """Yield the scores of each k: one per metric, then one per class with `per_class`.

        Args:
            neighbours: the nearest training images of each test image, of the largest k.
            test: the labelled test images.
            blocks: jackknife blocks of the test images.
        """
        n_classes = self.train.n_classes
        classes = self.train.labels[neighbours.rows]  # (test images, k)
        for k in self.ks:
            rank = ranks(
                neighbours.cosines[:, :k],
                classes[:, :k],
                test.labels,
                n_classes=n_classes,
                vote=self.vote,
                temperature=self.temperature,
            )
            for metric in self.metrics:
                if metric == "top5" and (k < TOP or n_classes <= TOP):
                    continue
                is_right = rank < (1 if metric == "top1" else TOP)
                yield {"k": k, "metric": metric, **_accuracy(is_right, test, blocks)}
            if not self.per_class:
                continue
            for number, name in enumerate(self.train.classes):
                in_class = test.labels == number
                accuracy = _accuracy(rank == 0, test, blocks, in_class)
                yield {"k": k, "metric": "top1_class", "class": name, **accuracy}


def _accuracy(
    right: Mask, data: LabelledRows, blocks: Blocks, among: Mask | None = None
) -> dict[str, Any]:
    """Return the accuracy over test images, its spread, interval and number of images.

    Args:
        right: (images,) whether each image is right.
        data: the labelled test images.
        blocks: their jackknife blocks.
        among: (images,) which of them count; None for all.
    """
    counted = right if among is None else right[among]
    value, std, _, _ = accuracy_interval(counted)
    without = blocks.means_without(right, among)
    low, high = data.ends(value, len(counted), int(counted.sum()), without)
    return {
        "value": value,
        "std": std,
        "low": low,
        "high": high,
        REPLICATES: without,
        **data.counted(among),
    }


def ranks(
    cosines: Float32,
    neighbours: Integers,
    labels: Integers,
    n_classes: int,
    vote: str = "softmax",
    temperature: float = 0.07,
) -> Integers:
    """Return how many classes come before each test image's own, (m,).

    A class comes before if it has more votes, or as many and a lower number. An image whose own
    class gets no vote has `n_classes`.

    Args:
        cosines: (m, k) cosine of each test image with its neighbours, nearest first.
        neighbours: (m, k) classes of the neighbours.
        labels: (m,) class of each test image.
        n_classes: number of classes.
        vote: one of `VOTES`.
        temperature: temperature of the softmax vote.
    """
    result = np.empty(len(labels), np.int64)
    for start in range(0, len(labels), IMAGES_AT_ONCE):
        images = slice(start, start + IMAGES_AT_ONCE)
        own_class = labels[images]
        n_images = len(own_class)
        voters = neighbours[images]
        votes = np.ones(voters.shape)  # (images, k)
        if vote == "softmax":
            # Only ratios count: divided by the nearest one's, small temperatures stay finite.
            below_nearest = cosines[images] - cosines[images, :1].astype(float)
            with np.errstate(over="ignore"):  # to -inf: a vote of 0
                votes = np.exp(below_nearest / temperature)
        # Sum of the votes for each class, (images, classes), by one count over a flat index.
        flat = np.arange(n_images)[:, np.newaxis] * n_classes + voters
        sums = np.bincount(flat.ravel(), votes.ravel(), n_images * n_classes)
        sums = sums.reshape(n_images, n_classes)
        own_sum = sums[np.arange(n_images), own_class][:, np.newaxis]
        is_lower_class = np.arange(n_classes) < own_class[:, np.newaxis]
        comes_before = (sums > own_sum) | ((sums == own_sum) & is_lower_class)
        has_vote = (voters == own_class[:, np.newaxis]).any(1)
        result[images] = np.where(has_vote, comes_before.sum(1), n_classes)
    return result
