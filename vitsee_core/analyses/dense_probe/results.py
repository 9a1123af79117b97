"""The probes of one pair of stores: trained, scored in one pass over the tokens of test images, and
turned into rows; before them which images train and which test, after them small pictures of test
images.

Pictures show an image beside its label, prediction and error, and go into the sidecar.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.analyses.dense_probe.bank import train_from_bank
from vitsee_core.analyses.dense_probe.linear import train_ridge
from vitsee_core.analyses.dense_probe.metrics import CLOSE, LABELLED, Counts, Tally, Task
from vitsee_core.analyses.dense_probe.options import BATCH, RIDGE, SGD, Solver
from vitsee_core.analyses.dense_probe.pixels import (
    ClassHead,
    Head,
    Labels,
    Pixels,
    has_label,
    labelled_pixels,
)
from vitsee_core.analyses.dense_probe.work import (
    HeadKey,
    Images,
    Patches,
    SplitImages,
    Sums,
    Trained,
    counted_rows,
    drawn,
    probed,
)
from vitsee_core.features import require_comparable
from vitsee_core.figures.patch_maps.views import grid_sites
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import place
from vitsee_core.images.selection import named_only
from vitsee_core.models.provenance import Pictures
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.tables.columns import site_columns
from vitsee_core.truth.labels.labelled_rows import in_split
from vitsee_core.truth.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Float, Mask
from vitsee_stores import Store, open_store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab

log = logging.getLogger(__name__)

UNTRAINED = "untrained"
MOST_PIXELS = 320  # along a picture's longer side
WRONG = (204, 51, 17)
RIGHT = (221, 221, 221)
NOTHING = (255, 255, 255)


def pairs(
    train: Store,
    tests: Sequence[Store],
    split: str | None,
    holdout: float | None,
    execution: Execution,
    training: Execution,
) -> list[tuple[Images, Images]]:
    """The images that train and those that test, for each store that tests; training: how TRAIN is
    read beside them."""
    if not tests:
        ours, theirs = split_images(train, execution, split, holdout)
        return [((train, ours), (train, theirs))]
    require_comparable(train, tests, trains="dense-probe")
    ours = training.rows(train)
    return [((train, ours), (test, execution.rows(test))) for test in tests]


def pairs_of_untrained(
    places: Sequence[Path],
    n_tests: int,
    split: str | None,
    holdout: float | None,
    execution: Execution,
    training: Execution,
) -> list[tuple[Images, Images]]:
    """The same as `pairs`, for the stores of an untrained model.

    Raises:
        VitseeError: their number differs from that of the trained model's stores.
    """
    if not places:
        return []
    if len(places) != 1 + n_tests:
        raise VitseeError(
            f"--untrained was given {len(places)} times; expected {1 + n_tests}: the stores of a "
            f"model with random weights for {'TRAIN and each TEST' if n_tests else 'the store'}, "
            "in this order"
        )
    first, *others = [open_store(place) for place in places]
    return pairs(first, others, split, holdout, execution, training)


def split_images(
    store: Store, execution: Execution, split: str | None, holdout: float | None
) -> tuple[Rows, Rows]:
    """The images of one store that train, and those that test: those of a split of its data, or in
    the list of a file; or a share that is held out, drawn over the data set's own order.

    Raises:
        VitseeError: no such split, or nothing is left to train or to test.
    """
    rows = execution.rows(store)
    if split is not None:
        tested = _named(store, split)
        how = f"of split {split}"
    else:
        assert holdout is not None
        tested = drawn(store, rows.mask, holdout, (execution.seed, 2))
        how = f"{holdout:g} held out with seed {execution.seed}"
    parts = rows.mask & ~tested, rows.mask & tested
    for mask, use in zip(parts, ("train", "test"), strict=True):
        if not (mask & store.valid).any():
            raise VitseeError(
                f"{store.label}: no image is left to {use} ({rows.how}, {how})"
            )
    return tuple(  # type: ignore[return-value]
        replace(
            rows,
            mask=mask,
            n_invalid=int((mask & ~store.valid).sum()),
            how=f"{use} {how}",
        )
        for mask, use in zip(parts, ("not", "those"), strict=True)
    )


def _named(store: Store, split: str) -> Mask:
    """A mask (images,) of those in a split, or in the list of a file."""
    if not Path(split).is_file():
        return in_split(store, split)
    try:
        return named_only(Path(split), store.samples.id.tolist(), store.label)
    except DataError as error:
        raise VitseeError(str(error)) from None


@dataclass(frozen=True)
class Settings:
    """The choices of a run: sites, solver and metrics; eigen: on the crop of Eigen et al. 2014."""

    sites: tuple[str, ...]
    concat: int | None
    task: Task
    solver: Solver
    metrics: tuple[str, ...]
    per_class: bool
    eigen: bool


class PairOfStores:
    """A store that trains and a store that tests, which may be the same one."""

    def __init__(self, train: Images, test: Images, settings: Settings) -> None:
        self.settings = settings
        sites = grid_sites(train[0], settings.sites)
        self.chosen = probed(train[0], sites, settings.concat)
        others = [Patches.of(test[0], one.sites) for one in self.chosen]
        more = settings.task, settings.solver.resolution
        self.train = SplitImages.of(*train, self.chosen, *more)
        self.test = SplitImages.of(*test, others, *more, settings.eigen)
        for ours, theirs in zip(self.chosen, others, strict=True):
            ours.check_alike(theirs)

    @property
    def n_images(self) -> int:
        """The number of images that are read, for a progress bar."""
        solver = self.settings.solver
        trained = (2 if solver.balanced else 1) * self.train.n_images
        if solver.name == SGD:
            trained += solver.steps * BATCH * len(self.chosen)
        return trained + self.test.n_images

    def probe(self, execution: Execution) -> TrainedProbes:
        """Train the probes and test them."""
        solver = self.settings.solver
        if solver.name == RIDGE:
            trained = train_ridge(self.train, solver, execution)
        elif solver.name == SGD:
            from vitsee_core.analyses.dense_probe.sgd import train_sgd  # torch

            trained = train_sgd(self.train, solver, execution)
        else:
            trained = train_from_bank(self.train, solver, execution)
        for head in trained.heads.values():
            if isinstance(head, ClassHead):
                self.train.require_classes(head.classes, "training")
        alone = solver.of_neighbours  # they take all threads
        metrics = self.settings.metrics
        found = score_heads(self.test, trained.heads, metrics, execution, alone)
        return TrainedProbes(self, trained, *found)


@dataclass(frozen=True)
class TrainedProbes:
    """The trained probes of a pair of stores, and the counts of their predictions."""

    work: PairOfStores
    trained: Trained
    counts: Mapping[HeadKey, Tally]
    blocks: Blocks

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the model's sites, then those of the baselines at each of them."""
        for one in self.work.chosen:
            yield from self._of_site(one)
        several = len(self.work.settings.solver.l2s) > 1
        for one in self.work.chosen:
            grid = self.work.test.grids[one.name]
            place = site_columns(self.work.test.store, one)
            for own in self._keys(one):
                # Beside each row that they are compared with.
                of = place | {"k": own.k, "l2_relative": own.l2 if several else None}
                for name in self.work.settings.task.baselines:
                    yield from self._cells(
                        HeadKey(grid, baseline=name), of | {"baseline": name}
                    )

    def remarks(self) -> list[str]:
        """What the intervals of these images do not hold; see the tasks."""
        own = next(tally for key, tally in self.counts.items() if not key.baseline)
        label = self.work.test.store.label
        return [f"{label}: {remark}" for remark in self.work.settings.task.remarks(own)]

    def rows_for(self, trained: TrainedProbes) -> Iterator[dict[str, Any]]:
        """The rows of an untrained model's sites as a baseline of a trained model's."""
        known = {one.name: one for one in self.work.chosen}
        for one in trained.work.chosen:
            if one.name not in known:
                label = self.work.train.store.label
                raise VitseeError(f"{label} lacks the site {one.name}, which is probed")
            yield from self._of_site(
                known[one.name], site_columns(trained.work.test.store, one), UNTRAINED
            )

    def shown(self, n: int, data: str | None) -> list[dict[str, Any]]:
        """The first n test images as the best probe predicts them, for the notes."""
        keys = [key for key in self.counts if not key.baseline]
        values = [self.work.settings.task.quality(self.counts[key]) for key in keys]
        key = keys[int(np.nanargmax(values))]
        return show_images(self.work.test, key, self.trained.heads[key], n, data)

    def _of_site(
        self, one: Patches, place: Mapping[str, Any] | None = None, baseline: str = ""
    ) -> Iterator[dict[str, Any]]:
        place = place or site_columns(self.work.test.store, one)
        for key in self._keys(one):
            about = {**place, "baseline": baseline, "l2_relative": key.l2, "k": key.k}
            yield from self._cells(key, about)

    def _keys(self, one: Patches) -> list[HeadKey]:
        return [
            key for key in self.trained.heads if key.of == one.name and not key.baseline
        ]

    def _cells(self, key: HeadKey, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        settings = self.work.settings
        rows = settings.task.cells(self.counts[key], settings.metrics, settings.per_class)
        for cells in rows:
            yield {**about, **cells, "n_images": self.work.test.n_images}


@dataclass(frozen=True)
class Testing:
    """The test images, the heads that predict them, and what is measured."""

    part: SplitImages
    heads: Mapping[HeadKey, Head]
    wanted: Sequence[str]
    blocks: Blocks


@dataclass
class HeadCounts(Sums[Testing]):
    """The tallies of all heads."""

    counts: dict[HeadKey, Tally] = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Predict and count the images of a slab."""
        assert self.work is not None
        part = self.work.part
        heads = self.work.heads
        rows = counted_rows(slab)
        pixels = [part.truth.pixels(row) for row in rows]
        for key in heads:
            if key.baseline:
                for row, of_grid in zip(rows, pixels, strict=True):
                    self._count(key, row, np.zeros((0, 0, 0)), of_grid[key.of])
        for site, features in part.features.items():
            keys = [key for key in heads if key.of == site and not key.baseline]
            for row, x, of_grid in zip(rows, features.of_slab(slab), pixels, strict=True):
                z = x.astype(np.float64).reshape(*features.grid, features.dim)
                for key in keys:
                    self._count(key, row, z, of_grid[part.grids[site]])

    def _count(self, key: HeadKey, row: int, tokens: Float, pixels: Pixels) -> None:
        assert self.work is not None
        if key not in self.counts:
            blocks = self.work.blocks
            self.counts[key] = self.work.part.task.tally(self.work.wanted, blocks.n)
        block = int(self.work.blocks.of_rows[row])
        self.counts[key].count(
            block, self.work.heads[key].predict(tokens, pixels), pixels
        )


def score_heads(
    part: SplitImages,
    heads: dict[HeadKey, Head],
    wanted: Sequence[str],
    execution: Execution,
    alone: bool,
) -> tuple[dict[HeadKey, Tally], Blocks]:
    """Tally what each head predicts of the test images; also return the jackknife's blocks. wanted:
    metrics; alone: one slab after the other, as a head takes all threads, or is too large to be
    sent.

    Raises:
        VitseeError: no pixel of the test images counts, or all are of one class.
    """
    blocks = Blocks.of(part.store, part.truth.mask, execution.seed)
    make = partial(HeadCounts, Testing(part, heads, wanted, blocks))
    if alone:
        one = replace(execution, map=None, jobs=1)
        counts = one.fold(
            part.store, make, part.truth.rows, slab_bytes=part.slab_bytes
        ).counts
    else:
        counts = part.fold(make, execution).counts
    if not any(map(bool, counts.values())):
        raise part.no_pixel("test")
    for tally in counts.values():
        if isinstance(tally, Counts):
            n_pixels_by_class = tally.whole[:, LABELLED].sum(0)
            part.require_classes(np.flatnonzero(n_pixels_by_class), "test")
    return counts, blocks


def show_images(
    part: SplitImages, key: HeadKey, head: Head, n: int, data: str | None
) -> list[dict[str, Any]]:
    """The first n test images as the model saw them: name, site and pictures (`image` where it can
    be had, `label`, `prediction`, `error`), and the share of pixels that are right. data: where the
    data is now."""
    rows = np.flatnonzero(part.truth.mask)[:n]
    try:
        photos: list[Any] = list(Pictures(part.store, data)(rows))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        photos = [None] * len(rows)
    features = part.features[key.of]
    transform = part.store.manifest.transform
    size = tuple(transform["input_size"][1:])
    found = []
    for row, photo in zip(rows.tolist(), photos, strict=True):
        truth = part.truth.labels(row)
        placement = place(transform, truth.shape)
        pixels = labelled_pixels(truth, placement, features.layout, size, "input")
        x = features.load(row).astype(np.float64)
        prediction = head.predict(x.reshape(*features.grid, -1), pixels)
        one: dict[str, Any] = {
            "store": part.store.label,
            "image": str(part.store.samples.id[row]),
            "site": key.of,
            **_judged(prediction, pixels),
        }
        if photo is not None:
            rgb = photo.transpose(1, 2, 0).repeat(3 // len(photo), axis=2)
            one["photo"] = _picture(rgb, smooth=True)
        found.append(one)
    return found


def _judged(prediction: Labels, pixels: Pixels) -> dict[str, Any]:
    """Pictures of label, prediction and error, and the share of pixels that are right: of the
    class, or of a depth within a quarter."""
    labels = pixels.labels
    counted = has_label(pixels.labels)
    if not pixels.of_depth:
        right = prediction == labels
        off = np.where(right, 0.0, 1.0)
        drawn = [coloured(labels), coloured(prediction)]
    else:
        with np.errstate(invalid="ignore"):
            off = np.clip(np.abs(prediction - labels) / labels, 0, 1)
            right = np.maximum(prediction / labels, labels / prediction) < CLOSE
        top = float(np.nanmax(labels)) if counted.any() else 1.0
        drawn = [depth_colours(own, top) for own in (labels, prediction)]
    off = np.where(counted, off, 0.0)[..., None]
    error = (1 - off) * np.array(RIGHT) + off * np.array(WRONG)
    error = np.where(counted[..., None], error, NOTHING).astype(np.uint8)
    pictures = zip(("label", "prediction", "error"), [*drawn, error], strict=True)
    return {
        "right": float(right[counted].mean()) if counted.any() else None,
        **{name: _picture(own) for name, own in pictures},
    }


def depth_colours(depths: Labels, top: float) -> NDArray[np.uint8]:
    """The colours (height, width, 3) of depths, from near (dark) to `top` metres (light)."""
    from matplotlib import colormaps

    there = np.isfinite(depths)
    share = np.where(there, depths, 0) / top
    found: NDArray[np.uint8] = colormaps["viridis"](share, bytes=True)[..., :3].copy()
    found[~there] = NOTHING
    return found


def coloured(labels: ClassMap) -> NDArray[np.uint8]:
    """The colours (height, width, 3) of classes in the palette of Pascal VOC, which follow from the
    bits of a class; white without a class."""
    numbers = np.arange(IGNORED + 1)[:, None, None]
    bits = np.arange(8)
    set_bits = numbers >> (3 * bits + np.arange(3)[:, None]) & 1
    palette = (set_bits << (7 - bits)).sum(-1).astype(np.uint8)
    palette[IGNORED] = NOTHING
    return palette[labels]


def _picture(pixels: NDArray[np.uint8], *, smooth: bool = False) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail(
        (MOST_PIXELS, MOST_PIXELS),
        Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST,
    )
    return encode(np.asarray(image))
