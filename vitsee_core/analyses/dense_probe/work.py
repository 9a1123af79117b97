"""The images of a store that train or test, trained probes, and their scoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from vitsee_core.analyses.dense_probe.cells import Head
from vitsee_core.analyses.dense_probe.features import Patches, Probed
from vitsee_core.analyses.dense_probe.labelled_images import Truth, find_truth
from vitsee_core.analyses.dense_probe.scoring import HeadCounts, HeadKey, Tally, Task, TestImages
from vitsee_core.runtime.lanes import n_lanes, one_blas_thread
from vitsee_core.runtime.streaming import Rows
from vitsee_core.statistics.jackknife import Blocks
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout


@dataclass(frozen=True)
class Part:
    """The images of one store that train, or that test.

    Attributes:
        features: name of what is probed -> its patches.
        grids: the same name -> key of its grid in `truth.layouts`.
        truth: the labels.
        counts: how many images have a map, for a sidecar.
    """

    store: Store
    task: Task
    features: dict[str, Patches]
    grids: dict[str, str]
    truth: Truth
    counts: dict[str, int]

    @classmethod
    def of(
        cls,
        store: Store,
        rows: Rows,
        chosen: Sequence[Probed],
        task: Task,
        resolution: str,
        eigen: bool = False,
    ) -> Part:
        """Find the features and the labels of some images of a store.

        Raises:
            MissingInput: a site is stored pooled only.
            VitseeError: no image has a map.
        """
        features = {one.name: Patches.of(store, one) for one in chosen}
        layouts: dict[str, TokenLayout] = {}
        grids = {}
        for name, own in features.items():
            grids[name] = _grid_key(own.layout)
            layouts[grids[name]] = own.layout
        truth, counts = find_truth(store, task.maps, rows, layouts, resolution, eigen)
        return cls(store, task, features, grids, truth, counts)

    @property
    def n_images(self) -> int:
        """The number of images with a map."""
        return int(self.truth.mask.sum())

    def slab_bytes(self) -> int:
        """Return the bytes that one slab takes while it is worked on."""
        return max(own.slab_bytes for own in self.features.values())

    def no_pixel(self, use: str) -> VitseeError:
        """Return the error that there is nothing to train or to test with."""
        return VitseeError(
            f"no pixel of the {self.n_images} {use} images of {self.store.label} has a "
            f"{self.task.label} in {self.truth.maps.name} (all are ignored, or were cropped)"
        )


@dataclass(frozen=True)
class Trained:
    """The trained probes of a pair of stores, and notes on the training for a sidecar."""

    heads: dict[HeadKey, Head]
    notes: dict[str, object]


def score_heads(
    part: Part, heads: dict[HeadKey, Head], wanted: Sequence[str], execution: Execution, alone: bool
) -> tuple[dict[HeadKey, Tally], Blocks]:
    """Tally what each head predicts of the test images; also return the jackknife's blocks.

    Args:
        part: the test images.
        heads: by key.
        wanted: metrics.
        execution: what the work may use.
        alone: one slab after the other, as a head takes all threads, or is too large to be sent.

    Raises:
        VitseeError: no pixel of the test images counts.
    """
    blocks = Blocks.of(part.store, part.truth.mask, execution.seed)
    tally = part.task.tally(wanted, blocks.n)
    images = TestImages(heads, part.features, part.grids, part.truth, blocks.of_rows, tally)
    make = partial(HeadCounts, images)
    size = part.slab_bytes()
    if alone:
        one = replace(execution, map=None, jobs=1)
        found = one.fold(part.store, make, part.truth.rows, slab_bytes=size).result()
    else:
        with lanes(size, execution) as wider:
            found = wider.fold(part.store, make, part.truth.rows, slab_bytes=size).result()
    if not any(map(bool, found.values())):
        raise part.no_pixel("test")
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
    """Return a key that is equal for grids that lie alike on the input."""
    return f"{layout.grid} every {layout.stride_px} from {layout.offset_px}"
