"""Attention summaries of some images on a GPU: few kernels, and the host never waits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vitsee_core.kernels.backend import Buffers
from vitsee_core.summaries.cpu_passes import COUNTS, IN_TIME, NUMBERS
from vitsee_core.summaries.summary import AttentionScores, GridDistances, sum_by_offset

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Bound on the scores of one block of images, for memory only.
BLOCK_BYTES = 256 << 20


class DevicePasses:
    """Fills the summaries of images from their A, pass by pass, in blocks of images."""

    pairs_dtype = torch.float32

    def __init__(
        self,
        layout: TokenLayout,
        grid: tuple[int, int],
        apart: GridDistances,
        device: torch.device,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._n = layout.n_prefix
        self._grid = grid
        self._cls = layout.cls
        self._block_bytes = block_bytes
        self._buffers = Buffers(device)
        self._unit_per_px = apart.unit_per_px
        self._times = layout.frames
        self._stride_frames = layout.stride_frames or 1.0
        times = layout.frames or 1
        # By spatial query and any key, 0 for prefix keys, so that whole rows are contiguous.
        self._px, self._unit = (
            torch.nn.functional.pad(x.repeat(times, times), (self._n, 0))
            .float()
            .to(device)
            for x in (apart.px, apart.unit)
        )
        self._sum_dtype = torch.float32 if device.type == "mps" else torch.float64

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Shape of the sums over images for `aligned`."""
        n_cells = self._grid[0] * self._grid[1]
        return n_heads, n_cells, n_cells

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Shapes of other arrays that `reduce` needs in `out`, float64: none."""
        return {}

    def reduce(
        self,
        call: AttentionScores,
        bounds: Sequence[int],
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        n_threads: tuple[int, int],
    ) -> None:
        """Fill the rows of all images, and the sums over them.

        Args:
            call: the attention of the batch.
            bounds: the first image of each part of the batch, and the one after the last.
            valid: (batch,) which of the images enter the sums; None: all.
            out: numbers (`NUMBERS`, batch, heads), counts (`COUNTS`, batch, heads), head_std
                (batch,), received_rows (batch, heads, tokens), head_mean (batch, tokens, tokens);
                if wanted cls_rows (batch, heads, tokens) and full (batch, heads, tokens, tokens).
            sums: by part: pairs of `pairs_shape`, and received_rows and cls_rows (heads, tokens);
                added to.
            n_threads: how many process parts and how many share an image; ignored by a GPU.
        """
        image_bytes = 4 * call.n_heads * call.n_tokens**2
        block = max(1, self._block_bytes // image_bytes)
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            here = {name: tensor[part] for name, tensor in sums.items()}
            for first in range(start, stop, block):
                some = slice(first, min(first + block, stop))
                shape = (some.stop - first, call.n_heads, call.n_tokens, call.n_tokens)
                scores = call.scores(some, out=self._buffers.get("scores", *shape))
                room = self._buffers.get("probabilities", *shape)
                a = torch.softmax(scores, -1, out=room)
                kept = None if valid is None else valid[some]
                self._reduce_block(a, scores, first, kept, out, here)
                if "cls_rows" in out:
                    assert self._cls is not None
                    out["cls_rows"][some] = a[:, :, self._cls]
                if "full" in out:
                    out["full"][some] = a
            for name in here.keys() - {"pairs", "in_time"}:
                rows = out[name][start:stop]
                if valid is not None:
                    rows = rows.masked_fill(~valid[start:stop, None, None], 0.0)
                here[name] += rows.sum(0, dtype=self._sum_dtype)

    def _reduce_block(
        self,
        a: Tensor,
        scores: Tensor,
        start: int,
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
    ) -> None:
        """`reduce` for images whose A (images, heads, tokens, tokens) fits the buffers; `scores`
        are overwritten, `start` is the first image's place in `out`."""
        n = self._n
        images = slice(start, start + len(a))
        names = NUMBERS if self._times is None else (*NUMBERS, *IN_TIME)
        here = {name: out["numbers"][i, images] for i, name in enumerate(names)}
        here |= {name: out["counts"][i, images] for i, name in enumerate(COUNTS)}
        here |= {
            name: out[name][images] for name in ("head_std", "received_rows", "head_mean")
        }
        rows = a[:, :, n:]
        scratch = scores[:, :, n:]
        mass = rows[..., n:].sum(-1)
        # Whether subnormal numbers count as zero depends on the device.
        counted = mass >= torch.finfo(mass.dtype).tiny
        n_queries = counted.sum(-1)
        here["n_queries"].copy_(n_queries)
        share = torch.where(counted, 1.0 / mass, 0.0) / n_queries.clamp(min=1).unsqueeze(
            -1
        )
        entropy, spatial = row_entropies(rows, scratch, mass)
        here["entropy"].copy_(entropy.mean(-1))
        self._distances(rows, scratch, share, n_queries, here)
        if self._times is not None:
            self._in_time(rows, share, n_queries, here)
        renormalised = self._received(rows, share, here)
        spatial = torch.where(counted, spatial, 0.0).sum(-1) / n_queries
        here["qk_nmi"].copy_(shared_information(renormalised, spatial, n_queries))
        here["query_std"].copy_(spread(a[:, :, n:], 2)[..., n:].mean(-1))
        torch.mean(a, 1, out=here["head_mean"])
        here["head_std"].copy_(spread(a[:, :, n:], 1)[..., n:].mean(-1).mean(-1))
        self._add_pairs(sums, a, scores, share, valid)

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """Complete `out` once it holds all images; returns `aligned`, (heads, 2 rows - 1, 2 columns
        - 1), from the sums of all."""
        return sum_by_offset(pairs.to(self._sum_dtype), self._grid)

    def _add_pairs(
        self,
        sums: Mapping[str, Tensor],
        a: Tensor,
        scratch: Tensor,
        share: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Add the renormalised rows of the valid images (None: of all) to `pairs`, of clips also by
        the offset in time to `in_time`."""
        n = self._n
        weighted = torch.mul(a[:, :, n:], share.unsqueeze(-1), out=scratch[:, :, n:])
        if valid is not None:
            # Selected, not multiplied by 0: an invalid image may hold NaN.
            weighted.masked_fill_(~valid[:, None, None, None], 0.0)
        if self._times is None:
            sums["pairs"] += weighted[..., n:].sum(0)
            return
        whole = weighted[..., n:].sum(0)
        both = whole.unflatten(2, (self._times, -1)).unflatten(1, (self._times, -1))
        sums["pairs"] += both.sum((1, 3))
        pairs = both.sum((2, 4)).to(self._sum_dtype)
        sums["in_time"] += sum_by_offset(pairs, (self._times, 1)).squeeze(-1)

    def _distances(
        self,
        rows: Tensor,
        scratch: Tensor,
        share: Tensor,
        n_queries: Tensor,
        here: dict[str, Tensor],
    ) -> None:
        """Mean distances; `share` (b, H, N) is each query's weight in the renormalised mean."""
        undefined = n_queries == 0
        reach = torch.mul(rows, self._px, out=scratch).sum(-1)
        here["distance_px_raw"].copy_(reach.mean(-1))
        distance = (reach * share).sum(-1).masked_fill(undefined, torch.nan)
        here["distance_px"].copy_(distance)
        if self._unit_per_px is not None:
            here["distance_unit"].copy_(distance * self._unit_per_px)
        else:
            reach = torch.mul(rows, self._unit, out=scratch).sum(-1)
            here["distance_unit"].copy_(
                (reach * share).sum(-1).masked_fill(undefined, torch.nan)
            )

    def _in_time(
        self, rows: Tensor, share: Tensor, n_queries: Tensor, here: dict[str, Tensor]
    ) -> None:
        """Mean distance in time and the share of the query's own time; `share` as in
        `_distances`."""
        assert self._times is not None
        by_time = rows[..., self._n :].unflatten(-1, (self._times, -1)).sum(-1)
        time = torch.arange(self._times, device=rows.device)
        away = (
            time.repeat_interleave(rows.shape[2] // self._times).unsqueeze(1) - time
        ).abs()
        undefined = n_queries == 0
        for name, of in (
            ("distance_frames", away * self._stride_frames),
            ("frame_mass", away == 0),
        ):
            found = ((by_time * of.to(rows.dtype)).sum(-1) * share).sum(-1)
            here[name].copy_(found.masked_fill(undefined, torch.nan))

    def _received(self, rows: Tensor, share: Tensor, here: dict[str, Tensor]) -> Tensor:
        """The mass that keys receive, and its maximum; returns the mean of the renormalised rows
        over spatial keys, (b, H, N), NaN without any."""
        n, (n_images, n_heads, n_queries, n_keys) = self._n, rows.shape
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


def row_entropies(p: Tensor, scratch: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p ln p of every row, over all keys and over the spatial ones alone.

    `p`: (images, heads, queries, keys), prefix keys first; `scratch`: of that shape, overwritten.
    `mass`: (images, heads, queries), the sum of p over spatial keys. Returns two (images, heads,
    queries) in nats; the second of the row restricted to the spatial keys and divided by its mass,
    NaN where the mass is 0. Keys without mass contribute 0, and a row with NaN is NaN.
    """
    n_prefix = p.shape[-1] - p.shape[-2]
    terms = torch.special.entr(p, out=scratch)
    within = terms[..., n_prefix:].sum(-1)
    total = within + terms[..., :n_prefix].sum(-1) if n_prefix else within
    return total, (within / mass + mass.log()).clamp_(min=0.0)


def spread(a: Tensor, dim: int) -> Tensor:
    """Standard deviation over an axis with n - 1, 0 for one."""
    return torch.std(a, dim, correction=min(1, a.shape[dim] - 1))


def shared_information(mean: Tensor, entropy: Tensor, n_queries: Tensor) -> Tensor:
    """[H(mean) - entropy] / sqrt(ln n_queries H(mean)): (images, heads).

    `mean`: (images, heads, keys), the mean row; `entropy`: the rows' mean entropy; `n_queries`:
    number of rows. NaN (0 / 0) for one query, and if all rows are the same single key.
    """
    of_keys = torch.special.entr(mean).sum(-1)
    shared = (of_keys - entropy).clamp_(min=0.0)
    return shared / (n_queries.log() * of_keys).sqrt()
