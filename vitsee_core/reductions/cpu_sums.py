"""A on a CPU, and its sums: loops that go through it while it lies in the caches.

Written as torch calls the same work is some twenty passes over A, and for small images mostly the
calls themselves. Here the scores of a few queries at a time are made probabilities and summed up
next to the core; A of one image is then read twice more, for spreads. Sums over keys are
in float32 (some hundred terms, in vector lanes), those over queries in float32 over eight of them
and then in float64.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import EXACT, compiled

# Sums over an image's queries, by head.
TOTALS = ("entropy", "within", "reach_raw", "reach", "reach_unit", "query_std", "n_queries")

TINY = np.float32(np.finfo(np.float32).tiny)
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
# Queries at a time: their rows stay next to the core, and eight sums of exponentials, each at least
# TINY, may be multiplied in float64 to take one logarithm of all.
QUERIES = 8
# Rows of A are padded to whole vectors.
LANES = 16

# exp(x) = 2^n exp(r) with x = n ln 2 + r; ln 2 in two parts, the first with few digits. The
# polynomial is that of Cephes' expf: within 1 unit in the last place. Below LEAST_EXPONENT it is 0,
# as is what a float32 can only hold with fewer digits.
LOG2_E, LN_2, LN_2_REST = (np.float32(x) for x in (1.44269504, 0.693359375, -2.12194440e-4))
EXP_2, EXP_3, EXP_4, EXP_5, EXP_6, EXP_7 = (
    np.float32(x)
    for x in (
        5.0000001201e-1,
        1.6666665459e-1,
        4.1665795894e-2,
        8.3334519073e-3,
        1.3981999507e-3,
        1.9875691500e-4,
    )
)
LEAST_EXPONENT, LEAST_SCORE, LEAST_POWER = np.float32(-87.3), np.float32(-104), np.float32(-127)
SMALLEST, MAGNITUDE = np.int32(-(2**31)), np.int32(2**31 - 1)


def padded(n: int) -> int:
    """The length of a row of `n` numbers in whole vectors."""
    return -(-n // LANES) * LANES


@partial(compiled, flags=EXACT)
def exponential(x: np.float32) -> np.float32:
    """e^x for x <= 0."""
    y = x * LOG2_E - HALF
    y = y if y > LEAST_POWER else LEAST_POWER  # also of NaN
    power = np.int32(y)
    n = np.float32(power)
    r = x - n * LN_2 - n * LN_2_REST
    e = EXP_7 * r + EXP_6
    e = e * r + EXP_5
    e = e * r + EXP_4
    e = e * r + EXP_3
    e = e * r + EXP_2
    e = e * r * r + r + ONE
    found = e * np.int32((power + 127) << 23).view(np.float32)
    return ZERO if x < LEAST_EXPONENT else found


@compiled
def subtract_largest(rows: NDArray[np.float32], n_rows: int, n_tokens: int, width: int) -> None:
    """Scores minus the largest of their row, at least LEAST_SCORE; NaN where one is NaN or all are
    -inf.

    Args:
        rows: of (rows, width), changed: the first are scores, LEAST_SCORE beyond.
        n_rows: how many.
        n_tokens: scores in a row.
        width: the length of a row.
    """
    # As integers of the same order: of floats the vector units would have to ask for NaN.
    bits = rows.view(np.int32)
    for i in range(n_rows):
        at = np.uintp(i * width)
        largest = SMALLEST
        for k in range(n_tokens):
            it = bits[at + np.uintp(k)]
            largest = np.int32(max(largest, np.int32(it ^ ((it >> 31) & MAGNITUDE))))
        top = np.int32(largest ^ ((largest >> 31) & MAGNITUDE)).view(np.float32)
        for k in range(n_tokens):
            score = rows[at + np.uintp(k)] - top
            rows[at + np.uintp(k)] = LEAST_SCORE if score < LEAST_SCORE else score
        for k in range(n_tokens, width):
            rows[at + np.uintp(k)] = LEAST_SCORE


@compiled
def sum_heads(
    given: NDArray[np.float32],
    first: int,
    n_prefix: int,
    grid: tuple[int, int],
    px: NDArray[np.float32],
    unit: NDArray[np.float32],
    image: int,
    heads: tuple[int, int],
    a: NDArray[np.float32],
    totals: NDArray[np.float64],
    received: NDArray[np.float64],
    renormalised: NDArray[np.float64],
    offsets: NDArray[np.float64],
) -> None:
    """A of an image and its sums over queries, for the heads from `heads[0]` to `heads[1]` - 1.

    Args:
        given: (images, heads, tokens, tokens), scores.
        first: the place of the first of the given images in the batch.
        n_prefix: tokens before the grid's.
        grid: rows and columns of the others.
        px: (cells cells,) distances in pixels.
        unit: the same on the unit square, or empty where it is not wanted.
        image: its place in the batch.
        heads: the first, and the one after the last.
        a: (heads, tokens, padded tokens), filled: the softmax of the scores, zeros beyond.
        totals: (batch, heads, 7), filled: `TOTALS`.
        received: (batch, heads, tokens), filled: the mass that keys receive.
        renormalised: of the same shape, filled: by renormalised rows.
        offsets: (batch, heads, (2 rows - 1) (2 columns - 1)), filled: that mass by offset.
    """
    n_tokens, width = a.shape[1], a.shape[2]
    flat = given.reshape(-1)
    n, (gh, gw) = n_prefix, grid
    n_cells = gh * gw
    scores = np.empty(QUERIES * width, np.float32)
    inverse, share = np.empty(QUERIES, np.float32), np.empty(QUERIES, np.float32)
    middle, apart = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    some, some_weighted = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    by_row = np.empty(gw * (2 * gh - 1) * gw, np.float32)
    for head in range(heads[0], heads[1]):
        rows = a[head].reshape(-1)
        mass, mean = received[image, head], renormalised[image, head]
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
            for i in range(n_here):
                query = ((image - first) * a.shape[0] + head) * n_tokens + start + i
                at, to = np.uintp(query * n_tokens), np.uintp(i * width)
                for k in range(n_tokens):
                    scores[to + np.uintp(k)] = flat[at + np.uintp(k)]
            subtract_largest(scores, n_here, n_tokens, width)
            for k in range(n_here * width):
                rows[np.uintp(start * width) + np.uintp(k)] = exponential(scores[np.uintp(k)])
            # Rows by themselves: mass, entropies, distances. Flat places instead of rows of their
            # own, each of which would be counted as a reference, by all threads at one place.
            all_totals: Any = 1.0
            all_masses: Any = 1.0
            for i in range(n_here):
                q = start + i - n
                at, at_scores = np.uintp((start + i) * width), np.uintp(i * width)
                before = dot_before = ZERO
                for k in range(n):
                    before += rows[at + np.uintp(k)]
                    dot_before += rows[at + np.uintp(k)] * scores[at_scores + np.uintp(k)]
                at, at_scores = at + np.uintp(n), at_scores + np.uintp(n)
                away = np.uintp(max(q, 0) * n_cells)
                m = dot = far = ZERO
                for k in range(n_cells):
                    x = rows[at + np.uintp(k)]
                    m += x
                    dot += x * scores[at_scores + np.uintp(k)]
                    far += x * px[away + np.uintp(k)]
                total = np.float64(before) + m
                inverse[i] = ONE / np.float32(total)
                if q < 0:
                    continue
                far_unit = ZERO
                if unit.shape[0]:
                    for k in range(n_cells):
                        far_unit += rows[at + np.uintp(k)] * unit[away + np.uintp(k)]
                # Of a row ln p = score - ln total, of the renormalised one score - ln m.
                all_totals *= total
                entropy -= (np.float64(dot) + dot_before) / total
                reach_raw += far / total
                # Below the smallest normal number it depends on the device whether it is zero.
                if m * inverse[i] >= TINY:
                    n_queries += 1
                    share[i] = np.float32(total / m)
                    all_masses *= m
                    within -= np.float64(dot) / m
                    reach += np.float64(far) / m
                    reach_unit += np.float64(far_unit) / m
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
                q, at = start + i - n, np.uintp((start + i) * width)
                factor, weight = inverse[i], share[i]
                if q < 0:
                    for k in range(n_tokens):
                        rows[at + np.uintp(k)] *= factor
                    continue
                for k in range(n_tokens):
                    x = rows[at + np.uintp(k)] * factor
                    rows[at + np.uintp(k)] = x
                    some[k] += x
                    some_weighted[k] += weight * x
                # By row a query's keys are one run: shifted by the query's row they add up.
                to = np.uintp((q % gw * (2 * gh - 1) + gh - 1 - q // gw) * gw)
                at += np.uintp(n)
                for k in range(n_cells):
                    by_row[to + np.uintp(k)] += weight * rows[at + np.uintp(k)]
            for k in range(n_tokens):
                mass[k] += some[k]
                mean[k] += some_weighted[k]
        to_offsets = offsets[image, head]
        to_offsets[:] = 0.0
        for x in range(gw):
            for y in range(2 * gh - 1):
                at = np.uintp((x * (2 * gh - 1) + y) * gw)
                to = np.uintp(y * (2 * gw - 1) + gw - 1 - x)
                for k in range(gw):
                    to_offsets[to + np.uintp(k)] += by_row[at + np.uintp(k)]
        # Squares of differences from the mean: a difference of sums of squares loses all digits
        # where rows are nearly alike.
        apart[:] = ZERO
        for k in range(n_tokens):
            middle[k] = mass[k] / n_cells
        for q in range(n, n_tokens):
            for k in range(n_tokens):
                difference = rows[np.uintp(q * width) + np.uintp(k)] - middle[k]
                apart[k] += difference * difference
        std: Any = 0.0
        for k in range(n, n_tokens):
            std += math.sqrt(apart[k] / max(1, n_cells - 1))
        numbers = totals[image, head]
        numbers[0], numbers[1], numbers[2], numbers[3] = entropy, within, reach_raw, reach
        numbers[4], numbers[5], numbers[6] = reach_unit, std, n_queries


@compiled
def sum_queries(
    a: NDArray[np.float32],
    n_prefix: int,
    cls: int,
    queries: tuple[int, int],
    image: int,
    head_mean: NDArray[np.float32],
    spread: NDArray[np.float32],
    cls_rows: NDArray[np.float32],
) -> None:
    """What the heads of an image have in common, for queries from `queries[0]` to `queries[1]` - 1.

    Args:
        a: (heads, tokens, padded tokens), as from `sum_heads`.
        n_prefix: tokens before the grid's.
        cls: the class token, -1 without one.
        queries: the first, and the one after the last.
        image: its place in the batch.
        head_mean: (batch, tokens, tokens), filled: the mean over heads.
        spread: (batch, tokens), filled for the grid's queries: the standard deviation over heads
            (n - 1; 0 for one), mean over the grid's keys.
        cls_rows: (batch, heads, tokens), filled where the class token is one of the queries: its
            row.
    """
    n_heads, n_tokens, width = a.shape
    part, fewer = ONE / np.float32(n_heads), ONE / np.float32(max(1, n_heads - 1))
    rows, means = a.reshape(-1), head_mean.reshape(-1)
    apart, mean = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    for q in range(queries[0], queries[1]):
        mean[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(n_tokens):
                mean[k] += rows[at + np.uintp(k)]
        to = np.uintp((image * n_tokens + q) * n_tokens)
        for k in range(n_tokens):
            mean[k] *= part
            means[to + np.uintp(k)] = mean[k]
        if q == cls:
            for head in range(n_heads):
                cls_rows[image, head] = a[head, q, :n_tokens]
        if q < n_prefix:
            continue
        apart[:] = ZERO
        for head in range(n_heads):
            at = np.uintp((head * n_tokens + q) * width)
            for k in range(n_tokens):
                difference = rows[at + np.uintp(k)] - mean[k]
                apart[k] += difference * difference
        std = ZERO
        for k in range(n_prefix, n_tokens):
            std += np.sqrt(apart[np.uintp(k)] * fewer)
        spread[image, q] = std / np.float32(n_tokens - n_prefix)


@compiled
def sum_images(
    given: NDArray[np.float32],
    first: int,
    n_prefix: int,
    grid: tuple[int, int],
    px: NDArray[np.float32],
    unit: NDArray[np.float32],
    cls: int,
    images: tuple[int, int],
    a: NDArray[np.float32],
    totals: NDArray[np.float64],
    received: NDArray[np.float64],
    renormalised: NDArray[np.float64],
    offsets: NDArray[np.float64],
    head_mean: NDArray[np.float32],
    spread: NDArray[np.float32],
    cls_rows: NDArray[np.float32],
) -> None:
    """`sum_heads` and `sum_queries` of all heads and queries of the images from `images[0]` to
    `images[1]` - 1; `a` is the last one's afterwards.

    Args of its own:
        cls: the class token, -1 without one.
        cls_rows: (batch, heads, tokens), filled where there is a class token: its row.
    """
    n_heads, n_tokens = a.shape[0], a.shape[1]
    for image in range(images[0], images[1]):
        sum_heads(
            given, first, n_prefix, grid, px, unit, image, (0, n_heads), a, totals, received,
            renormalised, offsets,
        )  # fmt: skip
        sum_queries(a, n_prefix, cls, (0, n_tokens), image, head_mean, spread, cls_rows)
