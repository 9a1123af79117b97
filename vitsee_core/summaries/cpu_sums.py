"""Compute A on a CPU, and its sums, by compiled loops while it is in the caches.

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
QUERIES = 8  # at a time: their scores stay in a core's cache
LEAST = np.float32(-np.inf)
TINY = np.float32(np.finfo(np.float32).tiny)
ZERO = np.float32(0)
ONE = np.float32(1)
# exp(x) = 2^n exp(r) with x = n ln 2 + r; ln 2 in two parts, the first with few digits. exp(r) is
# 1 + r + r^2 times a polynomial, the minimax of the relative error: 3e-9, and with all roundings
# within 1 unit in the last place. Below LEAST_EXPONENT it is 0, as is what a float32 can only hold
# with fewer digits. A number plus ROUND ends in the integer that is nearest to it.
LOG2_E = np.float32(1.44269504)
LN_2 = np.float32(0.693359375)
LN_2_REST = np.float32(-2.12194440e-4)
EXP_2 = np.float32(4.9999993432e-1)
EXP_3 = np.float32(1.6666520399e-1)
EXP_4 = np.float32(4.1668390790e-2)
EXP_5 = np.float32(8.3687451271e-3)
EXP_6 = np.float32(1.3814539879e-3)
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


class SharedValues(NamedTuple):
    """Values over all heads of each image."""

    head_mean: NDArray[np.float32]  # (batch, tokens, tokens), the mean over heads
    # (batch, tokens), for the grid's queries: the standard deviation over heads (n - 1; 0 for one),
    # mean over the grid's keys
    spread: NDArray[np.float32]
    # (batch, heads, tokens), the class token's row, or of no heads
    cls_rows: NDArray[np.float32]


class HeadValues(NamedTuple):
    """Values of each head by itself."""

    # (8 or 10, batch, heads), `NUMBERS`, of clips `IN_TIME` too
    numbers: NDArray[np.float32]
    counts: NDArray[np.int32]  # (2, batch, heads), `COUNTS`
    received_rows: NDArray[np.float32]  # (batch, heads, tokens), the mean over queries


class ImageSums(NamedTuple):
    """Sums over images that count, in float64, by part of the batch."""

    # (parts, heads, offsets in space), of total mass 1 per image
    aligned: NDArray[np.float64]
    # (parts, heads, offsets in time) of clips, else no parts
    in_time: NDArray[np.float64]
    received: NDArray[np.float64]  # (parts, heads, tokens) of `HeadValues.received_rows`
    cls: NDArray[np.float64]  # (parts, heads, tokens) of `SharedValues.cls_rows`


@compiled
def padded(n: int) -> int:
    """Return the length of a row of `n` numbers, rounded up to whole vectors."""
    return -(-n // LANES) * LANES


@partial(compiled, flags=EXACT)
def exponential(x: np.float32) -> np.float32:
    """Return e^x for x <= 0."""
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
    """Subtract the largest score of each row, in place.

    Results are at least LEAST_SCORE; a row is NaN if one of its scores is NaN or all are -inf.

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
            # Of negative floats the larger bits are the smaller number: all but the sign are
            # flipped.
            score_bits = bits[at + np.uintp(k)]
            ordered = np.int32(score_bits ^ ((score_bits >> 31) & MAGNITUDE))
            largest = np.int32(max(largest, ordered))
        top = np.int32(largest ^ ((largest >> 31) & MAGNITUDE)).view(np.float32)
        for k in range(width):
            score = rows[at + np.uintp(k)] - top
            rows[at + np.uintp(k)] = LEAST_SCORE if score < LEAST_SCORE else score


@compiled
def copy_scores(
    all_scores: NDArray[np.float32],
    at: int,
    n_queries: int,
    n_prefix: int,
    n_tokens: int,
    width: int,
    scores: NDArray[np.float32],
) -> None:
    """Copy the scores of a few queries into rows of whole vectors.

    Args:
        all_scores: flat, contiguous rows of the queries.
        at: index of the first row's first score.
        n_queries: number of queries.
        n_prefix: tokens before the grid's.
        n_tokens: length of a row of `all_scores`.
        width: length of a row of scores.
        scores: of (QUERIES, width), filled; LEAST in padding.
    """
    gap = padded(n_prefix) - n_prefix
    scores[:] = LEAST
    for i in range(n_queries):
        source = np.uintp(at + i * n_tokens)
        target = np.uintp(i * width)
        for k in range(n_prefix):
            scores[target + np.uintp(k)] = all_scores[source + np.uintp(k)]
        for k in range(n_prefix, n_tokens):
            scores[target + np.uintp(k + gap)] = all_scores[source + np.uintp(k)]


@compiled
def sum_heads(
    scores: NDArray[np.float32],
    geometry: TokenPositions,
    image: int,
    heads: tuple[int, int],
    a: NDArray[np.float32],
    sums: HeadSums,
) -> None:
    """Fill A of an image and its sums over queries, for some of its heads.

    This is one function, as steps of it would be calls with a dozen arrays each.

    Args:
        scores: (heads * tokens * tokens,) before the softmax, flat.
        geometry: positions of tokens.
        image: its index in the batch.
        heads: the first head, and the one after the last.
        a: (heads, tokens, width), filled with their softmax; width: keys, padded. Prefix keys and
            grid keys each begin at a vector boundary, with zeros in between.
        sums: of the whole batch; the entries of `image` are filled.
    """
    px = geometry.px
    unit = geometry.unit
    totals, received, renormalised, offsets = sums
    n_tokens = a.shape[1]
    width = a.shape[2]
    n = geometry.n_prefix
    gh, gw = geometry.grid
    begin = padded(n)  # where the grid's keys begin in a row of A
    times = geometry.times
    n_positions = gh * gw
    n_cells = times * n_positions
    n_keys = width - begin
    n_rows = times * gh
    # Keys are added up by the column of their query, of clips by its cell in the image.
    n_groups = gw if times == 1 else n_positions
    batch_scores = np.empty(QUERIES * width, np.float32)
    inverse = np.empty(QUERIES, np.float32)
    share = np.empty(QUERIES, np.float32)
    query_mean = np.empty(width, np.float32)
    squared_deviations = np.empty(width, np.float32)
    batch_mass = np.empty(width, np.float32)
    batch_mean = np.empty(width, np.float32)
    mass = np.empty(width, np.float64)
    mean = np.empty(width, np.float64)
    # The last run of keys is read past its end, where zeros are.
    by_row = np.empty(n_groups * (2 * n_rows - 1) * gw + n_keys - n_cells, np.float32)
    for head in range(heads[0], heads[1]):
        rows = a[head].reshape(-1)
        mass[:] = 0.0
        mean[:] = 0.0
        by_row[:] = ZERO
        entropy: Any = 0.0
        within: Any = 0.0
        # reach: sum over queries of the mean distance in pixels; _raw: A not renormalised;
        # _unit: on the unit square.
        reach_raw: Any = 0.0
        reach: Any = 0.0
        reach_unit: Any = 0.0
        n_queries = 0
        for start in range(0, n_tokens, QUERIES):
            n_batch = min(QUERIES, n_tokens - start)
            first = (head * n_tokens + start) * n_tokens
            copy_scores(scores, first, n_batch, n, n_tokens, width, batch_scores)
            subtract_largest(batch_scores, n_batch, width)
            for k in range(n_batch * width):
                rows[np.uintp(start * width) + np.uintp(k)] = exponential(
                    batch_scores[np.uintp(k)]
                )
            # Rows by themselves: mass, entropies, distances. Flat indices instead of views of rows:
            # numba counts references to each view, in memory that all threads would share.
            all_totals: Any = 1.0
            all_masses: Any = 1.0
            for i in range(n_batch):
                q = start + i - n
                at = np.uintp((start + i) * width)
                at_scores = np.uintp(i * width)
                before = dot_before = ZERO
                for k in range(begin):
                    x = rows[at + np.uintp(k)]
                    before += x
                    dot_before += x * batch_scores[at_scores + np.uintp(k)]
                at = at + np.uintp(begin)
                at_scores = at_scores + np.uintp(begin)
                distance_row = np.uintp(max(q, 0) % n_positions * n_keys)
                m = dot = far = ZERO
                for k in range(n_keys):
                    x = rows[at + np.uintp(k)]
                    m += x
                    dot += x * batch_scores[at_scores + np.uintp(k)]
                    far += x * px[distance_row + np.uintp(k)]
                total = np.float64(before) + m
                inverse_total: Any = 1.0 / total
                inverse[i] = np.float32(inverse_total)
                if q < 0:
                    continue
                far_unit = ZERO
                if unit.shape[0]:
                    for k in range(n_keys):
                        far_unit += (
                            rows[at + np.uintp(k)] * unit[distance_row + np.uintp(k)]
                        )
                # Of a row ln p = score - ln total, of the renormalised one score - ln m.
                all_totals *= total
                entropy -= (np.float64(dot) + dot_before) * inverse_total
                reach_raw += far * inverse_total
                # Below the smallest normal number it depends on the device whether it is zero.
                if m * inverse[i] >= TINY:
                    n_queries += 1
                    share[i] = np.float32(total / m)
                    all_masses *= m
                    inverse_mass: Any = 1.0 / m
                    within -= dot * inverse_mass
                    reach += far * inverse_mass
                    reach_unit += far_unit * inverse_mass
                else:
                    share[i] = ZERO
                    reach += ZERO * far  # NaN where the row is NaN
                    reach_unit += ZERO * far_unit
            entropy += math.log(all_totals)
            within += math.log(all_masses)
            # Sums over queries.
            batch_mass[:] = ZERO
            batch_mean[:] = ZERO
            for i in range(n_batch):
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
                    batch_mass[np.uintp(k)] += x
                # By row a query's keys are one run: shifted by the query's row they add up.
                at = at + np.uintp(begin)
                to = (q % n_groups * (2 * n_rows - 1) + n_rows - 1 - q // gw) * gw
                for k in range(n_keys):
                    x = rows[at + np.uintp(k)] * factor
                    rows[at + np.uintp(k)] = x
                    batch_mass[np.uintp(begin) + np.uintp(k)] += x
                    batch_mean[np.uintp(begin) + np.uintp(k)] += weight * x
                    by_row[np.uintp(to) + np.uintp(k)] += weight * x
            for k in range(width):
                mass[k] += batch_mass[k]
                mean[k] += batch_mean[k]
        to_offsets = offsets[image, head]
        to_offsets[:] = 0.0
        for group in range(n_groups):
            row = group // gw
            column = group % gw
            for y in range(2 * n_rows - 1):
                # A key's row less its query's is a number of frames and of rows, of images rows
                # alone, as those of all queries are shifted by their own.
                row_offset = y - (n_rows - 1) + row
                frame = row_offset // gh if times > 1 else 0
                down = row_offset - frame * gh - row
                if frame <= -times or frame >= times:
                    continue
                at = np.uintp((group * (2 * n_rows - 1) + y) * gw)
                first_offset = ((frame + times - 1) * (2 * gh - 1) + down + gh - 1) * (
                    2 * gw - 1
                )
                to_offset = np.uintp(first_offset + gw - 1 - column)
                for k in range(gw):
                    to_offsets[to_offset + np.uintp(k)] += by_row[at + np.uintp(k)]
        # Squares of differences from the mean: a difference of sums of squares loses all digits
        # where rows are nearly alike.
        squared_deviations[:] = ZERO
        for k in range(width):
            query_mean[k] = mass[k] / n_cells
        for q in range(n, n_tokens):
            for k in range(begin, width):
                difference = (
                    rows[np.uintp(q * width) + np.uintp(k)] - query_mean[np.uintp(k)]
                )
                squared_deviations[np.uintp(k)] += difference * difference
        std: Any = 0.0
        for k in range(begin, begin + n_cells):
            std += math.sqrt(squared_deviations[k] / max(1, n_cells - 1))
        for k in range(n_tokens):
            column = k if k < n else k - n + begin
            received[image, head, k] = mass[column]
            renormalised[image, head, k] = mean[column]
        numbers = totals[image, head]  # in the order of `TOTALS`
        numbers[0] = entropy
        numbers[1] = within
        numbers[2] = reach_raw
        numbers[3] = reach
        numbers[4] = reach_unit
        numbers[5] = std
        numbers[6] = n_queries


@compiled
def sum_queries(
    a: NDArray[np.float32],
    geometry: TokenPositions,
    queries: tuple[int, int],
    image: int,
    common: SharedValues,
) -> None:
    """Fill the values over all heads of an image, for some of its queries.

    Args:
        a: (heads, tokens, width), from `sum_heads`.
        geometry: positions of tokens.
        queries: the first query, and the one after the last.
        image: its index in the batch.
        common: filled; the class token's row if it is one of the queries.
    """
    head_mean, spread, cls_rows = common
    n_prefix = geometry.n_prefix
    cls = geometry.cls
    n_heads, n_tokens, width = a.shape
    begin = padded(n_prefix)
    inverse_heads = ONE / np.float32(n_heads)
    inverse_fewer = ONE / np.float32(max(1, n_heads - 1))
    rows = a.reshape(-1)
    means = head_mean.reshape(-1)
    squared_deviations = np.empty(width, np.float32)
    mean = np.empty(width, np.float32)
    for q in range(queries[0], queries[1]):
        mean[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(width):
                mean[k] += rows[at + np.uintp(k)]
        for k in range(width):
            mean[k] *= inverse_heads
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
        squared_deviations[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(width):
                difference = rows[at + np.uintp(k)] - mean[k]
                squared_deviations[k] += difference * difference
        std = ZERO
        for k in range(n_tokens - n_prefix):
            std += np.sqrt(
                squared_deviations[np.uintp(begin) + np.uintp(k)] * inverse_fewer
            )
        spread[image, q] = std / np.float32(n_tokens - n_prefix)
