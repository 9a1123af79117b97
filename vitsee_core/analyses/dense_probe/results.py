"""The probes of one pair of stores: which images train and test, their scores, and their
rows.

Test images are scored in one pass over their tokens, for all probes together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.bank import train_from_bank
from vitsee_core.analyses.dense_probe.figure import picture_examples
from vitsee_core.analyses.dense_probe.heads import ClassHead, Head, HeadKey, Trained
from vitsee_core.analyses.dense_probe.linear import train_ridge
from vitsee_core.analyses.dense_probe.metrics import LABELLED, Counts, Tally, Task
from vitsee_core.analyses.dense_probe.options import (
    BATCH,
    CAPI,
    CAPI_INPUT,
    HUMMINGBIRD,
    KNN,
    LOGISTIC,
    PROTOCOL_STEPS,
    RIDGE,
    SGD,
    Solver,
)
from vitsee_core.analyses.dense_probe.pixels import Pixels
from vitsee_core.analyses.dense_probe.split_images import (
    ImagePair,
    Patches,
    SplitImages,
    Sums,
    counted_rows,
    probed_patches,
)
from vitsee_core.figures.patch_maps.views import grid_sites
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import site_columns
from vitsee_core.types import Float
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab


UNTRAINED = "untrained"


@dataclass(frozen=True)
class Settings:
    """The choices of a run.

    Attributes:
        sites: patterns of site names.
        concat: probe the last so many sites together; None for each site alone.
        task: what is predicted.
        solver: how probes are fitted.
        metrics: names of metrics.
        per_class: add rows of each class.
        eigen_crop: test on the crop of Eigen et al. 2014 only.
    """

    sites: tuple[str, ...]
    concat: int | None
    task: Task
    solver: Solver
    metrics: tuple[str, ...]
    per_class: bool
    eigen_crop: bool


class PairOfStores:
    """A store that trains and a store that tests, which may be the same one.

    Attributes:
        settings: the choices of the run.
        all_probed_tokens: a reader for each probed site, or for the sites that are probed
            together, of their patch tokens in the training store.
        train: the training images with their labels.
        test: the test images with their labels.
    """

    def __init__(self, pair: ImagePair, settings: Settings) -> None:
        """Find the sites and the labels of both. Raises an error for whatever is
        missing."""
        self.settings = settings
        sites = grid_sites(pair.train, settings.sites)
        self.all_probed_tokens = probed_patches(pair.train, sites, settings.concat)
        test_tokens = [
            Patches.of(pair.test, train_tokens.sites)
            for train_tokens in self.all_probed_tokens
        ]
        self.train = SplitImages.of(
            pair.train,
            pair.train_rows,
            self.all_probed_tokens,
            task=settings.task,
            resolution=settings.solver.resolution,
        )
        self.test = SplitImages.of(
            pair.test,
            pair.test_rows,
            test_tokens,
            task=settings.task,
            resolution=settings.solver.resolution,
            eigen_crop=settings.eigen_crop,
        )
        for train_site, test_site in zip(
            self.all_probed_tokens, test_tokens, strict=True
        ):
            train_site.check_alike(test_site)

    @property
    def n_images(self) -> int:
        """The number of images that are read, for a progress bar."""
        solver = self.settings.solver
        # Each image counts once a pass, however many sites are read of it.
        n_read = self.train.n_images + self.test.n_images
        if solver.balanced:
            n_read += self.train.n_images  # a pass before, which counts the classes
        if solver.name == SGD:
            n_read += solver.steps * BATCH * len(self.all_probed_tokens)
        return n_read

    def probe(self, execution: Execution) -> TrainedProbes:
        """Train the probes and test them.

        Raises:
            VitseeError: too few patches, images or classes to train or to test with.
        """
        solver = self.settings.solver
        if solver.name == RIDGE:
            trained = train_ridge(self.train, solver, execution)
        elif solver.name == SGD:
            from vitsee_core.analyses.dense_probe.sgd import train_sgd  # torch

            trained = train_sgd(self.train, solver, execution)
        else:
            trained = train_from_bank(self.train, solver, execution)
        # With a single class there is nothing to tell apart.
        for probe in trained.probes.values():
            if isinstance(probe, ClassHead):
                self.train.require_classes(probe.classes, "training")
        counts, blocks = score_probes(
            self.test,
            trained.probes,
            self.settings.metrics,
            execution,
            one_slab_at_a_time=solver.of_neighbours,
        )
        return TrainedProbes(self, trained, counts, blocks)


@dataclass(frozen=True)
class TrainedProbes:
    """The trained probes of a pair of stores, and the counts of their predictions.

    Attributes:
        work: the pair of stores.
        trained: the trained probes and the baselines, and notes on the training.
        counts: tally of what each of them predicts of the test images.
        blocks: jackknife blocks of the test images.
    """

    work: PairOfStores
    trained: Trained
    counts: Mapping[HeadKey, Tally]
    blocks: Blocks

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the model's sites, then those of the baselines at each of
        them."""
        for probed_tokens in self.work.all_probed_tokens:
            site_cells = site_columns(self.work.test.store, probed_tokens)
            yield from self._site_rows(probed_tokens, site_cells, baseline="")
        # A chosen l2 differs from site to site; baselines have none of their own.
        several_l2s = len(self.work.settings.solver.l2s) > 1
        for probed_tokens in self.work.all_probed_tokens:
            grid = self.work.test.grids[probed_tokens.name]
            site_cells = site_columns(self.work.test.store, probed_tokens)
            # A baseline is repeated beside each row that it is compared with.
            for key in self._keys(probed_tokens):
                for name in self.work.settings.task.baselines:
                    cells = {
                        **site_cells,
                        "k": key.k,
                        "l2_relative": key.l2 if several_l2s else None,
                        "baseline": name,
                    }
                    yield from self._metric_rows(HeadKey(grid, baseline=name), cells)

    def remarks(self) -> list[str]:
        """Return what the intervals of these test images do not hold, as the task finds
        it."""
        tallies = [tally for key, tally in self.counts.items() if not key.baseline]
        label = self.work.test.store.label
        # Remarks are on labels, which are the same for every probe.
        remarks = self.work.settings.task.remarks(tallies[0])
        return [f"{label}: {remark}" for remark in remarks]

    def rows_for(self, trained: TrainedProbes) -> Iterator[dict[str, Any]]:
        """Yield the rows of this untrained model's sites, as a baseline of a trained
        model's.

        Raises:
            VitseeError: this model lacks a site of the trained one.
        """
        untrained_tokens = {
            probed_tokens.name: probed_tokens
            for probed_tokens in self.work.all_probed_tokens
        }
        for probed_tokens in trained.work.all_probed_tokens:
            if probed_tokens.name not in untrained_tokens:
                label = self.work.train.store.label
                raise VitseeError(
                    f"{label} lacks the site {probed_tokens.name}, which is probed"
                )
            site_cells = site_columns(trained.work.test.store, probed_tokens)
            yield from self._site_rows(
                untrained_tokens[probed_tokens.name], site_cells, baseline=UNTRAINED
            )

    def example_pictures(self, n: int, data: str | None) -> list[dict[str, Any]]:
        """Return pictures of the first n test images as the best probe predicts them.

        data: where the data is now; None for where it was.
        """
        keys = [key for key in self.counts if not key.baseline]
        qualities = [self.work.settings.task.quality(self.counts[key]) for key in keys]
        # A quality is NaN if no class occurs.
        best = keys[int(np.nanargmax(qualities))]
        best_probe = self.trained.probes[best]
        return picture_examples(self.work.test, best, best_probe, n, data)

    def _site_rows(
        self, probed_tokens: Patches, site_cells: Mapping[str, Any], baseline: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of all probes of a site.

        Args:
            probed_tokens: reader of the patch tokens that these probes read.
            site_cells: the columns that describe the site.
            baseline: "" for the model itself, "untrained" for an untrained model's probes.
        """
        for key in self._keys(probed_tokens):
            cells = {
                **site_cells,
                "baseline": baseline,
                "l2_relative": key.l2,
                "k": key.k,
            }
            yield from self._metric_rows(key, cells)

    def _keys(self, probed_tokens: Patches) -> list[HeadKey]:
        """Return the keys of the probes of a site: one for each l2 or k."""
        return [
            key
            for key in self.trained.probes
            if key.probed == probed_tokens.name and not key.baseline
        ]

    def _metric_rows(
        self, key: HeadKey, cells: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of one probe or baseline, one per metric.

        cells: the columns that these rows share.
        """
        settings = self.work.settings
        for metric_cells in settings.task.cells(
            self.counts[key], settings.metrics, settings.per_class
        ):
            yield {**cells, **metric_cells, "n_images": self.work.test.n_images}


@dataclass(frozen=True)
class Testing:
    """The test images, the probes and baselines that predict them, and what is measured."""

    images: SplitImages
    probes: Mapping[HeadKey, Head]
    metrics: Sequence[str]
    blocks: Blocks


@dataclass
class ProbeCounts(Sums[Testing]):
    """The tallies of all probes and baselines."""

    counts: dict[HeadKey, Tally] = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Predict and count the images of a slab."""
        assert self.work is not None
        images = self.work.images
        probes = self.work.probes
        rows = counted_rows(slab)
        # For each image: grid -> its labelled pixels. Read once for all probes.
        pixels_of_images = [images.truth.pixels(row) for row in rows]
        for key in probes:
            if key.baseline:
                for row, pixels in zip(rows, pixels_of_images, strict=True):
                    no_tokens = np.zeros((0, 0, 0))
                    self._count(key, row, no_tokens, pixels[key.probed])
        for site, probed_tokens in images.features.items():
            keys = [key for key in probes if key.probed == site and not key.baseline]
            grid = images.grids[site]
            for row, x, pixels in zip(
                rows, probed_tokens.of_slab(slab), pixels_of_images, strict=True
            ):
                tokens = x.astype(np.float64).reshape(
                    *probed_tokens.grid, probed_tokens.dim
                )
                for key in keys:
                    self._count(key, row, tokens, pixels[grid])

    def _count(self, key: HeadKey, row: int, tokens: Float, pixels: Pixels) -> None:
        """Count what one probe or baseline predicts of one image, from its tokens (rows, cols,
        dim)."""
        assert self.work is not None
        blocks = self.work.blocks
        if key not in self.counts:
            task = self.work.images.task
            self.counts[key] = task.tally(self.work.metrics, blocks.n)
        prediction = self.work.probes[key].predict(tokens, pixels)
        self.counts[key].count(int(blocks.of_rows[row]), prediction, pixels)


def score_probes(
    images: SplitImages,
    probes: dict[HeadKey, Head],
    metrics: Sequence[str],
    execution: Execution,
    *,
    one_slab_at_a_time: bool,
) -> tuple[dict[HeadKey, Tally], Blocks]:
    """Return a tally of what each probe and baseline predicts of the test images, and the
    jackknife's blocks.

    Args:
        images: the test images.
        probes: the trained probes and the baselines.
        metrics: names of the metrics.
        execution: seed, threads and memory.
        one_slab_at_a_time: work in this process alone, as a probe takes all threads, or is
            too large to be sent to another process.

    Raises:
        VitseeError: no pixel of the test images counts, or all are of one class.
    """
    blocks = Blocks.of(images.store, images.truth.mask, execution.seed)
    make = partial(ProbeCounts, Testing(images, probes, metrics, blocks))
    if one_slab_at_a_time:
        serial = replace(execution, map=None, jobs=1)
        counts = serial.fold(
            images.store, make, images.truth.rows, slab_bytes=images.slab_bytes
        ).counts
    else:
        counts = images.fold(make, execution).counts
    # A tally is false if nothing was counted.
    if not any(map(bool, counts.values())):
        raise images.no_pixel("test")
    for tally in counts.values():
        if isinstance(tally, Counts):
            n_pixels_by_class = tally.pixels[:, LABELLED].sum(0)
            images.require_classes(np.flatnonzero(n_pixels_by_class), "test")
    return counts, blocks


def differences(solver: Solver, store: Store, left_out: bool) -> list[str]:
    """Return the points in which a run differs from its preset's protocol.

    left_out: whether the bank lacks some of the training patches.
    """
    points = list(_differences_of_any(solver, store))
    if left_out and solver.name != HUMMINGBIRD:
        points.append(
            "a part of the training patches: memory holds no more (--bank, --memory)"
        )
    return points


def _differences_of_any(solver: Solver, store: Store) -> Iterator[str]:
    """Yield the differences that follow from the solver and from the store's transform."""
    transform = store.manifest.transform
    size = tuple(transform["input_size"][1:])
    mode = str(transform.get("crop_mode"))
    if solver.preset == CAPI:
        if size != CAPI_INPUT:
            yield f"an input of {size[1]} x {size[0]} px, not 224 x 224"
        if mode != "squash" or transform.get("crop_pct") != 1:
            yield f"images are brought to the input by {mode}, not squashed whole"
        if transform.get("interpolation") != "bicubic":
            yield f"images are resized {transform.get('interpolation')}, not bicubic"
        yield "standardised over training patches with a class, not over all"
        if solver.name == KNN:
            if not solver.chooses:
                yield "k and distance as given: none is chosen on held-out images"
            yield "pixels without a class do not vote"
        else:
            yield "l2 from a grid of its own, chosen by cross-entropy, not by mean IoU"
    elif solver.preset == HUMMINGBIRD:
        yield "no augmentation of the memory's images"
        yield (
            "pixels without a class are left out of patches' shares, not counted as class "
            "0"
        )
        yield "classes as predicted: no Hungarian matching"
        if solver.bank is None:
            yield "as many patches as fit into memory, not a given number"
    else:
        yield from _differences_of_dinov3(solver, size, mode)


def _differences_of_dinov3(
    solver: Solver, size: tuple[int, ...], mode: str
) -> Iterator[str]:
    """Yield the differences from the linear probes of Siméoni et al. 2025.

    Args:
        solver: how the probes are fitted.
        size: (height, width) of the model's input.
        mode: how images are brought to it.
    """
    is_depth = solver.target == "depth"
    n_steps = PROTOCOL_STEPS[solver.target]
    if solver.name == SGD:
        if solver.steps != n_steps:
            yield (
                f"{solver.steps:,} steps, not {n_steps:,}; the warm-up is shorter in "
                "proportion"
            )
    else:
        method = "L-BFGS" if solver.name == LOGISTIC else "least squares"
        yield (
            f"{method} on fixed tokens, not AdamW over {n_steps:,} steps; no batch norm, "
            "no dropout"
        )
    if is_depth and solver.name == RIDGE:
        yield "a linear map to metres, not to 256 bins"
    view = f"one view of {size[1]} x {size[0]} px ({mode})"
    if is_depth:
        yield "no augmentation in training, and no flip in testing"
        yield view
    else:
        yield "no augmentation in training"
        yield f"{view}, no sliding window"
    if solver.name == LOGISTIC:
        yield "in training every pixel has the scores of its patch, not interpolated ones"
