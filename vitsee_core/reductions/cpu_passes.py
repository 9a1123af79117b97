"""The attention of some images on a CPU: compiled loops, as `cpu_kernels` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vitsee_core.reductions.cpu_kernels import reduce_heads, reduce_queries
from vitsee_core.reductions.grid_distances import GridDistances
from vitsee_core.threads import run_split

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout


class CpuPasses:
    """Fills the summaries of images from their A; see `DevicePasses`, whose methods these are."""

    # Scores of one block of images: with their probabilities they stay in a core's own cache.
    block_bytes = 1 << 20
    pairs_dtype = torch.float64

    def __init__(self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances) -> None:
        self._n, self._grid = layout.n_prefix, grid
        self._px, self._unit = (x.float().numpy() for x in (apart.px, apart.unit))
        self._unit_per_px = apart.unit_per_px or 0.0

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Of what is summed over images for `aligned`."""
        gh, gw = self._grid
        return n_heads, 2 * gh - 1, 2 * gw - 1

    def reduce(
        self,
        a: Tensor,
        scores: Tensor,
        start: int,
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        pairs: Tensor,
        n_threads: int,
    ) -> None:
        """As `DevicePasses.reduce`; the threads take heads, then queries."""
        rows, logits, counted = a.numpy(), scores.numpy(), out["valid"].numpy()
        numbers, counts = out["numbers"].numpy(), out["counts"].numpy()
        received, aligned = out["received_rows"].numpy(), pairs.numpy()
        mean, spread = out["head_mean"].numpy(), out["spread"].numpy()

        def some_heads(_: int, heads: range) -> None:
            reduce_heads(
                *(rows, logits, self._n, self._grid, self._px, self._unit, self._unit_per_px),
                *((heads.start, heads.stop), start, counted, numbers, counts, received, aligned),
            )

        def some_queries(_: int, queries: range) -> None:
            reduce_queries(rows, self._n, (queries.start, queries.stop), start, mean, spread)

        run_split(some_heads, a.shape[1], min(n_threads, a.shape[1]))
        run_split(some_queries, a.shape[2], min(n_threads, a.shape[2]))

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """As `DevicePasses.finish`."""
        torch.mean(out["spread"][:, self._n :], -1, out=out["head_std"])
        return pairs
