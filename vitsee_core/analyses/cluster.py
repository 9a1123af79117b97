"""Clusters: do images of a class lie together, without labels?

k-means on one vector per image; the clusters are compared with the labels (Walmer et al. 2023,
Figs. 7, 24, 25, with k = 50 on 5000 images):

    purity   (1 / n) sum over clusters of the largest number of images of one class in it
    nmi      mutual information of clusters and classes over the mean of their entropies
    ari      pairs that agree, corrected for chance (Hubert and Arabie 1985)

With masks, the same of objects or parts in place of images (Figs. 8, 26, 27): the vector of a
segment is the mean of the patches it lies on, weighted by its area in each, and its label the
category (`segment_purity`, ...). Their interval is over images: the clusters stay, and the
agreement is taken without each block of images.

Purity is not corrected for chance and grows with k; so each site comes with the same numbers for
shuffled labels (the same clusters), for Gaussian features of the same shape (clusters of noise)
and, of segments, for the mean over all patches of their image (clusters of scenes).
k-means is scikit-learn's: k-means++, the best of 10 starts, Lloyd's iterations, float32, features
as they are (not normalised). Values are means over seeds of k-means, `std` is the spread over those
seeds: the method's, not that of the sample of images.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.declaration import Analysis
from vitsee_core.features import choose_features
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes, plural
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
from vitsee_core.runtime.progress import SITE_IMAGES, Progress, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.statistics.jackknife import SHARE, Blocks, interval
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import asked_for
from vitsee_core.tables.replicates import WORD
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import LabelledRows, random_features
from vitsee_core.truth.masks.segments import (
    LabelledSegments,
    Segmentation,
    as_segmentation,
    examples_of,
)
from vitsee_core.types import Float, Float32, Integers, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores.layout import SiteSpec

log = logging.getLogger(__name__)


headline = partial(
    best_layers, units={"purity": "purity", "segment_purity": "purity of segments"}
)

Score = dict[str, Any]

METRICS = ("purity", "nmi", "ari")
N_INIT = 10  # starts of k-means
BASELINES = ("shuffled", "random")
SEGMENT_BASELINES = (*BASELINES, "image")
MAX_SEED = 2**32 - 1  # scikit-learn's
COLUMNS = (*SITE, "k", "metric", "value", "std", "n_images", "baseline")
SEGMENT_COLUMNS = (*COLUMNS[:-2], "low", "high", "n_images", "n_segments", "baseline")
SEGMENT = "segment_"  # before a metric's name, of segments
SEGMENT_METRICS = tuple(f"{SEGMENT}{metric}" for metric in METRICS)
PRESETS = ("walmer",)
# as their code has it: of COCO and of PartImageNet
WALMER_K = 80
WALMER_IMAGES = 999
METHOD = (
    f"scikit-learn KMeans, init k-means++, n_init {N_INIT}, float32, random_state seed, seed + 1, "
    "...; nmi normalised by the arithmetic mean of the entropies"
)
SPREAD = "std: standard deviation (n - 1) over the seeds of k-means; empty with one seed"


@analysis
def run(
    *stores: Store,
    masks: Annotated[
        Segmentation | Path | str | Sequence[Path] | None, Gather(Segmentation)
    ] = None,
    preset: Annotated[
        str | None,
        Option(
            "walmer: k = 80, vit_analysis weights, crowds too, of the first 999 images of the "
            "masks. Options given beside it win.",
            choices=tuple(PRESETS),
            default="none",
        ),
    ] = None,
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[str | None, tokens_option(VECTOR_WORDS, CLS_OR_MEAN)] = None,
    k: Annotated[
        int | None,
        Option(
            "Number of clusters.",
            metavar="K",
            least=1,
            default="the number of classes that occur; walmer: 80",
        ),
    ] = None,
    n_seeds: Annotated[
        int,
        Option("Runs of k-means, with the seeds SEED, SEED + 1, ...", "--seeds", least=1),
    ] = 3,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            (*METRICS, *SEGMENT_METRICS),
            "all three",
            "How clusters and classes agree; of segments purity is segment_purity, and so on.",
        ),
    ] = (),
    baselines: Annotated[
        Sequence[str] | None,
        Option(
            "shuffled: the same clusters against shuffled labels; random: clusters of Gaussian "
            "features of the same shape; image: of segments, clusters of the mean over all "
            "patches of their image.",
            "--baseline",
            choices=SEGMENT_BASELINES,
            or_none=True,
            decide=lambda given: (
                BASELINES if given["masks"] is None else SEGMENT_BASELINES
            ),
            default="shuffled and random, with --masks image too",
        ),
    ] = None,
    execution: Annotated[
        Execution,
        Offers("images seed jobs memory", dask="sites, and the masks of --masks,"),
    ] = DEFAULT,
) -> Table:
    """One row per site and metric, then those of the baselines.

    Columns: see `COLUMNS`, with masks `SEGMENT_COLUMNS`; `baseline` is empty in the rows about the
    model. NaN where the numbers would be the same for any features, which is logged, see
    `why_meaningless`.

    Memory: the vectors of one site, in float32, three times; with masks 8 bytes for each token that
    a segment lies on.

    Args:
        stores: with labels or masks; they may have different images.
        masks: cluster segments in place of images; a `Segmentation`, or the paths of masks.

    Raises:
        MissingInput: no labels, or a store lacks what is asked for.
        SiteError: with masks, a site without a grid.
        VitseeError: more clusters than images, seeds beyond `MAX_SEED`, vectors beyond the
            memory, segments of one category only, masks that cannot be used (see
            `Segmentation.open`, `find_segments`), or an unknown choice.
    """
    choice = as_segmentation(masks)
    if preset is not None:
        if preset not in PRESETS:
            raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
        if choice is None:
            raise VitseeError(f"--preset {preset} is of segments: give --masks too")
        choice = choice.filled(weights="vit_analysis", crowd=True, first=WALMER_IMAGES)
        k = WALMER_K if k is None else k
    names = METRICS if choice is None else SEGMENT_METRICS
    plain = {} if choice is None else dict(zip(METRICS, names, strict=True))
    wanted = asked_for(
        [plain.get(name, name) for name in metrics] or names, names, "cluster"
    )
    known = BASELINES if choice is None else SEGMENT_BASELINES
    baselines = known if baselines is None else baselines
    for name in baselines:
        if name not in known:
            raise VitseeError(f"no baseline {name!r}; expected {' or '.join(known)}")
    if n_seeds < 1:
        raise VitseeError(f"{n_seeds} seeds were asked for; expected at least 1")
    seed = execution.seed
    if seed + n_seeds - 1 > MAX_SEED:
        raise VitseeError(
            f"the seeds {seed} to {seed + n_seeds - 1} were asked for; k-means takes 0 to "
            f"{MAX_SEED}: a smaller --seed"
        )
    selected = select_each(stores, sites, sites_of)
    plans = []
    read = {}
    for store, chosen in selected.members:
        examples = examples_of(choice, [(store, chosen)], execution)
        data = examples.rows(store)
        present = len(np.unique(data.labels))
        n_clusters = present if k is None else k
        if k is None and choice is None and present < data.n_classes:
            log.info(
                "%s: %d of its %d classes occur, so k = %d",
                *(store.label, present, data.n_classes, present),
            )
        _check(data, n_clusters, chosen, execution.memory)
        read[store.label] = {
            site.name: examples.features(data, site, tokens, one_vector=True)
            for site in chosen
        }
        plans.append((data, chosen, n_clusters))
    dims = [
        len({site.dim for site in sites_}) * ("random" in baselines)
        for _, sites_, _ in plans
    ]
    counts = [
        len(data) * (len(sites_) * (1 + ("image" in baselines)) + n)
        for (data, sites_, n_clusters), n in zip(plans, dims, strict=True)
        if why_meaningless(data.labels, n_clusters, data.NOUN) is None
    ]
    notes: dict[str, Any] = {
        "method": METHOD,
        "spread": SPREAD,
        "seeds": [seed + i for i in range(n_seeds)],
        "images": {data.store.label: data.describe() for data, _, _ in plans},
        "tokens": {
            label: {name: of.selection for name, of in sites_.items()}
            for label, sites_ in read.items()
        },
        "remarks": [],
    }
    if choice is not None:
        blocks = {data.store.label: data.jackknife(seed) for data, _, _ in plans}
        notes["interval"] = plans[0][0].INTERVAL
        notes[WORD] = {label: of_store.describe() for label, of_store in blocks.items()}
    tables = []
    with counting(execution.progress, n_seeds * sum(counts), SITE_IMAGES):
        for data, chosen, n_clusters in plans:
            label = data.store.label
            own = None if choice is None else blocks[label]
            work = _Clusters(
                data, n_clusters, notes["seeds"], read[label], baselines, wanted, own
            )
            tables += _store_rows(work, chosen, execution, notes)
    return Table.from_rows(tables, COLUMNS if choice is None else SEGMENT_COLUMNS, notes)


def _check(
    data: LabelledRows, k: int, sites: Sequence[SiteSpec], memory: int | None
) -> None:
    """Refuse what cannot be clustered, before any work."""
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
            f"all {n} segments of {label} are of one category, {data.classes[data.labels[0]]}: "
            "every clustering agrees with it; expected several"
        )
    widest = max(sites, key=lambda site: site.dim)
    size_bytes = 3 * n * widest.dim * 4
    if memory is not None and size_bytes > memory:
        raise VitseeError(
            f"k-means of {n} {data.WHAT} of {label} at {widest.name} ({widest.dim} channels) takes "
            f"{human_bytes(size_bytes)} of memory; --memory is {human_bytes(memory)} (use fewer "
            f"--images, {memory // (12 * widest.dim)} fit, or give more --memory)"
        )


@dataclass(frozen=True)
class _Clusters:
    """k-means of one store's examples with each seed, and the clusters compared with labels. read:
    the examples, by site; metrics: those of the rows; blocks: of segments, for intervals."""

    data: LabelledRows
    k: int
    seeds: Sequence[int]
    read: Mapping[str, Any]
    baselines: Sequence[str]
    metrics: Sequence[str]
    blocks: Blocks | None = None

    def __call__(
        self, execution: Execution, item: str | int
    ) -> tuple[dict[str, list[Score]], str]:
        """The scores of a site and of its baselines, or those of random features with this many
        channels; and remarks."""
        data = self.data
        progress = execution.progress
        if isinstance(item, int):
            # Standard normal vectors, drawn anew for each seed.
            noise = (random_features(len(data), item, (seed, 2)) for seed in self.seeds)
            return {"random": self.scores(self.of(noise, progress))}, ""
        features = self.read[item]
        jobs = execution.jobs
        memory = execution.budget
        vectors = np.concatenate(list(data.vectors(features, jobs=jobs, memory=memory)))
        remark = ""
        if (vectors == vectors[0]).all():
            vector = self.blocks or features.site.layout is None
            which = "" if vector else f"{features.selection} "
            remark = (
                f"{data.store.label} {item}: the {which}vector of every {data.NOUN} is the same, "
                "so all are one cluster"
            )
        clusters = self.of(repeat(vectors), progress)
        found = {"": self.scores(clusters)}
        if "shuffled" in self.baselines:
            found["shuffled"] = self.scores(clusters, shuffled=True)
        if "image" in self.baselines:
            scenes = choose_features(data.store, data.store.site(item), "mean")
            of_images = np.concatenate(list(scenes.vectors(data.mask, jobs=jobs)))
            image = np.searchsorted(np.flatnonzero(data.mask), data.rows)
            found["image"] = self.scores(self.of(repeat(of_images[image]), progress))
        return found, remark

    def of(self, features: Iterable[Float32], progress: Progress) -> list[Integers]:
        """(n,) cluster of each image, one array per seed; features: the vectors of each seed."""
        clusters = []
        for seed, vectors in zip(self.seeds, features, strict=False):
            clusters.append(k_means(vectors, self.k, seed))
            progress.advance(len(self.data))
        return clusters

    def scores(self, clusters: Sequence[Integers], shuffled: bool = False) -> list[Score]:
        """One entry per metric: mean and spread over seeds, and the interval of segments."""
        values = []
        without = []
        for seed, assigned in zip(self.seeds, clusters, strict=True):
            labels = self.data.labels
            if shuffled:
                labels = np.random.default_rng((seed, 1)).permutation(labels)
            values.append(agreement(assigned, labels))
            if self.blocks is not None:
                without.append(agreement_without(assigned, labels, self.blocks))
        out = []
        for name in self.metrics:
            metric = name.removeprefix(SEGMENT)
            over = [value[metric] for value in values]
            std = statistics.stdev(over) if len(over) > 1 else np.nan
            score: Score = {"metric": name, "value": statistics.fmean(over), "std": std}
            if without:
                replicates = np.mean([of_seed[metric] for of_seed in without], axis=0)
                limits = (-1.0, 1.0) if metric == "ari" else SHARE
                low, high = (
                    jackknife_share(score["value"], replicates, self.data.n_images)
                    if metric == "purity"
                    else interval(np.array(score["value"]), replicates, limits)[1:]
                )
                score |= {"low": low, "high": high, WORD: replicates}
            out.append(score)
        return out


def _store_rows(
    work: _Clusters,
    sites: Sequence[SiteSpec],
    execution: Execution,
    notes: dict[str, Any],
) -> list[Score]:
    """The rows of one store, the baselines' last."""
    data = work.data
    store = work.data.store
    reason = why_meaningless(data.labels, work.k, data.NOUN)
    found: dict[str | int, dict[str, list[Score]]] = {}
    if reason is not None:
        notes["remarks"].append(f"{store.label}: no value: {reason}")
        log.warning("%s", notes["remarks"][-1])
    else:
        dims = dict.fromkeys(site.dim for site in sites if "random" in work.baselines)
        items: list[str | int] = [*(site.name for site in sites), *dims]
        for item, (scores, remark) in zip(
            items, execution.spread(work, items), strict=True
        ):
            found[item] = scores
            if remark:
                notes["remarks"].append(remark)
                log.info("%s", remark)
    nothing = [
        {"metric": metric, "value": np.nan, "std": np.nan} for metric in work.metrics
    ]
    rows: list[Score] = []
    for name in ("", *dict.fromkeys(work.baselines)):
        for site in sites:
            place = {**site_columns(store, site), "k": work.k, **data.counted()}
            of = site.dim if name == "random" else site.name
            scores_of = nothing if reason is not None else found[of][name]
            rows += [place | score | {"baseline": name} for score in scores_of]
    return rows


@styled
def plot(table: Table) -> Figure:
    """Purity, NMI and ARI against relative depth, one panel each and one curve per store, baselines
    dashed (Walmer et al. 2023, Figs. 7, 24, 25; of segments Figs. 8, 26, 27); the band is one
    standard deviation over seeds, of segments the interval over images."""
    drawn = table.frame
    of_segments = "n_segments" in drawn.columns
    if not of_segments:
        value = pl.col("value")
        std = pl.col("std")
        drawn = drawn.with_columns(low=value - std, high=value + std)
    spread = "95 % interval over images" if of_segments else "one std over seeds"
    counts = ("n_segments", "segments") if of_segments else ("n_images", "")
    ks = f"k = {', '.join(map(str, drawn['k'].unique(maintain_order=True)))}"

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        axes.set_title(ks)

    metrics = [name for name in (*METRICS, *SEGMENT_METRICS) if name in table["metric"]]
    return draw_depth_panels(drawn, metrics, finish, spread=spread, counts=counts)


def why_meaningless(labels: Integers, k: int, noun: str = "image") -> str | None:
    """Why k clusters of these examples say nothing of any features; None if they do."""
    n = len(labels)
    n_classes = len(np.unique(labels))
    if n_classes == 1:
        one = noun if n == 1 else f"class among its {noun}s"
        return f"there is one {one}, with which all clusters agree"
    if k == n:
        return f"k is the number of {noun}s ({n}), so that each is a cluster of its own"
    if n_classes == n:
        return f"each of the {n} {noun}s has a class of its own"
    if k == 1:
        return f"k is 1, so that all {noun}s are one cluster"
    return None


def k_means(vectors: Float32, k: int, seed: int) -> Integers:
    """(n,) cluster of each vector; fewer than k clusters if there are fewer distinct vectors."""
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
    """Purity, NMI (0 to 1) and ARI (at most 1, 0 by chance) of clusters (n,) and classes (n,), both
    numbers from 0."""
    return _agreement_of_table(_contingency(clusters, labels))


def _contingency(clusters: Integers, labels: Integers) -> Integers:
    """(clusters, classes) numbers of members."""
    shape = int(clusters.max()) + 1, int(labels.max()) + 1
    return np.bincount(
        clusters * shape[1] + labels, minlength=shape[0] * shape[1]
    ).reshape(shape)


def agreement_without(
    clusters: Integers, labels: Integers, blocks: Blocks
) -> dict[str, Float]:
    """Metric -> (blocks,) the agreement of the same clusters without the members of each block; NaN
    if nothing is left."""
    n_classes = int(labels.max()) + 1
    whole = _contingency(clusters, labels)
    rows = []
    for block in range(blocks.n):
        own = (clusters * n_classes + labels)[blocks.labels == block]
        without = whole - np.bincount(own, minlength=whole.size).reshape(whole.shape)
        rows.append(_agreement_of_table(without))
    return {metric: np.array([row[metric] for row in rows]) for metric in METRICS}


def _agreement_of_table(table: NDArray[Any]) -> dict[str, float]:
    counts = table.astype(np.float64)
    n = counts.sum()
    if n == 0:
        return dict.fromkeys(METRICS, np.nan)
    rows = counts.sum(1)
    columns = counts.sum(0)
    of_rows, of_columns, of_both = (
        _entropy(x / n) for x in (rows, columns, counts.ravel())
    )
    mean_entropy = (of_rows + of_columns) / 2
    mutual = of_rows + of_columns - of_both
    together, in_rows, in_columns = (
        float((c * (c - 1)).sum()) for c in (counts, rows, columns)
    )
    by_chance = in_rows * in_columns / (n * (n - 1)) if n > 1 else 0.0
    most = (in_rows + in_columns) / 2
    return {
        "purity": float(counts.max(1).sum() / n),
        # One cluster and one class agree, as do single members with classes of their own.
        "nmi": float(max(mutual, 0) / mean_entropy) if mean_entropy > 0 else 1.0,
        "ari": (together - by_chance) / (most - by_chance) if most != by_chance else 1.0,
    }


def _entropy(shares: Float) -> float:
    known = shares[shares > 0]
    return float(-(known * np.log(known)).sum())


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Cluster images, objects or parts; compare with classes.

    k-means on one vector per image; the clusters are compared with the labels by purity, NMI and
    ARI (Walmer et al. 2023, Figs. 7, 24, 25). With --masks on one vector per segment, the mean of
    the patches it lies on, weighted by its area in each (Figs. 8, 26, 27). k-means is
    scikit-learn's (k-means++, best of 10 starts, float32); each value is the mean over seeds.
    Labels are not used for clustering.

      $ vitsee cluster b16.zarr -o cluster.csv --png cluster.png
      $ vitsee cluster b16.zarr dino=vits16-dino.zarr --k 50 --images 5000 --png both.png
      $ vitsee cluster b16.zarr --tokens mean --seeds 10
      $ vitsee cluster coco.zarr --masks instances_val2017.json -o objects.csv --png objects.png
      $ vitsee cluster pin.zarr --masks train.json --masks val.json --masks test.json
      $ vitsee cluster parts.zarr --masks masks/ --background 40 --void none --segments 5000

    With --masks the metrics are segment_purity, segment_nmi, segment_ari, with the 95 %
    interval over images and the column n_segments. The figure shows the three against depth.
    """,
    needs=("sites",),
    reading=(
        "How well clusters found without labels agree with the classes, layer by layer. Purity "
        "grows with the number of clusters by itself: read it against the dashed lines, which "
        "are the same clusters with shuffled labels, and clusters of noise."
    ),
    source="Walmer et al. 2023, Figs. 7, 8, 24 to 27",
    columns=COLUMNS,
    other_columns=(SEGMENT_COLUMNS,),
    meanings={"std": "over seeds", "high": ""},
    metrics=(*METRICS, *SEGMENT_METRICS),
    may_lack_values=True,
    run=run,
    plot=plot,
    headline=headline,
)
