"""Products of strips on the CPU's matrix unit: of bfloat16 parts, summed in single precision.

A number x is its 8 leading bits, h, and the 8 that follow, l, each with a sign and an exponent, so

    x y = h h' + h l' + l h' + l l'        with |l l'| < 2^-16 |x y|

of which the last is left out but in the squares along the diagonal of a symmetric product: between
different images its terms average out, and no image is in both factors of another product. Features
that are stored in half precision have 11 bits; of their differences from the mean these parts keep
17, with the signs. CKA is as near to double precision as by products of single precision, within
1e-7 (a test measures both); entries of a Gram matrix are off by 1e-6 of their images' norms, and by
2e-5 where a few features outweigh all others. The three products take less than half of the time of
one in single precision.

With the leading bits alone it is `--precision bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams import amx, amx_parts
from vitsee_core.grams.amx import PANEL, TILE
from vitsee_core.grams.arithmetic import Host
from vitsee_core.grams.memory import LINE_BYTES, aligned
from vitsee_core.grams.panels import ROW_NUMBERS, TILE_NUMBERS, take_rows
from vitsee_core.grams.scratch import Scratch
from vitsee_core.grams.syrk import mirror
from vitsee_core.types import Float, Float32


@dataclass(frozen=True)
class Panels:
    """Rows of features as the matrix unit wants them; see `amx_parts`.

    values: (blocks, panels, tiles, parts, 2, 16, 32) the bits of bfloat16.
    """

    values: NDArray[np.uint16]
    n_rows: int

    @classmethod
    def empty(
        cls, n_rows: int, n_columns: int, parts: int, memory: NDArray[Any], beside: int = 0
    ) -> Panels:
        """In some memory, with zeros in the places beyond its rows and columns; to be multiplied
        with panels of `beside` parts, by default as many."""
        shape = _shape(n_rows, n_columns, parts, beside or parts)
        values = aligned(memory).view(np.uint16)[: int(np.prod(shape))].reshape(shape)
        if n_columns < len(values) * shape[2] * TILE_NUMBERS:
            values[-1] = 0
        if n_rows < shape[1] * PANEL:
            values[:, -1] = 0
        return cls(values, n_rows)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, places: slice | NDArray[np.int64]) -> Panels:
        """Some of the rows: in the same memory where they begin with a panel."""
        if isinstance(places, slice):
            if places.start % PANEL == 0:
                some = slice(places.start // PANEL, -(-places.stop // PANEL))
                return Panels(self.values[:, some], places.stop - places.start)
            places = np.arange(places.start, places.stop)
        blocks, _, tiles, parts = self.values.shape[:4]
        n_columns = blocks * tiles * TILE_NUMBERS
        memory = np.empty(panels_bytes(len(places), n_columns, parts), np.uint8)
        found = Panels.empty(len(places), n_columns, parts, memory)
        take_rows(self.values, places, found.values)
        return found


@dataclass(frozen=True)
class Sums:
    """Sums of products: (panels of columns, panels of rows, 32, 32), of which a symmetric one has
    what lies on and below the diagonal."""

    values: Float
    shape: tuple[int, int]
    symmetric: bool


class InPanels(Host):
    """Strips as `Panels` with two parts of each number, or with one."""

    def __init__(self, unit: ModuleType, parts: int) -> None:
        super().__init__()
        self._unit, self._parts, self._scratch = unit, parts, Scratch()

    def strip_bytes(self, rows: int, columns: int, item: int) -> int:
        """Whole panels and blocks."""
        return panels_bytes(rows, columns, self._parts)

    def strip(self, memory: NDArray[Any], rows: int, columns: int) -> Panels:
        """`Panels`, to be filled."""
        return Panels.empty(rows, columns, self._parts, memory)

    def product_size(self, rows: int, others: int) -> int:
        """Whole panels of both, and what it takes to be aligned."""
        return _panels(rows) * _panels(others) * PANEL**2 + LINE_BYTES

    def zeros(self, shape: tuple[int, int], symmetric: bool) -> Any:
        """`Sums`, in float64."""
        return Sums(np.zeros(_blocks(*shape)), shape, symmetric)

    def multiply(self, left: Any, right: Any, out: NDArray[Any]) -> Any:
        """As the blocks of `Sums`."""
        made = self.blocks(len(left), len(right), out)
        self.add_product(left, right, made, symmetric=left is right, fresh=True)
        return made

    def blocks(self, rows: int, others: int, memory: NDArray[Any]) -> Float32:
        """Memory as the blocks of a sum, of so many rows times the transpose of so many others."""
        shape = _blocks(rows, others)
        made: Float32 = aligned(memory)[: int(np.prod(shape))].reshape(shape)
        return made

    def add_product(
        self,
        left: Panels,
        right: Panels,
        to: Float32,
        *,
        symmetric: bool = False,
        every: bool = False,
        fresh: bool = False,
    ) -> None:
        """`to` += left right^T, in blocks; see `amx_parts.add_product`."""
        size = PANEL * ROW_NUMBERS * 2 + LINE_BYTES
        turned = aligned(self._scratch.take("turned", size, np.uint8))
        of = left.values, right.values, to, turned
        self._unit.add_product(*of, symmetric, every, fresh)

    def panels(self, name: str, rows: int, columns: int, parts: int = 0, beside: int = 0) -> Panels:
        """Room for rows, in memory that this thread takes again for the next of this name; with so
        many parts of each number, as `Panels.empty` has it."""
        parts = parts or self._parts
        size = panels_bytes(rows, columns, max(parts, beside))
        memory = self._scratch.take(name, size, np.uint8)
        return Panels.empty(rows, columns, parts, memory, beside)

    def add(self, total: Any, product: NDArray[Any]) -> None:
        """total += product."""
        for j, column in enumerate(total.values):
            low = j if total.symmetric else 0
            np.add(column[low:], product[j, low:], out=column[low:])

    def host(self, total: Any, symmetric: bool) -> Float:
        """The whole sum."""
        found: Float = in_rows(total.values, *total.shape)
        if symmetric:
            mirror(found)
        return found


def in_rows(blocks: NDArray[Any], n: int, m: int) -> NDArray[Any]:
    """(n, m) of what lies in blocks of 32 x 32; see `Sums`."""
    found = np.empty((blocks.shape[1] * PANEL, blocks.shape[0] * PANEL), blocks.dtype)
    found.reshape(-1, PANEL, blocks.shape[0], PANEL)[...] = blocks.transpose(1, 2, 0, 3)
    return np.ascontiguousarray(found[:n, :m])


def in_panels(precision: str) -> InPanels | None:
    """For features in half precision, or for bf16; None where the processor has no matrix unit."""
    return InPanels(amx_parts, 1 if precision == "bf16" else 2) if amx.is_there() else None


def panels_bytes(n_rows: int, n_columns: int, parts: int) -> int:
    """Of `Panels`, with what it takes to be aligned."""
    return int(np.prod(_shape(n_rows, n_columns, parts, parts))) * 2 + LINE_BYTES


def _shape(n_rows: int, n_columns: int, parts: int, beside: int) -> tuple[int, ...]:
    """Blocks have as many tiles as a panel of 16 kB takes, or less, all alike."""
    n_tiles = -(-n_columns // TILE_NUMBERS)
    most = ROW_NUMBERS // TILE_NUMBERS // max(parts, beside)
    n_blocks = -(-n_tiles // most)
    of_block = -(-n_tiles // n_blocks)
    return (
        *(n_blocks, _panels(n_rows), of_block, parts),
        *(PANEL // TILE, TILE, TILE_NUMBERS),
    )


def _blocks(n_rows: int, n_others: int) -> tuple[int, ...]:
    return (_panels(n_others), _panels(n_rows), PANEL, PANEL)


def _panels(n_rows: int) -> int:
    return -(-n_rows // PANEL)
