"""Summaries of softmax attention over token grids.

Definitions, for A (queries by keys) of one image and one head. Queries are spatial, and means go
over them: entropy = -sum_k A ln A over all keys, in nats; prefix_mass = sum of A over prefix
keys; query_std = std over queries of A[q, k], mean over spatial keys; head_std = std over heads of
A[q, k], mean over spatial queries and keys (both with n - 1, as torch.std in the code of Walmer et
al. 2023, and 0 where there is one query or one head). distance_px, distance_unit and aligned take
A over spatial keys with its rows renormalised: a query without spatial mass is left out of them,
n_queries counts the others. distance_px_raw, the class token's row and the received mass take A as
it is. A query that may attend to no key at all has no distribution: its image and head are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from vitsee_core.reductions.geometry import distances, sum_by_offset, unit_step
from vitsee_core.reductions.passes import row_entropy, spread

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Scores of one block of images. On a CPU a block and its probabilities stay in cache over all the
# passes, with enough work a pass for every thread; on a GPU blocks only bound the memory.
BLOCK_BYTES_THREAD = 2 << 20
BLOCK_BYTES_GPU = 256 << 20
PER_IMAGE = (
    "distance_px",
    "distance_px_raw",
    "distance_unit",
    "prefix_mass",
    "entropy",
    "query_std",
    "n_queries",
    "head_std",
)


class AttentionCall(Protocol):
    """One call of attention by the model, as far as it is needed here."""

    @property
    def n_images(self) -> int:
        """How many images the batch has."""
        ...

    @property
    def n_heads(self) -> int:
        """How many heads the block has."""
        ...

    @property
    def n_tokens(self) -> int:
        """How many tokens an image has, prefix included."""
        ...

    def scores(self, images: slice, out: Tensor | None = None) -> Tensor:
        """What goes into the softmax: (images, heads, tokens, tokens) float32, in `out`."""
        ...


@dataclass
class AttentionSummary:
    """One block's attention over one batch, on the model's device.

    Per image, float32 (images, heads): `distance_px`, `distance_unit` (NaN where no query has
    spatial mass), `distance_px_raw`, `prefix_mass`, `entropy`, `query_std`, and `n_queries` as
    int32; `head_std` (images,).
    Sums over the valid images, float64 where the device has it: `aligned` (heads, 2 gh - 1,
    2 gw - 1) by the offset key minus query, of total mass 1 an image; `cls_map` (heads, tokens),
    the class token's row, None without one; `received` (heads, tokens), the mean over queries.
    On request: `head_mean` (images, tokens, tokens); `cls_rows` (None without a class token) and
    `received_rows` (images, heads, tokens); `full` (images, heads, tokens, tokens) float16.
    """

    distance_px: Tensor
    distance_px_raw: Tensor
    distance_unit: Tensor
    prefix_mass: Tensor
    entropy: Tensor
    query_std: Tensor
    n_queries: Tensor
    head_std: Tensor
    aligned: Tensor
    cls_map: Tensor | None
    received: Tensor
    head_mean: Tensor | None = None
    cls_rows: Tensor | None = None
    received_rows: Tensor | None = None
    full: Tensor | None = None


class AttentionReducer:
    """Summarises the attention of blocks that share a token layout.

    Holds their constants and its buffers: twice the scores of a block of images (on a CPU 2 MiB a
    thread, on a GPU 256 MiB, or one image if that is more; `block_bytes` sets it), and once those
    of one image. Every image is reduced by itself: its values do not depend on blocks or batches,
    bit for bit, and on a CPU neither do the sums on blocks.

    `rollout` asks for head means, `rows` for the rows of every image, `full` for A itself.
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
        by_threads = BLOCK_BYTES_THREAD * torch.get_num_threads()
        on_cpu = self.device.type == "cpu"
        self._block_bytes = block_bytes or (by_threads if on_cpu else BLOCK_BYTES_GPU)
        self._sum_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._buffers: dict[str, Tensor] = {}
        px = distances(self.grid, layout.stride_px)
        unit = distances(self.grid, unit_step(self.grid))
        # Where both are the same up to a factor (square grids of square cells) one pass serves.
        ratio = float(unit.max() / px.max()) if px.max() > 0 else 1.0
        self._unit_per_px = ratio if torch.allclose(unit, px * ratio, rtol=1e-12) else None
        self._px, self._unit = self._widened(px), self._widened(unit)

    def _widened(self, distance: Tensor) -> Tensor:
        """Distances by spatial query and any key, 0 for prefix keys: whole rows are contiguous."""
        n = self.layout.n_prefix
        return torch.nn.functional.pad(distance, (n, 0)).float().to(self.device)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Reused memory of that name; what it held is lost."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            # Fresh memory of this size costs page faults worth a tenth of the run. An inference
            # tensor could not be written outside inference mode by a later caller.
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=torch.float32, device=self.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    @torch.no_grad()
    def reduce(self, call: AttentionCall, valid: Tensor) -> AttentionSummary:
        """The summary of one call; `valid` (images,) bool says which images enter the sums.

        Rows of an invalid image hold whatever the model made of its pixels, NaN included. A
        `valid` on the host spares a GPU the pass that would leave invalid images out. Nothing
        waits for the device.

        Raises ValueError if the call's tokens are not the layout's.
        """
        n_tokens, n_heads = call.n_tokens, call.n_heads
        if n_tokens != self.layout.n_tokens:
            raise ValueError(f"attention over {n_tokens} tokens; layout: {self.layout.n_tokens}")
        out = self._empty(call.n_images, n_heads)
        # Only a host tensor tells without waiting for the device.
        all_valid = valid.device.type == "cpu" and bool(valid.all())
        valid = valid.to(self.device)
        pairs = self._buffer("pairs", n_heads, n_tokens, n_tokens).zero_()
        step = max(1, self._block_bytes // (4 * n_heads * n_tokens * n_tokens))
        for start in range(0, call.n_images, step):
            images = slice(start, min(start + step, call.n_images))
            shape = (images.stop - start, n_heads, n_tokens, n_tokens)
            scores = call.scores(images, out=self._buffer("scores", *shape))
            a = torch.softmax(scores, -1, out=self._buffer("probabilities", *shape))
            here = {name: tensor[images] for name, tensor in out.items()}
            share = self._reduce_images(a, scores, here)
            self._add_pairs(pairs, a, scores, share, None if all_valid else valid[images])
        n = self.layout.n_prefix
        received, cls_rows = out["received_rows"], out.get("cls_rows")
        return AttentionSummary(
            **{name: out[name] for name in PER_IMAGE},
            aligned=sum_by_offset(pairs[:, n:, n:].to(self._sum_dtype), self.grid),
            received=self._sum_valid(received, valid),
            cls_map=None if cls_rows is None else self._sum_valid(cls_rows, valid),
            head_mean=out.get("head_mean"),
            received_rows=received if self.rows else None,
            cls_rows=cls_rows if self.rows else None,
            full=out.get("full"),
        )

    def _empty(self, n_images: int, n_heads: int) -> dict[str, Tensor]:
        """Memory for what is known image by image."""
        t = self.layout.n_tokens
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_IMAGE, (n_images, n_heads))
        shapes["head_std"] = (n_images,)
        shapes["received_rows"] = (n_images, n_heads, t)
        if self.layout.cls is not None:
            shapes["cls_rows"] = (n_images, n_heads, t)
        if self.rollout:
            shapes["head_mean"] = (n_images, t, t)
        if self.full:
            shapes["full"] = (n_images, n_heads, t, t)
        dtypes = {"n_queries": torch.int32, "full": torch.float16}
        return {
            name: torch.empty(shape, dtype=dtypes.get(name, torch.float32), device=self.device)
            for name, shape in shapes.items()
        }

    def _reduce_images(self, a: Tensor, scores: Tensor, here: dict[str, Tensor]) -> Tensor:
        """Fills the rows of a block's images; returns each query's weight in `aligned`.

        `scores` is overwritten: the passes over A share it as scratch memory.
        """
        n = self.layout.n_prefix
        rows, scratch = a[:, :, n:], scores[:, :, n:]
        here["entropy"].copy_(row_entropy(rows, scratch).mean(-1))
        share = self._distances(rows, scratch, here)
        self._spreads(a, scores, here)
        if self.layout.cls is not None:
            here["cls_rows"].copy_(a[:, :, self.layout.cls])
        if self.full:
            here["full"].copy_(a)
        return share

    def _add_pairs(
        self, pairs: Tensor, a: Tensor, scratch: Tensor, share: Tensor, valid: Tensor | None
    ) -> None:
        """Adds the renormalised rows of the valid images (None: of all) to `pairs`.

        Offsets need no sum an image: one sum by offset a batch follows, instead of one an image.
        """
        n = self.layout.n_prefix
        if valid is not None:
            # Selected, not multiplied by 0: an invalid image may hold NaN.
            a = a.masked_fill_(~valid[:, None, None, None], 0.0)
            share = share.masked_fill(~valid[:, None, None], 0.0)
        if a.device.type == "cpu":
            for image, weight in zip(a, share.unsqueeze(-1), strict=True):
                pairs[:, n:].addcmul_(image[:, n:], weight)
        else:
            weighted = torch.mul(a[:, :, n:], share.unsqueeze(-1), out=scratch[:, :, n:])
            pairs[:, n:].add_(weighted.sum(0))

    def _distances(self, rows: Tensor, scratch: Tensor, here: dict[str, Tensor]) -> Tensor:
        """Distances and counts; returns each query's weight in the renormalised mean, (b, H, N)."""
        mass = rows[..., self.layout.n_prefix :].sum(-1)
        # Below the smallest normal number the device decides whether a value is zero.
        counted = mass >= torch.finfo(mass.dtype).tiny
        n_queries = counted.sum(-1)
        share = torch.where(counted, 1.0 / mass, 0.0) / n_queries.clamp(min=1).unsqueeze(-1)
        undefined = n_queries == 0
        here["n_queries"].copy_(n_queries)

        reach = torch.mul(rows, self._px, out=scratch).sum(-1)
        here["distance_px_raw"].copy_(reach.mean(-1))
        distance = (reach * share).sum(-1).masked_fill(undefined, torch.nan)
        here["distance_px"].copy_(distance)
        if self._unit_per_px is not None:
            here["distance_unit"].copy_(distance * self._unit_per_px)
        else:
            reach = torch.mul(rows, self._unit, out=scratch).sum(-1)
            here["distance_unit"].copy_((reach * share).sum(-1).masked_fill(undefined, torch.nan))
        return share

    def _spreads(self, a: Tensor, scratch: Tensor, here: dict[str, Tensor]) -> None:
        """Standard deviations over queries and over heads, the head mean and the received mass.

        From sums of A and A^2: torch.var over a dimension that is not the last is slow. What
        cancels is known to some 1e-7 of A^2, so a spread of zero to 1e-3 of A.
        """
        n = self.layout.n_prefix
        squares = torch.mul(a, a, out=scratch)
        received = torch.mean(a[:, :, n:], 2, out=here["received_rows"])
        here["prefix_mass"].copy_(received[..., :n].sum(-1))
        std = spread(squares[:, :, n:].sum(2), received, a.shape[-1] - n)
        here["query_std"].copy_(std[..., n:].mean(-1))
        head_mean = torch.mean(a, 1, out=here["head_mean"]) if self.rollout else a.mean(1)
        std = spread(squares.sum(1), head_mean, a.shape[1])
        here["head_std"].copy_(std[:, n:, n:].mean(-1).mean(-1))

    def _sum_valid(self, rows: Tensor, valid: Tensor) -> Tensor:
        return rows.masked_fill(~valid[:, None, None], 0.0).sum(0, dtype=self._sum_dtype)
