"""The two passes over the images: listed ones are found, then all are counted.

A rank is the number of images nearer to a query than an image of its lists. The searched
images come in tiles. A tile's cosines are sorted in the processor's cache, and the number
above that of each listed image is looked up; no ranking of all images is ever made.
Memory: the lists, and one tile; whatever the number of images.

Cosines are float64 products rounded to float32; equal ones are ties, and the image that
comes first in the store (its distractors after it) is the nearer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.retrieve.search import Features, RandomFeatures, Search
from vitsee_core.features import SiteFeatures
from vitsee_core.runtime.execution import Execution
from vitsee_core.truth.labels.neighbours import in_tiles
from vitsee_core.types import Float32, Integers, Mask

TILE_CELLS = 1 << 24  # cosines in a tile
TILE_ROWS = 4096
MIN_EFFICIENT_ROWS = 512  # in smaller tiles the overhead per row dominates
CELL_BYTES = 32  # cosines in float64 and float32, and copies during rounding and sorting
PAIR_BYTES = 64
PAIR_BLOCK_BYTES = 12  # a pair's count in a block, and a query's temporaries
UNREADABLE = -2.0  # less than any cosine
UNCOUNTED = -np.inf

Cosines = Callable[[Float32], Float32]  # rows (rows, dim) -> (queries, rows) in float32


@dataclass(frozen=True)
class ListedPairs:
    """The pairs of a query and an image of its lists, ordered by image, then query.

    Attributes:
        query: (pairs,) index of the query.
        image: (pairs,) index of the image.
        list_number: (pairs,) index of the list in `list_names`.
        list_names: names of all lists.
    """

    query: Integers
    image: Integers
    list_number: Integers
    list_names: tuple[str, ...]

    @classmethod
    def from_lists(cls, lists: Sequence[Mapping[str, Integers]]) -> ListedPairs:
        """Return the pairs of all queries and the images of their lists.

        lists: for each query, name of the list -> (n,) indices of its images.
        """
        list_names = tuple(dict.fromkeys(name for by_name in lists for name in by_name))
        # Empty arrays first, so that there is something to join without any list.
        query_indices = [np.empty(0, np.int64)]
        images = [np.empty(0, np.int64)]
        list_numbers = [np.empty(0, np.int64)]
        for i, query_lists in enumerate(lists):
            for name, indices in query_lists.items():
                query_indices.append(np.full(len(indices), i))
                images.append(indices)
                list_numbers.append(np.full(len(indices), list_names.index(name)))
        query = np.concatenate(query_indices)
        image = np.concatenate(images)
        list_number = np.concatenate(list_numbers)
        order = np.lexsort((query, image))
        return cls(query[order], image[order], list_number[order], list_names)

    def in_lists(self, names: Sequence[str]) -> Mask:
        """Return (pairs,) which are in one of the named lists."""
        numbers = [i for i, name in enumerate(self.list_names) if name in names]
        return np.isin(self.list_number, numbers)


class PairCounts(NamedTuple):
    """What the counter has counted for each pair of a query and a listed image.

    Attributes:
        keys: (pairs,) order of the images by their cosine to the query, larger is nearer.
        n_above: (pairs,) number of nearer images in no list of the query.
        n_above_by_block: (pairs, blocks) how many of these are in each block.
    """

    keys: Integers
    n_above: Integers
    n_above_by_block: NDArray[np.int32]


class Counter:
    """Counts the images that are nearer to a query than an image of its lists.

    Images in any list of the query are not counted. First pass all listed images to
    `find`, then all images to `count`; images are known by their indices.
    """

    def __init__(
        self,
        n_queries: int,
        pairs: ListedPairs,
        cosines: Cosines,
        blocks: Integers | None = None,
    ) -> None:
        """Start with no image found and none counted.

        Args:
            n_queries: number of queries.
            pairs: the images of their lists.
            cosines: rows (rows, dim) -> (queries, rows) cosines of these queries.
            blocks: (images,) blocks of the first images, to count by block, too; images
                behind them, the distractors, are in no block.
        """
        self._n_queries = n_queries
        self._pairs = pairs
        self._cosines = cosines
        self._blocks = blocks
        n_pairs = len(pairs.image)
        n_blocks = 0 if blocks is None else int(blocks.max(initial=-1)) + 1
        self._n_above = np.zeros(n_pairs, np.int64)
        self._n_above_by_block = np.zeros((n_pairs, n_blocks), np.int32)
        # Until found, an image ranks behind all others; an unreadable one stays there.
        self._scores = np.full(n_pairs, UNREADABLE, np.float32)
        self._pairs_of_query: list[Integers] = []

    def find(self, indices: Integers, rows: Float32) -> None:
        """Record the cosines of the listed images among these.

        Args:
            indices: (rows,) which images these are, ascending.
            rows: (rows, dim) their vectors.
        """
        pairs, columns = self._pairs_among(indices)
        if len(columns):
            self._scores[pairs] = self._cosines(rows)[self._pairs.query[pairs], columns]

    def count(self, indices: Integers, rows: Float32 | None) -> None:
        """Count images against all listed ones.

        Args:
            indices: (rows,) which images these are, ascending.
            rows: (rows, dim) their vectors; None if they could not be read.
        """
        if rows is None:
            cosines = np.full((self._n_queries, len(indices)), UNREADABLE, np.float32)
        else:
            cosines = self._cosines(rows)
        listed_pairs, columns = self._pairs_among(indices)
        cosines[self._pairs.query[listed_pairs], columns] = UNCOUNTED
        if self._blocks is not None:
            self._count_by_block(self._blocks, cosines, indices)
            return
        ascending = np.sort(cosines, axis=1)
        for pairs, row, sorted_row in zip(
            self._pairs_by_query(), cosines, ascending, strict=True
        ):
            scores = self._scores[pairs]
            end = np.searchsorted(sorted_row, scores, side="right")
            self._n_above[pairs] += len(row) - end
            # Ties are rare: the order within them is looked at only where there are any.
            tied = sorted_row[end - 1] == scores
            if tied.any():
                n_before = self._count_ties_before(pairs[tied], row, sorted_row, indices)
                self._n_above[pairs[tied]] += n_before

    def _count_by_block(
        self, blocks: Integers, cosines: Float32, indices: Integers
    ) -> None:
        """Count images as `count` does, by block.

        The other way round: a listed image is passed by each image that is nearer, so that
        one histogram over (listed images passed, block) has the counts of all blocks.
        """
        n_blocks = self._n_above_by_block.shape[1]
        label = np.full(len(indices), n_blocks)  # a distractor is in no block
        has_block = indices < len(blocks)
        label[has_block] = blocks[indices[has_block]]
        image_keys = keys_of(cosines, indices)
        for pairs, row in zip(self._pairs_by_query(), image_keys, strict=True):
            keys = keys_of(self._scores[pairs], self._pairs.image[pairs])
            order = np.argsort(keys)
            n_passed = np.searchsorted(keys[order], row)
            # (passed, blocks + 1)
            histogram = np.bincount(
                n_passed * (n_blocks + 1) + label,
                minlength=(len(pairs) + 1) * (n_blocks + 1),
            ).reshape(-1, n_blocks + 1)
            # Listed image i in this order is passed by images that pass more than i.
            above = histogram[:0:-1].cumsum(0)[::-1]
            self._n_above[pairs[order]] += above.sum(1)
            self._n_above_by_block[pairs[order]] += above[:, :n_blocks].astype(np.int32)

    def _count_ties_before(
        self, pairs: Integers, row: Float32, sorted_row: Float32, indices: Integers
    ) -> Integers:
        """Return (pairs,) how many images tie with a pair's listed image and come before
        it.

        Args:
            pairs: pairs of one query.
            row: (rows,) the query's cosines to these images.
            sorted_row: the same, ascending.
            indices: (rows,) which images these are, ascending.
        """
        scores = self._scores[pairs]
        listed = self._pairs.image[pairs]
        end = np.searchsorted(sorted_row, scores, side="right")
        n_ties: Integers = end - np.searchsorted(sorted_row, scores)
        # All of the tile comes after the listed image, or before it; or the image is among
        # them.
        n_ties[listed < indices[0]] = 0
        is_among = (listed >= indices[0]) & (listed <= indices[-1])
        for i in np.flatnonzero(is_among).tolist():
            before = row[: np.searchsorted(indices, listed[i])]
            n_ties[i] = np.count_nonzero(before == scores[i])
        return n_ties

    def _pairs_by_query(self) -> list[Integers]:
        """Return for each query the numbers of its pairs, in ascending order of their
        scores.

        Made once, after all listed images are found.
        """
        if not self._pairs_of_query:
            query = self._pairs.query
            order = np.lexsort((self._scores, query))
            n_pairs = np.bincount(query, minlength=self._n_queries)
            self._pairs_of_query = np.split(order, np.cumsum(n_pairs)[:-1])
        return self._pairs_of_query

    def _pairs_among(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return the pairs whose image is among these, and its position among them."""
        listed = self._pairs.image
        low, high = np.searchsorted(listed, [indices[0], indices[-1] + 1]).tolist()
        columns = np.searchsorted(indices, listed[low:high])
        # Unreadable images in between are not among them.
        is_among = indices[columns] == listed[low:high]
        return np.arange(low, high)[is_among], columns[is_among]

    def result(self) -> PairCounts:
        """Return the counts of all images so far."""
        keys = keys_of(self._scores, self._pairs.image)
        return PairCounts(keys, self._n_above, self._n_above_by_block)


def keys_of(cosines: Float32, indices: Integers) -> Integers:
    """Return integers that order images: larger is nearer, of equal cosines the earlier
    image.

    Args:
        cosines: (..., images).
        indices: (images,) which images these are.
    """
    import torch

    from vitsee_core.kernels import neighbours

    return neighbours.keys_of(
        torch.from_numpy(cosines), torch.from_numpy(indices)
    ).numpy()


def tile_rows(n_queries: int, memory_bytes: int) -> int:
    """Return how many images are counted at a time."""
    n_cells = min(TILE_CELLS, max(1, memory_bytes // CELL_BYTES))
    return max(16, min(TILE_ROWS, n_cells // max(1, n_queries)))


def tiles_with_indices(
    pieces: Iterable[Float32], indices: Integers, size: int
) -> Iterator[tuple[Integers, Float32]]:
    """Yield tiles of at most `size` images, each with the images' indices.

    Args:
        pieces: (images, dim) of all images in order, in pieces of any size.
        indices: (images,) which images these are.
        size: images per tile.
    """
    start = 0
    for tile in in_tiles(pieces, size):
        yield indices[start : start + len(tile)], tile
        start += len(tile)


# ---------------------------------------------------------------- the two passes


@dataclass(frozen=True)
class QueryBlock:
    """What is counted for some successive queries and their listed images.

    Attributes:
        pairs: pairs of a query, which counts from 0 here, and an image of its lists.
        counts: the counts of each pair.
        is_constant: all images have one vector.
        is_blank: (queries,) whose cosine is the same with every image, as the images have
            one vector or the query is zero.
    """

    pairs: ListedPairs
    counts: PairCounts
    is_constant: bool
    is_blank: Mask

    @property
    def n_queries(self) -> int:
        """Number of these queries."""
        return len(self.is_blank)


def count_in_two_passes(
    search: Search, features: Features, execution: Execution
) -> Iterator[QueryBlock]:
    """Yield the counts of the queries in order, as many queries at a time as fit.

    `progress` counts images, once in all.

    Memory: a third of the budget for queries and their lists, a quarter for a tile of
    cosines, a quarter for slabs while they are read.

    Raises:
        VitseeError: a number is not finite.
    """
    reader = _SiteReader(search, features, execution)
    queries = reader.query_vectors()
    block_labels = None
    n_blocks = 0
    if search.image_blocks is not None:
        block_labels = search.image_blocks.labels
        n_blocks = search.image_blocks.n
    pair_bytes = PAIR_BYTES + PAIR_BLOCK_BYTES * n_blocks
    # 20 bytes per channel: the vector in float32, its unit vector in float64, a temporary.
    query_bytes = 20 * queries.shape[1] + pair_bytes * search.max_listed
    # Few enough queries at a time that tiles have enough rows.
    tile_cells = min(TILE_CELLS, execution.budget // 4 // CELL_BYTES)
    n_efficient = max(16, tile_cells // MIN_EFFICIENT_ROWS)
    n_at_once = max(1, min(execution.budget // 3 // query_bytes, n_efficient))
    with _cosines_on_device(execution.device) as make_cosines:
        for start in range(0, len(queries), n_at_once):
            rows = slice(start, start + n_at_once)
            vectors = queries[rows]
            pairs = ListedPairs.from_lists(search.lists[rows])
            counter = Counter(len(vectors), pairs, make_cosines(vectors), block_labels)
            is_constant = reader.feed(counter, pairs, len(vectors))
            yield QueryBlock(
                pairs=pairs,
                counts=counter.result(),
                is_constant=is_constant,
                is_blank=np.logical_or(~vectors.any(1), is_constant),
            )


@contextmanager
def _cosines_on_device(device_name: str) -> Iterator[Callable[[Float32], Cosines]]:
    """Yield a function: queries (m, dim) -> their cosines to rows, computed on a device."""
    from vitsee_core.kernels import neighbours
    from vitsee_core.runtime.device import precision_context, resolve_device

    device = resolve_device(device_name)
    with precision_context(device, "fp32"):
        yield partial(neighbours.Cosines, device=device)


class _SiteReader:
    """Reads the vectors of one site for a counter."""

    def __init__(self, search: Search, features: Features, execution: Execution) -> None:
        self._search = search
        self._features = features
        self._execution = execution

    def query_vectors(self) -> Float32:
        """Return (queries, dim) in the queries' order."""
        rows = self._search.query_rows
        # A store is read in its own order, each row once.
        ascending = np.unique(rows)
        vectors = np.concatenate(list(self._vectors(self._features.queries, ascending)))
        return vectors[np.searchsorted(ascending, rows)]

    def feed(self, counter: Counter, pairs: ListedPairs, n_queries: int) -> bool:
        """Pass the listed images, then all images to a counter.

        Args:
            counter: what finds and counts them.
            pairs: the listed images of its queries.
            n_queries: number of its queries, which is less than all if memory is scarce.

        Returns:
            Whether all images have one vector.
        """
        search = self._search
        size = tile_rows(n_queries, self._execution.budget // 4)
        is_readable = search.is_readable
        is_listed = np.zeros(len(is_readable), bool)
        is_listed[pairs.image] = True
        listed = np.flatnonzero(is_listed & is_readable)
        vectors = self._vectors(self._features.images, search.rows[listed])
        for indices, tile in tiles_with_indices(vectors, listed, size):
            counter.find(indices, tile)

        first_vector: Float32 | None = None
        all_equal = True
        for features, rows, all_indices in self._image_sources():
            vectors = self._vectors(features, rows)
            for indices, tile in tiles_with_indices(vectors, all_indices, size):
                counter.count(indices, tile)
                if first_vector is None:
                    first_vector = tile[0].copy()
                all_equal = all_equal and bool((tile == first_vector).all())
                # Each image counts once, however many blocks of queries it is read for.
                n_done = round(len(tile) * n_queries / len(search.query_rows))
                self._execution.progress.advance(n_done)
        if not is_readable.all():
            counter.count(np.flatnonzero(~is_readable), None)
        return all_equal

    def _image_sources(
        self,
    ) -> Iterator[tuple[SiteFeatures | RandomFeatures, Integers, Integers]]:
        """Yield the features, rows and image indices of the searched images, then of each
        store of distractors; unreadable rows are left out."""
        search = self._search
        readable = np.flatnonzero(search.is_readable)
        yield self._features.images, search.rows[readable], readable
        start = len(search.rows)
        for features in self._features.distractors:
            rows = np.flatnonzero(features.store.valid)
            yield features, rows, np.arange(start, start + len(rows))
            start += len(rows)

    def _vectors(
        self, features: SiteFeatures | RandomFeatures, rows: Integers
    ) -> Iterator[Float32]:
        """Yield the vectors of these rows, all readable, in the store's order."""
        mask = np.zeros(features.store.n_images, bool)
        mask[rows] = True
        return features.vectors(
            mask, jobs=self._execution.jobs, memory=self._execution.budget // 4
        )
