"""Summarise the attention of a batch on a GPU: few kernels, and the host never waits."""

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
    """Fills the summaries of images from their A, pass by pass, in blocks of images.

    Args:
        layout: of the tokens.
        grid: rows and columns of the layout's grid.
        apart: distances between its cells.
        device: torch's.
        block_bytes: bound on the scores of a block.
    """

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
        prefix = (self._n, 0)
        px = torch.nn.functional.pad(apart.px.repeat(times, times), prefix)
        unit = torch.nn.functional.pad(apart.unit.repeat(times, times), prefix)
        self._px = px.float().to(device)
        self._unit = unit.float().to(device)
        self._sum_dtype = torch.float32 if device.type == "mps" else torch.float64

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Return the shape of the sums over images for `aligned`."""
        n_cells = self._grid[0] * self._grid[1]
        return n_heads, n_cells, n_cells

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of other arrays that `reduce` needs in `out`: none."""
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
            part_sums = {name: tensor[part] for name, tensor in sums.items()}
            for first in range(start, stop, block):
                images = slice(first, min(first + block, stop))
                shape = (images.stop - first, call.n_heads, call.n_tokens, call.n_tokens)
                scores = call.scores(images, out=self._buffers.get("scores", *shape))
                probabilities = self._buffers.get("probabilities", *shape)
                a = torch.softmax(scores, -1, out=probabilities)
                block_valid = None if valid is None else valid[images]
                self._reduce_block(
                    a, scores, start=first, valid=block_valid, out=out, sums=part_sums
                )
                if "cls_rows" in out:
                    assert self._cls is not None
                    out["cls_rows"][images] = a[:, :, self._cls]
                if "full" in out:
                    out["full"][images] = a
            # The other sums are of rows that are in `out`.
            for name in part_sums.keys() - {"pairs", "in_time"}:
                rows = out[name][start:stop]
                if valid is not None:
                    rows = rows.masked_fill(~valid[start:stop, None, None], 0.0)
                part_sums[name] += rows.sum(0, dtype=self._sum_dtype)

    def _reduce_block(
        self,
        a: Tensor,
        scores: Tensor,
        *,
        start: int,
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
    ) -> None:
        """Fill the rows of a block of images, and add to the sums over images.

        Args:
            a: (images, heads, tokens, tokens).
            scores: of the same shape, overwritten.
            start: index of the first image in the batch.
            valid: (images,) which of them enter the sums; None: all.
            out: as of `reduce`.
            sums: of one part.
        """
        n = self._n
        images = slice(start, start + len(a))
        names = NUMBERS if self._times is None else (*NUMBERS, *IN_TIME)
        # The block's views of what is filled, by name.
        block = {name: out["numbers"][i, images] for i, name in enumerate(names)}
        block |= {name: out["counts"][i, images] for i, name in enumerate(COUNTS)}
        block["head_std"] = out["head_std"][images]
        block["received_rows"] = out["received_rows"][images]
        block["head_mean"] = out["head_mean"][images]
        # Queries of the grid: (images, heads, queries, keys).
        rows = a[:, :, n:]
        scratch = scores[:, :, n:]
        mass = rows[..., n:].sum(-1)
        # Whether subnormal numbers count as zero depends on the device.
        counted = mass >= torch.finfo(mass.dtype).tiny
        n_queries = counted.sum(-1)
        block["n_queries"].copy_(n_queries)
        # (images, heads, queries): the weight of a query's row in the mean of renormalised rows.
        n_counted = n_queries.clamp(min=1).unsqueeze(-1)
        share = torch.where(counted, 1.0 / mass, 0.0) / n_counted
        entropy, spatial = row_entropies(rows, scratch, mass)
        block["entropy"].copy_(entropy.mean(-1))
        self._distances(rows, scratch, share, n_queries, block)
        if self._times is not None:
            self._in_time(rows, share, n_queries, block)
        renormalised = self._received(rows, share, block)
        spatial = torch.where(counted, spatial, 0.0).sum(-1) / n_queries
        block["qk_nmi"].copy_(shared_information(renormalised, spatial, n_queries))
        block["query_std"].copy_(spread(a[:, :, n:], 2)[..., n:].mean(-1))
        torch.mean(a, 1, out=block["head_mean"])
        block["head_std"].copy_(spread(a[:, :, n:], 1)[..., n:].mean(-1).mean(-1))
        self._add_pairs(sums, a, scores, share, valid)

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """Return `aligned`, (heads, 2 rows - 1, 2 columns - 1), from the sums over all images."""
        return sum_by_offset(pairs.to(self._sum_dtype), self._grid)

    def _add_pairs(
        self,
        sums: Mapping[str, Tensor],
        a: Tensor,
        scratch: Tensor,
        share: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Add the renormalised rows of the valid images to `pairs`, of clips also by the offset in
        time to `in_time`; None as `valid` is all images."""
        n = self._n
        weighted = torch.mul(a[:, :, n:], share.unsqueeze(-1), out=scratch[:, :, n:])
        if valid is not None:
            # Selected, not multiplied by 0: an invalid image may hold NaN.
            weighted.masked_fill_(~valid[:, None, None, None], 0.0)
        if self._times is None:
            sums["pairs"] += weighted[..., n:].sum(0)
            return
        over_images = weighted[..., n:].sum(0)  # (heads, queries, keys)
        # (heads, query time, query cell, key time, key cell)
        by_time = over_images.unflatten(2, (self._times, -1))
        by_time = by_time.unflatten(1, (self._times, -1))
        sums["pairs"] += by_time.sum((1, 3))
        pairs = by_time.sum((2, 4)).to(self._sum_dtype)
        sums["in_time"] += sum_by_offset(pairs, (self._times, 1)).squeeze(-1)

    def _distances(
        self,
        rows: Tensor,
        scratch: Tensor,
        share: Tensor,
        n_queries: Tensor,
        block: dict[str, Tensor],
    ) -> None:
        """Fill the mean distances.

        Args:
            rows: (images, heads, queries, keys).
            scratch: of the same shape, overwritten.
            share: (images, heads, queries) weights in the mean of renormalised rows.
            n_queries: (images, heads) number of queries with a weight.
            block: by name, filled.
        """
        undefined = n_queries == 0
        reach = torch.mul(rows, self._px, out=scratch).sum(-1)
        block["distance_px_raw"].copy_(reach.mean(-1))
        distance = (reach * share).sum(-1).masked_fill(undefined, torch.nan)
        block["distance_px"].copy_(distance)
        if self._unit_per_px is not None:
            block["distance_unit"].copy_(distance * self._unit_per_px)
        else:
            reach = torch.mul(rows, self._unit, out=scratch).sum(-1)
            block["distance_unit"].copy_(
                (reach * share).sum(-1).masked_fill(undefined, torch.nan)
            )

    def _in_time(
        self, rows: Tensor, share: Tensor, n_queries: Tensor, block: dict[str, Tensor]
    ) -> None:
        """Fill the mean distance in time and the share of the query's time; arguments as of
        `_distances`."""
        assert self._times is not None
        # (images, heads, queries, times) mass by the key's time.
        by_time = rows[..., self._n :].unflatten(-1, (self._times, -1)).sum(-1)
        key_time = torch.arange(self._times, device=rows.device)
        query_time = key_time.repeat_interleave(rows.shape[2] // self._times)
        time_distance = (query_time.unsqueeze(1) - key_time).abs()
        weights = {
            "distance_frames": time_distance * self._stride_frames,
            "frame_mass": time_distance == 0,
        }
        undefined = n_queries == 0
        for name, weight in weights.items():
            by_query = (by_time * weight.to(rows.dtype)).sum(-1)
            mean = (by_query * share).sum(-1)
            block[name].copy_(mean.masked_fill(undefined, torch.nan))

    def _received(self, rows: Tensor, share: Tensor, block: dict[str, Tensor]) -> Tensor:
        """Fill the mass that keys receive, and its maximum.

        Returns:
            The mean of the renormalised rows over spatial keys, (images, heads, cells), NaN without
            any.
        """
        n = self._n
        n_images, n_heads, n_queries, n_keys = rows.shape
        received = torch.mean(rows, 2, out=block["received_rows"])
        block["prefix_mass"].copy_(received[..., :n].sum(-1))
        argmax = received.argmax(-1, keepdim=True)  # the first of equal ones
        largest = received.gather(-1, argmax).squeeze(-1)
        block["received_max"].copy_(largest)
        block["received_argmax"].copy_(
            torch.where(largest.isnan(), -1, argmax.squeeze(-1))
        )
        # A product with one row of weights, made anew a distribution: its sum over hundreds of
        # queries rounds by more than that of `mean`.
        mean = rows.new_empty(n_images * n_heads, 1, n_keys)
        torch.bmm(share.view(-1, 1, n_queries), rows.flatten(0, 1), out=mean)
        mean = mean.view(n_images, n_heads, n_keys)[..., n:]
        return mean / mean.sum(-1, keepdim=True)


def row_entropies(p: Tensor, scratch: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy -sum p ln p of each row, over all keys and over the spatial ones alone.

    Args:
        p: (images, heads, queries, keys), prefix keys first.
        scratch: of that shape, overwritten.
        mass: (images, heads, queries), the sum of p over spatial keys.

    Returns:
        Two (images, heads, queries), in nats. The second is of the row restricted to the spatial
        keys and divided by its mass, NaN where the mass is 0. Keys without mass contribute 0, and a
        row with NaN is NaN.
    """
    n_prefix = p.shape[-1] - p.shape[-2]
    terms = torch.special.entr(p, out=scratch)
    within = terms[..., n_prefix:].sum(-1)
    total = within + terms[..., :n_prefix].sum(-1) if n_prefix else within
    # -sum (p / m) ln (p / m) = -sum p ln p / m + ln m
    return total, (within / mass + mass.log()).clamp_(min=0.0)


def spread(a: Tensor, dim: int) -> Tensor:
    """Return the standard deviation over an axis, with n - 1; 0 along an axis of length 1."""
    return torch.std(a, dim, correction=min(1, a.shape[dim] - 1))


def shared_information(mean: Tensor, entropy: Tensor, n_queries: Tensor) -> Tensor:
    """Return [H(mean) - entropy] / sqrt(ln n_queries H(mean)), (images, heads).

    It is NaN (0 / 0) for one query, and if all rows are the same single key.

    Args:
        mean: (images, heads, keys) the mean row.
        entropy: (images, heads) the rows' mean entropy.
        n_queries: (images, heads) number of rows.
    """
    key_entropy = torch.special.entr(mean).sum(-1)
    shared = (key_entropy - entropy).clamp_(min=0.0)
    return shared / (n_queries.log() * key_entropy).sqrt()
