"""Per-head numbers from an image's sums in `cpu_sums`, compiled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.compiled import compiled
from vitsee_core.reductions.cpu_arrays import Geometry, HeadSums, OfHeads, OverImages

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
# The rows of `numbers` that follow for clips.
IN_TIME = ("distance_frames", "frame_mass")
COUNTS = ("n_queries", "received_argmax")


@compiled
def numbers_of(
    images: tuple[int, int],
    geometry: Geometry,
    valid: NDArray[np.bool_],
    head_sums: HeadSums,
    cls_rows: NDArray[np.float32],
    found: OfHeads,
    over: OverImages,
    part: int,
) -> None:
    """Values of every head by itself, for the images from `images[0]` to `images[1]` - 1.

    Args:
        images: the first, and the one after the last.
        geometry: positions of tokens.
        valid: (batch,) which images enter the sums over images.
        head_sums: from `sum_heads`.
        cls_rows: (batch, heads, tokens), or of no heads.
        found: filled.
        over: added to.
        part: of the batch, which contains the images.
    """
    totals, received, renormalised, offsets = head_sums
    numbers, counts, received_rows = found
    aligned, received_sum, cls_sum = over.aligned[part], over.received[part], over.cls[part]
    times, n_places = geometry.times, over.aligned.shape[2]
    last = times - 1
    unit_per_px = geometry.unit_per_px
    n_heads, n_tokens = received.shape[1], received.shape[2]
    n, n_cells = geometry.n_prefix, n_tokens - geometry.n_prefix
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
                    aligned[head, k % n_places] += weight * offsets[image, head, k]
                for k in range(offsets.shape[2] if over.in_time.shape[0] else 0):
                    over.in_time[part, head, k // n_places] += weight * offsets[image, head, k]
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
            if numbers.shape[0] > 8:
                away = own = 0.0
                for k in range(offsets.shape[2]):
                    away += abs(k // n_places - last) * offsets[image, head, k]
                for k in range(last * n_places, times * n_places):
                    own += offsets[image, head, k]
                numbers[8, image, head] = away * each * geometry.stride_frames
                numbers[9, image, head] = own * each
            counts[0, image, head] = n_queries
            counts[1, image, head] = -1 if broken else which
