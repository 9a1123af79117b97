"""The images of a store that train or test, what is summed over them, and trained probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

from vitsee_core.analyses.dense_probe.cells import Head, PlaceSums
from vitsee_core.analyses.dense_probe.features import Patches
from vitsee_core.analyses.dense_probe.labelled_images import Truth
from vitsee_core.analyses.dense_probe.tasks import Task
from vitsee_core.runtime.lanes import n_lanes
from vitsee_core.runtime.one_thread import one_blas_thread
from vitsee_core.runtime.streaming import A, Rows
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vitsee_core.runtime.execution import Execution
    from vitsee_stores import Slab, Store
    from vitsee_stores.layout import TokenLayout

W = TypeVar("W")


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
        chosen: Sequence[Patches],
        task: Task,
        resolution: str,
        eigen: bool = False,
    ) -> Part:
        """Find the labels of some images of a store.

        Raises:
            VitseeError: no image has a map.
        """
        grids = {one.name: _grid_key(one.layout) for one in chosen}
        layouts = {grids[one.name]: one.layout for one in chosen}
        truth, counts = Truth.find(store, task.maps, rows, layouts, resolution, eigen)
        return cls(store, task, {one.name: one for one in chosen}, grids, truth, counts)

    @property
    def n_images(self) -> int:
        """The number of images with a map."""
        return int(self.truth.mask.sum())

    @property
    def slab_bytes(self) -> int:
        """The bytes that one slab takes while it is worked on."""
        return max((own.slab_bytes for own in self.features.values()), default=1)

    def fold(self, make: Callable[[], A], execution: Execution, size: int | None = None) -> A:
        """Fold the part's images on threads of one BLAS thread each; size: bytes of one's work."""
        size = self.slab_bytes if size is None else size
        with lanes(size, execution) as wider:
            return wider.fold(self.store, make, self.truth.rows, slab_bytes=size).result()

    def no_pixel(self, use: str) -> VitseeError:
        """The error that there is nothing to train or to test with."""
        return VitseeError(
            f"no pixel of the {self.n_images} {use} images of {self.store.label} has a "
            f"{self.task.label} in {self.truth.maps.name} (all are ignored, or were cropped)"
        )


def _grid_key(layout: TokenLayout) -> str:
    """Equal for grids that lie alike on the input."""
    return f"{layout.grid} every {layout.stride_px} from {layout.offset_px}"


def counted_rows(slab: Slab) -> list[int]:
    """The store's rows of a slab's images that count."""
    return np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()


@contextmanager
def lanes(size: int, execution: Execution) -> Iterator[Execution]:
    """As many threads as cores and memory allow, each with one BLAS thread; size: bytes of one's
    work."""
    if execution.map is None:
        width = n_lanes(execution.budget // (2 * size))
        execution = replace(execution, jobs=max(execution.jobs, width))
    with one_blas_thread():
        yield execution


@dataclass
class Sums(Generic[W]):
    """An accumulator, see `streaming.Accumulator`: its fields but `work`, which says what is done,
    are dicts of what adds up. Another process returns these alone."""

    work: W | None

    def __getstate__(self) -> dict[str, Any]:
        filled = any(found for name, found in vars(self).items() if name != "work")
        return self.__dict__ | ({"work": None} if filled else {})

    def merge(self, other: Self) -> None:
        """Add the sums of later slabs."""
        for name, own in vars(self).items():
            if name != "work":
                for key, value in getattr(other, name).items():
                    own[key] = own[key] + value if key in own else value

    def result(self) -> Self:
        """The sums themselves."""
        return self


@dataclass(frozen=True)
class HeadKey:
    """Identifies a head: that of a site at an l2 or with k neighbours, or a baseline on a grid."""

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Trained:
    """The trained probes of a pair of stores, and notes on the training for a sidecar."""

    heads: dict[HeadKey, Head]
    notes: dict[str, object]


def blind_heads(task: Task, places: Mapping[str, PlaceSums]) -> dict[HeadKey, Head]:
    """The head of each baseline of every grid."""
    found = {}
    for grid, own in places.items():
        classes, *both = own.scores()
        for name, scores in zip(task.baselines, both, strict=True):
            found[HeadKey(grid, baseline=name)] = task.head(classes, scores)
    return found
