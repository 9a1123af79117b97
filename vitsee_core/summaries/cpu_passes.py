"""Attention summaries of some images on a CPU: the loops of `cpu_sums`, and the numbers of every
head that follow from their sums, compiled as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.kernels.backend import Buffers
from vitsee_core.kernels.compiled import compiled
from vitsee_core.runtime.threads import run_split
from vitsee_core.summaries.cpu_sums import (
    TOTALS,
    HeadSums,
    InCommon,
    OfHeads,
    OverImages,
    TokenPositions,
    padded,
    sum_heads,
    sum_queries,
)
from vitsee_core.summaries.summary import AttentionScores, GridDistances
from vitsee_core.types import Float32

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

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
NO_CLS = np.empty((0, 0, 0), np.float32)
NO_TIMES = np.empty((0, 0, 0))


@compiled
def numbers_of(
    images: tuple[int, int],
    geometry: TokenPositions,
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
    aligned = over.aligned[part]
    received_sum = over.received[part]
    cls_sum = over.cls[part]
    times = geometry.times
    n_places = over.aligned.shape[2]
    last = times - 1
    unit_per_px = geometry.unit_per_px
    n_heads = received.shape[1]
    n_tokens = received.shape[2]
    n = geometry.n_prefix
    n_cells = n_tokens - geometry.n_prefix
    for image in range(images[0], images[1]):
        for head in range(n_heads):
            sums = totals[image, head]
            mass = received[image, head]
            mean = renormalised[image, head]
            entropy = sums[0]
            within = sums[1]
            reach_raw = sums[2]
            reach = sums[3]
            reach_unit = sums[4]
            std = sums[5]
            n_queries = int(sums[6])
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
                    over.in_time[part, head, k // n_places] += (
                        weight * offsets[image, head, k]
                    )
                for k in range(n_tokens):
                    received_sum[head, k] += row[k]
                if cls_rows.shape[1]:
                    for k in range(n_tokens):
                        cls_sum[head, k] += cls_rows[image, head, k]
            largest = mass[0] / n_cells
            which = 0
            broken = False
            for k in range(n_tokens):
                if mass[k] / n_cells > largest:
                    largest = mass[k] / n_cells
                    which = k
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
                math.nan
                if known == 0.0
                else (0.0 if shared < 0.0 else shared) / math.sqrt(known)
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


class CpuPasses:
    """Fills the summaries of images from their scores, with the interface of `DevicePasses`. Holds
    each thread's buffers: the scores of one image, and A."""

    pairs_dtype = torch.float64

    def __init__(
        self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances
    ) -> None:
        times = layout.frames or 1
        px, unit = (_padded_rows(x.repeat(1, times)) for x in (apart.px, apart.unit))
        unit_per_px = apart.unit_per_px or 0.0
        cls = -1 if layout.cls is None else layout.cls
        unit = unit[:0] if unit_per_px else unit
        in_time = times, layout.stride_frames or 1.0
        self._geometry = TokenPositions(
            layout.n_prefix, grid, *in_time, cls, px, unit, unit_per_px
        )
        self._buffers = Buffers(torch.device("cpu"))

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Shape of the sums over images for `aligned`."""
        gh, gw = self._geometry.grid
        return n_heads, 2 * gh - 1, 2 * gw - 1

    def reduce(
        self,
        call: AttentionScores,
        bounds: Sequence[int],
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        n_threads: tuple[int, int],
    ) -> None:
        arrays: Any = {name: tensor.numpy() for name, tensor in out.items()}
        head_sums = HeadSums(*(arrays[name] for name in HeadSums._fields))
        common = InCommon(
            arrays["head_mean"], arrays["spread"], arrays.get("cls_rows", NO_CLS)
        )
        n_parts = len(bounds) - 1
        # By part, then by head.
        pairs = sums["pairs"].numpy().reshape(n_parts, call.n_heads, -1)
        received = sums["received_rows"].numpy()
        of_cls = sums.get("cls_rows", sums["received_rows"]).numpy()
        in_time = sums["in_time"].numpy() if "in_time" in sums else NO_TIMES
        over = OverImages(pairs, in_time, received, of_cls)
        counted = np.ones(call.n_images, np.bool_) if valid is None else valid.numpy()
        of_heads = OfHeads(*(arrays[name] for name in OfHeads._fields))

        n = self._geometry.n_prefix
        n_tokens = call.n_tokens

        def some_parts(thread: int, parts: range) -> None:
            width = padded(n) + padded(n_tokens - n)  # as `sum_heads` fills A of an image
            a = self._buffers.get(f"a {thread}", call.n_heads, n_tokens, width)
            shape = 1, call.n_heads, n_tokens, n_tokens
            room = self._buffers.get(f"scores {thread}", *shape)
            for part in parts:
                images = bounds[part], bounds[part + 1]
                for image in range(*images):
                    scores = call.scores(slice(image, image + 1), out=room)
                    given = scores.numpy().reshape(-1)
                    self._sum(given, image, a, head_sums, common, n_threads[1])
                    if (
                        "full" in out
                    ):  # without the padding between the prefix and the grid
                        out["full"][image, ..., :n] = a[..., :n]
                        grid = a[..., padded(n) : padded(n) + n_tokens - n]
                        out["full"][image, ..., n:] = grid
                of = images, self._geometry, counted, head_sums, common.cls_rows
                numbers_of(*of, of_heads, over, part)

        run_split(some_parts, n_parts, n_threads[0])

    def _sum(
        self,
        given: Float32,
        image: int,
        room: Tensor,
        sums: HeadSums,
        common: InCommon,
        n_threads: int,
    ) -> None:
        """`sum_heads` and `sum_queries` of an image, on some threads."""
        a = room.numpy()
        geometry = self._geometry

        def some_heads(_: int, heads: range) -> None:
            sum_heads(given, geometry, image, (heads.start, heads.stop), a, sums)

        def some_queries(_: int, queries: range) -> None:
            sum_queries(a, geometry, (queries.start, queries.stop), image, common)

        run_split(some_heads, len(a), min(n_threads, len(a)))
        run_split(some_queries, a.shape[1], min(n_threads, a.shape[1]))

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Shapes of `HeadSums`, float64: what `reduce` needs in `out` for itself."""
        (gh, gw), times = self._geometry.grid, self._geometry.times
        n_tokens = self._geometry.n_prefix + times * gh * gw
        last = (
            len(TOTALS),
            n_tokens,
            n_tokens,
            (2 * times - 1) * (2 * gh - 1) * (2 * gw - 1),
        )
        of = zip(HeadSums._fields, last, strict=True)
        return {name: (n_images, n_heads, n) for name, n in of}

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        torch.mean(out["spread"][:, self._geometry.n_prefix :], -1, out=out["head_std"])
        return pairs


def _padded_rows(x: Tensor) -> Float32:
    """Rows padded with zeros to whole vectors, flattened."""
    more = padded(x.shape[1]) - x.shape[1]
    return torch.nn.functional.pad(x.float(), (0, more)).flatten().numpy()
