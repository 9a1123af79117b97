"""x y^T of bfloat16 by the matrix unit: two tiles of 16 rows times two.

No library offers the three products that `halves` sums, nor a triangle, nor sums that stay in
single precision beside it; so the unit's instructions are emitted.

Features lie in tiles, each a stretch of memory, (blocks, panels, tiles, parts, 2, 16, 32): panels
of 32 rows, of which a block of columns takes at most 16 kB: two of them stay in the nearest cache.
Sums of two panels, 32 x 32, stay in four tiles; those of 16 panels by 16 stay in the second cache
while all blocks go by. The right side's panel is turned before, pairs of numbers at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.grams.amx import (
    ALL_TILES,
    BYTES,
    PANEL,
    PITCH,
    clear,
    configure,
    load_left,
    load_right,
    load_sums,
    multiply_bfloat16,
    release,
    store_sums,
    turn_all,
)
from vitsee_core.grams.memory import Long, address
from vitsee_core.grams.panels import Tiles

# Panels of either side whose sums, 1 MB, stay in the second cache.
STAY = 16

# (panels of columns, panels of rows, 32, 32): the sums of one pair of panels lie together.
Blocks = NDArray[np.float32]


def add_product(
    left: Tiles,
    right: Tiles,
    out: Blocks,
    turned: NDArray[np.uint8],
    symmetric: bool,
    every: bool,
    fresh: bool,
) -> None:
    """out += left right^T. Of numbers in two parts on both sides the product of the second ones is
    left out, but for what `symmetric` and `every` say.

    Args:
        left: (blocks, panels, tiles, parts, 2, 16, 32) the bits of bfloat16, contiguous but along
            the blocks; for speed it begins with a line of the cache, as what follows.
        right: likewise, of as many blocks and tiles.
        out: (panels of right, panels of left, 32, 32) rows of left and of right.
        turned: as large as a panel of `right` in a block, changed.
        symmetric: only blocks on and below the diagonal are made, and those along it have the
            product of the second parts, too.
        every: all blocks have it.
        fresh: out = left right^T, whatever it was.
    """
    _add(left, right, out, symmetric, every, fresh, ALL_TILES, turned)


@compiled
def _add_block(
    a: Long, b: Long, out: Long, of: tuple[int, int, int], every: bool, fresh: bool
) -> None:
    """32 x 32 sums += a panel times a turned one; of: tiles, parts of a and of b; fresh: from 0."""
    tiles, parts_a, parts_b = of
    if fresh:
        clear()
    else:
        load_sums(out)
    for _ in range(tiles):
        load_left(a)
        load_right(b)
        multiply_bfloat16()
        if parts_b > 1:
            load_right(b + 2 * BYTES)
            multiply_bfloat16()
        if parts_a > 1:
            load_left(a + 2 * BYTES)
            if every and parts_b > 1:
                multiply_bfloat16()
            load_right(b)
            multiply_bfloat16()
        a, b = a + 2 * parts_a * BYTES, b + 2 * parts_b * BYTES
    store_sums(out)


@compiled
def _add(
    left: Tiles,
    right: Tiles,
    out: Blocks,
    symmetric: bool,
    every: bool,
    fresh: bool,
    tiles: NDArray[np.uint8],
    turned: NDArray[np.uint8],
) -> None:
    n, m, n_tiles = left.shape[1], right.shape[1], left.shape[2]
    parts_a, parts_b = left.shape[3], right.shape[3]
    to, turned_b = address(out), address(turned)
    of_a, of_b = n_tiles * parts_a * 2 * BYTES, n_tiles * parts_b * 2 * BYTES
    configure(address(tiles))
    for low in range(0, n, STAY):
        for first in range(0, low + 1 if symmetric else m, STAY):
            high, last = min(n, low + STAY), min(m, first + STAY)
            for block in range(len(left)):
                a, b = address(left[block]), address(right[block])
                for j in range(first, last):
                    turn_all(b + j * of_b, turned_b, of_b)
                    for i in range(max(low, j) if symmetric else low, high):
                        place = to + (j * n + i) * PANEL * PITCH
                        whole = every or (symmetric and i == j)
                        first_one = fresh and block == 0
                        a_i, of_i = a + i * of_a, (n_tiles, parts_a, parts_b)
                        _add_block(a_i, turned_b, place, of_i, whole, first_one)
    release()
