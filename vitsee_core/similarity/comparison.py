"""The comparison to be made and its settings, decided before anything is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.backend import full_precision
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.lanes import one_blas_thread
from vitsee_core.runtime.machine import free_disk_bytes, human_bytes
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.runtime.streaming import Map
from vitsee_core.similarity.cache import GramCache
from vitsee_core.similarity.gram_file import GramFile
from vitsee_core.similarity.products import GramTile, Workspace, products
from vitsee_core.similarity.representation import FeatureOffset, Representation
from vitsee_core.types import Integers
from vitsee_stores.errors import VitseeError

FOUND_SECONDS = 60.0  # for a shared file system to show another machine's file
SHARE = "--dask needs a --cache DIR that all machines share"
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Estimator:
    """The way in which HSIC is estimated.

    Attributes:
        kind: "exact", the unbiased HSIC_1 over all images; "minibatch", its mean over batches
            (Raghu et al. 2021: 10 batches of 1024 images drawn without replacement, 20 times);
            "biased", HSIC_0 over all images (Kornblith et al. 2019); "auto": exact for up to 16384
            images, else minibatch; within slabs if only those Gram matrices are stored.
        batch, examples, repeats: of minibatch; None: 1024, 10240, 20, or what the data allow.
        rescale: batches in the store's order, features not centred, every batch's Gram matrix
            scaled to [0, 1] by its smallest and largest entry, as the code of Walmer et al. 2023
            does. It weighs batches by their outliers, and is no estimator of HSIC.
    """

    kind: str = "auto"
    batch: int | None = None
    examples: int | None = None
    repeats: int | None = None
    rescale: bool = False


@dataclass(frozen=True)
class GramOptions:
    """Resources; of these only `precision` affects the result."""

    cache: Path | None = (
        None  # folder for Gram matrices; None: `<store>.grams` beside each store
    )
    use_cache: bool = True  # False keeps nothing
    device: str = "auto"
    memory: int | None = None  # bytes to stay within; None: a quarter of the machine's
    map: Map | None = None  # its processes compute Gram matrices, see `Execution`
    precision: str = "fp32"  # of the products, see `kernels.backend.PRECISIONS`


@dataclass(frozen=True)
class Comparison:
    """A comparison of representations.

    Attributes:
        rows: store_id -> the rows with its images, in the first store's order.
        own: store_id -> the rows that each store counts by itself: Gram matrices are made of these,
            so that other comparisons can use them, too.
        notes: the choice of images, for a sidecar.
        fused: see `similarity.products`.
    """

    representations: tuple[Representation, ...]
    n_rows: int
    among_themselves: bool
    rows: dict[str, Integers]
    own: dict[str, Integers]
    shuffled: bool
    seed: int
    device: str
    memory: int
    cache: GramCache
    progress: Progress
    notes: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    map: Map | None = None
    fused: bool = False

    def split(self, items: Sequence[T]) -> tuple[Sequence[T], Sequence[T] | None]:
        """The items of rows, and those of cols (None if they are the same)."""
        return items[: self.n_rows], None if self.among_themselves else items[
            self.n_rows :
        ]

    @property
    def n_images(self) -> int:
        return len(next(iter(self.rows.values())))

    def rows_of(self, of: Representation) -> Integers:
        """The rows of a representation's store that hold the comparison's images."""
        return self.rows[of.store.manifest.store_id]

    @property
    def in_order(self) -> bool:
        """Whether every store has the images in the first one's order."""
        return all(bool((np.diff(rows) > 0).all()) for rows in self.rows.values())

    def own_rows(self, of: Representation) -> Integers:
        """The rows that a representation's store counts by itself."""
        return self.own[of.store.manifest.store_id]

    def find(
        self, of: Representation, batches: Sequence[Integers] = ()
    ) -> GramFile | None:
        """The cached Gram matrix of a representation over the comparison's images (or over each of
        these batches of them)."""
        return self.cache.find(of.features, self.rows_of(of), batches)

    def products(
        self,
        of: Representation,
        rows: Integers,
        tiles: Sequence[GramTile],
        origin: FeatureOffset,
    ) -> Iterator[NDArray[np.float64]]:
        """See `products.products`."""
        return products(
            of.features,
            rows,
            tiles,
            device=self.device,
            memory=self.memory,
            precision=self.cache.precision,
            fused=self.fused,
            origin=origin,
            workspace=self.workspace,
            progress=lambda read: self.progress.advance(0, read),
        )

    def grams(
        self,
        find: Callable[[Representation], GramFile | None],
        how: Callable[[Comparison, Representation], GramFile],
        size: Callable[[Representation], int],
    ) -> list[GramFile]:
        """Every representation's Gram matrix, as `find` finds it in the cache, else as `how` makes
        it there.

        Args:
            find: None for one that is missing.
            how: picklable.
            size: in bytes.

        Raises:
            VitseeError: the disk is too small for them, or processes of `map` use another disk.
        """
        missing = {
            r.features.identity: r for r in self.representations if find(r) is None
        }
        if missing:
            self._require_disk([(r, size(r)) for r in missing.values()])
            self.progress.start(len(missing), unit="Gram matrices")
        try:
            self._make(how, missing.values())
            return [find(r) or how(self, r) for r in self.representations]
        finally:
            self.progress.stop()
            self.workspace.clear()  # free memory for the pairs

    def _make(
        self,
        how: Callable[[Comparison, Representation], GramFile],
        missing: Iterable[Representation],
    ) -> None:
        """One after the other, or each in a process of `map`, which leaves it in the cache's
        folder."""
        elsewhere: list[Representation] = []
        for of in missing:
            if self.map is not None and self.cache.is_shared(of.store, self.map):
                elsewhere.append(of)
            else:
                how(self, of)
        made = self.execution.spread(_Made(self.alone, how), elsewhere)
        for of, path in zip(elsewhere, made, strict=True):
            until = time.monotonic() + FOUND_SECONDS
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.1)
            if not path.exists():
                what = f"the Gram matrix of {of.store.label} {of.site.name}"
                raise VitseeError(
                    f"{what} is not at {path}, where another process put it: {SHARE}"
                )

    @property
    def execution(self) -> Execution:
        return Execution(memory=self.memory, map=self.map, progress=self.progress)

    @property
    def alone(self) -> Comparison:
        """The part that another process needs."""
        return replace(
            self,
            representations=(),
            cache=self.cache.absolute(),
            progress=SILENT,
            workspace=Workspace(),
            map=None,
        )

    def _require_disk(self, sizes: Sequence[tuple[Representation, int]]) -> None:
        """Refuse Gram matrices that exceed the disk, before any work; `sizes` in bytes."""
        by_place: dict[Path, int] = {}
        for of, size in sizes:
            place = self.cache.place(of.store)
            by_place[place] = by_place.get(place, 0) + size
        for place, need in by_place.items():
            free = free_disk_bytes(place)
            if need > free:
                raise VitseeError(
                    f"the Gram matrices of {len(sizes)} sites take {human_bytes(need)}, {place} "
                    f"has {human_bytes(free)} free; choose another --cache DIR, fewer --sites or "
                    "--images, or --estimator minibatch with fewer --examples"
                )
            kept = (
                ""
                if self.cache.persistent and place != self.cache.scratch
                else "temporary "
            )
            log.info("%sGram matrices to make: %s in %s", kept, human_bytes(need), place)


@dataclass(frozen=True)
class _Made:
    """Path of the Gram matrix that another process computed."""

    comparison: Comparison
    how: Callable[[Comparison, Representation], GramFile]

    def __call__(self, execution: Execution, of: Representation) -> Path:
        here = replace(
            self.comparison,
            memory=execution.budget,
            progress=execution.progress,
            workspace=Workspace(),
        )
        with full_precision(here.device), one_blas_thread():
            return self.how(here, of).path
