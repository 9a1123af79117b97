"""Clusters: whether images of a class cluster together without the use of labels.

k-means on one vector per image; the clusters are compared with the labels (Walmer et al. 2023,
Figs. 7, 24, 25, with k = 50 on 5000 images):

    purity   (1 / n) sum over clusters of the largest number of images of one class in it
    nmi      mutual information of clusters and classes over the mean of their entropies
    ari      pairs that agree, corrected for chance (Hubert and Arabie 1985)

Purity is not corrected for chance and grows with k; so each site comes with the same numbers for
shuffled labels (the same clusters) and for Gaussian features of the same shape (clusters of noise).
k-means is scikit-learn's: k-means++, the best of 10 starts, Lloyd's iterations, float32, features
as they are (not normalised). Values are means over seeds of k-means, `std` is the spread over those
seeds: the method's, not that of the sample of images.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.arguments import analysis
from vitsee_core.columns import SITE, site_columns
from vitsee_core.execution import DEFAULT, Execution
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.labelled.labelled_rows import (
    LabelledRows,
    labelled_rows,
    random_features,
)
from vitsee_core.machine import counted, human_bytes
from vitsee_core.plotting import new_figure, styled
from vitsee_core.progress import Progress, counting
from vitsee_core.results import Table
from vitsee_core.selection import select_each, sites_of
from vitsee_core.types import Float32, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_stores import Store
    from vitsee_stores.layout import SiteSpec

log = logging.getLogger(__name__)

NEEDS = ("sites",)

Score = dict[str, Any]

METRICS = ("purity", "nmi", "ari")
BASELINES = ("shuffled", "random")
N_INIT = 10
MAX_SEED = 2**32 - 1  # scikit-learn's
COLUMNS = (
    *(*SITE, "k"),
    *("metric", "value", "std", "n_images", "baseline"),
)
UNITS = {
    "purity": "purity",
    "nmi": "normalised mutual information",
    "ari": "adjusted Rand index",
}
METHOD = (
    f"scikit-learn KMeans, init k-means++, n_init {N_INIT}, float32, random_state seed, seed + 1, "
    "...; nmi normalised by the arithmetic mean of the entropies"
)
SPREAD = "std: standard deviation (n - 1) over the seeds of k-means; empty with one seed"


@analysis
def run(
    *stores: Store,
    sites: Sequence[str] = ("blocks",),
    tokens: str | None = None,
    k: int | None = None,
    n_seeds: int = 3,
    baselines: Sequence[str] = BASELINES,
    execution: Execution = DEFAULT,
) -> Table:
    """One row per site and metric, then those of the baselines.

    Columns: see `COLUMNS`; `baseline` is empty in the rows about the model. NaN where the numbers
    would be the same for any features, which is logged, see `why_meaningless`.

    Memory: the vectors of one site, in float32, three times.

    Args:
        stores: with labels; they may have different images.
        sites: names, globs and groups.
        tokens: which token stands for an image; see `features.choose_features`.
        k: number of clusters; by default each store's number of classes.
        n_seeds: runs of k-means, with seeds from `seed` on.
        baselines: `shuffled`: labels permuted, one permutation per seed; `random`: standard normal
            features of the same shape (one draw for each seed and number of channels).
        execution: which images, and what the work may use; see `Execution`.

    Raises:
        MissingInput: no labels, or a store lacks what is asked for.
        VitseeError: more clusters than images, seeds beyond `MAX_SEED`, vectors beyond the
            memory, or an unknown choice.
    """
    for name in baselines:
        if name not in BASELINES:
            raise VitseeError(f"no baseline {name!r}; expected {' or '.join(BASELINES)}")
    if n_seeds < 1:
        raise VitseeError(f"{n_seeds} seeds were asked for; expected at least 1")
    seed = execution.seed
    if seed + n_seeds - 1 > MAX_SEED:
        raise VitseeError(
            f"the seeds {seed} to {seed + n_seeds - 1} were asked for; k-means takes 0 to "
            f"{MAX_SEED}: a smaller --seed"
        )
    selected = select_each(stores, sites, sites_of)
    plans = [
        (labelled_rows(store, execution.images, seed), chosen) for store, chosen in selected.members
    ]
    read: dict[str, dict[str, SiteFeatures]] = {}
    for data, chosen in plans:
        _check(data, k if k is not None else data.n_classes, chosen, execution.memory)
        read[data.store.label] = {
            site.name: choose_features(data.store, site, tokens, one_vector=True) for site in chosen
        }
    dims = [len({site.dim for site in chosen}) * ("random" in baselines) for _, chosen in plans]
    counts = [len(data) * (len(sites_) + n) for (data, sites_), n in zip(plans, dims, strict=True)]
    notes: dict[str, Any] = {
        "method": METHOD,
        "spread": SPREAD,
        "seeds": [seed + i for i in range(n_seeds)],
        "images": {data.store.label: data.describe() for data, _ in plans},
        "tokens": {
            label: {name: of.selection for name, of in sites_.items()}
            for label, sites_ in read.items()
        },
        "remarks": [],
    }
    tables = []
    with counting(execution.progress, n_seeds * sum(counts), "rows") as progress:
        for data, chosen in plans:
            n_clusters = k if k is not None else data.n_classes
            work = _Clusters(data, n_clusters, notes["seeds"], progress)
            of_store = read[data.store.label]
            tables += _store_rows(work, chosen, of_store, baselines, execution, notes)
    return Table.from_rows(tables, COLUMNS, notes)


def _check(data: LabelledRows, k: int, sites: Sequence[SiteSpec], memory: int | None) -> None:
    """Refuse what cannot be clustered, before any work."""
    label, n = data.store.label, len(data)
    if k < 1:
        raise VitseeError(f"k is {k}; expected at least 1 cluster")
    if k > n:
        raise VitseeError(
            f"{k} clusters were asked for, but {label} has {counted(n, 'labelled images')}; "
            f"expected --k of at most {n}"
        )
    widest = max(sites, key=lambda site: site.dim)
    size_bytes = 3 * n * widest.dim * 4
    if memory is not None and size_bytes > memory:
        raise VitseeError(
            f"k-means of {n} images of {label} at {widest.name} ({widest.dim} channels) takes "
            f"{human_bytes(size_bytes)} of memory; --memory is {human_bytes(memory)} (use fewer "
            f"--images, {memory // (12 * widest.dim)} fit, or give more --memory)"
        )


class _Clusters:
    """k-means of one store's images with each seed, and the clusters compared with labels."""

    def __init__(
        self, data: LabelledRows, k: int, seeds: Sequence[int], progress: Progress
    ) -> None:
        self.data, self.k, self.seeds, self.progress = data, k, seeds, progress

    def of(self, features: Iterable[Float32]) -> list[Integers]:
        """(n,) cluster of each image, one array per seed; features: the vectors of each seed."""
        found = []
        for seed, vectors in zip(self.seeds, features, strict=False):
            found.append(k_means(vectors, self.k, seed))
            self.progress.advance(len(self.data))
        return found

    def of_noise(self, dim: int) -> list[Integers]:
        """The same of standard normal vectors, drawn anew for each seed."""
        return self.of(random_features(len(self.data), dim, (seed, 2)) for seed in self.seeds)

    def scores(self, clusters: Sequence[Integers], shuffled: bool = False) -> list[Score]:
        """One entry per metric: mean and spread over seeds."""
        values = []
        for seed, assigned in zip(self.seeds, clusters, strict=True):
            labels = self.data.labels
            if shuffled:
                labels = np.random.default_rng((seed, 1)).permutation(labels)
            values.append(agreement(assigned, labels))
        out = []
        for metric in METRICS:
            over = [value[metric] for value in values]
            std = statistics.stdev(over) if len(over) > 1 else np.nan
            out.append({"metric": metric, "value": statistics.fmean(over), "std": std})
        return out


def _store_rows(
    work: _Clusters,
    sites: Sequence[SiteSpec],
    read: Mapping[str, SiteFeatures],
    baselines: Sequence[str],
    execution: Execution,
    notes: dict[str, Any],
) -> list[Score]:
    """The rows of one store, the baselines' last."""
    data, store = work.data, work.data.store
    reason = why_meaningless(data.labels, work.k)
    if reason is not None:
        notes["remarks"].append(f"{store.label}: no value: {reason}")
        log.warning("%s", notes["remarks"][-1])
    rows: dict[str, list[Score]] = {name: [] for name in ("", *dict.fromkeys(baselines))}
    drawn: dict[int, list[Score]] = {}
    for site in sites:
        place = {
            **site_columns(store, site),
            "k": work.k,
            "n_images": len(data),
        }
        if reason is not None:
            nothing = {"value": np.nan, "std": np.nan}
            for name in rows:
                about = place | nothing | {"baseline": name}
                rows[name] += [about | {"metric": metric} for metric in METRICS]
            continue
        features = read[site.name]
        jobs, memory = execution.jobs, execution.memory
        vectors = np.concatenate(list(features.vectors(data.mask, jobs=jobs, memory=memory)))
        if (vectors == vectors[0]).all():
            which = "" if site.layout is None else f"{features.selection} "
            remark = (
                f"{store.label} {site.name}: the {which}vector of every image is the same, so all "
                "are one cluster"
            )
            notes["remarks"].append(remark)
            log.info("%s", remark)
        clusters = work.of(repeat(vectors))
        found = {"": work.scores(clusters)}
        if "shuffled" in rows:
            found["shuffled"] = work.scores(clusters, shuffled=True)
        if "random" in rows:
            if site.dim not in drawn:
                drawn[site.dim] = work.scores(work.of_noise(site.dim))
            found["random"] = drawn[site.dim]
        for name, scores in found.items():
            rows[name] += [place | score | {"baseline": name} for score in scores]
    return [row for some in rows.values() for row in some]


def why_meaningless(labels: Integers, k: int) -> str | None:
    """Why k clusters of these images carry no information about the features, whatever these are;
    None where they do."""
    n, n_classes = len(labels), len(np.unique(labels))
    if n_classes == 1:
        what = "image" if n == 1 else "class among its images"
        return f"there is one {what}, with which all clusters agree"
    if k == n:
        return f"k is the number of images ({n}), so that each is a cluster of its own"
    if n_classes == n:
        return f"each of the {n} images has a class of its own"
    if k == 1:
        return "k is 1, so that all images are one cluster"
    return None


def k_means(vectors: Float32, k: int, seed: int) -> Integers:
    """(n,) cluster of each vector; fewer than k clusters where fewer vectors differ."""
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


def agreement(clusters: Integers, labels: Integers) -> dict[str, float]:
    """Purity, NMI (0 to 1) and ARI (at most 1, 0 by chance) of a clustering.

    Args:
        clusters: (n,) numbers from 0.
        labels: (n,) classes from 0.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    n_classes = int(labels.max()) + 1
    cells = (int(clusters.max()) + 1) * n_classes
    table = np.bincount(clusters * n_classes + labels, minlength=cells).reshape(-1, n_classes)
    return {
        "purity": float(table.max(1).sum()) / len(labels),
        "nmi": float(normalized_mutual_info_score(labels, clusters, average_method="arithmetic")),
        "ari": float(adjusted_rand_score(labels, clusters)),
    }


@styled
def plot(table: Table) -> Figure:
    """Purity, NMI and ARI against relative depth, one panel each and one curve per store, baselines
    dashed (Walmer et al. 2023, Figs. 7, 24, 25); the band is one standard deviation over seeds."""
    figure = new_figure(11.4, 3.6)
    panels = figure.subplots(1, len(METRICS), squeeze=False)[0]
    drawn = Table(
        {
            **table.columns,
            "low": table["value"].astype(float) - table["std"].astype(float),
            "high": table["value"].astype(float) + table["std"].astype(float),
        }
    )
    ks = ", ".join(str(k) for k in table.unique("k"))
    for axes, metric in zip(panels, METRICS, strict=True):
        draw_depth_curves(axes, drawn.where(metric=metric), ylabel=UNITS[metric], among=drawn)
    panels[0].set_title(f"clusters against classes (k-means, k = {ks})")
    panels[1].set_title("band: one std over seeds" if np.isfinite(drawn["low"]).any() else "")
    add_curve_legend(figure, list(panels))
    return figure
