"""Attention summaries of some images on a CPU, by compiled loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitsee_core.reductions.buffers import Buffers
from vitsee_core.reductions.cpu_arrays import (
    Geometry,
    HeadSums,
    InCommon,
    OfHeads,
    OverImages,
)
from vitsee_core.reductions.cpu_numbers import numbers_of
from vitsee_core.reductions.cpu_sums import TOTALS, padded, sum_heads, sum_queries
from vitsee_core.reductions.grid_distances import GridDistances
from vitsee_core.reductions.summary import AttentionScores
from vitsee_core.runtime.threads import run_split
from vitsee_core.types import Float32

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

NO_CLS = np.empty((0, 0, 0), np.float32)
NO_TIMES = np.empty((0, 0, 0))


class CpuPasses:
    """Fills the summaries of images from their scores, with the interface of `DevicePasses`. Holds
    each thread's buffers: the scores of one image, and A."""

    pairs_dtype = torch.float64

    def __init__(self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances) -> None:
        times = layout.frames or 1
        px, unit = (_padded_rows(x.repeat(1, times)) for x in (apart.px, apart.unit))
        unit_per_px = apart.unit_per_px or 0.0
        cls = -1 if layout.cls is None else layout.cls
        unit = unit[:0] if unit_per_px else unit
        in_time = times, layout.stride_frames or 1.0
        self._geometry = Geometry(layout.n_prefix, grid, *in_time, cls, px, unit, unit_per_px)
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
        common = InCommon(arrays["head_mean"], arrays["spread"], arrays.get("cls_rows", NO_CLS))
        n_parts = len(bounds) - 1
        # By part, then by head.
        pairs = sums["pairs"].numpy().reshape(n_parts, call.n_heads, -1)
        received = sums["received_rows"].numpy()
        of_cls = sums.get("cls_rows", sums["received_rows"]).numpy()
        in_time = sums["in_time"].numpy() if "in_time" in sums else NO_TIMES
        over = OverImages(pairs, in_time, received, of_cls)
        counted = np.ones(call.n_images, np.bool_) if valid is None else valid.numpy()
        of_heads = OfHeads(*(arrays[name] for name in OfHeads._fields))

        def some_parts(thread: int, parts: range) -> None:
            a = self._room(call, thread)
            for part in parts:
                images = bounds[part], bounds[part + 1]
                for image in range(*images):
                    given = self._given(call, image, thread)
                    self._sum(given, image, a, head_sums, common, n_threads[1])
                    if "full" in out:
                        self._keep(a, out["full"][image])
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
        a, geometry = room.numpy(), self._geometry

        def some_heads(_: int, heads: range) -> None:
            sum_heads(given, geometry, image, (heads.start, heads.stop), a, sums)

        def some_queries(_: int, queries: range) -> None:
            sum_queries(a, geometry, (queries.start, queries.stop), image, common)

        run_split(some_heads, len(a), min(n_threads, len(a)))
        run_split(some_queries, a.shape[1], min(n_threads, a.shape[1]))

    def _keep(self, a: Tensor, out: Tensor) -> None:
        """Copy A of an image without the padding between the prefix and the grid."""
        n = self._geometry.n_prefix
        out[..., :n] = a[..., :n]
        out[..., n:] = a[..., padded(n) : padded(n) + out.shape[-1] - n]

    def _room(self, call: AttentionScores, thread: int) -> Tensor:
        """Memory for A of an image, as `sum_heads` fills it."""
        width = padded(self._geometry.n_prefix) + padded(call.n_tokens - self._geometry.n_prefix)
        return self._buffers.get(f"a {thread}", call.n_heads, call.n_tokens, width)

    def _given(self, call: AttentionScores, image: int, thread: int) -> Float32:
        """The scores of an image."""
        shape = 1, call.n_heads, call.n_tokens, call.n_tokens
        room = self._buffers.get(f"scores {thread}", *shape)
        return call.scores(slice(image, image + 1), out=room).numpy().reshape(-1)

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Shapes of `HeadSums`, float64: what `reduce` needs in `out` for itself."""
        (gh, gw), times = self._geometry.grid, self._geometry.times
        n_tokens = self._geometry.n_prefix + times * gh * gw
        last = len(TOTALS), n_tokens, n_tokens, (2 * times - 1) * (2 * gh - 1) * (2 * gw - 1)
        of = zip(HeadSums._fields, last, strict=True)
        return {name: (n_images, n_heads, n) for name, n in of}

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        torch.mean(out["spread"][:, self._geometry.n_prefix :], -1, out=out["head_std"])
        return pairs


def _padded_rows(x: Tensor) -> Float32:
    """Rows padded with zeros to whole vectors, flattened."""
    more = padded(x.shape[1]) - x.shape[1]
    return torch.nn.functional.pad(x.float(), (0, more)).flatten().numpy()
