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

# of `each`: batches per process, and items per batch
PIECES = 4
LONGEST = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """Which images an analysis uses, and on which resources. Results depend on `images` and `seed`,
    in their last digits on `device`, and on nothing else here; an analysis may ignore fields."""

    images: int | None = None  # number of images per store, see `choose_rows`; None: all
    seed: int = 0  # of everything random
    jobs: int = 1  # slabs (or probes, masks) processed in parallel
    memory: int | None = None  # bytes to stay within; None: a quarter of the machine's
    device: str = "auto"  # "auto" (a GPU if there is one), "cpu", "cuda", ...
    # distributes work over processes instead of `jobs` threads, see `dask_map`
    map: Map | None = None
    progress: Progress = SILENT  # receives progress reports
    keep: FoldCheckpoints | None = (
        None  # where half of long work is kept, and continued from
    )

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
        """Refuse a missing device before any work; the CPU always exists, and is accepted without
        importing torch. Raises VitseeError: see `resolve_device`."""
        if self.device not in ("auto", "cpu"):
            from vitsee_core.runtime.device import resolve_device

            resolve_device(self.device)

    def rows(self, store: Store, *, whole_slabs: bool = False) -> Rows:
        """The images to use of a store, see `choose_rows`; remarks are logged. Raises VitseeError:
        none of them could be read."""
        chosen = choose_rows(store, self.images, self.seed, whole_slabs=whole_slabs)
        for remark in chosen.remarks:
            log.info("%s", remark)
        return chosen

    def fold(
        self,
        stores: Store | tuple[Store, Store],
        make: Callable[[], A],
        rows: Rows,
        *,
        slab_bytes: int = 0,
    ) -> A:
        """`streaming.fold` over these rows, advancing `progress`, which the caller starts and
        stops."""
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
        """Apply `work(execution, item)` to every item, results in order. Runs serially here, or on
        the workers of `map`, each single-threaded; progress is forwarded. With `keep`, results of
        long work are kept, and those that a run before this one kept are not computed again.

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
        assert self.map is not None
        if unit:
            self.progress.start(done + len(items), done, unit)
        try:
            for result, tally in self.map(partial(_alone, work, self), items):
                self.progress.advance(1 if unit else tally.count, tally.size_bytes)
                yield result
        finally:
            if unit:
                self.progress.stop()

    def _spread_kept(
        self, work: Callable[[Execution, T], R], items: list[T], unit: str
    ) -> Iterator[R]:
        assert self.keep is not None
        kept = self.keep.next_sum([self.width], unit or "pieces", len(items))
        resumed = kept.resume()
        state: tuple[list[R], int] = ([], 0) if resumed is None else resumed[1]
        results = state[0]
        progress = Forwarded(to=self.progress)
        progress.skip(state[1])
        own = replace(self, progress=progress)
        yield from results
        rest = items[len(results) :]
        done = len(results)
        if self.map is not None:
            new = own._over_workers(work, rest, unit, done)
        else:
            keep = self.keep
            at = kept.number
            new = (
                work(replace(own, keep=keep.inside(at, i)), item)
                for i, item in enumerate(rest, done)
            )
        for result in new:
            results.append(result)
            kept.offer(
                len(results),
                lambda: (results, progress.count),
                last=len(results) == len(items),
            )
            yield result

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Apply `work(item)` to every item, results in order, for many items of milliseconds: on
        `jobs` threads, or in batches on the workers of `map`. The caller reports progress. work:
        picklable; returns something small. items: its arguments."""
        if self.map is None:
            yield from thread_map(self.jobs)(work, items)
            return
        size = max(1, min(LONGEST, len(items) // (PIECES * self.width)))
        pieces = [items[at : at + size] for at in range(0, len(items), size)]
        for results in self.map(partial(_piece, work), pieces):
            yield from results

    def __reduce__(self) -> tuple[Any, ...]:
        """Executions are pickled without map, progress and keep; if the map's processes share this
        machine, with their share of the memory."""
        if self.map is None:
            jobs = self.jobs
            memory = self.memory
        else:
            jobs = 1
            memory = self.budget // max(1, getattr(self.map, "local", 0))
        return Execution, (self.images, self.seed, jobs, memory, self.device)


def _alone(
    work: Callable[[Execution, T], R], execution: Execution, item: T
) -> tuple[R, Tally]:
    """`work` in another process, with a tally of its progress."""
    tally = Tally()
    # This machine may be smaller than the one that the budget was chosen on.
    memory = min(execution.budget, memory_bytes() // 2)
    return work(replace(execution, memory=memory, progress=tally), item), tally


def _piece(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]


DEFAULT = Execution()
