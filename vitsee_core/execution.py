"""What every analysis takes beside its own parameters: which images, and what the work may use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vitsee_core.machine import memory_bytes
from vitsee_core.progress import SILENT, Progress
from vitsee_core.streaming import A, Map, Rows, choose_rows, fold
from vitsee_stores import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """Which images an analysis looks at, and what it may use. Results depend on `images` and
    `seed`, to the last bits on `device`, and on nothing else here; an analysis that has no use for
    a field takes it all the same.

    images: so many of each store, see `choose_rows`; all by default. seed: of everything random.
    jobs: slabs (or probes, masks) worked on at a time. memory: bytes to stay within, a quarter of
    the machine's by default. device: "auto" (a GPU if there is one), "cpu", "cuda", ... map:
    spreads the work on slabs in place of `jobs` threads, see `fold`. progress: receives how far the
    work is.
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


DEFAULT = Execution()
