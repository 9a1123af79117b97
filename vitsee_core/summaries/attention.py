"""Attention summaries as summary.py defines them, and attention rollout.

Rollout is how much of every input token reaches the class token through all blocks. Source: Abnar &
Zuidema 2020; used by Dosovitskiy et al. 2021 (Figs. 6 and 13), whose text mentions the averaging
over heads and the recursive product, but not the residual term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitsee_core.runtime.device import no_autocast
from vitsee_core.summaries.cpu_passes import COUNTS, IN_TIME, NUMBERS, CpuPasses
from vitsee_core.summaries.device_passes import BLOCK_BYTES, DevicePasses
from vitsee_core.summaries.summary import (
    AttentionScores,
    AttentionSummary,
    grid_distances,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Where one image's scores are larger, all threads share it: one image is enough work for them, and
# one buffer per thread would take too much memory.
THREAD_BYTES = 16 << 20
# A batch's sums have at most this many parts, whatever the number of threads.
MAX_PARTS = 16
# Least scores of a part: a fraction of a millisecond.
PART_BYTES = 512 << 10


def is_cpu(device: torch.device) -> bool:
    """Whether compiled loops do the work, not a GPU's kernels."""
    return device.type == "cpu"


class AttentionReducer:
    """Summarises the attention of blocks that share a token layout.

    Holds their constants and its buffers: on a CPU for each thread A of one image, and its scores
    if they are not a plain product; on a GPU twice the scores of a block of images (`block_bytes`,
    or one image if that is more). Every image is reduced separately: on a CPU its values are
    bitwise independent of blocks, batches and threads, and the sums of threads; a GPU's libraries
    choose kernels by the number of images, which affects last digits.

    `rollout` adds head means, `rows` the rows of every image, `full` A itself. Raises ValueError if
    the layout has no grid or no stride: callers select blocks that do.
    """

    def __init__(
        self,
        layout: TokenLayout,
        device: torch.device | str,
        *,
        rollout: bool = True,
        rows: bool = False,
        full: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        if layout.grid is None or layout.stride_px is None:
            raise ValueError(
                "attention is summarised on a grid whose stride in pixels is known"
            )
        self.layout = layout
        self.grid = layout.grid
        self.device = torch.device(device)
        self.rollout = rollout
        self.rows = rows
        self.full = full
        self._numbers = NUMBERS if layout.frames is None else (*NUMBERS, *IN_TIME)
        apart = grid_distances(self.grid, layout.stride_px)
        self._passes = (
            CpuPasses(layout, self.grid, apart)
            if is_cpu(self.device)
            else DevicePasses(layout, self.grid, apart, self.device, block_bytes)
        )
        self._sum_dtype = torch.float32 if self.device.type == "mps" else torch.float64

    @torch.no_grad()
    def reduce(self, call: AttentionScores, valid: Tensor) -> AttentionSummary:
        """Return the summary of one call; `valid` (images,) bool: which images enter the sums.

        Rows of an invalid image contain whatever the model computed from its pixels, including NaN.
        With `valid` on the host a GPU skips the pass that excludes invalid images. The host never
        waits for the device.

        Raises ValueError if the call's tokens are not the layout's.
        """
        n_tokens = call.n_tokens
        if n_tokens != self.layout.n_tokens:
            raise ValueError(
                f"attention over {n_tokens} tokens; layout: {self.layout.n_tokens}"
            )
        kept = self._mask(valid)
        n_parts, n_threads, n_sharing = self._split(call)
        out = self._empty(call.n_images, call.n_heads)
        sums = self._no_sums(n_parts, call.n_heads)
        bounds = [call.n_images * part // n_parts for part in range(n_parts + 1)]
        self._passes.reduce(call, bounds, kept, out, sums, (n_threads, n_sharing))
        # Always in the same order: bitwise equal whatever else runs at the same time.
        total = {}
        for name, sums_of_parts in sums.items():
            if len(sums_of_parts) == 1:
                total[name] = sums_of_parts[0]
            else:
                added = np.add.reduce(sums_of_parts.numpy(), axis=0)
                total[name] = torch.from_numpy(added)
        return AttentionSummary(
            **dict(zip(self._numbers, out["numbers"], strict=True)),
            **dict(zip(COUNTS, out["counts"], strict=True)),
            head_std=out["head_std"],
            aligned=self._passes.finish(out, total["pairs"]),
            received=total["received_rows"],
            cls_map=total.get("cls_rows"),
            head_mean=out["head_mean"] if self.rollout else None,
            received_rows=out["received_rows"] if self.rows else None,
            cls_rows=out.get("cls_rows") if self.rows else None,
            full=out.get("full"),
            aligned_frames=total.get("in_time"),
        )

    def _mask(self, valid: Tensor) -> Tensor | None:
        """Return which images count, on the reducing device; on a GPU None if all are known to."""
        if is_cpu(self.device):
            return valid.cpu()
        # Only a host tensor can be read without waiting for the device.
        all_valid = valid.device.type == "cpu" and bool(valid.all())
        return None if all_valid else valid.to(self.device)

    def _empty(self, n_images: int, n_heads: int) -> dict[str, Tensor]:
        """Return memory for the results of every image, by name, and for copies of A."""
        t = self.layout.n_tokens
        shapes: dict[str, tuple[int, ...]] = {
            "numbers": (len(self._numbers), n_images, n_heads),
            "counts": (len(COUNTS), n_images, n_heads),
            "head_std": (n_images,),
            "head_mean": (n_images, t, t),
            "spread": (n_images, t),
            "received_rows": (n_images, n_heads, t),
        }
        if self.layout.cls is not None:
            shapes["cls_rows"] = (n_images, n_heads, t)
        if self.full:
            shapes["full"] = (n_images, n_heads, t, t)
        own = self._passes.shapes(n_images, n_heads)
        dtypes = {
            "counts": torch.int32,
            "full": torch.float16,
            **dict.fromkeys(own, torch.float64),
        }
        shapes |= own
        return {
            name: torch.empty(
                shape, dtype=dtypes.get(name, torch.float32), device=self.device
            )
            for name, shape in shapes.items()
        }

    def _no_sums(self, n_parts: int, n_heads: int) -> dict[str, Tensor]:
        """Return zeros for the sums of each part over its images, by name."""
        names = ["received_rows"]
        if self.layout.cls is not None:
            names.append("cls_rows")
        if self.layout.frames is not None:
            names.append("in_time")
        dtypes = {"pairs": self._passes.pairs_dtype} | dict.fromkeys(
            names, self._sum_dtype
        )
        in_time = n_heads, 2 * (self.layout.frames or 1) - 1
        shapes = {"pairs": self._passes.pairs_shape(n_heads), "in_time": in_time}
        rows = n_heads, self.layout.n_tokens
        return {
            name: torch.zeros(
                (n_parts, *shapes.get(name, rows)), dtype=dtype, device=self.device
            )
            for name, dtype in dtypes.items()
        }

    def _split(self, call: AttentionScores) -> tuple[int, int, int]:
        """Return the numbers of parts, of threads, and of threads that share an image.

        A part is a run of images with sums of its own; threads process one part after the other.
        """
        image_bytes = 4 * call.n_heads * call.n_tokens**2
        if not is_cpu(self.device) or image_bytes > THREAD_BYTES:
            # Two even for one thread: shared images have separate loops.
            return 1, 1, max(2, torch.get_num_threads())
        n_parts = max(1, min(MAX_PARTS, call.n_images * image_bytes // PART_BYTES))
        n_parts = min(n_parts, max(1, call.n_images))
        return n_parts, min(torch.get_num_threads(), n_parts), 1


def rollout(
    head_means: Sequence[Tensor], layout: TokenLayout, residual: bool = True
) -> Tensor:
    """Return the class token's row of A_L ... A_1 with A = 0.5 (mean over heads) + 0.5 I.

    `head_means`: one (images, tokens, tokens) tensor per block, first block first. Rows are
    renormalised, so a result sums to 1 over its tokens; `residual=False` omits the identity.
    Without a class token the row is the mean over the spatial queries. Returns (images, tokens),
    prefix tokens included.

    Only one row of the product is needed, so a row is propagated from the last block to the first:
    T^2 multiplications per block instead of T^3 for the full product.
    """
    if not head_means:
        raise ValueError("rollout needs the head means of at least one block")
    last = head_means[-1]
    with no_autocast(last.device):
        row = torch.zeros(
            last.shape[0], 1, last.shape[-1], dtype=last.dtype, device=last.device
        )
        if layout.cls is not None:
            row[..., layout.cls] = 1.0
        else:
            row[..., layout.n_prefix :] = 1.0 / (layout.n_tokens - layout.n_prefix)
        for mean in reversed(head_means):
            total = mean.sum(-1).unsqueeze(1)
            if residual:
                # (A + I) / (its row sum): the identity is added to the product, not to the matrix.
                row = row / (total + 1.0)
                row = torch.baddbmm(row, row, mean)
            else:
                row = torch.bmm(row / total, mean)
        return row.squeeze(1)
