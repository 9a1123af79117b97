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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.cluster.agreement import METRICS
from vitsee_core.analyses.cluster.clustering import (
    N_INIT,
    SEGMENT,
    Score,
    StoreClusters,
    require_clusterable,
)
from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
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
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.tables.columns import REPLICATES, SITE, site_columns
from vitsee_core.tables.headlines import best_layers
from vitsee_core.tables.metrics import select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.truth.labels.labelled_rows import LabelledRows
from vitsee_core.truth.masks.segments import Segmentation, as_segmentation, examples_of
from vitsee_core.types import pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import VECTOR_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BASELINES", "COLUMNS", "METRICS", "SEGMENT_COLUMNS", "plot", "run"]

log = logging.getLogger(__name__)

headline = partial(
    best_layers, units={"purity": "purity", "segment_purity": "purity of segments"}
)

BASELINES = ("shuffled", "random")
SEGMENT_BASELINES = (*BASELINES, "image")
MAX_SEED = 2**32 - 1  # scikit-learn's random_state is 32 bits
COLUMNS = (*SITE, "k", "metric", "value", "std", "n_images", "baseline")
SEGMENT_COLUMNS = (*COLUMNS[:-2], "low", "high", "n_images", "n_segments", "baseline")
SEGMENT_METRICS = tuple(f"{SEGMENT}{metric}" for metric in METRICS)
PRESETS = ("walmer",)
# As in the released code of Walmer et al. 2023, for COCO and for PartImageNet.
WALMER_K = 80
WALMER_IMAGES = 999
METHOD = (
    f"scikit-learn KMeans, init k-means++, n_init {N_INIT}, float32, random_state seed, "
    "seed + 1, ...; nmi normalised by the arithmetic mean of the entropies"
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
            "walmer: k = 80, vit_analysis weights, crowds too, of the first 999 images "
            "of the masks. Options given beside it win.",
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
            "How clusters and classes agree; of segments purity is segment_purity, and "
            "so on.",
        ),
    ] = (),
    baselines: Annotated[
        Sequence[str] | None,
        Option(
            "shuffled: the same clusters against shuffled labels; random: clusters of "
            "Gaussian features of the same shape; image: of segments, clusters of the "
            "mean over all patches of their image.",
            "--baseline",
            choices=SEGMENT_BASELINES,
            or_none=True,
            decide=lambda options: (
                BASELINES if options["masks"] is None else SEGMENT_BASELINES
            ),
            default="shuffled and random, with --masks image too",
        ),
    ] = None,
    execution: Annotated[
        Execution,
        Offers("images seed jobs memory", dask="sites, and the masks of --masks,"),
    ] = DEFAULT,
) -> Table:
    """Return one row per site and metric, then those of the baselines.

    The columns are `COLUMNS`, with masks `SEGMENT_COLUMNS`; `baseline` is empty in the rows about
    the model. Values are NaN where they would be the same for any features (one class, as many
    clusters as images); the reason is logged.

    In memory are the vectors of one site, in float32, three times; with masks 8 bytes for each
    token that a segment lies on.

    Args:
        stores: stores with labels or masks; they may have different images.
        masks: cluster segments in place of images; a `Segmentation`, or the paths of masks.
        preset: "walmer" for the choices of Walmer et al. 2023 for segments.
        sites: patterns of site names.
        tokens: word for the vector of a site with tokens; None for its default.
        k: number of clusters; None for the number of classes that occur.
        n_seeds: number of runs of k-means.
        metrics: some of `METRICS`; () for all.
        baselines: names of baselines; None for all of them.
        execution: images, seed, threads and memory.

    Raises:
        MissingInput: no labels, or a store lacks what is asked for.
        SiteError: with masks, a site without a grid.
        VitseeError: more clusters than images, seeds beyond `MAX_SEED`, vectors beyond the
            memory, segments of one category only, masks that cannot be used (see
            `Segmentation.open`, `find_segments`), or an unknown choice.

    Examples:
        >>> import vitsee
        >>> table = vitsee.cluster("vit.zarr", sites="blocks.-1.out", metrics="purity")
        >>> list(zip(table["baseline"].tolist(), table["value"].round(1).tolist()))
        [('', 0.9), ('shuffled', 0.2), ('random', 0.2)]
    """
    segmentation = as_segmentation(masks)
    if preset is not None:
        segmentation = _apply_preset(preset, segmentation)
        if k is None:
            k = WALMER_K
    is_segments = segmentation is not None
    row_metrics = _choose_metrics(metrics, is_segments)
    row_baselines = _choose_baselines(baselines, is_segments)
    seeds = _seeds(execution.seed, n_seeds)

    # Every store is checked before the first is clustered.
    selection = select_each(stores, sites, sites_of)
    works = []
    for store, store_sites in selection.members:
        examples = examples_of(segmentation, [(store, store_sites)], execution)
        data = examples.rows(store)
        n_clusters = _count_classes(data, is_segments) if k is None else k
        require_clusterable(data, n_clusters, store_sites, execution.memory)
        features = {
            site.name: examples.features(data, site, tokens, one_vector=True)
            for site in store_sites
        }
        works.append(
            StoreClusters(
                data=data,
                sites=store_sites,
                k=n_clusters,
                seeds=seeds,
                features=features,
                baselines=row_baselines,
                metrics=row_metrics,
                blocks=data.jackknife(execution.seed) if is_segments else None,
            )
        )

    remarks: list[str] = []
    notes: dict[str, Any] = {
        "method": METHOD,
        "spread": SPREAD,
        "seeds": seeds,
        "images": {work.data.store.label: work.data.describe() for work in works},
        "tokens": {work.data.store.label: work.selections() for work in works},
        "remarks": remarks,
    }
    if is_segments:
        notes["interval"] = works[0].data.INTERVAL
        notes[REPLICATES] = {
            work.data.store.label: work.blocks.describe()
            for work in works
            if work.blocks is not None
        }
    rows: list[Score] = []
    n_clustered = sum(work.n_clustered for work in works)
    with counting(execution.progress, n_clustered, SITE_IMAGES):
        for work in works:
            rows += _store_rows(work, execution, remarks)
    return Table.from_rows(rows, SEGMENT_COLUMNS if is_segments else COLUMNS, notes)


def _apply_preset(preset: str, segmentation: Segmentation | None) -> Segmentation:
    """Return the segments with the preset's choices where none were made.

    Raises:
        VitseeError: an unknown preset, or there are no segments.
    """
    if preset not in PRESETS:
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    if segmentation is None:
        raise VitseeError(f"--preset {preset} is of segments: give --masks too")
    return segmentation.filled(weights="vit_analysis", crowd=True, first=WALMER_IMAGES)


def _choose_metrics(metrics: Sequence[str], is_segments: bool) -> list[str]:
    """Return the names of the metrics in the table; all of them if none are named."""
    known_metrics = SEGMENT_METRICS if is_segments else METRICS
    if is_segments:
        # purity means segment_purity, and so on.
        metrics = [SEGMENT + name if name in METRICS else name for name in metrics]
    return select_metrics(metrics or known_metrics, known_metrics, "cluster")


def _choose_baselines(
    baselines: Sequence[str] | None, is_segments: bool
) -> Sequence[str]:
    """Return the names of the baselines; all of them for None.

    Raises:
        VitseeError: an unknown one.
    """
    known_baselines = SEGMENT_BASELINES if is_segments else BASELINES
    if baselines is None:
        return known_baselines
    for name in baselines:
        if name not in known_baselines:
            raise VitseeError(
                f"no baseline {name!r}; expected {' or '.join(known_baselines)}"
            )
    return baselines


def _count_classes(data: LabelledRows, is_segments: bool) -> int:
    """Return the number of classes that occur; log it if a store's data has further ones."""
    n_present = len(np.unique(data.labels))
    # Masks of a whole data set nearly always have categories that few images show.
    if not is_segments and n_present < data.n_classes:
        log.info(
            "%s: %d of its %d classes occur, so k = %d",
            data.store.label,
            n_present,
            data.n_classes,
            n_present,
        )
    return n_present


def _seeds(first: int, n_seeds: int) -> list[int]:
    """Return the seeds of the runs of k-means, `n_seeds` consecutive ones.

    Raises:
        VitseeError: none, or seeds beyond those of scikit-learn.
    """
    if n_seeds < 1:
        raise VitseeError(f"{n_seeds} seeds were asked for; expected at least 1")
    last = first + n_seeds - 1
    if last > MAX_SEED:
        raise VitseeError(
            f"the seeds {first} to {last} were asked for; k-means takes 0 to "
            f"{MAX_SEED}: a smaller --seed"
        )
    return list(range(first, last + 1))


def _store_rows(
    work: StoreClusters, execution: Execution, remarks: list[str]
) -> list[Score]:
    """Return the rows of one store, the model's first, then those of each baseline.

    Args:
        work: what is clustered.
        execution: threads and progress.
        remarks: the list that remarks are added to, on missing values and equal vectors.
    """
    data = work.data
    reason = work.reason_without_values
    # Name of a site, or number of channels of random features -> baseline -> scores.
    scores_by_item: dict[str | int, dict[str, list[Score]]] = {}
    if reason is not None:
        remarks.append(f"{data.store.label}: no value: {reason}")
        log.warning("%s", remarks[-1])
    else:
        items: list[str | int] = [site.name for site in work.sites]
        items += work.random_dims
        results = execution.spread(work, items)
        for item, (scores, remark) in zip(items, results, strict=True):
            scores_by_item[item] = scores
            if remark:
                remarks.append(remark)
                log.info("%s", remark)
    missing_scores: list[Score] = [
        {"metric": metric, "value": np.nan, "std": np.nan} for metric in work.metrics
    ]
    rows: list[Score] = []
    model_and_baselines = ("", *dict.fromkeys(work.baselines))
    for baseline in model_and_baselines:
        for site in work.sites:
            # Random features depend on the number of channels alone.
            item = site.dim if baseline == "random" else site.name
            site_scores: list[Score] = missing_scores
            if reason is None:
                site_scores = scores_by_item[item][baseline]
            common = {**site_columns(data.store, site), "k": work.k, **data.counted()}
            rows += [{**common, **score, "baseline": baseline} for score in site_scores]
    return rows


@styled
def plot(table: Table) -> Figure:
    """Draw purity, NMI and ARI against relative depth, one panel each and one curve per store.

    Baselines are dashed (Walmer et al. 2023, Figs. 7, 24, 25; of segments Figs. 8, 26, 27). The
    band is one standard deviation over seeds; of segments it is the interval over images.
    """
    # Of images the spread over seeds is drawn in place of an interval.
    rows = table.frame
    spread = "95 % interval over images"
    counts = ("n_segments", "segments")
    if "n_segments" not in rows.columns:
        spread = "one std over seeds"
        counts = ("n_images", "")
        value = pl.col("value")
        std = pl.col("std")
        rows = rows.with_columns(low=value - std, high=value + std)
    title = f"k = {', '.join(map(str, rows['k'].unique(maintain_order=True)))}"

    def set_title(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        """Write the number of clusters above a panel."""
        axes.set_title(title)

    all_metrics = (*METRICS, *SEGMENT_METRICS)
    metrics = [name for name in all_metrics if name in table["metric"]]
    return draw_depth_panels(rows, metrics, set_title, spread=spread, counts=counts)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Cluster images, objects or parts; compare with classes.

    k-means on one vector per image; the clusters are compared with the labels by purity,
    NMI and ARI (Walmer et al. 2023, Figs. 7, 24, 25). With --masks on one vector per
    segment, the mean of the patches it lies on, weighted by its area in each (Figs. 8,
    26, 27). k-means is scikit-learn's (k-means++, best of 10 starts, float32); each value
    is the mean over seeds. Labels are not used for clustering.

      $ vitsee cluster b16.zarr -o cluster.csv --png cluster.png
      $ vitsee cluster b16.zarr dino=vits16-dino.zarr --k 50 --images 5000 --png both.png
      $ vitsee cluster b16.zarr --tokens mean --seeds 10
      $ vitsee cluster coco.zarr --masks instances_val2017.json -o objects.csv --png objects.png
      $ vitsee cluster pin.zarr --masks train.json --masks val.json --masks test.json
      $ vitsee cluster parts.zarr --masks masks/ --background 40 --void none --segments 5000

    With --masks the metrics are segment_purity, segment_nmi, segment_ari, with the 95 %
    interval over images and the column n_segments. The figure shows the three against
    depth.
    """,
    needs=("sites",),
    reading=(
        "How well clusters found without labels agree with the classes, layer by "
        "layer. Purity grows with the number of clusters by itself: read it against "
        "the dashed lines, which are the same clusters with shuffled labels, and "
        "clusters of noise."
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
