"""Summaries on a CPU: functions that go through A, or activations, while they lie in the caches.

Written as torch calls the same work is some twenty passes over A, and for small images mostly the
calls themselves. Here a row of A is read three times in all, from the cache that is next to the
core. Sums over keys are in float32 (some hundred terms, in vector lanes), those over queries in
float64, or in float32 over one row of the grid and then in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.compiled import compiled

# The rows of `numbers` and `counts` by name.
NUMBERS = (
    "entropy",
    "distance_px",
    "distance_px_raw",
    "distance_unit",
    "prefix_mass",
    "query_std",
    "received_max",
    "qk_nmi",
)
COUNTS = ("n_queries", "received_argmax")

TINY = np.float32(np.finfo(np.float32).tiny)
ZERO, ONE = np.float32(0), np.float32(1)
# ln p = score - lse, with lse from the first key: where its p is too small for a logarithm, or the
# scores so far from 0 that the difference would lose more than 1e-4 nats, p ln p is summed.
LEAST_FIRST = np.float32(1e-30)
MOST_LSE = 256.0


@compiled
def reduce_heads(
    a: NDArray[np.float32],
    scores: NDArray[np.float32],
    n_prefix: int,
    grid: tuple[int, int],
    px: NDArray[np.float32],
    unit: NDArray[np.float32],
    unit_per_px: float,
    heads: tuple[int, int],
    start: int,
    valid: NDArray[np.bool_],
    numbers: NDArray[np.float32],
    counts: NDArray[np.int32],
    received_rows: NDArray[np.float32],
    aligned: NDArray[np.float64],
) -> None:
    """What is said of every head by itself: the heads from `heads[0]` to `heads[1]` - 1.

    Args:
        a: (images, heads, tokens, tokens), the softmax of `scores`.
        scores: of the same shape.
        n_prefix: tokens before the grid's.
        grid: rows and columns of the others.
        px: (cells, cells) distances in pixels.
        unit: the same on the unit square, read where `unit_per_px` is 0.
        unit_per_px: their ratio, where it is one number.
        heads: the first, and the one after the last.
        start: the place of the first of these images in the arrays that follow, of a whole batch.
        valid: (batch,) which of them enter `aligned`.
        numbers: (8, batch, heads), filled: `NUMBERS`.
        counts: (2, batch, heads), filled: `COUNTS`.
        received_rows: (batch, heads, tokens), filled: the mean over queries.
        aligned: (heads, 2 rows - 1, 2 columns - 1), added to.
    """
    n_tokens = a.shape[2]
    n, (gh, gw) = n_prefix, grid
    n_cells = gh * gw
    share = np.empty(n_cells, np.float32)
    received, mean = np.empty(n_tokens, np.float64), np.empty(n_tokens, np.float64)
    middle, apart = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    some, some_weighted = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    by_row = np.empty((gw, (2 * gh - 1) * gw), np.float32)
    for image in range(a.shape[0]):
        place = start + image
        for head in range(heads[0], heads[1]):
            # Rows by themselves: mass, entropies, distances.
            rows, row_scores = a[image, head, n:], scores[image, head, n:]
            entropy: Any = 0.0
            within: Any = 0.0
            reach_raw: Any = 0.0
            reach, reach_unit = 0.0, 0.0
            n_queries = 0
            for q in range(n_cells):
                whole, logits = rows[q], row_scores[q]
                p, s, away = whole[n:], logits[n:], px[q]
                m = dot = far = ZERO
                for k in range(n_cells):
                    x = p[k]
                    m += x
                    dot += x * s[k]
                    far += x * away[k]
                far_unit = ZERO
                if unit_per_px == 0.0:
                    away = unit[q]
                    for k in range(n_cells):
                        far_unit += p[k] * away[k]
                prefix = ZERO
                for k in range(n):
                    prefix += whole[k] * logits[k]
                lse = logits[0] - math.log(whole[0]) if whole[0] > LEAST_FIRST else math.inf
                of_row = lse - (dot + prefix)
                # Of the renormalised row ln p = score - lse - ln mass.
                of_cells = lse + math.log(m) - dot / m
                # Comparisons alone: compiled so, math.isfinite takes NaN for finite.
                if not (abs(lse) < MOST_LSE and abs(of_row) < math.inf):
                    in_prefix = in_cells = 0.0
                    for k in range(n_tokens):
                        wide = np.float64(whole[k])
                        term = 0.0 if wide == 0.0 else -wide * math.log(wide)
                        if k < n:
                            in_prefix += term
                        else:
                            in_cells += term
                    of_row = in_prefix + in_cells
                    of_cells = in_cells / m + math.log(m)
                entropy += 0.0 if of_row < 0.0 else of_row
                reach_raw += far
                # Below the smallest normal number it depends on the device whether it is zero.
                if m >= TINY:
                    n_queries += 1
                    share[q] = ONE / m
                    within += 0.0 if of_cells < 0.0 else of_cells
                else:
                    share[q] = ZERO
                reach += far * share[q]
                reach_unit += far_unit * share[q]
            # Sums over queries.
            received[:] = 0.0
            mean[:] = 0.0
            by_row[:] = ZERO
            for y in range(gh):
                some[:] = ZERO
                some_weighted[:] = ZERO
                for x in range(gw):
                    whole, weight = rows[y * gw + x], share[y * gw + x]
                    for k in range(n_tokens):
                        some[k] += whole[k]
                        some_weighted[k] += weight * whole[k]
                    # By row a query's keys are one run: shifted by the query's row they add up.
                    shifted, p = by_row[x, (gh - 1 - y) * gw :], whole[n:]
                    for k in range(n_cells):
                        shifted[k] += weight * p[k]
                for k in range(n_tokens):
                    received[k] += some[k]
                    mean[k] += some_weighted[k]
            out = received_rows[place, head]
            for k in range(n_tokens):
                received[k] /= n_cells
                middle[k] = received[k]
                out[k] = received[k]
            if valid[place]:
                weight = ONE / np.float32(max(n_queries, 1))
                for x in range(gw):
                    for y in range(2 * gh - 1):
                        to, run = aligned[head, y, gw - 1 - x :], by_row[x, y * gw :]
                        for k in range(gw):
                            to[k] += weight * run[k]
            # Squares of differences from the mean: a difference of sums of squares loses all digits
            # where rows are nearly alike.
            apart[:] = ZERO
            for q in range(n_cells):
                whole = rows[q]
                for k in range(n_tokens):
                    difference = whole[k] - middle[k]
                    apart[k] += difference * difference
            std = 0.0
            for k in range(n, n_tokens):
                std += math.sqrt(apart[k] / max(1, n_cells - 1))
            prefix_mass = cells_mass = 0.0
            for k in range(n):
                prefix_mass += received[k]
            for k in range(n, n_tokens):
                cells_mass += mean[k]
            largest, which = received[0], 0
            broken = False
            for k in range(n_tokens):
                if received[k] > largest:
                    largest, which = received[k], k
                broken |= received[k] != received[k]
            of_keys = 0.0
            for k in range(n, n_tokens):
                fraction = mean[k] / cells_mass
                of_keys += 0.0 if fraction == 0.0 else -fraction * math.log(fraction)
            shared = of_keys - within / max(n_queries, 1)
            known = math.log(n_queries) * of_keys if n_queries > 1 else 0.0
            each = 1.0 / n_queries if n_queries else math.nan
            distance = reach * each
            numbers[0, place, head] = entropy / n_cells
            numbers[1, place, head] = distance
            numbers[2, place, head] = reach_raw / n_cells
            numbers[3, place, head] = distance * unit_per_px if unit_per_px else reach_unit * each
            numbers[4, place, head] = prefix_mass
            numbers[5, place, head] = std / n_cells
            numbers[6, place, head] = math.nan if broken else largest
            numbers[7, place, head] = (
                math.nan if known == 0.0 else (0.0 if shared < 0.0 else shared) / math.sqrt(known)
            )
            counts[0, place, head] = n_queries
            counts[1, place, head] = -1 if broken else which


@compiled
def reduce_queries(
    a: NDArray[np.float32],
    n_prefix: int,
    queries: tuple[int, int],
    start: int,
    head_mean: NDArray[np.float32],
    spread: NDArray[np.float32],
) -> None:
    """What heads have in common, for the queries from `queries[0]` to `queries[1]` - 1.

    Args:
        a: (images, heads, tokens, tokens).
        n_prefix: tokens before the grid's.
        queries: the first, and the one after the last.
        start: as in `reduce_heads`.
        head_mean: (batch, tokens, tokens), filled: the mean over heads.
        spread: (batch, tokens), filled for the grid's queries: the standard deviation over heads
            (n - 1; 0 for one), mean over the grid's keys.
    """
    n_images, n_heads, n_tokens, _ = a.shape
    part = ONE / np.float32(n_heads)
    apart = np.empty(n_tokens, np.float32)
    for image in range(n_images):
        for q in range(queries[0], queries[1]):
            mean = head_mean[start + image, q]
            mean[:] = ZERO
            for head in range(n_heads):
                p = a[image, head, q]
                for k in range(n_tokens):
                    mean[k] += p[k]
            for k in range(n_tokens):
                mean[k] *= part
            if q < n_prefix:
                continue
            apart[:] = ZERO
            for head in range(n_heads):
                p = a[image, head, q]
                for k in range(n_tokens):
                    difference = p[k] - mean[k]
                    apart[k] += difference * difference
            std = 0.0
            for k in range(n_prefix, n_tokens):
                std += math.sqrt(apart[k] / max(1, n_heads - 1))
            spread[start + image, q] = std / (n_tokens - n_prefix)


@compiled
def dot_products(
    z: NDArray[np.float32], f: NDArray[np.float32], out: NDArray[np.float32], start: int, stop: int
) -> None:
    """z.z, f.f and z.f of every token of the images from `start` to `stop` - 1, in one pass.

    Args:
        z: (images, tokens, dim).
        f: of the same shape.
        out: (images, tokens, 3), filled.
        start: the first image.
        stop: the one after the last.
    """
    for image in range(start, stop):
        for token in range(z.shape[1]):
            left, right, dots = z[image, token], f[image, token], out[image, token]
            of_z = of_f = of_both = ZERO
            for k in range(z.shape[2]):
                x, y = left[k], right[k]
                of_z += x * x
                of_f += y * y
                of_both += x * y
            dots[0], dots[1], dots[2] = of_z, of_f, of_both
