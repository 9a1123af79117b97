"""Products of queries and keys on a CPU, compiled: a few queries at a time with all keys.

A library's product takes some microseconds a call and a lock, and leaves its scores in a matrix of
its own. Here the scores of a few queries stay next to the core, where what follows takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled, emitted
from vitsee_core.reductions.cpu_tokens import memory_of

if TYPE_CHECKING:
    from torch import Tensor

Places = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
Operands = tuple[NDArray[np.float32], NDArray[np.float32], np.float32]

# Numbers in a vector: of the widest units one register, of others two or four.
LANES = 16
# Queries at a time, and vectors of keys: with their sums in registers a load serves many products.
QUERIES, VECTORS = 8, 3
LEAST = np.float32(-np.inf)


class Product(NamedTuple):
    """Scores as a product: queries and keys by the memory they lie in.

    operands: memory with the queries in it, memory with the keys, and the factor.
    places: in them: the place of the first number and the strides by image, head, token and
        channel, of queries and then of keys; the channels, and how many heads share keys.
    """

    operands: Operands
    places: Places

    @classmethod
    def of(cls, query: Tensor, key: Tensor, scale: float) -> Product | None:
        """Of tensors (images, heads, tokens, channels), keys with as many heads or fewer; None
        where they are not in single precision."""
        if {query.dtype, key.dtype} != {torch.float32}:
            return None
        at = query.storage_offset(), *query.stride(), key.storage_offset(), *key.stride()
        places: Any = (*at, query.shape[3], query.shape[1] // key.shape[1])
        return cls((memory_of(query), memory_of(key), np.float32(scale)), places)

    @classmethod
    def none(cls) -> Product:
        """In place of one, where scores are given."""
        nothing = np.empty(0, np.float32)
        return cls((nothing, nothing, np.float32(0)), (0,) * 12)


@compiled
def padded(n: int) -> int:
    """The length of a row of `n` numbers in whole vectors."""
    return -(-n // LANES) * LANES


@compiled
def lay_out_keys(
    operands: Operands,
    places: Places,
    image: int,
    heads: tuple[int, int],
    n_prefix: int,
    n_tokens: int,
    width: int,
    keys: NDArray[np.float32],
) -> None:
    """Keys of an image as `multiply` takes them.

    By token and then by head: as they mostly lie in memory, which is read once and in its order.

    Args:
        operands: as in `Product`.
        places: as in `Product`.
        image: its place in the batch.
        heads: the first, and the one after the last.
        n_prefix: tokens before the grid's.
        n_tokens: of an image.
        width: of a row of scores.
        keys: of (heads, 1 + channels, width), filled: what the scores begin with, LEAST where there
            is no key and 0 elsewhere, then channel by channel times the factor, zeros where there
            is no key.
    """
    memory, scale = operands[1], operands[2]
    n_channels, n_sharing = places[10], places[11]
    step, token_step = np.uintp(places[9]), np.uintp(places[8])
    begin, n_rows = padded(n_prefix), 1 + n_channels
    keys[:] = np.float32(0)
    for head in range(heads[1] - heads[0]):
        at = head * n_rows * width
        keys[at : at + width] = LEAST
        keys[at : at + n_prefix] = np.float32(0)
        keys[at + begin : at + begin + n_tokens - n_prefix] = np.float32(0)
    for place in range(0, width, LANES):
        token = place if place < begin else place - begin + n_prefix
        n_here = min(LANES, (n_prefix if place < begin else n_tokens) - token)
        for head in range(heads[0], heads[1]):
            at = places[5] + image * places[6] + head // n_sharing * places[7] + token * places[8]
            start = ((head - heads[0]) * n_rows + 1) * width + place
            for channel in range(n_channels):
                from_ = np.uintp(at) + np.uintp(channel) * step
                to = np.uintp(start + channel * width)
                for key in range(n_here):
                    which = np.uintp(key)
                    keys[to + which] = scale * memory[from_ + which * token_step]


def _products(n_vectors: int) -> Callable[..., None]:
    """Sums of products of `QUERIES` queries with so many vectors of keys, kept in registers: what
    compilers do not make of loops."""

    def emit(
        builder: Any, memory: Any, at: Any, step: Any, channel_step: Any, last: Any, keys: Any,
        key: Any, width: Any, n_channels: Any, out: Any, place: Any,
    ) -> None:  # fmt: skip
        """Arguments as of `multiply`, place: the first vector's in a row."""
        from llvmlite import ir
        from numba.core import cgutils

        vector = ir.VectorType(ir.FloatType(), LANES)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        zero, nothing = ir.Constant(ir.IntType(32), 0), ir.Constant(vector, ir.Undefined)
        flags = ("contract",)

        def of_vectors(pointer: Any, row: Any) -> list[Any]:
            first = builder.add(row, place)
            places = [builder.add(first, first.type(i * LANES)) for i in range(n_vectors)]
            found = [builder.gep(pointer, [which]) for which in places]
            return [builder.bitcast(where, vector.as_pointer()) for where in found]

        def load(where: Any) -> Any:
            found = builder.load(where)
            found.align = 4
            return found

        begin = [load(where) for where in of_vectors(keys, key)]
        keep: Any = cgutils.alloca_once_value
        sums = [[keep(builder, x) for x in begin] for _ in range(QUERIES)]
        rows = []
        for i in range(QUERIES):
            row = at.type(i)
            row = builder.select(builder.icmp_unsigned("<", row, last), row, last)
            rows.append(builder.add(at, builder.mul(row, step)))
        with cgutils.for_range(builder, n_channels, intp=n_channels.type) as loop:
            row = builder.add(loop.index, loop.index.type(1))
            of_keys = of_vectors(keys, builder.add(key, builder.mul(row, width)))
            some_keys = [load(where) for where in of_keys]
            channel = builder.mul(loop.index, channel_step)
            for first, of_query in zip(rows, sums, strict=True):
                one = builder.load(builder.gep(memory, [builder.add(first, channel)]))
                alone = builder.insert_element(nothing, one, zero)
                query = builder.shuffle_vector(alone, nothing, everywhere)
                for some, total in zip(some_keys, of_query, strict=True):
                    product = builder.fmul(query, some, flags=flags)
                    more = builder.fadd(builder.load(total), product, flags=flags)
                    builder.store(more, total)
        for i, of_query in enumerate(sums):
            to = of_vectors(out, builder.mul(width, width.type(i)))
            for where, total in zip(to, of_query, strict=True):
                builder.store(builder.load(total), where).align = 4

    return emitted(emit)


one_vector, two_vectors, three_vectors = (_products(n) for n in (1, 2, 3))


@compiled
def multiply(
    operands: Operands,
    places: Places,
    image: int,
    head: int,
    queries: tuple[int, int],
    keys: NDArray[np.float32],
    key: int,
    width: int,
    scores: NDArray[np.float32],
) -> None:
    """The scores of a few queries.

    Args:
        operands: as in `Product`.
        places: as in `Product`.
        image: its place in the batch.
        head: which.
        queries: the first, and how many; QUERIES at most.
        keys: as from `lay_out_keys`.
        key: where the head's begin.
        width: of a row of scores.
        scores: of (QUERIES, width), filled: with what comes of the last query beyond it.
    """
    memory = operands[0]
    first = places[0] + image * places[1] + head * places[2] + queries[0] * places[3]
    at, step, channel_step = np.uintp(first), np.uintp(places[3]), np.uintp(places[4])
    last, row, start = np.uintp(queries[1] - 1), np.uintp(width), np.uintp(key)
    n = np.uintp(places[10])
    for vector in range(0, width // LANES, VECTORS):
        place, rest = np.uintp(vector * LANES), width // LANES - vector
        if rest >= 3:
            three_vectors(memory, at, step, channel_step, last, keys, start, row, n, scores, place)
        elif rest == 2:
            two_vectors(memory, at, step, channel_step, last, keys, start, row, n, scores, place)
        else:
            one_vector(memory, at, step, channel_step, last, keys, start, row, n, scores, place)
