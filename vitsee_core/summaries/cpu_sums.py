"""A on a CPU, and its sums: loops over A while it is in the caches.

As torch calls the same work is some twenty passes over A, and for small images mostly call
overhead. Here the scores of a few queries at a time become probabilities and are summed in a core's
cache; A of one image is then read twice more, for spreads. Sums over keys are in float32 (some
hundred terms, in vector lanes), those over queries in float32 over eight of them and then in
float64.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import EXACT, compiled

# Sums over an image's queries, by head.
TOTALS = (
    "entropy",
    "within",
    "reach_raw",
    "reach",
    "reach_unit",
    "query_std",
    "n_queries",
)
# Numbers in a vector: of the widest units one register, of others two or four.
LANES = 16
QUERIES = 8  # at a time
LEAST = np.float32(-np.inf)
TINY = np.float32(np.finfo(np.float32).tiny)
ZERO = np.float32(0)
ONE = np.float32(1)
# exp(x) = 2^n exp(r) with x = n ln 2 + r; ln 2 in two parts, the first with few digits. exp(r) is
# 1 + r + r^2 times a polynomial, the minimax of the relative error: 3e-9, and with all roundings
# within 1 unit in the last place. Below LEAST_EXPONENT it is 0, as is what a float32 can only hold
# with fewer digits. A number plus ROUND ends in the integer that is nearest to it.
LOG2_E, LN_2, LN_2_REST = (
    np.float32(x) for x in (1.44269504, 0.693359375, -2.12194440e-4)
)
EXP_2, EXP_3, EXP_4, EXP_5, EXP_6 = (
    np.float32(x)
    for x in (
        4.9999993432e-1,
        1.6666520399e-1,
        4.1668390790e-2,
        8.3687451271e-3,
        1.3814539879e-3,
    )
)
ROUND = np.float32(1.5 * 2**23)
BITS_OF_ONE = 127 << 23
LEAST_EXPONENT = np.float32(-87.3)
LEAST_SCORE = np.float32(-104)
SMALLEST = np.int32(-(2**31))
MAGNITUDE = np.int32(2**31 - 1)


class TokenPositions(NamedTuple):
    """The positions of tokens on the grid."""

    n_prefix: int  # tokens before the grid's
    grid: tuple[int, int]  # rows and columns of the others
    times: int  # how often the grid is there, time by time; 1 for images
    stride_frames: float  # frames between these times
    cls: int  # the class token, -1 without one
    # (places padded cells,) distances in pixels from a place of the grid, 0 in padding
    px: NDArray[np.float32]
    unit: NDArray[np.float32]  # the same on the unit square, or empty if not wanted
    unit_per_px: float  # the ratio of the two, 0 if it is not constant


class HeadSums(NamedTuple):
    """Sums over queries, by head of each image, in float64."""

    totals: NDArray[np.float64]  # (batch, heads, 7), `TOTALS`
    received: NDArray[np.float64]  # (batch, heads, tokens), the mass that keys receive
    renormalised: NDArray[np.float64]  # (batch, heads, tokens), by renormalised rows
    # (batch, heads, (2 times - 1) (2 rows - 1) (2 columns - 1)), that mass by offset
    offsets: NDArray[np.float64]


class InCommon(NamedTuple):
    """Values shared by the heads of each image."""

    head_mean: NDArray[np.float32]  # (batch, tokens, tokens), the mean over heads
    # (batch, tokens), for the grid's queries: the standard deviation over heads (n - 1; 0 for one),
    # mean over the grid's keys
    spread: NDArray[np.float32]
    cls_rows: NDArray[
        np.float32
    ]  # (batch, heads, tokens), the class token's row, or of no heads


class OfHeads(NamedTuple):
    """Values of every head by itself."""

    numbers: NDArray[
        np.float32
    ]  # (8 or 10, batch, heads), `NUMBERS`, of clips `IN_TIME` too
    counts: NDArray[np.int32]  # (2, batch, heads), `COUNTS`
    received_rows: NDArray[np.float32]  # (batch, heads, tokens), the mean over queries


class OverImages(NamedTuple):
    """Sums over images that count, in float64, by part of the batch."""

    aligned: NDArray[
        np.float64
    ]  # (parts, heads, offsets in space), of total mass 1 per image
    in_time: NDArray[
        np.float64
    ]  # (parts, heads, offsets in time) of clips, else no parts
    received: NDArray[np.float64]  # (parts, heads, tokens) of `OfHeads.received_rows`
    cls: NDArray[np.float64]  # (parts, heads, tokens) of `InCommon.cls_rows`


@compiled
def padded(n: int) -> int:
    """The length of a row of `n` numbers, rounded up to whole vectors."""
    return -(-n // LANES) * LANES


@partial(compiled, flags=EXACT)
def exponential(x: np.float32) -> np.float32:
    """e^x for x <= 0."""
    y = x * LOG2_E + ROUND
    n = y - ROUND
    r = x - n * LN_2 - n * LN_2_REST
    e = EXP_6 * r + EXP_5
    e = e * r + EXP_4
    e = e * r + EXP_3
    e = e * r + EXP_2
    e = e * (r * r) + r + ONE
    power = e * np.int32((np.float32(y).view(np.int32) << 23) + BITS_OF_ONE).view(
        np.float32
    )
    return ZERO if x < LEAST_EXPONENT else power


@compiled
def subtract_largest(rows: NDArray[np.float32], n_rows: int, width: int) -> None:
    """Scores minus the largest of their row, at least LEAST_SCORE; NaN if one is NaN or all are
    -inf.

    Args:
        rows: of (rows, width), changed.
        n_rows: number of rows.
        width: the length of a row.
    """
    # Compared as integers of the same order: floats would need checks for NaN.
    bits = rows.view(np.int32)
    for i in range(n_rows):
        at = np.uintp(i * width)
        largest = SMALLEST
        for k in range(width):
            it = bits[at + np.uintp(k)]
            largest = np.int32(max(largest, np.int32(it ^ ((it >> 31) & MAGNITUDE))))
        top = np.int32(largest ^ ((largest >> 31) & MAGNITUDE)).view(np.float32)
        for k in range(width):
            score = rows[at + np.uintp(k)] - top
            rows[at + np.uintp(k)] = LEAST_SCORE if score < LEAST_SCORE else score


@compiled
def take(
    given: NDArray[np.float32],
    at: int,
    n_queries: int,
    n_prefix: int,
    n_tokens: int,
    width: int,
    scores: NDArray[np.float32],
) -> None:
    """Copy the scores of a few queries into rows of whole vectors.

    Args:
        given: (anything,) contiguous rows of the queries.
        at: where the first begins.
        n_queries: number of queries.
        n_prefix: tokens before the grid's.
        n_tokens: length of a given row.
        width: length of a row of scores.
        scores: of (QUERIES, width), filled; LEAST in padding.
    """
    gap = padded(n_prefix) - n_prefix
    scores[:] = LEAST
    for i in range(n_queries):
        from_ = np.uintp(at + i * n_tokens)
        to = np.uintp(i * width)
        for k in range(n_prefix):
            scores[to + np.uintp(k)] = given[from_ + np.uintp(k)]
        for k in range(n_prefix, n_tokens):
            scores[to + np.uintp(k + gap)] = given[from_ + np.uintp(k)]


@compiled
def sum_heads(
    given: NDArray[np.float32],
    geometry: TokenPositions,
    image: int,
    heads: tuple[int, int],
    a: NDArray[np.float32],
    sums: HeadSums,
) -> None:
    """A of an image and its sums over queries, for the heads from `heads[0]` to `heads[1]` - 1.

    Args:
        given: (heads tokens tokens,) scores of the image.
        geometry: positions of tokens.
        image: its place in the batch.
        heads: the first, and the one after the last.
        a: (heads, tokens, width), filled: the softmax of the scores. Prefix keys and grid keys each
            begin at a vector boundary, with zeros in between.
        sums: filled.
    """
    px = geometry.px
    unit = geometry.unit
    totals, received, renormalised, offsets = sums
    n_tokens = a.shape[1]
    width = a.shape[2]
    n, (gh, gw), begin = geometry.n_prefix, geometry.grid, padded(geometry.n_prefix)
    times = geometry.times
    n_places = gh * gw
    n_cells = times * n_places
    reach_of = width - begin
    n_rows = times * gh
    # Keys are added up by the column of their query, of clips by its place, row by row.
    n_groups = gw if times == 1 else n_places
    made = np.empty(QUERIES * width, np.float32)
    inverse = np.empty(QUERIES, np.float32)
    share = np.empty(QUERIES, np.float32)
    middle = np.empty(width, np.float32)
    apart = np.empty(width, np.float32)
    some = np.empty(width, np.float32)
    some_weighted = np.empty(width, np.float32)
    mass = np.empty(width, np.float64)
    mean = np.empty(width, np.float64)
    # The last run of keys is read past its end, where zeros are.
    by_row = np.empty(n_groups * (2 * n_rows - 1) * gw + reach_of - n_cells, np.float32)
    for head in range(heads[0], heads[1]):
        rows = a[head].reshape(-1)
        mass[:] = 0.0
        mean[:] = 0.0
        by_row[:] = ZERO
        entropy: Any = 0.0
        within: Any = 0.0
        reach_raw: Any = 0.0
        reach: Any = 0.0
        reach_unit: Any = 0.0
        n_queries = 0
        for start in range(0, n_tokens, QUERIES):
            n_here = min(QUERIES, n_tokens - start)
            first = (head * n_tokens + start) * n_tokens
            take(given, first, n_here, n, n_tokens, width, made)
            subtract_largest(made, n_here, width)
            for k in range(n_here * width):
                rows[np.uintp(start * width) + np.uintp(k)] = exponential(
                    made[np.uintp(k)]
                )
            # Rows by themselves: mass, entropies, distances. Flat places instead of rows of their
            # own, each of which would be counted as a reference, by all threads at one place.
            all_totals: Any = 1.0
            all_masses: Any = 1.0
            for i in range(n_here):
                q = start + i - n
                at = np.uintp((start + i) * width)
                at_scores = np.uintp(i * width)
                before = dot_before = ZERO
                for k in range(begin):
                    x = rows[at + np.uintp(k)]
                    before += x
                    dot_before += x * made[at_scores + np.uintp(k)]
                at = at + np.uintp(begin)
                at_scores = at_scores + np.uintp(begin)
                away = np.uintp(max(q, 0) % n_places * reach_of)
                m = dot = far = ZERO
                for k in range(reach_of):
                    x = rows[at + np.uintp(k)]
                    m += x
                    dot += x * made[at_scores + np.uintp(k)]
                    far += x * px[away + np.uintp(k)]
                total = np.float64(before) + m
                part: Any = 1.0 / total
                inverse[i] = np.float32(part)
                if q < 0:
                    continue
                far_unit = ZERO
                if unit.shape[0]:
                    for k in range(reach_of):
                        far_unit += rows[at + np.uintp(k)] * unit[away + np.uintp(k)]
                # Of a row ln p = score - ln total, of the renormalised one score - ln m.
                all_totals *= total
                entropy -= (np.float64(dot) + dot_before) * part
                reach_raw += far * part
                # Below the smallest normal number it depends on the device whether it is zero.
                if m * inverse[i] >= TINY:
                    n_queries += 1
                    share[i] = np.float32(total / m)
                    all_masses *= m
                    part = 1.0 / m
                    within -= dot * part
                    reach += far * part
                    reach_unit += far_unit * part
                else:
                    share[i] = ZERO
                    reach += ZERO * far  # NaN where the row is NaN
                    reach_unit += ZERO * far_unit
            entropy += math.log(all_totals)
            within += math.log(all_masses)
            # Sums over queries.
            some[:] = ZERO
            some_weighted[:] = ZERO
            for i in range(n_here):
                q = start + i - n
                at = np.uintp((start + i) * width)
                factor = inverse[i]
                weight = share[i]
                if q < 0:
                    for k in range(width):
                        rows[at + np.uintp(k)] *= factor
                    continue
                for k in range(begin):
                    x = rows[at + np.uintp(k)] * factor
                    rows[at + np.uintp(k)] = x
                    some[np.uintp(k)] += x
                # By row a query's keys are one run: shifted by the query's row they add up.
                at = at + np.uintp(begin)
                to = (q % n_groups * (2 * n_rows - 1) + n_rows - 1 - q // gw) * gw
                for k in range(reach_of):
                    x = rows[at + np.uintp(k)] * factor
                    rows[at + np.uintp(k)] = x
                    some[np.uintp(begin) + np.uintp(k)] += x
                    some_weighted[np.uintp(begin) + np.uintp(k)] += weight * x
                    by_row[np.uintp(to) + np.uintp(k)] += weight * x
            for k in range(width):
                mass[k] += some[k]
                mean[k] += some_weighted[k]
        to_offsets = offsets[image, head]
        to_offsets[:] = 0.0
        for group in range(n_groups):
            row = group // gw
            column = group % gw
            for y in range(2 * n_rows - 1):
                # A key's row less its query's is a number of frames and of rows, of images rows
                # alone, as those of all queries are shifted by their own.
                apart_rows = y - (n_rows - 1) + row
                frame = apart_rows // gh if times > 1 else 0
                down = apart_rows - frame * gh - row
                if frame <= -times or frame >= times:
                    continue
                at = np.uintp((group * (2 * n_rows - 1) + y) * gw)
                place = ((frame + times - 1) * (2 * gh - 1) + down + gh - 1) * (
                    2 * gw - 1
                )
                to_offset = np.uintp(place + gw - 1 - column)
                for k in range(gw):
                    to_offsets[to_offset + np.uintp(k)] += by_row[at + np.uintp(k)]
        # Squares of differences from the mean: a difference of sums of squares loses all digits
        # where rows are nearly alike.
        apart[:] = ZERO
        for k in range(width):
            middle[k] = mass[k] / n_cells
        for q in range(n, n_tokens):
            for k in range(begin, width):
                difference = rows[np.uintp(q * width) + np.uintp(k)] - middle[np.uintp(k)]
                apart[np.uintp(k)] += difference * difference
        std: Any = 0.0
        for k in range(begin, begin + n_cells):
            std += math.sqrt(apart[k] / max(1, n_cells - 1))
        for k in range(n_tokens):
            place = k if k < n else k - n + begin
            received[image, head, k] = mass[place]
            renormalised[image, head, k] = mean[place]
        numbers = totals[image, head]
        numbers[0], numbers[1], numbers[2], numbers[3] = entropy, within, reach_raw, reach
        numbers[4], numbers[5], numbers[6] = reach_unit, std, n_queries


@compiled
def sum_queries(
    a: NDArray[np.float32],
    geometry: TokenPositions,
    queries: tuple[int, int],
    image: int,
    common: InCommon,
) -> None:
    """Values shared by the heads of an image, for queries from `queries[0]` to `queries[1]` - 1.

    Args:
        a: (heads, tokens, width), from `sum_heads`.
        geometry: positions of tokens.
        queries: the first, and the one after the last.
        image: its place in the batch.
        common: filled; the class token's row if it is one of the queries.
    """
    head_mean, spread, cls_rows = common
    n_prefix = geometry.n_prefix
    cls = geometry.cls
    n_heads, n_tokens, width = a.shape
    begin = padded(n_prefix)
    part = ONE / np.float32(n_heads)
    fewer = ONE / np.float32(max(1, n_heads - 1))
    rows = a.reshape(-1)
    means = head_mean.reshape(-1)
    apart = np.empty(width, np.float32)
    mean = np.empty(width, np.float32)
    for q in range(queries[0], queries[1]):
        mean[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(width):
                mean[k] += rows[at + np.uintp(k)]
        for k in range(width):
            mean[k] *= part
        to = np.uintp((image * n_tokens + q) * n_tokens)
        for k in range(n_prefix):
            means[to + np.uintp(k)] = mean[k]
        to += np.uintp(n_prefix)
        for k in range(n_tokens - n_prefix):
            means[to + np.uintp(k)] = mean[np.uintp(begin) + np.uintp(k)]
        if q == cls:
            for head in range(n_heads):
                cls_rows[image, head, :n_prefix] = a[head, q, :n_prefix]
                cls_rows[image, head, n_prefix:] = a[
                    head, q, begin : begin + n_tokens - n_prefix
                ]
        if q < n_prefix:
            continue
        apart[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(width):
                difference = rows[at + np.uintp(k)] - mean[k]
                apart[k] += difference * difference
        std = ZERO
        for k in range(n_tokens - n_prefix):
            std += np.sqrt(apart[np.uintp(begin) + np.uintp(k)] * fewer)
        spread[image, q] = std / np.float32(n_tokens - n_prefix)
