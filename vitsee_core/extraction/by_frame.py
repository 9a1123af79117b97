"""Image models on clips: each frame goes through the model as an image, their tokens are joined.

The tokens of a clip are the prefix tokens, kind by kind and each once per frame, then the grids
frame by frame. The attention of a clip is that of its frames, and 0 between them; FORMAT.md has the
definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitsee_core.extraction.slab import SlabObserver
from vitsee_core.summaries import (
    AttentionReducer,
    largest_magnitude,
    pass_over,
    residual_products,
    rollout,
)
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import AttentionGroup, SiteSpec, TokenLayout

if TYPE_CHECKING:
    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_core.models.sites import AttentionBlock, SiteTable, Sublayer
    from vitsee_core.summaries.summary import AttentionSummary

# How the numbers of a clip follow from those of its frames (see `FrameObserver._clip_values`).
COUNTED_MEANS = ("distance_px", "distance_unit")  # over the queries that count
QUERY_MEANS = ("distance_px_raw", "prefix_mass", "entropy")  # over all queries
FRAME_MEANS = ("query_std", "qk_nmi")  # over frames that have a value
FULL = (
    "an image model attends within single frames: of clips --attention full would be zeros for the "
    "most part (take --attention rows, or extract the frames as images)"
)


def clip_layout(layout: TokenLayout, n_frames: int) -> TokenLayout:
    """Return the layout of a clip whose frames have this layout."""
    prefix = tuple(f"{name}.{k}" for name in layout.prefix for k in range(n_frames))
    if layout.grid is None:
        rows = n_frames * layout.rows
        return dataclasses.replace(layout, prefix=prefix, rows=rows)
    return dataclasses.replace(layout, prefix=prefix, frames=n_frames, stride_frames=1.0)


def frame_layout(layout: TokenLayout, n_frames: int) -> TokenLayout:
    """Return the layout of one frame from that of its clip: the inverse of `clip_layout`."""
    first_frame = layout.prefix[::n_frames]
    prefix = tuple(name.rpartition(".")[0] for name in first_frame)
    rows = layout.rows // n_frames
    return dataclasses.replace(
        layout, prefix=prefix, rows=rows, frames=None, stride_frames=None
    )


def clip_site(site: SiteSpec, n_frames: int) -> SiteSpec:
    """Return a site of an image model as a store of clips has it."""
    if site.layout is not None:
        layout = clip_layout(site.layout, n_frames)
        return dataclasses.replace(site, layout=layout, shape=(layout.n_tokens, site.dim))
    if site.kind == "raw":
        shape = (n_frames, *site.shape)
        return dataclasses.replace(site, shape=shape, dim=n_frames * site.dim)
    return site  # vectors are averaged over frames


def clip_table(table: SiteTable, n_frames: int) -> SiteTable:
    """Return the sites, sublayers and attention that a store of clips has of an image model."""
    attention = []
    for block in table.attention:
        assert block.layout.grid is not None
        # A window of one frame: attention between frames does not exist.
        window = (1, *(block.window or block.layout.grid))
        layout = clip_layout(block.layout, n_frames)
        attention.append(dataclasses.replace(block, layout=layout, window=window))
    sublayers = []
    for sublayer in table.sublayers:
        layout = clip_layout(sublayer.layout, n_frames)
        sublayers.append(dataclasses.replace(sublayer, layout=layout))
    return dataclasses.replace(
        table,
        sites=tuple(clip_site(site, n_frames) for site in table.sites),
        sublayers=tuple(sublayers),
        attention=tuple(attention),
    )


def check_by_frame(attention_level: str | None, interventions: Sequence[object]) -> None:
    """Refuse options that an image model does not support on clips.

    Raises:
        VitseeError: names the option.
    """
    if attention_level == "full":
        raise VitseeError(f"--attention full is not supported: {FULL}")
    if interventions:
        raise VitseeError(
            "--frames with an image model and interventions is not supported: what replaces a "
            "value is that of an image (extract the frames as images)"
        )


class FrameObserver(SlabObserver):
    """Joins the frames of a batch of clips.

    The tensors that it observes are (clips x frames, ...), clip by clip; the values that it stores
    are (clips, ...). Memory on the device, beside that of `SlabObserver`: the attention rows of one
    block.
    """

    @property
    def _n_frames(self) -> int:
        """Frames of a clip."""
        clip = self._plan.clip
        assert clip is not None
        return clip.frames

    def images_of_pass(self, n_rows: int) -> list[int]:
        """Return the index in the batch of the clip of each frame."""
        return [row // self._n_frames for row in range(n_rows)]

    def _reducer(self, group: AttentionGroup) -> AttentionReducer:
        """Return the reducer of attention within single frames."""
        return AttentionReducer(
            frame_layout(group.layout, self._n_frames),
            self._device,
            rollout=self._plan.rollout,
            rows=True,  # the sums over a clip are made of the rows of its frames
        )

    def _rollout(self, means: list[Tensor], layout: TokenLayout) -> Tensor:
        """Return the rollout of each clip, from the blocks' means over heads of each frame."""
        one_frame = frame_layout(layout, self._n_frames)
        frame_rollouts = rollout(means, one_frame)
        # The clip's row is the mean of the rows of its frames' class tokens.
        return self._in_clip_order(frame_rollouts, one_frame.n_prefix) / self._n_frames

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Store one site of a batch; prefix and body are (clips x frames, ...)."""
        stored = self._stored[site.name]
        name = site.name
        if stored.kind == "vector":
            self._note_peak(name, largest_magnitude(body))
            self._keep(f"vectors/{name}", self._mean_over_frames(body))
            return
        tensors = [self._by_clip(body)]
        if prefix is not None:
            tensors.insert(0, self._clip_prefix(prefix))
        self._sums |= self._grams.batch_matrices(name, tensors, self._valid)
        if stored.kind == "raw" or stored.layout is None:
            for tensor in tensors:
                if tensor.numel():
                    self._note_peak(name, largest_magnitude(tensor))
        else:
            one_frame = frame_layout(stored.layout, self._n_frames)
            summary = pass_over(prefix, body, one_frame)
            self._note_peak(name, summary.peak)
            if summary.cls is not None:
                self._keep(f"pooled/{name}/cls", self._mean_over_frames(summary.cls))
            self._keep(f"pooled/{name}/mean", self._mean_over_frames(summary.mean))
        paths = self._paths(stored)
        for path, value in zip(paths, tensors, strict=bool(paths)):
            self._keep(path, value)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Store the dot products of a skip and its branch, in the order of a clip's tokens."""
        with self._exactly():
            products = residual_products(z, f)
            n_prefix = sublayer.layout.n_prefix
            in_order = self._in_clip_order(products, n_prefix)
            self._keep(f"residual/{sublayer.name}", in_order)

    def _attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Reduce one call of a block's attention, and stage the numbers of each clip."""
        group, reducer, row = self._slots[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        n_frames = self._n_frames
        frame_mask = self._mask.repeat_interleave(n_frames)
        summary = reducer.reduce(call, frame_mask)

        # (clips, heads, tokens of a clip) from (clips x frames, heads, tokens of a frame).
        # A mean over the queries of all frames: each frame has 1 / n_frames of them.
        n_prefix = reducer.layout.n_prefix
        rows: dict[str, Tensor] = {}
        for name in ("received_rows", "cls_rows"):
            frame_rows = getattr(summary, name)
            if frame_rows is not None:
                rows[name] = self._in_clip_order(frame_rows, n_prefix, axis=2) / n_frames

        values = self._clip_values(summary, rows["received_rows"])
        for name, value in values.items():
            self._stage(folder + name, value, row, heads)
        head_std = self._mean_over_frames(summary.head_std)
        self._stage(folder + "head_std", head_std, row)

        # All attention has a distance of 0 frames, which is index n_frames - 1.
        aligned = summary.aligned / n_frames
        self._sums[folder + "aligned"][row, heads] += aligned
        over_offsets = aligned.sum((-2, -1))
        self._sums[folder + "aligned_frames"][row, heads, n_frames - 1] += over_offsets
        sum_names = {"received_rows": "received", "cls_rows": "cls_map"}
        for name, clip_rows in rows.items():
            valid_rows = clip_rows[self._mask].to(self._sum_dtype)
            self._sums[folder + sum_names[name]][row, heads] += valid_rows.sum(0)
            if self._plan.attention_level == "rows":
                self._stage(folder + name, clip_rows, row, heads)
        if summary.head_mean is not None:
            self._head_means[block.name] = summary.head_mean

    def _clip_values(
        self, summary: AttentionSummary, received: Tensor
    ) -> dict[str, Tensor]:
        """Return each number of the summary for clips: name -> (clips, heads).

        Args:
            summary: the summary of the frames, (clips x frames, heads) each.
            received: (clips, heads, tokens) attention that each token of a clip receives.
        """
        wide = self._sum_dtype
        n_queries = self._by_clip(summary.n_queries)  # (clips, frames, heads)
        weights = n_queries.to(wide)
        total_weight = weights.sum(1)
        values = {"n_queries": n_queries.sum(1)}
        for name in COUNTED_MEANS:
            by_frame = self._by_clip(getattr(summary, name)).to(wide)
            # A frame without queries has NaN, and NaN x 0 would spoil the clip.
            weighted = torch.where(weights > 0, by_frame * weights, 0.0)
            values[name] = weighted.sum(1) / total_weight
        for name in QUERY_MEANS:
            values[name] = self._mean_over_frames(getattr(summary, name))
        for name in FRAME_MEANS:
            values[name] = self._by_clip(getattr(summary, name)).to(wide).nanmean(1)
        # A query attends to its own frame alone: distance 0, and all of its mass.
        no_queries = total_weight == 0
        zeros = torch.zeros_like(total_weight)
        ones = torch.ones_like(total_weight)
        values["distance_frames"] = zeros.masked_fill(no_queries, torch.nan)
        values["frame_mass"] = ones.masked_fill(no_queries, torch.nan)
        largest = received.max(-1)
        is_nan = largest.values.isnan()
        values["received_max"] = largest.values
        values["received_argmax"] = largest.indices.masked_fill(is_nan, -1)
        return values

    def _by_clip(self, x: Tensor) -> Tensor:
        """Return (clips, frames, ...) of (clips x frames, ...)."""
        return x.reshape(len(x) // self._n_frames, self._n_frames, *x.shape[1:])

    def _mean_over_frames(self, x: Tensor) -> Tensor:
        """Return the mean over frames, (clips, ...) of (clips x frames, ...)."""
        return self._by_clip(x).to(self._sum_dtype).mean(1)

    def _clip_prefix(self, x: Tensor) -> Tensor:
        """Return (clips, prefix tokens x frames, ...) of (clips x frames, prefix tokens, ...)."""
        return self._by_clip(x).transpose(1, 2).flatten(1, 2)

    def _in_clip_order(self, x: Tensor, n_prefix: int, axis: int = 1) -> Tensor:
        """Return numbers of all tokens in the order of a clip's tokens.

        Args:
            x: (clips x frames, ...) with the tokens of a frame on `axis`.
            n_prefix: prefix tokens of a frame.
            axis: axis of the tokens, also of the result's (clips, ...).
        """
        x = x.movedim(axis, 1)
        prefix = self._clip_prefix(x[:, :n_prefix])
        grids = self._by_clip(x[:, n_prefix:]).flatten(1, 2)
        return torch.cat((prefix, grids), 1).movedim(1, axis)
