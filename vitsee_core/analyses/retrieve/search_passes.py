"""The two passes over the images: listed ones are found, then all are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.counted_ranks import (
    PAIR_BLOCK_BYTES,
    PAIR_BYTES,
    Cosines,
    Counter,
    Listed,
    most_queries,
    tile_rows,
    with_places,
)
from vitsee_core.analyses.retrieve.features import Features, RandomFeatures
from vitsee_core.analyses.retrieve.rows import Search
from vitsee_core.features import SiteFeatures
from vitsee_core.runtime.execution import Execution
from vitsee_core.types import Float32, Integers, Mask


@dataclass(frozen=True)
class Block:
    """Some queries and their listed images."""

    listed: Listed  # pairs of a query and an image of its lists
    keys: Integers  # (pairs,), larger is nearer
    above: Integers  # (pairs,) number of nearer images in no list of the query
    in_block: NDArray[np.int32]  # (pairs, blocks) how many of these are in each block
    constant: bool  # all images have one vector
    # (queries,) whose cosine is the same with every image, for this reason or because they are zero
    blank: Mask

    @property
    def n(self) -> int:
        return len(self.blank)


def passes(search: Search, features: Features, execution: Execution) -> Iterator[Block]:
    """The queries in order, as many at a time as fit; `progress` counts images, once in all.

    Memory: a third of the budget for queries and their lists, a quarter for a tile of cosines, a
    quarter for slabs while they are read.

    Raises:
        VitseeError: a number is not finite.
    """
    work = _Passes(search, features, execution)
    queries = work.queries()
    most = search.most_listed
    itself = search.itself
    of_pair = PAIR_BYTES + PAIR_BLOCK_BYTES * (0 if itself is None else itself.n)
    of_query = 20 * queries.shape[1] + of_pair * most
    at_once = max(1, min(execution.budget // 3 // of_query, most_queries(execution.budget // 4)))
    with _cosines(execution.device) as cosines:
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            listed = Listed.of(search.lists[part])
            labels = None if itself is None else itself.labels
            counter = Counter(len(queries[part]), listed, cosines(queries[part]), labels)
            constant = work.count(counter, listed, len(queries[part]), len(queries))
            blank = np.logical_or(~queries[part].any(1), constant)
            yield Block(listed, *counter.result(), constant, blank)


@contextmanager
def _cosines(text: str) -> Iterator[Callable[[Float32], Cosines]]:
    """Returns a function that makes cosines of queries (m, dim) on a device."""
    from vitsee_core.kernels import neighbours
    from vitsee_core.runtime.device import precision_context, resolve_device

    device = resolve_device(text)
    with precision_context(device, "fp32"):
        yield partial(neighbours.Cosines, device=device)


class _Passes:
    """Reads the vectors of one site."""

    def __init__(self, search: Search, features: Features, execution: Execution) -> None:
        self.search, self.features, self.execution = search, features, execution

    def queries(self) -> Float32:
        """(queries, dim) in the queries' order."""
        rows = self.search.queries
        ascending = np.unique(rows)
        vectors = np.concatenate(list(self._vectors(self.features.queries, ascending)))
        return vectors[np.searchsorted(ascending, rows)]

    def count(self, counter: Counter, listed: Listed, n: int, n_queries: int) -> bool:
        """Find and count all images; returns whether they share one vector. n: queries of this
        block."""
        search, images = self.search, self.features.images
        tiles = partial(with_places, size=tile_rows(n, self.execution.budget // 4))
        readable = search.readable
        wanted = np.zeros(len(readable), bool)
        wanted[listed.place] = True
        there = np.flatnonzero(wanted & readable)
        for places, tile in tiles(self._vectors(images, search.rows[there]), there):
            counter.find(places, tile)
        first_row: Float32 | None = None
        all_equal = True

        def count(features: SiteFeatures | RandomFeatures, rows: Integers, at: Integers) -> None:
            nonlocal first_row, all_equal
            for places, tile in tiles(self._vectors(features, rows), at):
                counter.count(places, tile)
                first_row = tile[0].copy() if first_row is None else first_row
                all_equal = all_equal and bool((tile == first_row).all())
                self.execution.progress.advance(round(len(tile) * n / n_queries))

        there = np.flatnonzero(readable)
        count(images, search.rows[there], there)
        if not readable.all():
            counter.count(np.flatnonzero(~readable), None)
        first = len(readable)
        for features in self.features.distractors:
            rows = np.flatnonzero(features.store.valid)
            count(features, rows, np.arange(first, first + len(rows)))
            first += len(rows)
        return all_equal

    def _vectors(
        self, features: SiteFeatures | RandomFeatures, rows: Integers
    ) -> Iterator[Float32]:
        """Vectors of these rows, all readable, in the store's order."""
        mask = np.zeros(features.store.n_images, bool)
        mask[rows] = True
        return features.vectors(mask, jobs=self.execution.jobs, memory=self.execution.budget // 4)
