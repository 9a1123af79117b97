"""Spectra: how many directions do a layer's features use?

Of one vector per image (class token, mean over patches, `pooled`), or of all tokens as examples:
`rankme`, `effective_rank`, `participation_ratio`, `alpha`, `anisotropy` as in
`statistics.covariance`. Of one vector per image also `twonn` and, where they have labels, `nc1`,
`cdnv`, `nc2_norms`, `nc2_angles`, `nc4`, see `measures`.

Each number depends on how many examples it is of, and cannot exceed a `cap`; so each row has the
cap, and the value of two halves of the images. Halves that are far from the whole say that more
images would give another number. One channel with a large mean takes RankMe to 1 whatever the
others do (massive activations): read it with the effective rank, which is centred.

Tokens of one image are no independent sample: for tokens the unbiased participation ratio is one
of tokens, intervals are over images.
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
from vitsee_core.tables.metrics import OF_THIS_SIZE, asked_for, depends_on_size
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
MOST_NEIGHBOURS = 4096  # images of twonn: n x n distances in memory

Measured = dict[str, float]

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
    """One row per store, site and metric.

    Columns: see `COLUMNS`; `token` which tokens are examples; `cap` the largest value possible;
    `half_a`, `half_b` the value of every second block of images, and of the others; `low`, `high`
    the 95 % interval over images by the jackknife; `n_examples` the vectors or tokens. NaN: a value
    that is not defined (all examples alike, too few).

    Memory: the vectors of one site in float32, with labels twice more in float64, and a D x D
    matrix in float64 for each of 20 blocks; of tokens these matrices only. Refused where that is
    more than the memory. Time: n D^2 once, and 23 eigendecompositions of min(n, D) per site.

    Args:
        stores: they may have different images; labels are needed for `OF_CLASSES` only.

    Raises:
        MissingInput: the site is stored pooled only.
        SiteError: no such site or tokens.
        VitseeError: unknown metric, metrics that need one vector per image, labels or logits, or
            more than fits the memory.
    """
    asked_for(metrics, METRICS, "spectrum")
    selected = select_each(stores, sites, sites_of)
    plans = []
    for store, chosen in selected.members:
        read = [choose_features(store, site, tokens) for site in chosen]
        work = _Store(store, execution.rows(store), execution.seed, metrics)
        for features in read:
            work.check(features, execution.budget)
        plans.append((work, list(zip(chosen, read, strict=True))))
    for work, own in plans:
        say_cost([features for _, features in own if features.has_tokens], work.rows.n)
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    counts = [2 * work.rows.n * len(own) for work, own in plans]
    with counting(execution.progress, sum(counts), SITE_IMAGES):
        for work, own in plans:
            for of_site, said in execution.spread(work, own):
                rows += of_site
                remarks += said
    for remark in remarks:
        log.info("%s", remark)
    notes = {
        "interval": METHODS["jackknife"],
        "interval_of": {m: OF_THIS_SIZE for m in METRICS if depends_on_size(m)},
        "twonn_interval": "standard error by batch means: the standard deviation over blocks of "
        "images of each block's own dimension, / sqrt(blocks); empty below 3 images a block",
        "nc4_interval": SHARES,
        "std": METHODS["std"],
        "halves": "half_a, half_b: of the blocks of images 0, 2, 4, ... and 1, 3, 5, ...",
        "cap": "the largest value that the metric can have with these examples and channels",
        "twonn_images": f"at most {MOST_NEIGHBOURS}",
        "remarks": remarks,
        "seed": execution.seed,
        "images": {work.store.label: work.rows.describe() for work, _ in plans},
        **selected.notes(),
    }
    return Table.from_rows(rows, COLUMNS, notes)


class _Store:
    """The rows of one store's sites."""

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
        """(images,) class of the model's logits; None if they are not of the labels' classes."""
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
        """Refuse, before any work, requests that cannot be met."""
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
        """The metrics of classes that are possible."""
        if len(np.unique(self.labels[self.labels >= 0])) < 2:
            return []
        metrics = [metric for metric in measures.METRICS if metric in self.metrics]
        return metrics + ([measures.FOURTH] if self.predicted is not None else [])

    def __call__(
        self, execution: Execution, of: tuple[SiteSpec, SiteFeatures]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows of a site, and remarks."""
        site, features = of
        make = self._of_tokens if features.has_tokens else self._of_vectors
        measure = make(features, execution)
        m = self.blocks.n
        every = np.ones(m, bool)
        even = np.arange(m) % 2 == 0
        left = [np.arange(m) != b for b in range(m)] if m > 1 else []
        # The whole comes first: it collects the remarks.
        whole, caps = measure.of(every)
        of_masks = thread_map(execution.jobs)(measure.values, [even, ~even, *left])
        first, second, *without = of_masks
        remarks = measure.remarks(f"{self.store.label} {site.name}")
        execution.progress.advance(self.rows.n)
        place = site_columns(self.store, site)
        place |= {
            "token": str(features.selection) if features.site.layout is not None else None
        }
        rows = []
        for metric in METRICS:
            if metric not in whole or metric not in self.metrics:
                continue
            replicates = np.array([one[metric] for one in without])
            replicates = measure.replicates.get(metric, replicates)
            about = {
                **{"metric": metric, "cap": caps.get(metric, math.nan)},
                **{"half_a": first[metric], "half_b": second[metric]},
                "n_examples": len(self.labels) * len(features.tokens),
            }
            limits = UNLIMITED if metric in ("alpha", "anisotropy") else (0.0, np.inf)
            cells = jackknife_cells(whole[metric], replicates, len(self.labels), limits)
            if metric == measures.FOURTH:
                ends = jackknife_share(whole[metric], replicates, len(self.labels))
                cells |= dict(zip(("low", "high"), ends, strict=True))
            rows.append(place | about | cells)
        return rows, remarks

    def _of_tokens(self, features: SiteFeatures, use: Execution) -> _Measure:
        of_rows = self.blocks.of_rows
        parts = block_sums(features, self.rows, of_rows, use)
        return _Measure(partial(_of_sums, parts, total(parts)), [], {})

    def _of_vectors(self, features: SiteFeatures, use: Execution) -> _Measure:
        """Spectra from D x D, or from n x n if that is smaller."""
        vectors = features.vectors(self.mask, jobs=use.jobs, memory=use.budget)
        x = np.concatenate(list(vectors))
        use.progress.advance(self.rows.n)
        labels = self.blocks.labels
        spectrum: Callable[[Mask], Spectrum]
        if len(x) > x.shape[1]:
            shift = x[0].astype(np.float64)
            parts = [
                CovarianceSums.of(x[labels == b], shift) for b in range(self.blocks.n)
            ]
            spectrum = partial(_of_sums, parts, total(parts))
        else:
            spectrum = partial(_of_examples, x, labels)
        others: list[_Neighbours | _Classes] = []
        replicates: dict[str, Float] = {}
        if "twonn" in self.metrics:
            neighbours = _Neighbours(x, labels, self.seed)
            replicates["twonn"] = neighbours.found.replicates()
            others.append(neighbours)
        if names := self._of_classes():
            others.append(_Classes(x, labels, self.labels, self.predicted, names))
        return _Measure(spectrum, others, replicates)


def _of_sums(
    parts: Sequence[CovarianceSums], whole: CovarianceSums, among: Mask
) -> Spectrum:
    """The sums of the blocks in `among`: the whole minus the others if these are few."""
    if among.sum() * 2 <= len(parts):
        return Spectrum.of_sums(
            total([part for part, use in zip(parts, among, strict=True) if use])
        )
    sums = total([whole])
    for b in np.flatnonzero(~among).tolist():
        sums.add(parts[b], -1)
    return Spectrum.of_sums(sums)


def _of_examples(x: Float32, labels: Integers, among: Mask) -> Spectrum:
    return Spectrum.of_examples(x[among[labels]].astype(np.float64))


class _Neighbours:
    def __init__(self, x: Float32, labels: Integers, seed: int) -> None:
        n = min(len(x), MOST_NEIGHBOURS)
        # Drawn from all blocks of images, each of which gives a replicate.
        some = np.sort(np.random.default_rng(seed).permutation(len(x))[:n])
        self.n = n
        self.found = TwoNearest(x[some].astype(np.float64), labels[some])

    def values(self, among: Mask) -> Measured:
        return {"twonn": self.found.dimension(among[self.found.blocks])}

    def remarks(self, where: str) -> list[str]:
        equal = self.found.n_equal
        return [
            f"{where}: {equal} of {self.n} vectors equal another: not in twonn"
        ] * bool(equal)


@dataclass
class _Classes:
    x: Float32
    blocks: Integers
    labels: Integers
    predicted: Integers | None
    names: Sequence[str]
    left_out: int = 0

    def values(self, among: Mask) -> Measured:
        keep = among[self.blocks] & (self.labels >= 0)
        x = self.x[keep].astype(np.float64)
        labels = self.labels[keep]
        values: Measured = {}
        if {*self.names} & {*measures.METRICS}:
            values, left_out = measures.collapse(x, labels)
            if among.all():
                self.left_out = left_out
        if self.predicted is not None:
            # One division into halves, whichever images are left out.
            predicted = self.predicted[keep]
            half = measures.halves(self.labels)[keep]
            differs = measures.nearest_mean_disagrees(x, labels, predicted, half)
            there = differs[~np.isnan(differs)]
            values[measures.FOURTH] = float(there.mean()) if len(there) else math.nan
        return values

    def remarks(self, where: str) -> list[str]:
        pairs = plural(self.left_out, "pairs")
        said = f"{where}: cdnv is without {pairs} of classes that are nearer than their noise"
        return [said] * bool(self.left_out)


@dataclass
class _Measure:
    """All metrics of one site."""

    spectrum: Callable[[Mask], Spectrum]  # of the blocks in a mask (blocks,)
    others: Sequence[_Neighbours | _Classes]  # metrics that no spectrum gives
    # metric -> (blocks,), if its replicates are not its values without each block
    replicates: dict[str, Float]
    whole: Spectrum | None = None

    def of(self, among: Mask) -> tuple[Measured, Measured]:
        self.whole = self.spectrum(among)
        return self._values(self.whole, among), self.whole.caps() | {measures.FOURTH: 1.0}

    def values(self, among: Mask) -> Measured:
        """The measures by name, over the blocks in `among` (blocks,); NaN if no image is left."""
        if not among.any():
            return dict.fromkeys(METRICS, math.nan)
        return self._values(self.spectrum(among), among)

    def _values(self, spectrum: Spectrum, among: Mask) -> Measured:
        values = spectrum.metrics()
        for other in self.others:
            values |= other.values(among)
        return values

    def remarks(self, where: str) -> list[str]:
        assert self.whole is not None
        remarks = [
            f"{where}: all examples are alike, so they have no spectrum"
        ] * self.whole.alike
        if zeros := self.whole.n - self.whole.n_long:
            remarks.append(f"{where}: {zeros} examples are 0: not in anisotropy")
        return remarks + [
            remark for other in self.others for remark in other.remarks(where)
        ]


def headline(table: Table) -> list[Answer]:
    """The effective rank of the last site and the largest one, with the cap."""
    answers = []
    for store, rows in by_store(table, metric="effective_rank"):
        rows = picked(rows, token=rows["token"][0])
        last = len(rows) - 1
        most = extremes(rows)[1]
        text = f"{measured(rows, last)} of at most {float(rows['cap'][last]):g} at "
        text += f"{rows['site'][last]} (effective rank)"
        if most != last:
            text += f"; most at {rows['site'][most]}, {measured(rows, most)}"
        answers.append((store, text))
    return answers


RANKS = ("rankme", "effective_rank", "participation_ratio")
LOGARITHMIC = (*RANKS, "nc1", "cdnv")


@styled
def plot(table: Table) -> Figure:
    """One panel per metric, one curve per store with the 95 % interval as a band, and the values of
    two halves of the images as dots; dotted lines are the caps of ranks, on logarithmic axes."""
    every_row = table.frame
    there = [metric for metric in METRICS if metric in every_row["metric"]]
    # A metric without a value (alpha of fewer than 100 channels) needs no panel beside others.
    lowest = dict(every_row.group_by("metric").agg(pl.col("value").min()).rows())
    metrics = [metric for metric in there if lowest[metric] is not None] or there

    def finish(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
        for half in ("half_a", "half_b"):
            draw_marks(axes, rows, every_row, half, DOTS, "half of the images")
        if metric in RANKS:
            draw_marks(axes, rows, every_row, "cap", DOTTED, "largest possible")
        if metric in LOGARITHMIC and (lowest[metric] or 0) > 0:
            _logarithmic(axes, rows, caps=metric in RANKS)
        axes.set_xlim(-0.04, max(1.04, axes.get_xlim()[1]))

    return draw_depth_panels(every_row, metrics, finish)


def _logarithmic(axes: Axes, rows: pl.DataFrame, *, caps: bool) -> None:
    names = ["value", "half_a", "half_b", *(["cap"] if caps else [])]
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
