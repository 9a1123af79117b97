"""The fold: an analysis is an accumulator, filled slab by slab and merged in the slabs' order.

    def fold(stores, make):
        total = make()
        for slab in slabs:  part = make();  part.update(slab);  total.merge(part)

Each slab gets an accumulator of its own, and all are merged here in the order of the slabs. So the
result is bitwise the same whether slabs are processed by this thread, by threads, by processes or
by a cluster: pass the `map` that distributes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

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
    def update(self) -> Callable[..., None]: ...
    @property
    def merge(self) -> Callable[..., None]: ...
    @property
    def result(self) -> Callable[[], Any]: ...


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

    def describe(self) -> dict[str, Any]:
        remarks = {"remarks": list(self.remarks)} if self.remarks else {}
        return {
            "rows": self.n,
            "left_out_invalid": self.n_invalid,
            "chosen": self.how,
            **remarks,
        }


def choose_rows(
    store: Store, images: int | None = None, seed: int = 0, *, whole_slabs: bool = False
) -> Rows:
    """Which rows an analysis of `images` images uses.

    The first rows of a shuffled store, which are a random sample; a sample drawn with `seed` from a
    store in the data set's order; all rows if `images` is None or more than there are. Paired
    stores give the same rows. Only committed slabs count.

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
            order = _order(len(slabs), None if shuffled else seed)
            reached = np.cumsum([len(slabs[k]) for k in order])
            order = order[: np.searchsorted(reached, images) + 1]
            rows = np.concatenate([slabs[k] for k in order])
            if len(rows) > images:
                how += f", rounded up to {plural(len(order), 'whole slabs')}"
                remarks.append(f"{store.label}: {how} ({len(rows)} images)")
        else:
            rows = rows[_order(n, None if shuffled else seed)[:images]]
    chosen = np.zeros(store.n_images, bool)
    chosen[rows] = True
    invalid = int((chosen & ~store.valid).sum())
    if invalid == chosen.sum():
        raise VitseeError(
            f"{store.label} holds no readable image ({n} rows); extract it anew"
        )
    return Rows(chosen, invalid, how, tuple(remarks))


def _order(n: int, seed: int | None) -> NDArray[np.int64]:
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
    """The accumulator of all slabs of a store, or of two paired stores in step.

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
    opened = _tuple(stores)
    rows = rows if rows is not None else choose_rows(opened[0])
    items = _pieces(opened, rows)
    done = 0
    total = None
    kept = None
    if keep is not None and items:
        kept = KeptFold(keep, make, opened, rows.mask, len(items))
        done, total = kept.resume()
        progress.skip(sum(_n_chosen(rows, place) for place, _ in items[:done]))
    width = (
        jobs
        if memory is None or not slab_bytes
        else min(jobs, max(1, memory // slab_bytes))
    )
    for part in _work_on(
        opened, partial(_filled, make), items[done:], rows, width, map, progress
    ):
        if total is None:
            total = part
        else:
            total.merge(part)
        done += 1
        if kept is not None:
            kept.offer(done, total)
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
    """Apply `work(slab)`, or `work(slab_a, slab_b)`, to every slab with a row that counts, in
    order.

    Arguments and errors as for `fold`, which adds the merge.
    """
    opened = _tuple(stores)
    yield from _work_on(opened, work, _pieces(opened, rows), rows, jobs, map, progress)


def _pieces(opened: tuple[Store, ...], rows: Rows) -> list[tuple[slice, Mask]]:
    """The rows of each slab with a row that counts, and which of them do."""
    counted = rows.mask & (
        require_paired(*opened) if len(opened) == 2 else opened[0].valid
    )
    # If slab sizes differ, pieces are the larger slabs: a chunk is read whole.
    plan = max((store.plan for store in opened), key=lambda plan: plan.slab)
    places = [plan.rows(k) for k in range(plan.n_slabs)]
    return [(place, counted[place]) for place in places if counted[place].any()]


def _work_on(
    opened: tuple[Store, ...],
    work: Callable[..., R],
    items: Sequence[tuple[slice, Mask]],
    rows: Rows,
    jobs: int,
    map: Map | None,
    progress: Progress,
) -> Iterator[R]:
    work_on: Map = map or thread_map(jobs if len(items) > 1 else 1)
    results = work_on(partial(_on_slab, opened, work), items)
    for (place, _), result in zip(items, results, strict=True):
        yield result
        progress.advance(_n_chosen(rows, place))


def _n_chosen(rows: Rows, place: slice) -> int:
    return int(rows.mask[place].sum())


def _tuple(stores: Store | tuple[Store, Store]) -> tuple[Store, ...]:
    return stores if isinstance(stores, tuple) else (stores,)


@dataclass(frozen=True)
class Piece(Slab):
    """A slab of which only the rows in `plural` (rows,) count. If a pair has slabs of different
    sizes, a piece has the rows of the larger one."""

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
                f"{self.store.label} holds {name} as sums over slabs of {self.store.plan.slab} "
                "images, the other store over slabs of another size (extract one of them again "
                f"with --slab {self.store.plan.slab})"
            )
        return super().attention_sums(name, group)


def _filled(make: Callable[[], A], *slabs: Slab) -> A:
    accumulator = make()
    accumulator.update(*slabs)
    return accumulator


def _on_slab(
    stores: tuple[Store, ...], work: Callable[..., R], item: tuple[slice, Mask]
) -> R:
    rows, counted = item
    pieces = (Piece(s, rows.start // s.plan.slab, rows, counted) for s in stores)
    return work(*pieces)


def thread_map(jobs: int) -> Map:
    """A `map` on threads, with a bounded number of results waiting; products of each are its own
    thread's, of one job, too."""
    return partial(_on_threads, jobs)


def _on_threads(
    jobs: int, function: Callable[[Any], R], items: Iterable[Any], /
) -> Iterator[R]:
    with one_blas_thread():
        if jobs == 1:
            yield from map(function, items)
            return
        with ThreadPoolExecutor(jobs) as pool:
            yield from submitted(
                lambda item: pool.submit(function, item), items, lambda: 2 * jobs
            )
