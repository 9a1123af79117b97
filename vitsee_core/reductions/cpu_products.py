"""Products of queries and keys of small images on a CPU, compiled.

A library's product takes some microseconds a call, and small images have many: all products of 65
tokens with 24 channels are as much work as one such call. With more tokens it is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.reductions.cpu_tokens import memory_of

if TYPE_CHECKING:
    from torch import Tensor

Places = tuple[int, int, int, int, int, int, int, int, int, int, int, int]

# Queries at a time, and keys, of which some tens of channels stay next to the core.
QUERIES, KEYS = 4, 208
UNIT, TWO, THREE = np.uintp(1), np.uintp(2), np.uintp(3)
ZERO, LANES = np.float32(0), 16
NEXT, NEXT_BUT_ONE, LAST = np.uintp(KEYS), np.uintp(2 * KEYS), np.uintp(3 * KEYS)


class Product(NamedTuple):
    """Scores as a product: queries and keys by the memory they lie in, see `multiply_images`."""

    operands: tuple[NDArray[np.float32], NDArray[np.float32], np.float32]
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


@compiled
def lay_out(
    products: tuple[NDArray[np.float32], NDArray[np.float32], np.float32],
    places: Places,
    image: int,
    n_heads: int,
    n_tokens: int,
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
) -> None:
    """Queries and keys of an image as `multiply` takes them.

    By token and then by head: as they mostly lie in memory, which is read once and in its order.

    Args:
        products: as in `multiply_images`.
        places: as in `multiply_images`.
        image: its place in the batch.
        n_heads: of an image.
        n_tokens: of an image.
        queries: of (heads, tokens, channels or more), filled: with the factor, zeros beyond.
        keys: of (heads, tiles, channels or more, KEYS), filled: channel by channel, zeros beyond.
    """
    of_queries, of_keys, scale = products
    n_channels, n_sharing = places[10], places[11]
    wide, n_tiles = -(-n_channels // 4) * 4, -(-n_tokens // KEYS)
    query_step, key_step = np.uintp(places[4]), np.uintp(places[9])
    if wide > n_channels:
        queries[:] = ZERO
    keys[:] = ZERO
    for token in range(n_tokens):
        tile, place = token // KEYS, token % KEYS
        for head in range(n_heads):
            at = places[0] + image * places[1] + head * places[2] + token * places[3]
            from_, to = np.uintp(at), np.uintp((head * n_tokens + token) * wide)
            if query_step == UNIT:  # which vector units load at once
                for channel in range(n_channels):
                    which = np.uintp(channel)
                    queries[to + which] = scale * of_queries[from_ + which]
            else:
                for channel in range(n_channels):
                    which = np.uintp(channel)
                    queries[to + which] = scale * of_queries[from_ + which * query_step]
            at = places[5] + image * places[6] + head // n_sharing * places[7] + token * places[8]
            from_, to = np.uintp(at), np.uintp((head * n_tiles + tile) * wide * KEYS + place)
            for channel in range(n_channels):
                which = np.uintp(channel)
                keys[to + which * NEXT] = of_keys[from_ + which * key_step]


@compiled
def multiply(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    at: tuple[int, int],
    shape: tuple[int, int],
    part: NDArray[np.float32],
    scores: NDArray[np.float32],
) -> None:
    """The products of a head's queries with its keys.

    Args:
        queries: as from `lay_out`.
        keys: as from `lay_out`.
        at: the places of the first query and of the first key.
        shape: channels, a multiple of four, and tokens.
        part: (4 KEYS,), lost.
        scores: (tokens tokens,), filled.
    """
    n_channels, n_tokens = shape
    end = np.uintp(at[0] + (n_tokens - 1) * n_channels)
    for tile in range(-(-n_tokens // KEYS)):
        n = min(KEYS, n_tokens - tile * KEYS)
        n_padded = -(-n // LANES) * LANES
        key = np.uintp(at[1] + tile * n_channels * KEYS)
        for first in range(0, n_tokens, QUERIES):
            for place in range(n_padded):
                j = np.uintp(place)
                part[j] = part[NEXT + j] = part[NEXT_BUT_ONE + j] = part[LAST + j] = ZERO
            # Beyond the last query that one is taken again, and what comes of it is left.
            one = np.uintp(at[0] + first * n_channels)
            two = min(np.uintp(at[0] + (first + 1) * n_channels), end)
            three = min(np.uintp(at[0] + (first + 2) * n_channels), end)
            four = min(np.uintp(at[0] + (first + 3) * n_channels), end)
            for channel in range(0, n_channels, 4):
                d = np.uintp(channel)
                a, b = queries[one + d], queries[one + d + UNIT]
                c, e = queries[one + d + TWO], queries[one + d + THREE]
                f, g = queries[two + d], queries[two + d + UNIT]
                h, i = queries[two + d + TWO], queries[two + d + THREE]
                o, p = queries[three + d], queries[three + d + UNIT]
                q, r = queries[three + d + TWO], queries[three + d + THREE]
                s, t = queries[four + d], queries[four + d + UNIT]
                v, w = queries[four + d + TWO], queries[four + d + THREE]
                some = key + d * NEXT
                for place in range(n_padded):
                    # Unsigned: of what may count from the end no vectors are loaded.
                    j = np.uintp(place)
                    x, y = keys[some + j], keys[some + NEXT + j]
                    z, u = keys[some + NEXT_BUT_ONE + j], keys[some + LAST + j]
                    part[j] += a * x + b * y + c * z + e * u
                    part[NEXT + j] += f * x + g * y + h * z + i * u
                    part[NEXT_BUT_ONE + j] += o * x + p * y + q * z + r * u
                    part[LAST + j] += s * x + t * y + v * z + w * u
            for row in range(min(QUERIES, n_tokens - first)):
                to = np.uintp((first + row) * n_tokens + tile * KEYS)
                for place in range(n):
                    scores[to + np.uintp(place)] = part[np.uintp(row) * NEXT + np.uintp(place)]


@compiled
def multiply_images(
    products: tuple[NDArray[np.float32], NDArray[np.float32], np.float32],
    places: Places,
    first: int,
    out: NDArray[np.float32],
) -> None:
    """The scaled products of all queries with all keys, image by image.

    Args:
        products: memory with the queries in it, memory with the keys, and the factor.
        places: in them: the place of the first number and the strides by image, head, token and
            channel, of queries and then of keys; the channels, and how many heads share keys.
        first: the place of the first image in the batch.
        out: (images, heads, tokens, tokens), filled.
    """
    n_heads, n_tokens = out.shape[1], out.shape[2]
    wide, n_tiles = -(-places[10] // 4) * 4, -(-n_tokens // KEYS)
    queries = np.empty(n_heads * n_tokens * wide, np.float32)
    keys = np.empty(n_heads * n_tiles * wide * KEYS, np.float32)
    part = np.empty(4 * KEYS, np.float32)
    for image in range(out.shape[0]):
        lay_out(products, places, first + image, n_heads, n_tokens, queries, keys)
        for head in range(n_heads):
            scores = out[image, head].reshape(-1)
            at = head * n_tokens * wide, head * n_tiles * wide * KEYS
            multiply(queries, keys, at, (wide, n_tokens), part, scores)
