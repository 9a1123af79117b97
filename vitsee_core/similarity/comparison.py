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

# How long a shared file system may take to show another machine's file.
VISIBLE_SECONDS = 60.0
SHARED_CACHE_HINT = "--dask needs a --cache DIR that all machines share"
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
            does. It weighs batches by their outliers, and is not an estimator of HSIC.
    """

    kind: str = "auto"
    batch: int | None = None
    examples: int | None = None
    repeats: int | None = None
    rescale: bool = False


@dataclass(frozen=True)
class GramOptions:
    """Resources for Gram matrices; of these only `precision` affects the result."""

    cache: Path | None = None  # folder; None: `<store>.grams` beside each store
    use_cache: bool = True  # False keeps nothing
    device: str = "auto"
    memory: int | None = None  # bytes to stay within; None: a quarter of the machine's
    map: Map | None = None  # its processes compute Gram matrices
    precision: str = "fp32"  # of the products, one of `kernels.backend.PRECISIONS`


@dataclass(frozen=True)
class Comparison:
    """A comparison of representations, with everything that was decided before reading.

    Attributes:
        representations: rows first, then columns.
        n_rows: how many of them are rows.
        among_themselves: whether the columns are the rows.
        rows: store_id -> the rows with its images, in the first store's order.
        own: store_id -> the rows that each store counts by itself: Gram matrices are made of these,
            so that other comparisons can use them, too.
        shuffled: whether the first store holds its images in random order.
        seed: of minibatches, and of the jackknife's blocks in stores that are not shuffled.
        device: where to multiply.
        memory: bytes to stay within.
        notes: the choice of images, for a table's sidecar.
        fused: whether reading, centring and multiplying are one compiled step.
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
        """Return the items of the rows, and those of the columns (None if they are the same)."""
        if self.among_themselves:
            return items[: self.n_rows], None
        return items[: self.n_rows], items[self.n_rows :]

    @property
    def n_images(self) -> int:
        """The number of images that are compared."""
        return len(next(iter(self.rows.values())))

    def rows_of(self, representation: Representation) -> Integers:
        """Return the rows of a representation's store that hold the comparison's images."""
        return self.rows[representation.store.manifest.store_id]

    @property
    def in_order(self) -> bool:
        """Whether every store has the images in the first one's order."""
        # Rows ascend in every store exactly if all have the first one's order.
        return all(bool((np.diff(rows) > 0).all()) for rows in self.rows.values())

    def own_rows(self, representation: Representation) -> Integers:
        """Return the rows that a representation's store counts by itself."""
        return self.own[representation.store.manifest.store_id]

    def find(
        self, representation: Representation, batches: Sequence[Integers] = ()
    ) -> GramFile | None:
        """Return the cached Gram matrix of a representation over the comparison's images (or over
        each of these batches of rows); None if there is none."""
        rows = self.rows_of(representation)
        return self.cache.find(representation.features, rows, batches)

    def products(
        self,
        representation: Representation,
        rows: Integers,
        tiles: Sequence[GramTile],
        origin: FeatureOffset,
    ) -> Iterator[NDArray[np.float64]]:
        """Return the tiles of a representation's Gram matrix over these rows of its store, as they
        are computed.

        Args:
            representation: whose matrix it is.
            rows: of its store.
            tiles: which to compute.
            origin: records what was subtracted from the features.
        """
        return products(
            representation.features,
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
        """Return every representation's Gram matrix, from the cache, else computed into it.

        Args:
            find: returns the cached matrix of a representation, None if it is missing.
            how: computes the matrix into the cache and returns it; picklable.
            size: returns the matrix's size in bytes.

        Raises:
            VitseeError: the disk is too small for them, or processes of `map` use another disk.
        """
        # By identity: a site that is a row and a column is computed once.
        missing = {
            r.features.identity: r for r in self.representations if find(r) is None
        }
        if missing:
            self._require_disk([(r, size(r)) for r in missing.values()])
            self.progress.start(len(missing), unit="Gram matrices")
        try:
            self._compute(how, missing.values())
            return [find(r) or how(self, r) for r in self.representations]
        finally:
            self.progress.stop()
            self.workspace.clear()  # free memory for the pairs

    def _compute(
        self,
        how: Callable[[Comparison, Representation], GramFile],
        missing: Iterable[Representation],
    ) -> None:
        """Compute Gram matrices into the cache: here, or each in a process of `map`.

        Raises:
            VitseeError: what another process wrote is not visible here.
        """
        elsewhere: list[Representation] = []
        for r in missing:
            if self.map is not None and self.cache.is_shared(r.store, self.map):
                elsewhere.append(r)
            else:
                how(self, r)
        # The comparison without what cannot be pickled or would be copied for nothing.
        compute = _ComputeElsewhere(self.alone, how)
        paths = self.execution.spread(compute, elsewhere)
        # Network file systems show a file of another machine with a delay.
        for r, path in zip(elsewhere, paths, strict=True):
            until = time.monotonic() + VISIBLE_SECONDS
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.1)
            if not path.exists():
                raise VitseeError(
                    f"the Gram matrix of {r.store.label} {r.site.name} is not at {path}, where "
                    f"another process put it: {SHARED_CACHE_HINT}"
                )

    @property
    def execution(self) -> Execution:
        """The resources of the comparison, to spread work with."""
        return Execution(memory=self.memory, map=self.map, progress=self.progress)

    @property
    def alone(self) -> Comparison:
        """The comparison with the parts that another process needs."""
        return replace(
            self,
            representations=(),
            cache=self.cache.absolute(),
            progress=SILENT,
            workspace=Workspace(),
            map=None,
        )

    def _require_disk(self, sizes: Sequence[tuple[Representation, int]]) -> None:
        """Raise VitseeError, before any work, for Gram matrices that exceed the disk.

        Args:
            sizes: each representation whose matrix is missing, and its size in bytes.
        """
        # Caches may be on different disks.
        needed_by_folder: dict[Path, int] = {}
        for r, size in sizes:
            folder = self.cache.place(r.store)
            needed_by_folder[folder] = needed_by_folder.get(folder, 0) + size
        for folder, needed in needed_by_folder.items():
            free = free_disk_bytes(folder)
            if needed > free:
                raise VitseeError(
                    f"the Gram matrices of {len(sizes)} sites take {human_bytes(needed)}, {folder} "
                    f"has {human_bytes(free)} free; choose another --cache DIR, fewer --sites or "
                    "--images, or --estimator minibatch with fewer --examples"
                )
            is_kept = self.cache.persistent and folder != self.cache.scratch
            log.info(
                "%sGram matrices to make: %s in %s",
                "" if is_kept else "temporary ",
                human_bytes(needed),
                folder,
            )


@dataclass(frozen=True)
class _ComputeElsewhere:
    """The computation of a Gram matrix in another process."""

    comparison: Comparison
    how: Callable[[Comparison, Representation], GramFile]

    def __call__(self, execution: Execution, representation: Representation) -> Path:
        """Return the path of the matrix, once it is in the cache's folder."""
        here = replace(
            self.comparison,
            memory=execution.budget,
            progress=execution.progress,
            workspace=Workspace(),
        )
        # The settings of a process, which the caller's do not reach.
        with full_precision(here.device), one_blas_thread():
            return self.how(here, representation).path
