"""The computation of attention summaries (see summary.py for what they are)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vitsee_core.reductions.grid_distances import distances, sum_by_offset, unit_step
from vitsee_core.reductions.matrix_passes import (
    by_caches,
    row_entropies,
    shared_information,
    spread_over_heads,
    spread_over_queries,
    sum_in_order,
)
from vitsee_core.reductions.summary import PER_IMAGE, AttentionScores, AttentionSummary
from vitsee_core.reductions.threads import run_split

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Scores of one block of images. On a CPU a block and its probabilities stay in cache over all the
# passes; on a GPU blocks only bound the memory.
BLOCK_BYTES_CPU = 2 << 20
BLOCK_BYTES_GPU = 256 << 20
# Where one image's scores are larger, all threads share every pass: one image is enough work for
# them, and one buffer per thread would take too much memory.
THREAD_BYTES = 16 << 20
# A batch's sums are added up from this many parts, whatever the number of threads.
MAX_PARTS = 16


class AttentionReducer:
    """Summarises the attention of blocks that share a token layout.

    Keeps their constants and its buffers: for each thread twice the scores of a block of images
    (2 MiB, on a GPU 256 MiB, or one image if that is more; `block_bytes` sets it), and those of
    up to 16 images (one if they are large, or on a GPU). Every image is reduced separately: on a
    CPU its values do not depend on blocks, batches or threads, bit for bit, nor do the sums on
    threads; a GPU's libraries choose kernels by the number of images, which moves last digits.

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
        on_cpu = self.device.type == "cpu"
        self._block_bytes = block_bytes or (BLOCK_BYTES_CPU if on_cpu else BLOCK_BYTES_GPU)
        self._sum_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._buffers: dict[str, Tensor] = {}
        px = distances(self.grid, layout.stride_px)
        unit = distances(self.grid, unit_step(self.grid))
        # Where both are equal up to a factor (square grids of square cells) one pass is enough.
        ratio = float(unit.max() / px.max()) if px.max() > 0 else 1.0
        self._unit_per_px = ratio if torch.allclose(unit, px * ratio, rtol=1e-12) else None
        self._px, self._unit = self._widened(px), self._widened(unit)

    def _widened(self, distance: Tensor) -> Tensor:
        """Distances by spatial query and any key, 0 for prefix keys: whole rows are contiguous."""
        n = self.layout.n_prefix
        return torch.nn.functional.pad(distance, (n, 0)).float().to(self.device)

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
        n, n_tokens = self.layout.n_prefix, call.n_tokens
        if n_tokens != self.layout.n_tokens:
            raise ValueError(f"attention over {n_tokens} tokens; layout: {self.layout.n_tokens}")
        # Only a host tensor can be read without waiting for the device.
        all_valid = valid.device.type == "cpu" and bool(valid.all())
        kept = None if all_valid else valid.to(self.device)
        n_parts, n_threads = self._split(call)
        out = self._empty(call.n_images, call.n_heads)
        sums = self._empty_sums(n_parts, call.n_heads)
        bounds = [call.n_images * part // n_parts for part in range(n_parts + 1)]

        def reduce_parts(thread: int, parts: range) -> None:
            for part in parts:
                images = range(bounds[part], bounds[part + 1])
                here = {name: tensor[part] for name, tensor in sums.items()}
                self._reduce_part(call, images, kept, out, here, thread)

        def sum_pairs(_: int, heads: range) -> None:
            total = sum_in_order(sums["pairs"][:, heads.start : heads.stop, n:])
            total = total[..., n:].to(self._sum_dtype)
            out["aligned"][heads.start : heads.stop] = sum_by_offset(total, self.grid)

        run_split(reduce_parts, n_parts, n_threads)
        run_split(sum_pairs, call.n_heads, min(n_threads, call.n_heads))
        return AttentionSummary(
            **{name: out[name] for name in (*PER_IMAGE, "aligned")},
            received=sum_in_order(sums["received_rows"]),
            cls_map=sum_in_order(sums["cls_rows"]) if "cls_rows" in sums else None,
            head_mean=out.get("head_mean"),
            received_rows=out["received_rows"] if self.rows else None,
            cls_rows=out.get("cls_rows") if self.rows else None,
            full=out.get("full"),
        )

    def _empty(self, n_images: int, n_heads: int) -> dict[str, Tensor]:
        """Buffers for the results per image, and for `aligned`."""
        t, (gh, gw) = self.layout.n_tokens, self.grid
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_IMAGE, (n_images, n_heads))
        shapes["head_std"] = (n_images,)
        shapes["aligned"] = (n_heads, 2 * gh - 1, 2 * gw - 1)
        shapes["received_rows"] = (n_images, n_heads, t)
        if self.layout.cls is not None:
            shapes["cls_rows"] = (n_images, n_heads, t)
        if self.rollout:
            shapes["head_mean"] = (n_images, t, t)
        if self.full:
            shapes["full"] = (n_images, n_heads, t, t)
        whole = dict.fromkeys(("n_queries", "received_argmax"), torch.int32)
        dtypes = {**whole, "full": torch.float16, "aligned": self._sum_dtype}
        return {
            name: torch.empty(shape, dtype=dtypes.get(name, torch.float32), device=self.device)
            for name, shape in shapes.items()
        }

    def _empty_sums(self, n_parts: int, n_heads: int) -> dict[str, Tensor]:
        """Buffers for each part's sums over its images, by name."""
        t = self.layout.n_tokens
        names = ["received_rows"] if self.layout.cls is None else ["received_rows", "cls_rows"]
        shape = (n_parts, n_heads, t)
        sums = {
            name: torch.empty(shape, dtype=self._sum_dtype, device=self.device) for name in names
        }
        return {"pairs": self._buffer("pairs", *shape, t), **sums}

    def _split(self, call: AttentionScores) -> tuple[int, int]:
        """The number of parts (runs of images with sums of their own) and of threads."""
        image_bytes = 4 * call.n_heads * call.n_tokens**2
        if self.device.type != "cpu" or image_bytes > THREAD_BYTES:
            return 1, 1
        n_parts = max(1, min(MAX_PARTS, call.n_images * image_bytes // self._block_bytes))
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
        if not part:
            sums["pairs"].zero_()
        block = max(1, self._block_bytes // (4 * call.n_heads * call.n_tokens**2))
        for first in range(part.start, part.stop, block):
            images = slice(first, min(first + block, part.stop))
            shape = (images.stop - first, call.n_heads, call.n_tokens, call.n_tokens)
            scores = call.scores(images, out=self._buffer(f"scores {thread}", *shape))
            a = torch.softmax(scores, -1, out=self._buffer(f"probabilities {thread}", *shape))
            here = {name: out[name][images] for name in out if name != "aligned"}
            share = self._reduce_images(a, scores, here)
            kept = None if valid is None else valid[images]
            self._add_pairs(sums["pairs"], a, scores, share, kept, fresh=first == part.start)
        for name in sums.keys() - {"pairs"}:
            rows = out[name][part.start : part.stop]
            if valid is not None:
                rows = rows.masked_fill(~valid[part.start : part.stop, None, None], 0.0)
            torch.sum(rows, 0, dtype=self._sum_dtype, out=sums[name])

    def _reduce_images(self, a: Tensor, scores: Tensor, here: dict[str, Tensor]) -> Tensor:
        """Fills the rows of a block's images; returns each query's weight in `aligned`.

        `scores` is overwritten: the passes over A share it as scratch memory.
        """
        n = self.layout.n_prefix
        rows, scratch = a[:, :, n:], scores[:, :, n:]
        mass = rows[..., n:].sum(-1)
        # Below the smallest normal number it depends on the device whether a value is zero.
        counted = mass >= torch.finfo(mass.dtype).tiny
        n_queries = counted.sum(-1)
        here["n_queries"].copy_(n_queries)
        share = torch.where(counted, 1.0 / mass, 0.0) / n_queries.clamp(min=1).unsqueeze(-1)
        entropy, spatial = row_entropies(rows, scratch, mass)
        here["entropy"].copy_(entropy.mean(-1))
        self._distances(rows, scratch, share, n_queries, here)
        renormalised = self._received(rows, share, here)
        spatial = torch.where(counted, spatial, 0.0).sum(-1) / n_queries
        here["qk_nmi"].copy_(shared_information(renormalised, spatial, n_queries))
        self._spreads(a, scores, here)
        if self.layout.cls is not None:
            here["cls_rows"].copy_(a[:, :, self.layout.cls])
        if self.full:
            here["full"].copy_(a)
        return share

    def _add_pairs(
        self,
        pairs: Tensor,
        a: Tensor,
        scratch: Tensor,
        share: Tensor,
        valid: Tensor | None,
        fresh: bool,
    ) -> None:
        """Adds the renormalised rows of the valid images (None: of all) to `pairs`.

        One sum by offset per batch follows, instead of one per image. `fresh`: `pairs` is
        uninitialised and is not read.
        """
        n = self.layout.n_prefix
        if valid is not None:
            # Selected, not multiplied by 0: an invalid image may hold NaN.
            a = a.masked_fill_(~valid[:, None, None, None], 0.0)
            share = share.masked_fill(~valid[:, None, None], 0.0)
        if by_caches(a):
            for image, weight in zip(a, share.unsqueeze(-1), strict=True):
                if fresh:
                    torch.mul(image[:, n:], weight, out=pairs[:, n:])
                else:
                    pairs[:, n:].addcmul_(image[:, n:], weight)
                fresh = False
        else:
            weighted = torch.mul(a[:, :, n:], share.unsqueeze(-1), out=scratch[:, :, n:]).sum(0)
            pairs[:, n:] = weighted if fresh else pairs[:, n:] + weighted

    def _distances(
        self,
        rows: Tensor,
        scratch: Tensor,
        share: Tensor,
        n_queries: Tensor,
        here: dict[str, Tensor],
    ) -> None:
        """Distances; `share` (b, H, N) is each query's weight in the renormalised mean."""
        undefined = n_queries == 0
        reach = torch.mul(rows, self._px, out=scratch).sum(-1)
        here["distance_px_raw"].copy_(reach.mean(-1))
        distance = (reach * share).sum(-1).masked_fill(undefined, torch.nan)
        here["distance_px"].copy_(distance)
        if self._unit_per_px is not None:
            here["distance_unit"].copy_(distance * self._unit_per_px)
        else:
            reach = torch.mul(rows, self._unit, out=scratch).sum(-1)
            here["distance_unit"].copy_((reach * share).sum(-1).masked_fill(undefined, torch.nan))

    def _received(self, rows: Tensor, share: Tensor, here: dict[str, Tensor]) -> Tensor:
        """The mass that keys receive, and its maximum; returns the mean of the renormalised rows
        over spatial keys, (b, H, N), NaN where there is none."""
        n, (n_images, n_heads, n_queries, n_keys) = self.layout.n_prefix, rows.shape
        received = torch.mean(rows, 2, out=here["received_rows"])
        here["prefix_mass"].copy_(received[..., :n].sum(-1))
        place = received.argmax(-1, keepdim=True)  # the first of equal ones
        most = received.gather(-1, place).squeeze(-1)
        here["received_max"].copy_(most)
        here["received_argmax"].copy_(torch.where(most.isnan(), -1, place.squeeze(-1)))
        # A product with one row of weights, made anew a distribution: its sum over hundreds of
        # queries rounds by more than that of `mean`.
        mean = rows.new_empty(n_images * n_heads, 1, n_keys)
        torch.bmm(share.view(-1, 1, n_queries), rows.flatten(0, 1), out=mean)
        mean = mean.view(n_images, n_heads, n_keys)[..., n:]
        return mean / mean.sum(-1, keepdim=True)

    def _spreads(self, a: Tensor, scratch: Tensor, here: dict[str, Tensor]) -> None:
        """Standard deviations over queries and over heads, and the head mean."""
        n = self.layout.n_prefix
        rows = a[:, :, n:]
        std = spread_over_queries(rows, here["received_rows"], scratch[:, :, n:])
        here["query_std"].copy_(std[..., n:].mean(-1))
        mean = torch.mean(a, 1, out=here["head_mean"]) if self.rollout else a.mean(1)
        std = spread_over_heads(rows, mean[:, n:], scratch[:, :, n:])
        here["head_std"].copy_(std[..., n:].mean(-1).mean(-1))
