"""Training and testing the probes of one pair of stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.linear import Head
from vitsee_core.analyses.dense_probe.places import MAJORITY, POSITION, blind_heads
from vitsee_core.analyses.dense_probe.ridge import (
    GRID,
    PixelSums,
    Solutions,
    TrainingImages,
    TrainingSums,
    choose_l2,
)
from vitsee_core.analyses.dense_probe.scoring import Counts, HeadCounts, HeadKey, TestImages
from vitsee_core.analyses.dense_probe.splits import CHOOSING, drawn
from vitsee_core.analyses.dense_probe.truth import Truth, find_truth
from vitsee_core.features import SiteFeatures, choose_features
from vitsee_core.masks.class_maps import IGNORED, ClassMaps
from vitsee_core.runtime.lanes import n_lanes, one_blas_thread
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

UNTRAINED = "untrained"
BASELINES = (MAJORITY, POSITION)


@dataclass(frozen=True)
class Part:
    """The images of one store that train, or that test. features: site -> its patches; grids: site
    -> key of its grid among the truth's. counts: what became of the images, for a sidecar."""

    store: Store
    rows: Rows
    features: dict[str, SiteFeatures]
    grids: dict[str, str]
    truth: Truth
    counts: dict[str, int]

    @classmethod
    def of(
        cls,
        store: Store,
        rows: Rows,
        sites: Sequence[SiteSpec],
        maps: ClassMaps,
        resolution: str,
    ) -> Part:
        """Of some images of a store.

        Raises:
            MissingInput: a site is stored pooled only.
            VitseeError: no image has a class map.
        """
        features = {
            site.name: choose_features(store, site, "patches", partial=True) for site in sites
        }
        layouts: dict[str, TokenLayout] = {}
        grids = {}
        for name, own in features.items():
            assert own.layout is not None
            grids[name] = _grid_key(own.layout)
            layouts[grids[name]] = own.layout
        truth, counts = find_truth(store, maps, rows, layouts, resolution)
        return cls(store, rows, features, grids, truth, counts)

    @property
    def n_images(self) -> int:
        """Those with a class map."""
        return int(self.truth.mask.sum())

    def slab_bytes(self) -> int:
        """What one slab takes while it is worked on."""
        return max(own.slab_bytes for own in self.features.values())


@dataclass(frozen=True)
class Trained:
    """The probes of a pair of stores. heads: by key. classes: those that occurred. notes: of the
    training, for a sidecar."""

    heads: dict[HeadKey, Head]
    classes: list[int]
    notes: dict[str, object]


def train_ridge(part: Part, l2s: Sequence[float], execution: Execution) -> Trained:
    """Probes of every site, and the baselines of every grid.

    Args:
        part: the training images.
        l2s: report all of these; none: choose one for each site on held-out training images.
        execution: what the work may use.

    Raises:
        VitseeError: no pixel has a class, or there are too few images to choose l2.
    """
    seed = (execution.seed, 3)
    held_out = np.zeros(part.store.n_images, bool)
    if not l2s:
        held_out = drawn(part.store, part.truth.mask, CHOOSING, seed)
    shifts = _shifts(part)
    sums = _fold_training(part, shifts, held_out, execution)
    heads: dict[HeadKey, Head] = {}
    chosen, notes = {}, dict[str, object]()
    classes: list[int] = []
    for site, features in part.features.items():
        fitted, held = sums.parts(site, features.dim)
        whole = fitted.joined(held)
        if not whole.n:
            raise VitseeError(
                f"no pixel of the {part.n_images} training images of {part.store.label} has a "
                f"class in {part.truth.maps.name} (all are ignored, or were cropped)"
            )
        values = list(l2s) or [_chosen(fitted, held, site)]
        solutions = Solutions.of(whole)
        for l2 in values:
            heads[HeadKey(site, l2)] = solutions.head(l2, shifts[site])
        chosen[site], classes = values, solutions.classes.tolist()
        notes["training_pixels"] = whole.n
    for grid, places in sums.places.items():
        heads |= {HeadKey(grid, baseline=n): head for n, head in blind_heads(places).items()}
    notes["l2"] = chosen
    if not l2s:
        notes["held_out_images"] = int(held_out.sum())
    return Trained(heads, classes, notes)


def _chosen(fitted: PixelSums, held: PixelSums, site: str) -> float:
    if not fitted.n or not held.n:
        raise VitseeError(
            f"{site}: l2 cannot be chosen, as the training images that fit have {fitted.n} pixels "
            f"with a class and those held out {held.n}; give it with --l2, or more images"
        )
    return choose_l2(fitted, held, GRID)


def _shifts(part: Part) -> dict[str, Float]:
    """Of each site a token, about which sums lose no digits."""
    first = int(np.flatnonzero(part.truth.mask)[0])
    found = {}
    for site, own in part.features.items():
        token = own.load(slice(first, first + 1), slice(0, 1))[0, 0].astype(np.float64)
        found[site] = np.where(np.isfinite(token), token, 0.0)
    return found


def _fold_training(
    part: Part, shifts: dict[str, Float], held_out: Mask, execution: Execution
) -> TrainingSums:
    images = TrainingImages(part.features, part.grids, part.truth, shifts, held_out)
    make = partial(TrainingSums, images)
    dims = [own.dim for own in part.features.values()]
    size = part.slab_bytes() + sum(8 * 2 * dim * (dim + IGNORED) for dim in dims)
    with lanes(size, execution) as wider:
        found = wider.fold(part.store, make, part.truth.rows, slab_bytes=size)
    return found.result()


def score_heads(
    part: Part, heads: dict[HeadKey, Head], boundary: bool, execution: Execution, spread: bool
) -> tuple[dict[HeadKey, Counts], Blocks]:
    """What each head predicts of the test images, counted; and the jackknife's blocks.

    Args:
        part: the test images.
        heads: by key.
        boundary: count pixels near boundaries too.
        execution: what the work may use.
        spread: over slabs; else one after the other, as a head takes all threads, or is too large
            to be sent.

    Raises:
        VitseeError: no pixel of the test images has a class.
    """
    blocks = Blocks.of(part.store, part.truth.mask, execution.seed)
    images = TestImages(
        heads, part.features, part.grids, part.truth, blocks.of_rows, blocks.n, boundary
    )
    make = partial(HeadCounts, images)
    size = part.slab_bytes()
    if spread:
        with lanes(size, execution) as wider:
            found = wider.fold(part.store, make, part.truth.rows, slab_bytes=size).result()
    else:
        alone = replace(execution, map=None, jobs=1)
        found = alone.fold(part.store, make, part.truth.rows, slab_bytes=size).result()
    if not any(counts.whole.any() for counts in found.values()):
        raise VitseeError(
            f"no pixel of the {part.n_images} test images of {part.store.label} has a class in "
            f"{part.truth.maps.name} (all are ignored, or were cropped)"
        )
    return found, blocks


@contextmanager
def lanes(size: int, execution: Execution) -> Iterator[Execution]:
    """As many threads as cores and memory allow, each with one BLAS thread; size: bytes of one's
    work."""
    if execution.map is None:
        width = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, width))
    with one_blas_thread():
        yield execution


def _grid_key(layout: TokenLayout) -> str:
    """Equal for grids that lie alike on the input."""
    assert layout.grid is not None
    return f"{layout.grid} every {layout.stride_px} from {layout.offset_px}"
