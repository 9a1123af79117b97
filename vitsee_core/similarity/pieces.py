"""Pieces of a tile of Gram matrices: the pairs of images of two cells of a partition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float

Labels = NDArray[np.int64]

# Terms of a float32 sum before it is added in float64: errors stay near 1e-7.
TERMS = 1 << 14


@dataclass(frozen=True)
class Partition:
    """A partition of the images into cells."""

    labels: Labels  # (n,) cell, counted from 0; -1 for none
    n_cells: int
    # count pairs of images in different cells, too (blocks of a jackknife), not only those within a
    # cell (minibatches)
    crossing: bool


# Terms of a product of two cells below which adding it up costs more than making it.
FEW_TERMS = 1 << 7
OTHERS = -2  # in place of a cell: all but the other one


class Piece(NamedTuple):
    """Some rows of a block of a tile: positions in the tile of the images of cell g and of those of
    cell h, or of all `OTHERS`. square: both are the images of one cell in the same order, or some
    of those and all of them, so that pairs below the diagonal equal those above it."""

    g: int
    h: int
    rows: Labels
    cols: Labels
    square: bool


class BlockSums(NamedTuple):
    """Sums of a piece and its transpose: (R, C) inner products, each matrix's own, in float64; sums
    over columns and over rows, None where the latter equal the former."""

    products: Float
    own: Float
    over_cols: NDArray[Any]
    over_rows: NDArray[Any] | None


def pieces(partition: Partition, i: slice, j: slice) -> Iterator[Piece]:
    """The pieces of a tile; of a diagonal tile, the cells on and below its diagonal. Of small
    cells, if all are in one tile, each with itself and with the others, so that pieces are few."""
    of_i, of_j = _cells(partition.labels[i]), _cells(partition.labels[j])
    n = len(partition.labels)
    if partition.crossing and i == j == slice(0, n) and (n / len(of_i)) ** 2 < FEW_TERMS:
        everyone = np.flatnonzero(partition.labels >= 0)
        for g, rows in of_i.items():
            if len(rows) > 1:  # one alone has no pair
                yield Piece(g, g, rows, rows, True)
            yield Piece(g, OTHERS, rows, everyone[partition.labels[everyone] != g], False)
        return
    for g, rows in of_i.items():
        for h, cols in of_j.items():
            if h > g and i == j:
                continue
            if partition.crossing or g == h:
                step = max(1, TERMS // len(cols))
                for at in range(0, len(rows), step):
                    yield Piece(g, h, rows[at : at + step], cols, g == h and i == j)


def _cells(labels: Labels) -> dict[int, Labels]:
    """Cell -> positions in it."""
    order = np.argsort(labels, kind="stable")
    names, starts = np.unique(labels[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(name): part for name, part in zip(names, parts, strict=True) if name >= 0}


def as_run(places: Labels) -> slice | Labels:
    """Consecutive positions as a slice."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == len(places) else places
