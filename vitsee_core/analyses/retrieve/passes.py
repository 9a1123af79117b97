"""The two passes over the images: listed ones are found, then all are counted.

A rank is the number of images nearer to a query than an image of its lists. The searched images
come in tiles. A tile's cosines are sorted in the processor's cache, and the number above that of
each listed image is looked up; no ranking of all images is ever made. Memory: the lists, and one
tile; whatever the number of images.

Cosines are float64 products rounded to float32; equal ones are ties, and the image that comes
first in the store (its distractors after it) is the nearer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.search import Features, RandomFeatures, Search
from vitsee_core.features import SiteFeatures
from vitsee_core.runtime.execution import Execution
from vitsee_core.truth.labels.neighbours import in_tiles
from vitsee_core.types import Float32, Integers, Mask

TILE_CELLS = 1 << 24
TILE_ROWS = 4096
FEW_ROWS = 512  # with fewer, overhead per row matters: process fewer queries at a time
CELL_BYTES = 32  # cosines in float64 and float32, and copies during rounding and sorting
PAIR_BYTES = 64
PAIR_BLOCK_BYTES = 12  # a pair's count in a block, and a query's temporaries
UNREADABLE = -2.0  # less than any cosine
UNCOUNTED = -np.inf

Cosines = Callable[[Float32], Float32]  # (queries, rows) in float32 with rows (rows, dim)


@dataclass(frozen=True)
class Listed:
    """The images of some queries' lists, by place."""

    query: Integers  # (pairs,) which query
    place: Integers  # (pairs,) which image
    name: Integers  # (pairs,) the index of its list in `names`
    names: tuple[str, ...]

    @classmethod
    def of(cls, lists: Sequence[Mapping[str, Integers]]) -> Listed:
        """Make it from each query's lists: name -> places."""
        names = tuple(dict.fromkeys(name for own in lists for name in own))
        parts = [
            (np.full(len(places), i), places, np.full(len(places), names.index(name)))
            for i, own in enumerate(lists)
            for name, places in own.items()
        ]
        if not parts:
            parts = [(np.empty(0, np.int64),) * 3]
        query, place, number = (np.concatenate(one) for one in zip(*parts, strict=True))
        order = np.lexsort((query, place))
        return cls(query[order], place[order], number[order], names)

    def among(self, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(pairs,) which are in one of these lists."""
        return np.isin(
            self.name, [i for i, name in enumerate(self.names) if name in names]
        )


class Counter:
    """A counter, for each of some queries and each image of its lists, of the nearer images that
    are in no list of the query. First pass all listed images to `find`, then everything to
    `count`."""

    def __init__(
        self, n: int, listed: Listed, cosines: Cosines, blocks: Integers | None = None
    ) -> None:
        """n: queries; cosines: theirs; blocks: (images,) of the first places, to count the images
        of each block, too."""
        self._n = n
        self._listed = listed
        self._cosines = cosines
        self._blocks = blocks
        n_blocks = 0 if blocks is None else int(blocks.max(initial=-1)) + 1
        self._in_block = np.zeros((len(listed.place), n_blocks), np.int32)
        # Until found, an image ranks behind all others; an unreadable one stays there.
        self._scores = np.full(len(listed.place), UNREADABLE, np.float32)
        self._above = np.zeros(len(listed.place), np.int64)
        self._pairs_of: list[Integers] = []

    def find(self, places: Integers, rows: Float32) -> None:
        """Record the listed ones of these images; places: (rows,) ascending."""
        pairs, columns = self._pairs_at(places)
        if len(columns):
            self._scores[pairs] = self._cosines(rows)[self._listed.query[pairs], columns]

    def count(self, places: Integers, rows: Float32 | None) -> None:
        """Count images against all listed ones; rows: None if they could not be read."""
        if rows is None:
            shape = (self._n, len(places))
            cosines = np.full(shape, UNREADABLE, np.float32)
        else:
            cosines = self._cosines(rows)
        pairs, columns = self._pairs_at(places)
        cosines[self._listed.query[pairs], columns] = UNCOUNTED
        if self._blocks is not None:
            self._count_blocks(self._blocks, cosines, places)
            return
        ordered = np.sort(cosines, axis=1)
        for own, row, sorted_ in zip(self._by_query(), cosines, ordered, strict=True):
            scores = self._scores[own]
            end = np.searchsorted(sorted_, scores, side="right")
            self._above[own] += len(row) - end
            tied = sorted_[end - 1] == scores
            if tied.any():
                self._above[own[tied]] += self._before(own[tied], row, sorted_, places)

    def _count_blocks(self, blocks: Integers, cosines: Float32, places: Integers) -> None:
        """Count images as `count` does, by block. Each image passes the listed ones that it is
        nearer than."""
        n = self._in_block.shape[1]
        label = np.full(len(places), n)  # a distractor is in no block
        inside = places < len(blocks)
        label[inside] = blocks[places[inside]]
        for own, row in zip(self._by_query(), keys_of(cosines, places), strict=True):
            keys = keys_of(self._scores[own], self._listed.place[own])
            order = np.argsort(keys)
            passed = np.searchsorted(keys[order], row)
            size = (len(own) + 1) * (n + 1)
            counts = np.bincount(passed * (n + 1) + label, minlength=size).reshape(
                -1, n + 1
            )
            above = counts[:0:-1].cumsum(0)[::-1]
            self._above[own[order]] += above.sum(1)
            self._in_block[own[order]] += above[:, :n].astype(np.int32)

    def _before(
        self, pairs: Integers, row: Float32, ordered: Float32, places: Integers
    ) -> Integers:
        """Number of images with exactly the cosine of each of these pairs that come before it."""
        scores = self._scores[pairs]
        own = self._listed.place[pairs]
        n: Integers = np.searchsorted(ordered, scores, "right") - np.searchsorted(
            ordered, scores
        )
        n[own < places[0]] = 0
        for i in np.flatnonzero((own >= places[0]) & (own <= places[-1])).tolist():
            n[i] = np.count_nonzero(row[: np.searchsorted(places, own[i])] == scores[i])
        return n

    def _by_query(self) -> list[Integers]:
        """The pairs of each query, in the order of their scores."""
        if not self._pairs_of:
            query = self._listed.query
            order = np.lexsort((self._scores, query))
            n = np.bincount(query, minlength=self._n)
            self._pairs_of = np.split(order, np.cumsum(n)[:-1])
        return self._pairs_of

    def _pairs_at(self, places: Integers) -> tuple[Integers, Integers]:
        """Which pairs are of these images, and each image's position among them."""
        listed = self._listed.place
        low, high = np.searchsorted(listed, [places[0], places[-1] + 1]).tolist()
        columns = np.searchsorted(places, listed[low:high])
        # Unreadable images in between are not among them.
        there = places[columns] == listed[low:high]
        return np.arange(low, high)[there], columns[there]

    def result(self) -> tuple[Integers, Integers, NDArray[np.int32]]:
        """(pairs,) keys, larger is nearer, number of nearer images that are not listed, and how
        many of these are in each block, (pairs, blocks)."""
        return keys_of(self._scores, self._listed.place), self._above, self._in_block


def keys_of(cosines: Float32, places: Integers) -> Integers:
    """Integers of the cosines' shape, larger is nearer; of equal cosines the earlier place is."""
    import torch

    from vitsee_core.kernels import neighbours

    return neighbours.keys_of(torch.from_numpy(cosines), torch.from_numpy(places)).numpy()


def tile_rows(n_queries: int, memory: int) -> int:
    """Images to count at a time."""
    cells = min(TILE_CELLS, max(1, memory // CELL_BYTES))
    return max(16, min(TILE_ROWS, cells // max(1, n_queries)))


def with_places(
    pieces: Iterable[Float32], places: Integers, size: int
) -> Iterable[tuple[Integers, Float32]]:
    """Tiles of `size` images with their places; pieces: all images in order."""
    at = 0
    for tile in in_tiles(pieces, size):
        yield places[at : at + len(tile)], tile
        at += len(tile)


# ---------------------------------------------------------------- the two passes


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
    # Few enough queries at a time that tiles have enough rows.
    few = max(16, min(TILE_CELLS, execution.budget // 4 // CELL_BYTES) // FEW_ROWS)
    at_once = max(1, min(execution.budget // 3 // of_query, few))
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
        self.search = search
        self.features = features
        self.execution = execution

    def queries(self) -> Float32:
        """(queries, dim) in the queries' order."""
        rows = self.search.queries
        ascending = np.unique(rows)
        vectors = np.concatenate(list(self._vectors(self.features.queries, ascending)))
        return vectors[np.searchsorted(ascending, rows)]

    def count(self, counter: Counter, listed: Listed, n: int, n_queries: int) -> bool:
        """Find and count all images; returns whether they share one vector. n: queries of this
        block."""
        search = self.search
        images = self.features.images
        tiles = partial(with_places, size=tile_rows(n, self.execution.budget // 4))
        readable = search.readable
        wanted = np.zeros(len(readable), bool)
        wanted[listed.place] = True
        there = np.flatnonzero(wanted & readable)
        for places, tile in tiles(self._vectors(images, search.rows[there]), there):
            counter.find(places, tile)
        first_row: Float32 | None = None
        all_equal = True

        def count(
            features: SiteFeatures | RandomFeatures, rows: Integers, at: Integers
        ) -> None:
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
        return features.vectors(
            mask, jobs=self.execution.jobs, memory=self.execution.budget // 4
        )
