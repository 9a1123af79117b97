"""Numbers of heads from what `cpu_sums` sums up over an image, compiled."""

from __future__ import annotations

import math

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


@compiled
def numbers_of(
    images: tuple[int, int],
    n_prefix: int,
    unit_per_px: float,
    valid: NDArray[np.bool_],
    totals: NDArray[np.float64],
    received: NDArray[np.float64],
    renormalised: NDArray[np.float64],
    offsets: NDArray[np.float64],
    cls_rows: NDArray[np.float32],
    numbers: NDArray[np.float32],
    counts: NDArray[np.int32],
    received_rows: NDArray[np.float32],
    aligned: NDArray[np.float64],
    received_sum: NDArray[np.float64],
    cls_sum: NDArray[np.float64],
) -> None:
    """What is said of every head by itself, for the images from `images[0]` to `images[1]` - 1.

    Args:
        images: the first, and the one after the last.
        n_prefix: tokens before the grid's.
        unit_per_px: the ratio of the two distances, 0 where it is not one number.
        valid: (batch,) which images enter the sums over images.
        totals: (batch, heads, 7), as from `sum_heads`; and so the next three.
        received: (batch, heads, tokens).
        renormalised: of the same shape.
        offsets: (batch, heads, offsets).
        cls_rows: (batch, heads, tokens), or of no heads.
        numbers: (8, batch, heads), filled: `NUMBERS`.
        counts: (2, batch, heads), filled: `COUNTS`.
        received_rows: (batch, heads, tokens), filled: the mean over queries.
        aligned: (heads, offsets), added to: of total mass 1 per image.
        received_sum: (heads, tokens), added to: `received_rows`.
        cls_sum: of the same shape, added to: `cls_rows`.
    """
    n_heads, n_tokens = received.shape[1], received.shape[2]
    n, n_cells = n_prefix, n_tokens - n_prefix
    for image in range(images[0], images[1]):
        for head in range(n_heads):
            sums, mass, mean = totals[image, head], received[image, head], renormalised[image, head]
            entropy, within, reach_raw, reach = sums[0], sums[1], sums[2], sums[3]
            reach_unit, std, n_queries = sums[4], sums[5], int(sums[6])
            row = received_rows[image, head]
            prefix_mass = cells_mass = 0.0
            for k in range(n_tokens):
                row[k] = mass[k] / n_cells
            for k in range(n):
                prefix_mass += mass[k] / n_cells
            for k in range(n, n_tokens):
                cells_mass += mean[k]
            if valid[image]:
                weight = 1.0 / max(n_queries, 1)
                for k in range(offsets.shape[2]):
                    aligned[head, k] += weight * offsets[image, head, k]
                for k in range(n_tokens):
                    received_sum[head, k] += row[k]
                if cls_rows.shape[1]:
                    for k in range(n_tokens):
                        cls_sum[head, k] += cls_rows[image, head, k]
            largest, which = mass[0] / n_cells, 0
            broken = False
            for k in range(n_tokens):
                if mass[k] / n_cells > largest:
                    largest, which = mass[k] / n_cells, k
                broken |= mass[k] != mass[k]
            of_keys = 0.0
            for k in range(n, n_tokens):
                fraction = mean[k] / cells_mass
                of_keys += 0.0 if fraction == 0.0 else -fraction * math.log(fraction)
            shared = of_keys - within / max(n_queries, 1)
            known = math.log(n_queries) * of_keys if n_queries > 1 else 0.0
            each = 1.0 / n_queries if n_queries else math.nan
            distance = reach * each
            unit = distance * unit_per_px if unit_per_px else reach_unit * each
            numbers[0, image, head] = entropy / n_cells
            numbers[1, image, head] = distance
            numbers[2, image, head] = reach_raw / n_cells
            numbers[3, image, head] = unit
            numbers[4, image, head] = prefix_mass
            numbers[5, image, head] = std / n_cells
            numbers[6, image, head] = math.nan if broken else largest
            numbers[7, image, head] = (
                math.nan if known == 0.0 else (0.0 if shared < 0.0 else shared) / math.sqrt(known)
            )
            counts[0, image, head] = n_queries
            counts[1, image, head] = -1 if broken else which
