"""What every analysis takes beside its own parameters: which images, and what the work may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from vitsee_core.runtime.machine import memory_bytes
from vitsee_core.runtime.progress import SILENT, Progress, Tally
from vitsee_core.runtime.streaming import A, Map, Rows, choose_rows, fold, thread_map
from vitsee_stores import Store

T = TypeVar("T")
R = TypeVar("R")

PIECES, LONGEST = 4, 64  # of `each`: for each process, and items in one

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """Which images an analysis looks at, and what it may use. Results depend on `images` and
    `seed`, to the last bits on `device`, and on nothing else here; an analysis that has no use for
    a field takes it all the same.

    images: so many of each store, see `choose_rows`; all by default. seed: of everything random.
    jobs: slabs (or probes, masks) worked on at a time. memory: bytes to stay within, a quarter of
    the machine's by default. device: "auto" (a GPU if there is one), "cpu", "cuda", ... map:
    spreads the work over processes in place of `jobs` threads, see `dask_map`. progress: receives
    how far the work is.
    """

    images: int | None = None
    seed: int = 0
    jobs: int = 1
    memory: int | None = None
    device: str = "auto"
    map: Map | None = None
    progress: Progress = SILENT

    @property
    def budget(self) -> int:
        """Bytes to stay within, the default among them."""
        return memory_bytes() // 4 if self.memory is None else self.memory

    @property
    def width(self) -> int:
        """Pieces of work that are done at a time: by threads, or by the processes of `map`."""
        n_threads = getattr(self.map, "n_threads", None)
        return self.jobs if n_threads is None else int(n_threads())

    def check_device(self) -> None:
        """Refuse a device that is not there before any work; the CPU always is, and torch is not
        imported to say so.

        Raises:
            VitseeError: see `resolve_device`.
        """
        if self.device not in ("auto", "cpu"):
            from vitsee_core.runtime.device import resolve_device

            resolve_device(self.device)

    def rows(self, store: Store, *, whole_slabs: bool = False) -> Rows:
        """The images of a store, see `choose_rows`; remarks about them are logged.

        Raises:
            VitseeError: none of them could be read.
        """
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
        """`streaming.fold` over these rows, which counts them in `progress`; what calls it starts
        and stops that."""
        return fold(
            stores,
            make,
            rows=rows,
            jobs=self.jobs,
            memory=self.memory,
            slab_bytes=slab_bytes,
            map=self.map,
            progress=self.progress,
        )

    def spread(
        self, work: Callable[[Execution, T], R], items: Iterable[T], *, unit: str = ""
    ) -> Iterator[R]:
        """`work(execution, item)` of every item, in their order: here, one after the other, with
        this execution; where there is a `map`, by its processes, with one of one thread there,
        whose progress is passed on.

        Args:
            work: to be pickled with what it holds, and to return what is small.
            items: what it takes.
            unit: where `work` starts and stops progress itself, which another process cannot: of
                what items are counted instead.
        """
        if self.map is None:
            yield from (work(self, item) for item in items)
            return
        items = list(items)
        if unit:
            self.progress.start(len(items), unit=unit)
        try:
            for result, tally in self.map(_Alone(work, self), items):
                self.progress.advance(1 if unit else tally.count, tally.size_bytes)
                yield result
        finally:
            if unit:
                self.progress.stop()

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`work(item)` of every item, in their order, for many that take milliseconds: by `jobs`
        threads, or some at a time by the processes of `map`. Progress is the caller's.

        Args:
            work: to be pickled with what it holds, and to return what is small.
            items: what it takes.
        """
        if self.map is None:
            yield from thread_map(self.jobs)(work, items)
            return
        size = max(1, min(LONGEST, len(items) // (PIECES * self.width)))
        pieces = [items[at : at + size] for at in range(0, len(items), size)]
        for results in self.map(_Piece(work), pieces):
            yield from results

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has neither the map nor the progress, and where the map's processes share
        this machine, its part of the memory."""
        if self.map is None:
            jobs, memory = self.jobs, self.memory
        else:
            jobs, memory = 1, self.budget // max(1, getattr(self.map, "local", 0))
        return Execution, (self.images, self.seed, jobs, memory, self.device)


@dataclass(frozen=True)
class _Alone(Generic[T, R]):
    """`work` in another process, and how far it says it came."""

    work: Callable[[Execution, T], R]
    execution: Execution

    def __call__(self, item: T) -> tuple[R, Tally]:
        tally = Tally()
        # Its machine may be smaller than the one where the budget was chosen.
        memory = min(self.execution.budget, memory_bytes() // 2)
        return self.work(replace(self.execution, memory=memory, progress=tally), item), tally


@dataclass(frozen=True)
class _Piece(Generic[T, R]):
    """`work` of some items."""

    work: Callable[[T], R]

    def __call__(self, items: Sequence[T]) -> list[R]:
        return [self.work(item) for item in items]


DEFAULT = Execution()
