"""Spectra: how many directions do a layer's features use?

Of one vector per image (class token, mean over patches, `pooled`), or of all tokens as examples:
`rankme`, `effective_rank`, `participation_ratio`, `alpha`, `anisotropy` as in
`statistics.covariance`. Of one vector per image also `twonn` and, where they have labels, `nc1`,
`cdnv`, `nc2_norms`, `nc2_angles`, `nc4`, see `measures`.

Each number depends on how many examples it is of, and cannot exceed a `cap`; so each row has the
cap, and the value of two halves of the images. Halves that are far from the whole say that more
images would give another number. One channel with a large mean takes RankMe to 1 whatever the
others do (massive activations): read it with the effective rank, which is centred.

Tokens of one image are not an independent sample: with tokens as examples, the unbiased
participation ratio is that of tokens, but intervals are over images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from vitsee_core.analyses.spectrum import measures
from vitsee_core.analyses.spectrum.measures import TwoNearest
from vitsee_core.declaration import Analysis
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.figures.curve_panels import draw_depth_panels
from vitsee_core.figures.depth_curves import DOTS, DOTTED, draw_marks
from vitsee_core.figures.plotting import DECADES, FINE, plain_log_ticks, styled
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.execution import DEFAULT, Execution
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.runtime.options import (
    KNOWLEDGE,
    SITES,
    Offers,
    metrics_option,
    tokens_option,
)
from vitsee_core.runtime.progress import SITE_IMAGES, counting
from vitsee_core.runtime.store_selection import select_each, sites_of
from vitsee_core.runtime.streaming import Rows, thread_map
from vitsee_core.statistics.covariance import METRICS as OF_SPECTRA
from vitsee_core.statistics.covariance import (
    CovarianceSums,
    Spectrum,
    block_sums,
    say_cost,
    total,
)
from vitsee_core.statistics.image_statistics import METHODS
from vitsee_core.statistics.jackknife import UNLIMITED, Blocks, jackknife_cells
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import SITE, site_columns
from vitsee_core.tables.headlines import Answer, by_store, extremes, measured, picked
from vitsee_core.tables.metrics import SIZE_NOTE, depends_on_size, select_metrics
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, Float32, Integers, Mask, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_stores import SiteSpec

log = logging.getLogger(__name__)


OF_CLASSES = (*measures.METRICS, measures.FOURTH)
METRICS = (*OF_SPECTRA, "twonn", *OF_CLASSES)
COLUMNS = (
    *(*SITE, "token", "cap", "half_a", "half_b"),
    *("metric", "value", "std", "low", "high", "n_images", "n_examples"),
)
MAX_NEIGHBOUR_IMAGES = 4096  # images of twonn: n x n distances in memory

MetricValues = dict[str, float]

TOKENS = ("cls", "mean", "mean-all", "first", "rest", "patches", "prefix", "all")


@analysis
def run(
    *stores: Store,
    metrics: Annotated[
        Sequence[str],
        metrics_option(
            METRICS,
            "all that can be had",
            "twonn needs one vector per image, nc1 to nc4 and cdnv labels too.",
        ),
    ] = (),
    sites: Annotated[Sequence[str], SITES] = ("blocks",),
    tokens: Annotated[
        str | None, tokens_option(TOKENS, "cls where there is one, else mean")
    ] = None,
    execution: Annotated[
        Execution, Offers("images seed jobs memory", dask="sites")
    ] = DEFAULT,
) -> Table:
    """Return a table with one row per store, site and metric.

    The columns are `COLUMNS`. `token` says which tokens are examples, `n_examples` counts them.
    `cap` is the largest value possible. `half_a` and `half_b` are the values on every second block
    of images and on the others; `low` and `high` are the 95 % interval over images by the
    jackknife. NaN is a value that is not defined (all examples alike, or too few).

    Memory: the vectors of one site in float32, with labels twice more in float64, and a D x D
    matrix in float64 for each of 20 blocks; for tokens the matrices only. More than the budget is
    refused. Time: n D^2 once, and 23 eigendecompositions of min(n, D) per site.

    Args:
        stores: stores, perhaps of different images; `OF_CLASSES` need labels.
        metrics: names out of `METRICS`; empty for all that the stores allow.
        sites: patterns of the sites.
        tokens: which tokens are examples.
        execution: images, seed and parallel work.

    Raises:
        MissingInput: the site is stored pooled only.
        SiteError: no site matches, or it does not have these tokens.
        VitseeError: a metric is unknown or needs one vector per image, labels or logits that are
            missing; or the work does not fit the memory.

    Examples:
        >>> import vitsee
        >>> table = vitsee.spectrum("vit.zarr", metrics=("rankme", "alpha"), sites="blocks.-1.out")
        >>> list(zip(table["metric"].tolist(), table["value"].round(1).tolist()))
        [('rankme', 29.0), ('alpha', nan)]
    """
    select_metrics(metrics, METRICS, "spectrum")
    selected = select_each(stores, sites, sites_of)
    plans = []
    for store, chosen in selected.members:
        all_features = [choose_features(store, site, tokens) for site in chosen]
        work = SpectrumWork(store, execution.rows(store), execution.seed, metrics)
        for features in all_features:
            work.check(features, execution.budget)
        plans.append((work, list(zip(chosen, all_features, strict=True))))
    for work, site_features in plans:
        say_cost(
            [features for _, features in site_features if features.has_tokens],
            work.rows.n,
        )
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    counts = [2 * work.rows.n * len(site_features) for work, site_features in plans]
    with counting(execution.progress, sum(counts), SITE_IMAGES):
        for work, site_features in plans:
            for site_rows, site_remarks in execution.spread(work, site_features):
                rows += site_rows
                remarks += site_remarks
    for remark in remarks:
        log.info("%s", remark)
    notes = {
        "interval": METHODS["jackknife"],
        "interval_of": {m: SIZE_NOTE for m in METRICS if depends_on_size(m)},
        "twonn_interval": "standard error by batch means: the standard deviation over blocks of "
        "images of each block's own dimension, / sqrt(blocks); empty below 3 images a block",
        "nc4_interval": SHARES,
        "std": METHODS["std"],
        "halves": "half_a, half_b: of the blocks of images 0, 2, 4, ... and 1, 3, 5, ...",
        "cap": "the largest value that the metric can have with these examples and channels",
        "twonn_images": f"at most {MAX_NEIGHBOUR_IMAGES}",
        "remarks": remarks,
        "seed": execution.seed,
        "images": {work.store.label: work.rows.describe() for work, _ in plans},
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


class SpectrumWork:
    """The work on one store: measures its sites and makes rows of them.

    Attributes:
        asked: the metrics that were named; without them a store has to refuse nothing.
        metrics: the metrics that are measured if possible.
        mask: (rows of the store,) the images that count.
        labels: (images,) their labels, -1 for none.
        predicted: (images,) the classes of the model's logits, None without usable logits.
    """

    def __init__(
        self, store: Store, rows: Rows, seed: int, metrics: Sequence[str]
    ) -> None:
        self.store = store
        self.rows = rows
        self.seed = seed
        self.asked = frozenset(metrics)
        self.metrics = frozenset(metrics or METRICS)
        self.mask = rows.mask & store.valid
        self.blocks = Blocks.of(store, self.mask, seed)
        self.labels: Integers = store.samples.label[self.mask].astype(np.int64)
        self.predicted = self._predicted()

    def _predicted(self) -> Integers | None:
        """Return (images,) the class of the model's logits; None unless they are of the labels'
        classes."""
        classes = max(
            len(self.store.class_names or ()), int(self.labels.max(initial=-1)) + 1
        )
        if measures.FOURTH not in self.metrics or "logits" not in self.store.sites:
            return None
        if self.store.site("logits").dim != classes:
            return None
        features = choose_features(self.store, self.store.site("logits"))
        return np.concatenate([x.argmax(1) for x in features.vectors(self.mask)])

    def check(self, features: SiteFeatures, budget: int) -> None:
        """Refuse, before any work, requests that cannot be met.

        Raises:
            VitseeError: a named metric needs what the store does not have, or memory is too small.
        """
        label = self.store.label
        n = len(self.labels)
        dim = features.dim
        of_images = {"twonn", *OF_CLASSES} & self.asked
        if features.has_tokens and of_images:
            raise VitseeError(
                f"{', '.join(sorted(of_images))} of {features.site.name} of {label} needs one "
                "vector per image: give --tokens cls or mean"
            )
        if {*OF_CLASSES} & self.asked and len(
            np.unique(self.labels[self.labels >= 0])
        ) < 2:
            raise VitseeError(f"{label} has no labels of two classes: no neural collapse")
        if measures.FOURTH in self.asked and self.predicted is None:
            raise VitseeError(f"{label} keeps no logits of its labels' classes: no nc4")
        need = 8 * dim * min(dim, n * len(features.tokens)) * (self.blocks.n + 4)
        if not features.has_tokens:
            need += (4 + 16 * bool(self._of_classes())) * n * dim
        if need > budget:
            raise VitseeError(
                f"the spectrum of {features.site.name} of {label} ({dim} channels) takes "
                f"{human_bytes(need)} of memory; --memory is {human_bytes(budget)}"
            )

    def _of_classes(self) -> list[str]:
        """Return the metrics of classes that the labels and logits allow."""
        if len(np.unique(self.labels[self.labels >= 0])) < 2:
            return []
        metrics = [metric for metric in measures.METRICS if metric in self.metrics]
        if self.predicted is not None:
            metrics.append(measures.FOURTH)
        return metrics

    def __call__(
        self, execution: Execution, site_features: tuple[SiteSpec, SiteFeatures]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows of a site, and remarks about it."""
        site, features = site_features
        if features.has_tokens:
            site_measures = self._of_tokens(features, execution)
        else:
            site_measures = self._of_vectors(features, execution)
        n_blocks = self.blocks.n
        n_images = len(self.labels)
        all_blocks = np.ones(n_blocks, bool)
        even = np.arange(n_blocks) % 2 == 0
        without_one = []
        if n_blocks > 1:
            without_one = [np.arange(n_blocks) != b for b in range(n_blocks)]
        # All images come first: their measurement collects the remarks.
        values, caps = site_measures.of(all_blocks)
        half_a, half_b, *values_without = thread_map(execution.jobs)(
            site_measures.values, [even, ~even, *without_one]
        )
        remarks = site_measures.remarks(f"{self.store.label} {site.name}")
        execution.progress.advance(self.rows.n)
        about_site = site_columns(self.store, site)
        about_site["token"] = None
        if features.site.layout is not None:
            about_site["token"] = str(features.selection)
        rows = []
        for metric in METRICS:
            if metric not in values or metric not in self.metrics:
                continue
            value = values[metric]
            replicates = np.array([sample[metric] for sample in values_without])
            replicates = site_measures.replicates.get(metric, replicates)
            limits = UNLIMITED if metric in ("alpha", "anisotropy") else (0.0, np.inf)
            row = {
                **about_site,
                "metric": metric,
                "cap": caps.get(metric, math.nan),
                "half_a": half_a[metric],
                "half_b": half_b[metric],
                "n_examples": n_images * len(features.tokens),
                **jackknife_cells(value, replicates, n_images, limits),
            }
            if metric == measures.FOURTH:
                # A share near 0 or 1 has an interval that is not symmetric.
                row["low"], row["high"] = jackknife_share(value, replicates, n_images)
            rows.append(row)
        return rows, remarks

    def _of_tokens(self, features: SiteFeatures, execution: Execution) -> SiteMeasures:
        """Return the measures of all tokens: spectra of their second moments."""
        sums = block_sums(features, self.rows, self.blocks.of_rows, execution)
        return SiteMeasures(partial(spectrum_of_blocks, sums, total(sums)), [], {})

    def _of_vectors(self, features: SiteFeatures, execution: Execution) -> SiteMeasures:
        """Return the measures of one vector per image."""
        vectors = features.vectors(
            self.mask, jobs=execution.jobs, memory=execution.budget
        )
        # (images, dim)
        x = np.concatenate(list(vectors))
        execution.progress.advance(self.rows.n)
        block_of = self.blocks.labels
        spectrum: Callable[[Mask], Spectrum]
        # The spectrum of D x D second moments, or of n x n products if these are fewer.
        if len(x) > x.shape[1]:
            # Sums of x - x_0 lose fewer digits than sums of x if the mean is large.
            shift = x[0].astype(np.float64)
            sums = [
                CovarianceSums.from_examples(x[block_of == b], shift)
                for b in range(self.blocks.n)
            ]
            spectrum = partial(spectrum_of_blocks, sums, total(sums))
        else:
            spectrum = partial(spectrum_of_examples, x, block_of)
        others: list[NeighbourMeasure | ClassMeasures] = []
        replicates: dict[str, Float] = {}
        if "twonn" in self.metrics:
            neighbours = NeighbourMeasure(x, block_of, self.seed)
            replicates["twonn"] = neighbours.nearest.replicates()
            others.append(neighbours)
        names = self._of_classes()
        if names:
            others.append(
                ClassMeasures(
                    x,
                    blocks=block_of,
                    labels=self.labels,
                    predicted=self.predicted,
                    names=names,
                )
            )
        return SiteMeasures(spectrum, others, replicates)


def spectrum_of_blocks(
    sums_by_block: Sequence[CovarianceSums], all_sums: CovarianceSums, included: Mask
) -> Spectrum:
    """Return the spectrum of some blocks of images, from each block's sums.

    Args:
        sums_by_block: second moments of each block.
        all_sums: those of all blocks together.
        included: (blocks,) the blocks that count.
    """
    if included.sum() * 2 <= len(sums_by_block):
        return Spectrum.from_sums(
            total([sums_by_block[b] for b in np.flatnonzero(included).tolist()])
        )
    # If most blocks are included, subtracting the others takes less time than adding up.
    sums = total([all_sums])
    for b in np.flatnonzero(~included).tolist():
        sums.add(sums_by_block[b], -1)
    return Spectrum.from_sums(sums)


def spectrum_of_examples(x: Float32, labels: Integers, included: Mask) -> Spectrum:
    """Return the spectrum of the examples in some blocks.

    Args:
        x: (examples, dim).
        labels: (examples,) their blocks.
        included: (blocks,) the blocks that count.
    """
    return Spectrum.from_examples(x[included[labels]].astype(np.float64))


class NeighbourMeasure:
    """The intrinsic dimension from nearest neighbours, of at most `MAX_NEIGHBOUR_IMAGES`."""

    def __init__(self, x: Float32, labels: Integers, seed: int) -> None:
        n = min(len(x), MAX_NEIGHBOUR_IMAGES)
        # Drawn from all blocks of images, each of which gives a replicate.
        drawn = np.sort(np.random.default_rng(seed).permutation(len(x))[:n])
        self.n = n
        self.nearest = TwoNearest(x[drawn].astype(np.float64), labels[drawn])

    def values(self, included: Mask) -> MetricValues:
        """Return `twonn` of the blocks in a mask (blocks,)."""
        return {"twonn": self.nearest.dimension(included[self.nearest.blocks])}

    def remarks(self, where: str) -> list[str]:
        """Return a remark if some vectors are equal; where: store and site."""
        n_equal = self.nearest.n_equal
        if not n_equal:
            return []
        return [f"{where}: {n_equal} of {self.n} vectors equal another: not in twonn"]


@dataclass
class ClassMeasures:
    """Neural collapse of vectors with labels.

    Attributes:
        x: (images, dim).
        blocks: (images,) the images' blocks.
        labels: (images,) -1 for none.
        predicted: (images,) the classes of the model's logits, None without usable logits.
        names: the metrics that are measured.
        left_out: pairs of classes without a `cdnv`; known after all images were measured.
    """

    x: Float32
    blocks: Integers
    labels: Integers
    predicted: Integers | None
    names: Sequence[str]
    left_out: int = 0

    def values(self, included: Mask) -> MetricValues:
        """Return the metrics of the images in some blocks, a mask (blocks,)."""
        keep = included[self.blocks] & (self.labels >= 0)
        x = self.x[keep].astype(np.float64)
        labels = self.labels[keep]
        values: MetricValues = {}
        if {*self.names} & {*measures.METRICS}:
            values, left_out = measures.collapse(x, labels)
            if included.all():
                self.left_out = left_out
        if self.predicted is not None:
            # One division into halves, whichever images are left out.
            predicted = self.predicted[keep]
            half = measures.halves(self.labels)[keep]
            differs = measures.nearest_mean_disagrees(x, labels, predicted, half)
            defined = differs[~np.isnan(differs)]
            values[measures.FOURTH] = float(defined.mean()) if len(defined) else math.nan
        return values

    def remarks(self, where: str) -> list[str]:
        """Return a remark if `cdnv` leaves out pairs of classes; where: store and site."""
        if not self.left_out:
            return []
        pairs = plural(self.left_out, "pairs")
        return [
            f"{where}: cdnv is without {pairs} of classes that are nearer than their noise"
        ]


@dataclass
class SiteMeasures:
    """All metrics of one site.

    Attributes:
        spectrum: gives the spectrum of the blocks in a mask (blocks,).
        others: give the metrics that a spectrum does not.
        replicates: metric -> (blocks,), for metrics whose replicates are not their values without
            each block.
        whole: the spectrum of all images, once `of` was called.
    """

    spectrum: Callable[[Mask], Spectrum]
    others: Sequence[NeighbourMeasure | ClassMeasures]
    replicates: dict[str, Float]
    whole: Spectrum | None = None

    def of(self, included: Mask) -> tuple[MetricValues, MetricValues]:
        """Return the metrics and their largest possible values, and keep the spectrum."""
        self.whole = self.spectrum(included)
        return self._values(self.whole, included), self.whole.caps() | {
            measures.FOURTH: 1.0
        }

    def values(self, included: Mask) -> MetricValues:
        """Return the metrics of the blocks in a mask (blocks,); NaN if no image is left."""
        if not included.any():
            return dict.fromkeys(METRICS, math.nan)
        return self._values(self.spectrum(included), included)

    def _values(self, spectrum: Spectrum, included: Mask) -> MetricValues:
        """Return the spectrum's metrics and all others."""
        values = spectrum.metrics()
        for other in self.others:
            values |= other.values(included)
        return values

    def remarks(self, where: str) -> list[str]:
        """Return the remarks of all measures; where: store and site."""
        assert self.whole is not None
        remarks = []
        if self.whole.is_constant:
            remarks.append(f"{where}: all examples are alike, so they have no spectrum")
        n_zero = self.whole.n - self.whole.n_nonzero
        if n_zero:
            remarks.append(f"{where}: {n_zero} examples are 0: not in anisotropy")
        for other in self.others:
            remarks += other.remarks(where)
        return remarks


def headline(table: Table) -> list[Answer]:
    """Return per store the effective rank of the last site with its cap, and the largest one."""
    answers = []
    for store, rows in by_store(table, metric="effective_rank"):
        rows = picked(rows, token=rows["token"][0])
        last = len(rows) - 1
        largest = extremes(rows)[1]
        text = f"{measured(rows, last)} of at most {float(rows['cap'][last]):g} at "
        text += f"{rows['site'][last]} (effective rank)"
        if largest != last:
            text += f"; most at {rows['site'][largest]}, {measured(rows, largest)}"
        answers.append((store, text))
    return answers


RANKS = ("rankme", "effective_rank", "participation_ratio")
LOGARITHMIC = (*RANKS, "nc1", "cdnv")


@styled
def plot(table: Table) -> Figure:
    """Draw a panel per metric: a curve per store over depth, with the 95 % interval as a band.

    Dots are the values of two halves of the images. Dotted lines are the caps of ranks, which have
    logarithmic axes.
    """
    frame = table.frame
    present = [metric for metric in METRICS if metric in frame["metric"]]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    lowest = dict(frame.group_by("metric").agg(pl.col("value").min()).rows())
    metrics = [metric for metric in present if lowest[metric] is not None] or present

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        """Add halves and caps to a panel that has its curves."""
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, frame, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, frame, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and (lowest[metric] or 0) > 0:
            _use_log_axis(axes, rows, caps=metric in RANKS)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))

    return draw_depth_panels(frame, metrics, finish)


def _use_log_axis(axes: Axes, rows: pl.DataFrame, *, caps: bool) -> None:
    """Give a panel a logarithmic axis that shows all values, and the caps if there are any."""
    names = ["value", "half_a", "half_b"]
    if caps:
        names.append("cap")
    values = rows.select(names).to_numpy()
    values = values[values > 0]
    axes.set_yscale("log")
    axes.set_ylim(0.8 * values.min(), 1.3 * values.max())
    # Every decade where there are several, else what lies within it.
    few = values.max() < 40 * values.min()
    plain_log_ticks(axes.yaxis, FINE if few else DECADES)


ANALYSIS = Analysis(
    module=__name__,
    question=KNOWLEDGE,
    help="""
    Measure how many directions a layer's features use.

    RankMe, effective rank, participation ratio, decay of the spectrum (alpha), anisotropy and
    intrinsic dimension (TwoNN) of one vector per image, or of tokens; with labels, neural
    collapse. Every value comes with the largest it can be, two halves of the images, and an
    interval.

      $ vitsee spectrum b16.zarr -o spectrum.csv --png spectrum.png
      $ vitsee spectrum mae=a.zarr dino=b.zarr --tokens mean --metric rankme > rankme.csv
      $ vitsee spectrum b16.zarr --tokens patches --sites 'blocks.*.out' -o tokens.csv

    --tokens patches, prefix, all: every token is an example (n D^2 multiply-adds a site).

    The figure shows each metric over depth, dots for the halves, dotted lines for the caps.
    """,
    needs=("sites",),
    reading=(
        "How many directions a layer's features use, how fast their spectrum falls, and how far "
        "the classes have collapsed to points. No number can exceed its cap, and all depend on "
        "the number of images: halves (in the table) far from the whole say that more images "
        "would move it."
    ),
    source="Garrido et al. 2023; Papyan et al. 2020; Facco et al. 2017",
    columns=COLUMNS,
    meanings={
        "cap": "the largest value possible",
        "half_b": "values of two halves of the images",
    },
    metrics=METRICS,
    run=run,
    plot=plot,
    headline=headline,
    glance_metric="effective_rank",
)
