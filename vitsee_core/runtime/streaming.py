"""The fold: an analysis is an accumulator, filled slab by slab and merged in the slabs' order.

    def fold(stores, make):
        total = make()
        for slab in slabs:
            accumulator = make()
            accumulator.update(slab)
            total.merge(accumulator)

Each slab gets an accumulator of its own, and all are merged here in the order of the slabs. So the
result is bitwise the same whether slabs are processed by this thread, by threads, by processes or
by a cluster: pass the `map` that distributes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.kept_sums import FoldCheckpoints, KeptFold
from vitsee_core.runtime.lanes import one_blas_thread, submitted
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.types import Mask
from vitsee_stores import Slab, Store, require_paired
from vitsee_stores.errors import StoreMismatch, VitseeError

T = TypeVar("T")
R = TypeVar("R")


class Map(Protocol):
    """Like the builtin `map`: results in the order of the items."""

    def __call__(
        self, function: Callable[[Any], R], items: Iterable[Any], /
    ) -> Iterable[R]:
        """Apply `function` to each item."""


class Accumulator(Protocol):
    """A sum over slabs, in the widest sense.

    `update(slab)`, or `update(slab_a, slab_b)` over a pair of stores, is called once on a fresh
    accumulator; `merge(other)` adds a later slab's and leaves `other` unchanged; `result()`
    divides. Only rows with `slab.valid` count; in a pair both slabs have the same `valid`. To
    travel between processes an accumulator must be picklable.
    """

    # Properties: a method of one slab would not match a method of any number of slabs.
    @property
    def update(self) -> Callable[..., None]:
        """Adds a slab, or a pair of slabs."""

    @property
    def merge(self) -> Callable[..., None]:
        """Adds the accumulator of a later slab."""

    @property
    def result(self) -> Callable[[], Any]:
        """Returns the result of what was added."""


A = TypeVar("A", bound=Accumulator)


@dataclass(frozen=True)
class Rows:
    """The images that an analysis uses."""

    mask: Mask  # (images,) over all rows of the store
    n_invalid: int  # how many of them could not be read and are left out
    how: str  # the choice in words
    remarks: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of rows, invalid ones included."""
        return int(self.mask.sum())

    def n_in(self, rows: slice) -> int:
        """Return how many of these rows of the store are used, invalid ones included."""
        return int(self.mask[rows].sum())

    def describe(self) -> dict[str, Any]:
        """Return the entry of a sidecar about the images that were used."""
        entry: dict[str, Any] = {
            "rows": self.n,
            "left_out_invalid": self.n_invalid,
            "chosen": self.how,
        }
        if self.remarks:
            entry["remarks"] = list(self.remarks)
        return entry


def choose_rows(
    store: Store, images: int | None = None, seed: int = 0, *, whole_slabs: bool = False
) -> Rows:
    """Return the rows that an analysis of `images` images uses.

    These are the first rows of a shuffled store, which are a random sample; a sample drawn with
    `seed` from a store in the data set's order; all rows if `images` is None or more than there
    are. Paired stores give the same rows. Only committed slabs count.

    Args:
        store: the store, or the first of a pair.
        images: how many, including invalid ones.
        seed: of the sample.
        whole_slabs: round up to whole slabs, for quantities stored as sums over slabs.

    Raises:
        VitseeError: none of the rows holds a readable image.
    """
    if images is not None and images < 1:
        raise VitseeError(f"{images} images were asked for; expected a positive number")
    slabs = [np.arange(slab.rows.start, slab.rows.stop) for slab in store.slabs()]
    rows = np.concatenate(slabs)
    n = len(rows)
    how = "all"
    remarks = list[str]()
    if images is not None and images > n:
        remarks.append(
            f"{store.label} holds {n} images: {images} were asked for, all are used"
        )
    elif images is not None and images < n:
        shuffled = store.shuffled
        how = f"the first {images}" if shuffled else f"{images} drawn with seed {seed}"
        if whole_slabs:
            order = _slab_or_row_order(len(slabs), None if shuffled else seed)
            # As many slabs as hold `images` rows or more.
            rows_so_far = np.cumsum([len(slabs[k]) for k in order])
            order = order[: np.searchsorted(rows_so_far, images) + 1]
            rows = np.concatenate([slabs[k] for k in order])
            if len(rows) > images:
                how += f", rounded up to {plural(len(order), 'whole slabs')}"
                remarks.append(f"{store.label}: {how} ({len(rows)} images)")
        else:
            rows = rows[_slab_or_row_order(n, None if shuffled else seed)[:images]]
    mask = np.zeros(store.n_images, bool)
    mask[rows] = True
    n_invalid = int((mask & ~store.valid).sum())
    if n_invalid == mask.sum():
        raise VitseeError(
            f"{store.label} holds no readable image ({n} rows); extract it anew"
        )
    return Rows(mask, n_invalid, how, tuple(remarks))


def _slab_or_row_order(n: int, seed: int | None) -> NDArray[np.int64]:
    """Return (n,) the order in which slabs or rows are taken; seed None: as they are stored."""
    if seed is None:
        return np.arange(n)
    return np.random.default_rng(seed).permutation(n)


def fold(
    stores: Store | tuple[Store, Store],
    make: Callable[[], A],
    *,
    rows: Rows | None = None,
    jobs: int = 1,
    memory: int | None = None,
    slab_bytes: int = 0,
    map: Map | None = None,
    progress: Progress = SILENT,
    keep: FoldCheckpoints | None = None,
) -> A:
    """Return the accumulator of all slabs of a store, or of two paired stores in step.

    Memory: `jobs` slabs as far as the accumulator reads them, and up to twice as many accumulators.

    Args:
        stores: one store, or a pair; of a pair only the rows valid in both count.
        make: creates an empty accumulator; picklable if `map` crosses processes.
        rows: the images to use; by default all.
        jobs: threads, without `map`.
        memory: bytes to stay within, without `map`: fewer threads are used.
        slab_bytes: memory of one slab during work.
        map: distributes the calls, e.g. the `map` of a `ProcessPoolExecutor`; processes reopen the
            stores by their paths.
        progress: advanced by the number of rows of each finished slab.
        keep: where the sum of a long fold is kept, and continued from.

    Raises:
        StoreMismatch: a pair with different images.
    """
    store_tuple = _as_tuple(stores)
    rows = rows if rows is not None else choose_rows(store_tuple[0])
    slabs = _slabs_with_rows(store_tuple, rows)
    n_done = 0
    total = None
    kept_fold = None
    if keep is not None and slabs:
        kept_fold = KeptFold(keep, make, store_tuple, rows.mask, len(slabs))
        n_done, total = kept_fold.resume()
        progress.skip(sum(rows.n_in(slab.rows) for slab in slabs[:n_done]))
    if memory is not None and slab_bytes:
        jobs = min(jobs, max(1, memory // slab_bytes))
    accumulators = _work_on(
        store_tuple,
        partial(_fill_accumulator, make),
        slabs[n_done:],
        rows,
        jobs=jobs,
        map=map,
        progress=progress,
    )
    # In the slabs' order, whoever filled them: sums of floats depend on it.
    for accumulator in accumulators:
        if total is None:
            total = accumulator
        else:
            total.merge(accumulator)
        n_done += 1
        if kept_fold is not None:
            kept_fold.offer(n_done, total)
    return make() if total is None else total


def each_slab(
    stores: Store | tuple[Store, Store],
    work: Callable[..., R],
    *,
    rows: Rows,
    jobs: int = 1,
    map: Map | None = None,
    progress: Progress = SILENT,
) -> Iterator[R]:
    """Apply `work(slab)`, or `work(slab_a, slab_b)`, to every slab with a row that counts.

    Yields the results in the slabs' order. Arguments and errors are those of `fold`, which adds
    the merge.
    """
    store_tuple = _as_tuple(stores)
    slabs = _slabs_with_rows(store_tuple, rows)
    yield from _work_on(
        store_tuple, work, slabs, rows, jobs=jobs, map=map, progress=progress
    )


class SlabRows(NamedTuple):
    """The rows of a slab; what is sent to a thread or a worker."""

    rows: slice  # of the store
    counted: Mask  # (rows of the slab,) which of them count


def _slabs_with_rows(stores: tuple[Store, ...], rows: Rows) -> list[SlabRows]:
    """Return the slabs that have a row that counts: chosen, and valid in all stores."""
    if len(stores) == 2:
        counted = rows.mask & require_paired(*stores)
    else:
        counted = rows.mask & stores[0].valid
    # If slab sizes differ, pieces are the larger slabs: a chunk is read whole.
    plan = max((store.plan for store in stores), key=lambda plan: plan.slab)
    slabs = []
    for k in range(plan.n_slabs):
        slab_rows = plan.rows(k)
        if counted[slab_rows].any():
            slabs.append(SlabRows(slab_rows, counted[slab_rows]))
    return slabs


def _work_on(
    stores: tuple[Store, ...],
    work: Callable[..., R],
    slabs: Sequence[SlabRows],
    rows: Rows,
    *,
    jobs: int,
    map: Map | None,
    progress: Progress,
) -> Iterator[R]:
    """Yield the result of `work` for each slab, in order, and count its images."""
    map_slabs: Map = map or thread_map(jobs if len(slabs) > 1 else 1)
    results = map_slabs(partial(_call_on_slab, stores, work), slabs)
    for slab, result in zip(slabs, results, strict=True):
        yield result
        progress.advance(rows.n_in(slab.rows))


def _as_tuple(stores: Store | tuple[Store, Store]) -> tuple[Store, ...]:
    """Return one store, or a pair, as a tuple."""
    return stores if isinstance(stores, tuple) else (stores,)


@dataclass(frozen=True)
class Piece(Slab):
    """A slab of which only the rows in `counted` (rows,) count.

    If a pair has slabs of different sizes, a piece has the rows of the larger one.
    """

    counted: Mask

    @property
    def valid(self) -> Mask:
        """(rows,) which rows count: chosen, and with an image (in both stores of a pair)."""
        return self.counted

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        """The sums of `Slab.attention_sums`, refused where they are not over the images that count.

        Raises:
            StoreMismatch: these rows are not one slab of this store, whose sums are per slab.
            ValueError: some images in the sums do not count; see `choose_rows(whole_slabs=True)`.
        """
        if (self.counted != self.store.valid[self.rows]).any():
            raise ValueError(
                "a part of a slab's images was chosen, its sums are over all of them"
            )
        if self.rows != self.store.plan.rows(self.k):
            raise StoreMismatch(
                f"{self.store.label} holds {name} as sums over slabs of "
                f"{self.store.plan.slab} images, the other store over slabs of another "
                f"size (extract one of them again with --slab {self.store.plan.slab})"
            )
        return super().attention_sums(name, group)


def _fill_accumulator(make: Callable[[], A], *slabs: Slab) -> A:
    """Return a new accumulator that has seen a slab, or a pair of slabs."""
    accumulator = make()
    accumulator.update(*slabs)
    return accumulator


def _call_on_slab(stores: tuple[Store, ...], work: Callable[..., R], slab: SlabRows) -> R:
    """Return the result of `work` for a slab of each store."""
    pieces = [
        Piece(store, slab.rows.start // store.plan.slab, slab.rows, slab.counted)
        for store in stores
    ]
    return work(*pieces)


def thread_map(jobs: int) -> Map:
    """Return a `map` on threads, with a bounded number of results waiting.

    Products of matrices run in the thread that asks for them, even if there is one job alone:
    results then do not depend on the number of threads.
    """
    return partial(_map_on_threads, jobs)


def _map_on_threads(
    jobs: int, function: Callable[[Any], R], items: Iterable[Any], /
) -> Iterator[R]:
    """Yield the results in the items' order; two results for each thread wait at most."""
    with one_blas_thread():
        if jobs == 1:
            yield from map(function, items)
            return
        with ThreadPoolExecutor(jobs) as pool:
            yield from submitted(
                lambda item: pool.submit(function, item), items, lambda: 2 * jobs
            )
