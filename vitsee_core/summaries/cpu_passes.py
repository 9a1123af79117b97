"""Summarise the attention of a batch on a CPU.

The loops of `cpu_sums` make A and its sums over queries, image by image; those here, compiled as
well, make the numbers of each head from these sums.
"""

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
    HeadValues,
    ImageSums,
    SharedValues,
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
def fill_head_values(
    images: tuple[int, int],
    geometry: TokenPositions,
    valid: NDArray[np.bool_],
    head_sums: HeadSums,
    cls_rows: NDArray[np.float32],
    values: HeadValues,
    over: ImageSums,
    part: int,
) -> None:
    """Fill the values of each head, and add to the sums over images.

    Args:
        images: the first image, and the one after the last.
        geometry: positions of tokens.
        valid: (batch,) which images enter the sums over images.
        head_sums: from `sum_heads`.
        cls_rows: (batch, heads, tokens), or of no heads.
        values: filled.
        over: added to.
        part: part of the batch that contains the images.
    """
    totals, received, renormalised, offsets = head_sums
    numbers, counts, received_rows = values
    aligned = over.aligned[part]
    received_sum = over.received[part]
    cls_sum = over.cls[part]
    times = geometry.times
    n_offsets = over.aligned.shape[2]  # in space; those in time follow each other
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
            # Mean mass that each key receives.
            for k in range(n_tokens):
                row[k] = mass[k] / n_cells
            for k in range(n):
                prefix_mass += mass[k] / n_cells
            for k in range(n, n_tokens):
                cells_mass += mean[k]
            if valid[image]:
                # Each image has total mass 1 in `aligned`.
                weight = 1.0 / max(n_queries, 1)
                for k in range(offsets.shape[2]):
                    aligned[head, k % n_offsets] += weight * offsets[image, head, k]
                if over.in_time.shape[0]:
                    for k in range(offsets.shape[2]):
                        over.in_time[part, head, k // n_offsets] += (
                            weight * offsets[image, head, k]
                        )
                for k in range(n_tokens):
                    received_sum[head, k] += row[k]
                if cls_rows.shape[1]:
                    for k in range(n_tokens):
                        cls_sum[head, k] += cls_rows[image, head, k]
            # The key that receives most, the first of equal ones.
            largest = mass[0] / n_cells
            argmax = 0
            has_nan = False
            for k in range(n_tokens):
                if mass[k] / n_cells > largest:
                    largest = mass[k] / n_cells
                    argmax = k
                has_nan |= mass[k] != mass[k]
            # H(mean_q A') and the mutual information [H(mean_q A') - mean_q H(A'_q)], which is
            # divided by sqrt(ln Q H(mean_q A')).
            key_entropy = 0.0
            for k in range(n, n_tokens):
                fraction = mean[k] / cells_mass
                key_entropy += 0.0 if fraction == 0.0 else -fraction * math.log(fraction)
            shared = key_entropy - within / max(n_queries, 1)
            squared_norm = math.log(n_queries) * key_entropy if n_queries > 1 else 0.0
            per_query = 1.0 / n_queries if n_queries else math.nan
            distance = reach * per_query
            unit = distance * unit_per_px if unit_per_px else reach_unit * per_query
            numbers[0, image, head] = entropy / n_cells
            numbers[1, image, head] = distance
            numbers[2, image, head] = reach_raw / n_cells
            numbers[3, image, head] = unit
            numbers[4, image, head] = prefix_mass
            numbers[5, image, head] = std / n_cells
            numbers[6, image, head] = math.nan if has_nan else largest
            if squared_norm == 0.0:
                numbers[7, image, head] = math.nan
            else:
                # Rounding may take the information below 0.
                shared = 0.0 if shared < 0.0 else shared
                numbers[7, image, head] = shared / math.sqrt(squared_norm)
            if numbers.shape[0] > 8:  # clips, `IN_TIME`
                time_distance = same_time = 0.0
                for k in range(offsets.shape[2]):
                    time_distance += abs(k // n_offsets - last) * offsets[image, head, k]
                for k in range(last * n_offsets, times * n_offsets):
                    same_time += offsets[image, head, k]
                numbers[8, image, head] = (
                    time_distance * per_query * geometry.stride_frames
                )
                numbers[9, image, head] = same_time * per_query
            counts[0, image, head] = n_queries
            counts[1, image, head] = -1 if has_nan else argmax


class CpuPasses:
    """Fills the summaries of images from their scores, with the interface of `DevicePasses`.

    It holds each thread's buffers: the scores of one image, and A.

    Args:
        layout: of the tokens.
        grid: rows and columns of the layout's grid.
        apart: distances between its cells.
    """

    pairs_dtype = torch.float64

    def __init__(
        self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances
    ) -> None:
        times = layout.frames or 1
        unit_per_px = apart.unit_per_px or 0.0
        unit = _padded_rows(apart.unit.repeat(1, times))
        if unit_per_px:
            unit = unit[:0]  # follows from the distance in pixels
        self._geometry = TokenPositions(
            n_prefix=layout.n_prefix,
            grid=grid,
            times=times,
            stride_frames=layout.stride_frames or 1.0,
            cls=-1 if layout.cls is None else layout.cls,
            px=_padded_rows(apart.px.repeat(1, times)),
            unit=unit,
            unit_per_px=unit_per_px,
        )
        self._buffers = Buffers(torch.device("cpu"))

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Return the shape of the sums over images for `aligned`."""
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
        """Fill the rows of all images, and the sums over them, as `DevicePasses.reduce`.

        `out` also has `HeadSums`, and spread (batch, tokens). n_threads: how many process parts,
        and how many share an image.
        """
        arrays: Any = {name: tensor.numpy() for name, tensor in out.items()}
        head_sums = HeadSums(*(arrays[name] for name in HeadSums._fields))
        common = SharedValues(
            head_mean=arrays["head_mean"],
            spread=arrays["spread"],
            cls_rows=arrays.get("cls_rows", NO_CLS),
        )
        n_parts = len(bounds) - 1
        # By part, then by head.
        pairs = sums["pairs"].numpy().reshape(n_parts, call.n_heads, -1)
        received = sums["received_rows"].numpy()
        over = ImageSums(
            aligned=pairs,
            in_time=sums["in_time"].numpy() if "in_time" in sums else NO_TIMES,
            received=received,
            # Without a class token nothing is added to it.
            cls=sums["cls_rows"].numpy() if "cls_rows" in sums else received,
        )
        counted = np.ones(call.n_images, np.bool_) if valid is None else valid.numpy()
        head_values = HeadValues(*(arrays[name] for name in HeadValues._fields))

        n = self._geometry.n_prefix
        n_tokens = call.n_tokens

        def reduce_parts(thread: int, parts: range) -> None:
            """Fill the rows and sums of some parts, with one thread's buffers."""
            width = padded(n) + padded(n_tokens - n)  # as `sum_heads` fills A of an image
            a = self._buffers.get(f"a {thread}", call.n_heads, n_tokens, width)
            shape = 1, call.n_heads, n_tokens, n_tokens
            score_buffer = self._buffers.get(f"scores {thread}", *shape)
            for part in parts:
                images = bounds[part], bounds[part + 1]
                for image in range(*images):
                    scores = call.scores(slice(image, image + 1), out=score_buffer)
                    flat_scores = scores.numpy().reshape(-1)
                    self._sum_image(
                        flat_scores,
                        image=image,
                        a=a.numpy(),
                        head_sums=head_sums,
                        common=common,
                        n_threads=n_threads[1],
                    )
                    if "full" in out:
                        # Without the padding between the prefix and the grid.
                        grid = a[..., padded(n) : padded(n) + n_tokens - n]
                        out["full"][image, ..., :n] = a[..., :n]
                        out["full"][image, ..., n:] = grid
                fill_head_values(
                    images=images,
                    geometry=self._geometry,
                    valid=counted,
                    head_sums=head_sums,
                    cls_rows=common.cls_rows,
                    values=head_values,
                    over=over,
                    part=part,
                )

        run_split(reduce_parts, n_parts, n_threads[0])

    def _sum_image(
        self,
        scores: Float32,
        *,
        image: int,
        a: Float32,
        head_sums: HeadSums,
        common: SharedValues,
        n_threads: int,
    ) -> None:
        """Fill A of an image and its sums, on some threads: first by head, then by query.

        Args:
            scores: (heads * tokens * tokens,) before the softmax, flat.
            image: its index in the batch.
            a: (heads, tokens, width), filled with their softmax; width: keys, padded.
            head_sums: of the whole batch; the entries of `image` are filled.
            common: of the whole batch; the entries of `image` are filled.
            n_threads: threads that share the image.
        """
        geometry = self._geometry

        def work_on_heads(_: int, heads: range) -> None:
            """Fill A and its sums of some heads."""
            sum_heads(scores, geometry, image, (heads.start, heads.stop), a, head_sums)

        def work_on_queries(_: int, queries: range) -> None:
            """Fill the values of some queries, which need all heads' A."""
            sum_queries(a, geometry, (queries.start, queries.stop), image, common)

        run_split(work_on_heads, len(a), min(n_threads, len(a)))
        run_split(work_on_queries, a.shape[1], min(n_threads, a.shape[1]))

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `HeadSums`, float64: what `reduce` needs in `out` for itself."""
        gh, gw = self._geometry.grid
        times = self._geometry.times
        n_tokens = self._geometry.n_prefix + times * gh * gw
        n_offsets = (2 * times - 1) * (2 * gh - 1) * (2 * gw - 1)
        return {
            "totals": (n_images, n_heads, len(TOTALS)),
            "received": (n_images, n_heads, n_tokens),
            "renormalised": (n_images, n_heads, n_tokens),
            "offsets": (n_images, n_heads, n_offsets),
        }

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """Complete `out` once it holds all images; return `aligned`, which `pairs` is already."""
        torch.mean(out["spread"][:, self._geometry.n_prefix :], -1, out=out["head_std"])
        return pairs


def _padded_rows(x: Tensor) -> Float32:
    """Return rows padded with zeros to whole vectors, flattened."""
    n_zeros = padded(x.shape[1]) - x.shape[1]
    return torch.nn.functional.pad(x.float(), (0, n_zeros)).flatten().numpy()
