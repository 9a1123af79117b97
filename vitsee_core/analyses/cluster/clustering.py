"""k-means of one store's examples, compared with their labels."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.cluster.agreement import agreement, agreement_without
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.runtime.progress import Progress
from vitsee_core.statistics.jackknife import SHARE, Blocks, interval
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.truth.labels.labelled_rows import LabelledRows, random_features
from vitsee_core.truth.masks.segments import LabelledSegments
from vitsee_core.types import Float, Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores.layout import SiteSpec

Score = dict[str, Any]  # column -> cell
N_INIT = 10  # starts of k-means, of which the best is taken
SEGMENT = "segment_"  # before a metric's name, of segments


def require_clusterable(
    data: LabelledRows, k: int, sites: Sequence[SiteSpec], memory: int | None
) -> None:
    """Refuse what cannot be clustered, before any work.

    Args:
        data: the labelled examples of one store.
        k: number of clusters.
        sites: sites of the store.
        memory: bytes to stay within; None for no limit.

    Raises:
        VitseeError: too few or too many clusters, segments of one category, or too little memory.
    """
    label = data.store.label
    n = len(data)
    if k < 1:
        raise VitseeError(f"k is {k}; expected at least 1 cluster")
    if k > n:
        raise VitseeError(
            f"{k} clusters were asked for, but {label} has {plural(n, data.WHAT)}; "
            f"expected --k of at most {n}"
        )
    if isinstance(data, LabelledSegments) and len(np.unique(data.labels)) == 1:
        raise VitseeError(
            f"all {n} segments of {label} are of one category, "
            f"{data.classes[data.labels[0]]}: every clustering agrees with it; expected "
            "several"
        )
    # Sites are clustered one after the other: the widest decides.
    widest = max(sites, key=lambda site: site.dim)
    # float32: the vectors, and scikit-learn's copies while it centres and assigns them.
    bytes_per_example = 3 * 4 * widest.dim
    n_bytes = n * bytes_per_example
    if memory is not None and n_bytes > memory:
        raise VitseeError(
            f"k-means of {n} {data.WHAT} of {label} at {widest.name} ({widest.dim} "
            f"channels) takes {human_bytes(n_bytes)} of memory; --memory is "
            f"{human_bytes(memory)} (use fewer --images, {memory // bytes_per_example} "
            "fit, or give more --memory)"
        )


@dataclass(frozen=True)
class StoreClusters:
    """k-means of one store's examples with each seed, compared with labels; runs in any process.

    Attributes:
        data: the labelled examples.
        sites: the sites that are clustered.
        k: number of clusters.
        seeds: seed of each run of k-means.
        features: name of a site -> its features.
        baselines: names of the baselines.
        metrics: names of the metrics, as in the table.
        blocks: jackknife blocks of segments' images; None for images, which have no interval.
    """

    data: LabelledRows
    sites: Sequence[SiteSpec]
    k: int
    seeds: Sequence[int]
    features: Mapping[str, SiteFeatures]
    baselines: Sequence[str]
    metrics: Sequence[str]
    blocks: Blocks | None = None

    @property
    def reason_without_values(self) -> str | None:
        """Why any features would have the same values; None if they would not."""
        return why_meaningless(self.data.labels, self.k, self.data.NOUN)

    @property
    def random_dims(self) -> list[int]:
        """The numbers of channels of the random features that are clustered."""
        if "random" not in self.baselines:
            return []
        return list(dict.fromkeys(site.dim for site in self.sites))

    @property
    def n_clustered(self) -> int:
        """The number of examples over all runs of k-means, for a progress bar."""
        if self.reason_without_values is not None:
            return 0
        n_runs = len(self.sites) + len(self.random_dims)
        if "image" in self.baselines:
            n_runs += len(self.sites)
        return len(self.data) * n_runs * len(self.seeds)

    def selections(self) -> dict[str, str]:
        """Return name of a site -> which tokens make its vector."""
        return {name: features.selection for name, features in self.features.items()}

    def __call__(
        self, execution: Execution, item: str | int
    ) -> tuple[dict[str, list[Score]], str]:
        """Return the scores of a site and of its baselines, and a remark; "" for none.

        item: name of the site; or a number of channels, for random features of that many alone.
        """
        data = self.data
        progress = execution.progress
        if isinstance(item, int):
            # Standard normal vectors, drawn anew for each seed.
            # One at a time: all of them together may not fit the memory.
            noise = (random_features(len(data), item, (seed, 2)) for seed in self.seeds)
            return {"random": self._scores(self._clusters(noise, progress))}, ""
        features = self.features[item]
        jobs = execution.jobs
        memory = execution.budget
        # (n, dim)
        vectors = np.concatenate(list(data.vectors(features, jobs=jobs, memory=memory)))
        remark = ""
        if (vectors == vectors[0]).all():
            # Of segments the vector is no choice of tokens.
            which = ""
            if self.blocks is None and features.site.layout is not None:
                which = f"{features.selection} "
            remark = (
                f"{data.store.label} {item}: the {which}vector of every {data.NOUN} is "
                "the same, so all are one cluster"
            )
        clusters = self._clusters(repeat(vectors), progress)
        scores = {"": self._scores(clusters)}
        if "shuffled" in self.baselines:
            scores["shuffled"] = self._scores(clusters, shuffled=True)
        if "image" in self.baselines:
            # Every segment of an image gets the mean over all patches of the image.
            scenes = choose_features(data.store, data.store.site(item), "mean")
            image_vectors = np.concatenate(list(scenes.vectors(data.mask, jobs=jobs)))
            image_index = np.searchsorted(np.flatnonzero(data.mask), data.rows)
            scene_vectors = image_vectors[image_index]
            scene_clusters = self._clusters(repeat(scene_vectors), progress)
            scores["image"] = self._scores(scene_clusters)
        return scores, remark

    def _clusters(
        self, vectors_of_seeds: Iterable[Float32], progress: Progress
    ) -> list[Integers]:
        """Return the cluster of each example, (n,), for each seed.

        vectors_of_seeds: (n, dim) what is clustered with each seed; may be endless.
        """
        clusters = []
        for seed, vectors in zip(self.seeds, vectors_of_seeds, strict=False):
            clusters.append(k_means(vectors, self.k, seed))
            progress.advance(len(self.data))
        return clusters

    def _scores(
        self, clusters: Sequence[Integers], shuffled: bool = False
    ) -> list[Score]:
        """Return one entry per metric: mean and spread over seeds, and the interval of segments.

        Args:
            clusters: (n,) cluster of each example, for each seed.
            shuffled: compare with shuffled labels.
        """
        values_of_seeds = []
        replicates_of_seeds = []
        for seed, assigned in zip(self.seeds, clusters, strict=True):
            labels = self.data.labels
            if shuffled:
                # 1 after the seed: independent of the noise, which has 2.
                labels = np.random.default_rng((seed, 1)).permutation(labels)
            values_of_seeds.append(agreement(assigned, labels))
            if self.blocks is not None:
                replicates_of_seeds.append(
                    agreement_without(assigned, labels, self.blocks)
                )
        scores = []
        for name in self.metrics:
            metric = name.removeprefix(SEGMENT)
            values = [values_of_seed[metric] for values_of_seed in values_of_seeds]
            value = statistics.fmean(values)
            std = statistics.stdev(values) if len(values) > 1 else np.nan
            score: Score = {"metric": name, "value": value, "std": std}
            if replicates_of_seeds:
                seed_replicates = [by_metric[metric] for by_metric in replicates_of_seeds]
                replicates = np.mean(seed_replicates, axis=0)  # (blocks,)
                low, high = self._interval(metric, value, replicates)
                score["low"] = low
                score["high"] = high
                score[REPLICATES] = replicates
            scores.append(score)
        return scores

    def _interval(self, metric: str, value: float, replicates: Float) -> tuple[Any, Any]:
        """Return the ends of a metric's interval, from its replicates without each block."""
        if metric == "purity":
            return jackknife_share(value, replicates, self.data.n_images)
        # Less agreement than by chance gives an ari below 0.
        limits = (-1.0, 1.0) if metric == "ari" else SHARE
        _, low, high = interval(np.array(value), replicates, limits)
        return low, high


def why_meaningless(labels: Integers, k: int, noun: str = "image") -> str | None:
    """Return why k clusters would agree with the labels alike for any features; None if not."""
    n = len(labels)
    n_classes = len(np.unique(labels))
    if n_classes == 1:
        only = noun if n == 1 else f"class among its {noun}s"
        return f"there is one {only}, with which all clusters agree"
    if k == n:
        return f"k is the number of {noun}s ({n}), so that each is a cluster of its own"
    if n_classes == n:
        return f"each of the {n} {noun}s has a class of its own"
    if k == 1:
        return f"k is 1, so that all {noun}s are one cluster"
    return None


def k_means(vectors: Float32, k: int, seed: int) -> Integers:
    """Return the cluster of each vector, (n,), by scikit-learn's k-means.

    There are fewer than k clusters if there are fewer distinct vectors.

    Args:
        vectors: (n, dim).
        k: number of clusters.
        seed: seed of the starts.
    """
    if (vectors == vectors[0]).all():
        # k-means would fill its empty clusters with some of the equal vectors.
        return np.zeros(len(vectors), np.int64)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Fewer distinct vectors than clusters, which is no failure to converge.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(k, init="k-means++", n_init=N_INIT, random_state=seed)
        labels: Integers = model.fit_predict(vectors).astype(np.int64)
    return labels
