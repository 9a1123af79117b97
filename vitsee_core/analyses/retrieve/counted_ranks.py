"""Ranks by counting: the number of images nearer to a query than each image of its lists.

The searched images come in tiles. A tile's cosines are sorted in the processor's cache, and the
number above that of each listed image is looked up; no ranking of all images is ever made. Memory:
the lists, and one tile; whatever the number of images.

Cosines are float64 products rounded to float32; equal ones are ties, and the image that comes first
in the store (its distractors after it) is the nearer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitsee_core.labels.neighbours import in_tiles
from vitsee_core.types import Float32, Integers

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
        """From each query's lists: name -> places."""
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
        return np.isin(self.name, [i for i, name in enumerate(self.names) if name in names])


class Counter:
    """For each of some queries and each image of its lists: the number of nearer images that are in
    no list of the query. First pass all listed images to `find`, then everything to `count`."""

    def __init__(
        self, n: int, listed: Listed, cosines: Cosines, blocks: Integers | None = None
    ) -> None:
        """n: queries; cosines: theirs; blocks: (images,) of the first places, to count the images
        of each block, too."""
        self._n, self._listed, self._cosines, self._blocks = n, listed, cosines, blocks
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
        """Like `count`, by block: for each image, the number of listed ones it is nearer than."""
        n = self._in_block.shape[1]
        label = np.full(len(places), n)  # a distractor is in no block
        inside = places < len(blocks)
        label[inside] = blocks[places[inside]]
        for own, row in zip(self._by_query(), keys_of(cosines, places), strict=True):
            keys = keys_of(self._scores[own], self._listed.place[own])
            order = np.argsort(keys)
            passed = np.searchsorted(keys[order], row)
            size = (len(own) + 1) * (n + 1)
            counts = np.bincount(passed * (n + 1) + label, minlength=size).reshape(-1, n + 1)
            above = counts[:0:-1].cumsum(0)[::-1]
            self._above[own[order]] += above.sum(1)
            self._in_block[own[order]] += above[:, :n].astype(np.int32)

    def _before(
        self, pairs: Integers, row: Float32, ordered: Float32, places: Integers
    ) -> Integers:
        """Number of images with exactly the cosine of each of these pairs that come before it."""
        scores, own = self._scores[pairs], self._listed.place[pairs]
        n: Integers = np.searchsorted(ordered, scores, "right") - np.searchsorted(ordered, scores)
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
    """See `kernels.neighbours`, which imports torch."""
    import torch

    from vitsee_core.kernels import neighbours

    return neighbours.keys_of(torch.from_numpy(cosines), torch.from_numpy(places)).numpy()


def most_queries(memory: int) -> int:
    """Queries to process at a time, so that tiles have enough rows."""
    return max(16, min(TILE_CELLS, memory // CELL_BYTES) // FEW_ROWS)


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
