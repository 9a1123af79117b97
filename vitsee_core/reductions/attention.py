"""The computation of attention summaries (see summary.py for what they are)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vitsee_core.reductions.cpu_kernels import COUNTS, NUMBERS
from vitsee_core.reductions.cpu_passes import CpuPasses
from vitsee_core.reductions.device_passes import DevicePasses
from vitsee_core.reductions.grid_distances import grid_distances
from vitsee_core.reductions.summary import AttentionScores, AttentionSummary
from vitsee_core.threads import run_split

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Where one image's scores are larger, all threads share it: one image is enough work for them, and
# one buffer per thread would take too much memory.
THREAD_BYTES = 16 << 20
# A batch's sums are added up from this many parts at most, whatever the number of threads.
MAX_PARTS = 16
# Scores of a part at least: a fraction of a millisecond.
PART_BYTES = 256 << 10


def is_cpu(device: torch.device) -> bool:
    """Whether compiled loops do the work, and not a GPU's kernels."""
    return device.type == "cpu"


class AttentionReducer:
    """Summarises the attention of blocks that share a token layout.

    Keeps their constants and its buffers: for each thread twice the scores of a block of images
    (1 MiB, on a GPU 256 MiB, or one image if that is more; `block_bytes` sets it). Every image is
    reduced separately: on a CPU its values do not depend on blocks, batches or threads, bit for
    bit, nor do the sums on threads; a GPU's libraries choose kernels by the number of images, which
    moves last digits.

    `rollout` adds head means, `rows` the rows of every image, `full` A itself.
    Raises ValueError if the layout has no grid or no stride: callers choose blocks that do.
    """

    def __init__(
        self,
        layout: TokenLayout,
        device: torch.device | str,
        *,
        rollout: bool = True,
        rows: bool = False,
        full: bool = False,
        block_bytes: int | None = None,
    ) -> None:
        if layout.grid is None or layout.stride_px is None:
            raise ValueError("attention is summarised on a grid whose stride in pixels is known")
        self.layout, self.grid = layout, layout.grid
        self.device = torch.device(device)
        self.rollout, self.rows, self.full = rollout, rows, full
        apart = grid_distances(self.grid, layout.stride_px)
        self._passes = (
            CpuPasses(layout, self.grid, apart)
            if is_cpu(self.device)
            else DevicePasses(layout, self.grid, apart, self.device)
        )
        self._block_bytes = block_bytes or self._passes.block_bytes
        self._sum_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._buffers: dict[str, Tensor] = {}

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """The reused buffer of that name; its contents are lost."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Allocating this much memory each time costs page faults worth a tenth of the run. An
            # inference tensor could not be written outside inference mode by a later caller.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.float32, device=self.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    @torch.no_grad()
    def reduce(self, call: AttentionScores, valid: Tensor) -> AttentionSummary:
        """The summary of one call; `valid` (images,) bool says which images enter the sums.

        Rows of an invalid image contain whatever the model computed from its pixels, NaN included.
        With `valid` on the host a GPU skips the pass that excludes invalid images. The host never
        waits for the device.

        Raises ValueError if the call's tokens are not the layout's.
        """
        n_tokens = call.n_tokens
        if n_tokens != self.layout.n_tokens:
            raise ValueError(f"attention over {n_tokens} tokens; layout: {self.layout.n_tokens}")
        # Only a host tensor can be read without waiting for the device.
        all_valid = valid.device.type == "cpu" and bool(valid.all())
        kept = None if all_valid else valid.to(self.device)
        n_parts, n_threads = self._split(call)
        out = self._empty(call.n_images, call.n_heads)
        if is_cpu(self.device):
            out["valid"] = valid
        sums = self._empty_sums(n_parts, call.n_heads)
        bounds = [call.n_images * part // n_parts for part in range(n_parts + 1)]

        def reduce_parts(thread: int, parts: range) -> None:
            for part in parts:
                images = range(bounds[part], bounds[part + 1])
                here = {name: tensor[part] for name, tensor in sums.items()}
                self._reduce_part(call, images, kept, out, here, thread)

        run_split(reduce_parts, n_parts, n_threads)
        total = {name: sum_in_order(parts) for name, parts in sums.items()}
        return AttentionSummary(
            **dict(zip(NUMBERS, out["numbers"], strict=True)),
            **dict(zip(COUNTS, out["counts"], strict=True)),
            head_std=out["head_std"],
            aligned=self._passes.finish(out, total["pairs"]),
            received=total["received_rows"],
            cls_map=total.get("cls_rows"),
            head_mean=out["head_mean"] if self.rollout else None,
            received_rows=out["received_rows"] if self.rows else None,
            cls_rows=out.get("cls_rows") if self.rows else None,
            full=out.get("full"),
        )

    def _empty(self, n_images: int, n_heads: int) -> dict[str, Tensor]:
        """Room for the results per image: what `DevicePasses.reduce` fills, and copies of A."""
        t = self.layout.n_tokens
        shapes: dict[str, tuple[int, ...]] = {
            "numbers": (len(NUMBERS), n_images, n_heads),
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
        dtypes = {"counts": torch.int32, "full": torch.float16}
        return {
            name: torch.empty(shape, dtype=dtypes.get(name, torch.float32), device=self.device)
            for name, shape in shapes.items()
        }

    def _empty_sums(self, n_parts: int, n_heads: int) -> dict[str, Tensor]:
        """Room for each part's sums over its images, by name; zeros where they are added to."""
        shape = (n_parts, n_heads, self.layout.n_tokens)
        names = ["received_rows"] if self.layout.cls is None else ["received_rows", "cls_rows"]
        sums = {
            name: torch.empty(shape, dtype=self._sum_dtype, device=self.device) for name in names
        }
        pairs = (n_parts, *self._passes.pairs_shape(n_heads))
        dtype = self._passes.pairs_dtype
        return {"pairs": torch.zeros(pairs, dtype=dtype, device=self.device), **sums}

    def _split(self, call: AttentionScores) -> tuple[int, int]:
        """The number of parts (runs of images with sums of their own) and of threads."""
        image_bytes = 4 * call.n_heads * call.n_tokens**2
        if not is_cpu(self.device) or image_bytes > THREAD_BYTES:
            return 1, 1
        part_bytes = min(PART_BYTES, self._block_bytes)
        n_parts = max(1, min(MAX_PARTS, call.n_images * image_bytes // part_bytes))
        n_parts = min(n_parts, max(1, call.n_images))
        return n_parts, min(torch.get_num_threads(), n_parts)

    def _reduce_part(
        self,
        call: AttentionScores,
        part: range,
        valid: Tensor | None,
        out: dict[str, Tensor],
        sums: dict[str, Tensor],
        thread: int,
    ) -> None:
        """Fills `out` for a run of images, and the sums over them."""
        image_bytes = 4 * call.n_heads * call.n_tokens**2
        block = max(1, self._block_bytes // image_bytes)
        n_threads = torch.get_num_threads() if image_bytes > THREAD_BYTES else 1
        for first in range(part.start, part.stop, block):
            images = slice(first, min(first + block, part.stop))
            shape = (images.stop - first, call.n_heads, call.n_tokens, call.n_tokens)
            scores = call.scores(images, out=self._buffer(f"scores {thread}", *shape))
            a = torch.softmax(scores, -1, out=self._buffer(f"probabilities {thread}", *shape))
            kept = None if valid is None else valid[images]
            self._passes.reduce(a, scores, first, kept, out, sums["pairs"], n_threads)
            if self.layout.cls is not None:
                out["cls_rows"][images] = a[:, :, self.layout.cls]
            if self.full:
                out["full"][images] = a
        for name in sums.keys() - {"pairs"}:
            rows = out[name][part.start : part.stop]
            if valid is not None:
                rows = rows.masked_fill(~valid[part.start : part.stop, None, None], 0.0)
            torch.sum(rows, 0, dtype=self._sum_dtype, out=sums[name])


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, term by term: equal bits whatever else is computed at the same
    time."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
