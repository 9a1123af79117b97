"""The parameters that every analysis takes beside its own: which images to use, and which
resources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from vitsee_core.runtime.kept_sums import FoldCheckpoints
from vitsee_core.runtime.machine import memory_bytes
from vitsee_core.runtime.progress import SILENT, Forwarded, Progress, Tally
from vitsee_core.runtime.streaming import A, Map, Rows, choose_rows, fold, thread_map
from vitsee_stores import Store

T = TypeVar("T")
R = TypeVar("R")

# For `each`: several batches per process, so that no process waits long for the last one.
BATCHES_PER_PROCESS = 4
MAX_BATCH = 64  # items per batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """Which images an analysis uses, and on which resources.

    Results depend on `images` and `seed`, in their last digits on `device`, and on nothing else
    here; an analysis may ignore fields.
    """

    images: int | None = None  # images per store, chosen by `choose_rows`; None: all
    seed: int = 0  # of everything random
    jobs: int = 1  # slabs (or probes, masks) processed in parallel
    memory: int | None = None  # bytes to stay within; None: a quarter of the machine's
    device: str = "auto"  # "auto" (a GPU if there is one), "cpu", "cuda", ...
    # distributes work over processes instead of `jobs` threads; `dask_map` gives one
    map: Map | None = None
    progress: Progress = SILENT  # receives progress reports
    # where the sums of long work are kept, and continued from
    keep: FoldCheckpoints | None = None

    @property
    def budget(self) -> int:
        """Bytes to stay within, with the default filled in."""
        return memory_bytes() // 4 if self.memory is None else self.memory

    @property
    def width(self) -> int:
        """Degree of parallelism: threads, or tasks of `map`."""
        n_threads = getattr(self.map, "n_threads", None)
        return self.jobs if n_threads is None else int(n_threads())

    def check_device(self) -> None:
        """Refuse a missing device before any work.

        The CPU always exists, and is accepted without importing torch.

        Raises:
            VitseeError: the device is unknown, or not available here.
        """
        if self.device not in ("auto", "cpu"):
            from vitsee_core.runtime.device import resolve_device

            resolve_device(self.device)

    def rows(self, store: Store, *, whole_slabs: bool = False) -> Rows:
        """Return the images to use of a store, as `choose_rows` does, and log its remarks.

        Raises:
            VitseeError: none of them could be read.
        """
        rows = choose_rows(store, self.images, self.seed, whole_slabs=whole_slabs)
        for remark in rows.remarks:
            log.info("%s", remark)
        return rows

    def fold(
        self,
        stores: Store | tuple[Store, Store],
        make: Callable[[], A],
        rows: Rows,
        *,
        slab_bytes: int = 0,
    ) -> A:
        """Return the accumulator of these rows of a store, or of a pair, filled slab by slab.

        Args:
            stores: one store, or a pair.
            make: creates an empty accumulator.
            rows: the images to use.
            slab_bytes: memory of one slab during work.

        `progress` is advanced; the caller starts and stops it.
        """
        return fold(
            stores,
            make,
            rows=rows,
            jobs=self.jobs,
            memory=self.memory,
            slab_bytes=slab_bytes,
            map=self.map,
            progress=self.progress,
            keep=self.keep,
        )

    def spread(
        self, work: Callable[[Execution, T], R], items: Iterable[T], *, unit: str = ""
    ) -> Iterator[R]:
        """Apply `work(execution, item)` to every item, and yield the results in order.

        The work runs here, one item after the other, or on the workers of `map`, each
        single-threaded; progress is forwarded. With `keep`, results of long work are kept, and
        those that an earlier run kept are not computed again.

        Args:
            work: picklable; returns something small.
            items: its arguments.
            unit: set this if `work` starts and stops progress itself, which another process cannot:
                items are counted instead, under this plural.
        """
        if self.keep is not None:
            yield from self._spread_kept(work, list(items), unit)
        elif self.map is None:
            yield from (work(self, item) for item in items)
        else:
            yield from self._over_workers(work, list(items), unit)

    def _over_workers(
        self, work: Callable[[Execution, T], R], items: list[T], unit: str, done: int = 0
    ) -> Iterator[R]:
        """Do `spread` on the workers of `map`; done: number of items done before these."""
        assert self.map is not None
        if unit:
            self.progress.start(done + len(items), done, unit)
        try:
            for result, tally in self.map(partial(_run_on_worker, work, self), items):
                self.progress.advance(1 if unit else tally.count, tally.size_bytes)
                yield result
        finally:
            if unit:
                self.progress.stop()

    def _spread_kept(
        self, work: Callable[[Execution, T], R], items: list[T], unit: str
    ) -> Iterator[R]:
        """Do `spread` with results that are kept on disk, and begin after those kept before."""
        assert self.keep is not None
        keep = self.keep
        kept_results = keep.next_sum([self.width], unit or "pieces", len(items))
        resumed = kept_results.resume()
        results: list[R] = []
        n_counted = 0  # what these results advanced the progress by
        if resumed is not None:
            _, (results, n_counted) = resumed
        progress = Forwarded(to=self.progress)
        progress.skip(n_counted)
        execution = replace(self, progress=progress)
        yield from results
        n_done = len(results)
        remaining = items[n_done:]
        if self.map is not None:
            new_results = execution._over_workers(work, remaining, unit, n_done)
        else:
            # Folds within an item are kept, too, under the item's number.
            new_results = (
                work(replace(execution, keep=keep.inside(kept_results.number, i)), item)
                for i, item in enumerate(remaining, n_done)
            )
        for result in new_results:
            results.append(result)
            kept_results.offer(
                len(results),
                lambda: (results, progress.count),
                last=len(results) == len(items),
            )
            yield result

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Apply `work(item)` to every item, and yield the results in order.

        For many items that take milliseconds each: they run on `jobs` threads, or in batches on
        the workers of `map`. The caller reports progress.

        Args:
            work: picklable; returns something small.
            items: its arguments.
        """
        if self.map is None:
            yield from thread_map(self.jobs)(work, items)
            return
        size = max(1, min(MAX_BATCH, len(items) // (BATCHES_PER_PROCESS * self.width)))
        batches = [items[first : first + size] for first in range(0, len(items), size)]
        for results in self.map(partial(_run_batch, work), batches):
            yield from results

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the execution for a worker, without map, progress and keep.

        If the map's processes share this machine, each gets its share of the memory.
        """
        if self.map is None:
            jobs = self.jobs
            memory = self.memory
        else:
            jobs = 1
            memory = self.budget // max(1, getattr(self.map, "local", 0))
        return Execution, (self.images, self.seed, jobs, memory, self.device)


def _run_on_worker(
    work: Callable[[Execution, T], R], execution: Execution, item: T
) -> tuple[R, Tally]:
    """Return the result of `work` in another process, and a tally of its progress."""
    tally = Tally()
    # This machine may be smaller than the one that the budget was chosen on.
    memory = min(execution.budget, memory_bytes() // 2)
    return work(replace(execution, memory=memory, progress=tally), item), tally


def _run_batch(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of several items: a function at module level, as workers need one."""
    return [work(item) for item in items]


DEFAULT = Execution()
