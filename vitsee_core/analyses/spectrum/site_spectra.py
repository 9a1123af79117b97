"""The work of `vitsee spectrum` on one site: its measures, of all images and of parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.spectrum import measures
from vitsee_core.analyses.spectrum.measures import TwoNearest
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.runtime.streaming import Rows, thread_map
from vitsee_core.statistics.covariance import METRICS as OF_SPECTRA
from vitsee_core.statistics.covariance import CovarianceSums, Spectrum, block_sums, total
from vitsee_core.statistics.jackknife import UNLIMITED, Blocks, jackknife_cells
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Float, Float32, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec

OF_CLASSES = (*measures.METRICS, measures.FOURTH)
METRICS = (*OF_SPECTRA, "twonn", *OF_CLASSES)
MAX_NEIGHBOUR_IMAGES = 4096  # images of twonn: n x n distances in memory

MetricValues = dict[str, float]


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
        self.predicted = self._predict_classes()

    def _predict_classes(self) -> Integers | None:
        """Return (images,) the class of the model's logits.

        None if nc4 is not measured, or the logits are not of the labels' classes.
        """
        n_labels = int(self.labels.max(initial=-1)) + 1
        n_classes = max(len(self.store.class_names or ()), n_labels)
        if measures.FOURTH not in self.metrics or "logits" not in self.store.sites:
            return None
        # A head of other classes, as ImageNet's, says nothing about these labels.
        if self.store.site("logits").dim != n_classes:
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
                f"{', '.join(sorted(of_images))} of {features.site.name} of {label} "
                "needs one vector per image: give --tokens cls or mean"
            )
        n_classes = len(np.unique(self.labels[self.labels >= 0]))
        if {*OF_CLASSES} & self.asked and n_classes < 2:
            raise VitseeError(f"{label} has no labels of two classes: no neural collapse")
        if measures.FOURTH in self.asked and self.predicted is None:
            raise VitseeError(f"{label} keeps no logits of its labels' classes: no nc4")
        # In float64: second moments of each block, and four of a decomposition.
        n_examples = n * len(features.tokens)
        need = 8 * dim * min(dim, n_examples) * (self.blocks.n + 4)
        if not features.has_tokens:
            # Vectors in float32, with labels two copies in float64.
            vector_bytes = 4
            if self._class_metrics():
                vector_bytes += 16
            need += vector_bytes * n * dim
        if need > budget:
            raise VitseeError(
                f"the spectrum of {features.site.name} of {label} ({dim} channels) takes "
                f"{human_bytes(need)} of memory; --memory is {human_bytes(budget)}"
            )

    def _class_metrics(self) -> list[str]:
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
            # All tokens as examples: spectra of their second moments, slab by slab.
            sums = block_sums(features, self.rows, self.blocks.of_rows, execution)
            spectrum = partial(spectrum_of_blocks, sums, total(sums))
            site_measures = SiteMeasures(spectrum, further=[], replicates={})
        else:
            site_measures = self._measure_vectors(features, execution)
        n_blocks = self.blocks.n
        n_images = len(self.labels)
        all_blocks = np.ones(n_blocks, bool)
        # Alternate blocks, so that a drift along the data set is in both halves.
        even = np.arange(n_blocks) % 2 == 0
        without_one = []
        if n_blocks > 1:
            without_one = [np.arange(n_blocks) != b for b in range(n_blocks)]
        # All images come first: their measurement collects the remarks.
        values, caps = site_measures.measure_all(all_blocks)
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
            # Values without each block, unless a measure has a better standard error.
            replicates = np.array([sample[metric] for sample in values_without])
            replicates = site_measures.replicates.get(metric, replicates)
            # An interval is cut where the metric ends.
            limits = (0.0, np.inf)
            if metric in ("alpha", "anisotropy"):
                limits = UNLIMITED
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

    def _measure_vectors(
        self, features: SiteFeatures, execution: Execution
    ) -> SiteMeasures:
        """Return the measures of one vector per image."""
        vectors = features.vectors(
            self.mask, jobs=execution.jobs, memory=execution.budget
        )
        # (images, dim)
        x = np.concatenate(list(vectors))
        execution.progress.advance(self.rows.n)
        block_of = self.blocks.labels
        spectrum: Callable[[Mask], Spectrum]
        # The eigenvalues of D x D second moments, or of n x n products if these are fewer: the
        # same ones up to zeros.
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
        further: list[NeighbourMeasure | ClassMeasures] = []
        replicates: dict[str, Float] = {}
        if "twonn" in self.metrics:
            neighbours = NeighbourMeasure(x, block_of, self.seed)
            replicates["twonn"] = neighbours.nearest.replicates()
            further.append(neighbours)
        names = self._class_metrics()
        if names:
            further.append(
                ClassMeasures(
                    x,
                    blocks=block_of,
                    labels=self.labels,
                    predicted=self.predicted,
                    names=names,
                )
            )
        return SiteMeasures(spectrum, further, replicates)


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
        further: give the metrics that a spectrum does not.
        replicates: metric -> (blocks,), for metrics whose replicates are not their values without
            each block.
        all_spectrum: the spectrum of all images, once `measure_all` was called.
    """

    spectrum: Callable[[Mask], Spectrum]
    further: Sequence[NeighbourMeasure | ClassMeasures]
    replicates: dict[str, Float]
    all_spectrum: Spectrum | None = None

    def measure_all(self, included: Mask) -> tuple[MetricValues, MetricValues]:
        """Return the metrics of all blocks and their largest possible values.

        The spectrum is kept, for remarks about it.
        """
        self.all_spectrum = self.spectrum(included)
        caps = self.all_spectrum.caps()
        caps[measures.FOURTH] = 1.0
        return self._values(self.all_spectrum, included), caps

    def values(self, included: Mask) -> MetricValues:
        """Return the metrics of the blocks in a mask (blocks,); NaN if no image is left."""
        if not included.any():
            return dict.fromkeys(METRICS, math.nan)
        return self._values(self.spectrum(included), included)

    def _values(self, spectrum: Spectrum, included: Mask) -> MetricValues:
        """Return the spectrum's metrics and all others."""
        values = spectrum.metrics()
        for measure in self.further:
            values |= measure.values(included)
        return values

    def remarks(self, where: str) -> list[str]:
        """Return the remarks of all measures; where: store and site."""
        assert self.all_spectrum is not None
        remarks = []
        if self.all_spectrum.is_constant:
            remarks.append(f"{where}: all examples are alike, so they have no spectrum")
        n_zero = self.all_spectrum.n - self.all_spectrum.n_nonzero
        if n_zero:
            remarks.append(f"{where}: {n_zero} examples are 0: not in anisotropy")
        for measure in self.further:
            remarks += measure.remarks(where)
        return remarks
