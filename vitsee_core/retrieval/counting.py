"""Ranks by counting: how many images are nearer to a query than each image of its lists.

Nothing is sorted but a query's own right images. The images that are searched pass by in tiles; of
each tile it is counted between which right images its cosines fall. Memory: the lists, and one tile
of cosines; whatever the number of images.

Cosines are products in float64, rounded to float32; equal ones are ties, and the image that comes
first in the store (its distractors after it) is the nearer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vitsee_core.labelled.neighbours import UNUSED, in_tiles, keys_of, rounded
from vitsee_core.types import Float32, Integers

TILE_CELLS = 1 << 20
CELL_BYTES = 44  # cosines in float64 and float32, keys, bins, and the sums they go to
PAIR_BYTES = 72
UNREADABLE = float("-inf")

Pieces = Callable[[], Iterable[Float32]]


@dataclass(frozen=True)
class Listed:
    """The images of some queries' lists, by place. query, place, name: (pairs,) which query, which
    image, and the number of its list in `names`."""

    query: Integers
    place: Integers
    name: Integers
    names: tuple[str, ...]

    @classmethod
    def of(cls, lists: Sequence[Mapping[str, Integers]]) -> Listed:
        """Of each query's lists: name -> places."""
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
        chosen: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.isin(
            self.name, [i for i, name in enumerate(self.names) if name in names]
        )
        return chosen


class Counter:
    """For each of some queries and each image of its lists: how many images that are in no list of
    the query are nearer. First all that is listed is to be passed to `find`, then everything to
    `count`."""

    def __init__(self, queries: Float32, listed: Listed, device: torch.device) -> None:
        """Queries: (queries, dim)."""
        # Metal has no float64.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._listed = listed
        self._queries = _unit(self._tensor(queries))
        # Until it is found, an image is behind all others, as one that could not be read stays.
        nowhere = torch.full((len(listed.place),), UNREADABLE)
        self._keys = keys_of(nowhere, torch.from_numpy(listed.place)).numpy()
        self._sorted: torch.Tensor | None = None
        self._counts = torch.empty(0)
        # Of pairs in the order of `_sorted`: which pair, its query, its place in the query's row.
        self._order = (np.empty(0, np.int64),) * 3

    def _tensor(self, rows: Float32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self._device).to(torch.float64)

    def _cosines(self, rows: Float32) -> torch.Tensor:
        """(queries, rows) float32."""
        exact = self._tensor(rows)
        length = torch.linalg.vector_norm(exact, dim=1)
        products = self._queries @ exact.T
        return rounded(products.div_(torch.where(length > 0, length, 1.0)))

    def find(self, places: Integers, rows: Float32) -> None:
        """Take note of the listed ones of these images; places: (rows,) ascending."""
        pairs, columns = self._pairs_at(places)
        if len(columns):
            keys = self._keys_of(self._cosines(rows), places)
            query = torch.from_numpy(self._listed.query[pairs]).to(self._device)
            found = keys[query, torch.from_numpy(columns).to(self._device)]
            self._keys[pairs] = found.cpu().numpy()

    def count(self, places: Integers, rows: Float32 | None) -> None:
        """Count images against all listed ones; rows: None where they could not be read."""
        if self._sorted is None:
            self._sort()
        assert self._sorted is not None
        if rows is None:
            cosines = torch.full((len(self._queries), len(places)), UNREADABLE, device=self._device)
        else:
            cosines = self._cosines(rows)
        keys = self._keys_of(cosines, places)
        pairs, columns = self._pairs_at(places)
        query = torch.from_numpy(self._listed.query[pairs]).to(self._device)
        keys[query, torch.from_numpy(columns).to(self._device)] = UNUSED
        bins = torch.searchsorted(self._sorted, keys)
        self._counts.scatter_add_(1, bins, torch.ones_like(bins))

    def _keys_of(self, cosines: torch.Tensor, places: Integers) -> torch.Tensor:
        return keys_of(cosines, torch.from_numpy(places).to(self._device))

    def _pairs_at(self, places: Integers) -> tuple[Integers, Integers]:
        """Which pairs are of these images, and of the how-manieth of them."""
        listed = self._listed.place
        low, high = np.searchsorted(listed, [places[0], places[-1] + 1]).tolist()
        columns = np.searchsorted(places, listed[low:high])
        # An image between these that could not be read is not among them.
        there = places[columns] == listed[low:high]
        return np.arange(low, high)[there], columns[there]

    def _sort(self) -> None:
        """Each query's keys in ascending order, in a row, with what is larger than any behind."""
        query = self._listed.query
        order = np.lexsort((self._keys, query))
        n = np.bincount(query, minlength=len(self._queries))
        column = np.arange(len(order)) - (np.cumsum(n) - n)[query[order]]
        table = np.full((len(n), int(n.max(initial=0))), np.iinfo(np.int64).max)
        table[query[order], column] = self._keys[order]
        self._order = order, query[order], column
        self._sorted = torch.from_numpy(table).to(self._device)
        shape = (len(n), table.shape[1] + 1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def result(self) -> tuple[Integers, Integers]:
        """(pairs,) keys, larger is nearer, and how many images that are not listed are nearer."""
        if self._sorted is None:
            self._sort()
        # An image in bin b is nearer than the listed ones 0 to b - 1.
        counts = self._counts.cpu().numpy()
        beyond = counts[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
        above = np.empty(len(self._keys), np.int64)
        pair, query, column = self._order
        above[pair] = beyond[query, column]
        return self._keys, above


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Of length 1; a row of zeros stays, and has cosine 0 with everything."""
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)


def tile_rows(n_queries: int, memory: int) -> int:
    """How many images to count at a time."""
    cells = min(TILE_CELLS, max(1, memory // CELL_BYTES))
    return max(16, cells // max(1, n_queries))


def with_places(
    pieces: Iterable[Float32], places: Integers, size: int
) -> Iterable[tuple[Integers, Float32]]:
    """Tiles of `size` images with their places; pieces: all images in order."""
    at = 0
    for tile in in_tiles(pieces, size):
        yield places[at : at + len(tile)], tile
        at += len(tile)
