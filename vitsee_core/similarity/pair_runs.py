"""Gram matrices as the matrix unit makes them, taken apart into runs of pairs of images.

All pairs of two cells of images lie one after the other, in an order that is the same for every
matrix, so that the inner products of matrices are products of such runs. On the way each entry is
rounded to the two bfloat16 parts that are multiplied then (see `grams.halves`), and its sums are
taken of what it is rounded to: whatever is made of them is that of the rounded matrix, to single
precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted
from vitsee_core.grams.amx import PANEL
from vitsee_core.grams.memory import address
from vitsee_core.grams.panels import TILE_NUMBERS, split, vector_at
from vitsee_core.types import Float, Float32


@emitted
def _take_row(
    builder: Any, source: Any, to: Any, n: Any, over_rows: Any, over_cols: Any, squares: Any
) -> None:
    """The first n of 32 numbers, rounded; 0 for the others. Added to: one sum of them, the numbers
    one by one, their squares one by one."""
    from llvmlite import ir

    single, index = (ir.VectorType(kind, TILE_NUMBERS) for kind in (ir.FloatType(), ir.IntType(64)))
    place = ir.Constant(index, list(range(TILE_NUMBERS)))
    n = builder.insert_element(ir.Constant(index, ir.Undefined), n, ir.IntType(32)(0))
    n = builder.shuffle_vector(n, n, ir.Constant(ir.VectorType(ir.IntType(32), TILE_NUMBERS), None))
    x = builder.load(vector_at(builder, source, ir.FloatType()), align=4)
    x = builder.select(builder.icmp_unsigned("<", place, n), x, ir.Constant(single, None))
    x = builder.fadd(*split(builder, x, 2))
    builder.store(x, vector_at(builder, to, ir.FloatType()), align=4)
    for at, value in ((over_cols, x), (squares, builder.fmul(x, x))):
        sums = vector_at(builder, at, ir.FloatType())
        builder.store(builder.fadd(builder.load(sums, align=4), value), sums, align=4)
    name, of = "llvm.vector.reduce.fadd.v32f32", [ir.FloatType(), single]
    kind = ir.FunctionType(ir.FloatType(), of)
    add = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    row = builder.inttoptr(over_rows, ir.FloatType().as_pointer())
    total = builder.call(add, [builder.load(row, align=4), x], fastmath=["reassoc"])
    builder.store(total, row, align=4)


@compiled
def take_runs(
    blocks: Float32,
    cuts: NDArray[np.int64],
    pairs: Float32,
    over_cols: Float32,
    over_rows: Float32,
    squares: Float,
) -> None:
    """A product in blocks as `halves.Sums.values`, behind which is room for 32 numbers more.

    Args:
        blocks: (panels of columns, panels of rows, 32, 32).
        cuts: (pieces, 8) of each the first row and the one after the last, the same of columns,
            whether only pairs below the diagonal count, and where in `pairs`, `over_cols` and
            `over_rows` it begins.
        pairs: filled; each piece with zeros up to a multiple of 32.
        over_cols: each piece's sum over its columns, by row.
        over_rows: over its rows, by column.
        squares: (pieces,) each piece's sum of squares.
    """
    n_down, added = blocks.shape[1], np.empty(TILE_NUMBERS, np.float32)
    of, to = address(blocks), address(pairs)
    rows_at, cols_at, squares_at = address(over_cols), address(over_rows), address(added)
    for p in range(len(cuts)):
        top, bottom, left, right, below, first, first_row, first_col = cuts[p]
        over_cols[first_row : first_row + bottom - top] = 0
        over_rows[first_col : first_col + right - left] = 0
        added[:] = 0
        at = first
        for j in range(left // PANEL, -(-right // PANEL)):
            low, high = max(left, j * PANEL), min(right, (j + 1) * PANEL)
            sums = cols_at + 4 * (first_col + low - left)
            for i in range(top // PANEL, -(-bottom // PANEL)):
                block = of + 4 * PANEL * PANEL * (j * n_down + i) + 4 * (low % PANEL)
                for row in range(max(top, i * PANEL), min(bottom, (i + 1) * PANEL)):
                    n = (min(high, row) if below != 0 else high) - low
                    if n > 0:
                        source = block + 4 * PANEL * (row % PANEL)
                        sum_at = rows_at + 4 * (first_row + row - top)
                        _take_row(source, to + 4 * at, n, sum_at, sums, squares_at)
                        at += n
        pairs[at : at + -at % TILE_NUMBERS] = 0
        total = np.float32(0)
        for k in range(TILE_NUMBERS):
            total += added[k]
        squares[p] = total
