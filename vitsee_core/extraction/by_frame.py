"""Image models on clips: the frames go through the model one by one, as the images of one batch,
and their tokens are stored as one clip's.

Tokens of a clip: the prefix kind by kind, each once a frame, then the grids frame by frame. The
attention of a clip is that of its frames, 0 between them; FORMAT.md has the definitions.
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

# Means over the queries of each frame that count, over all queries, and over frames with a value.
OF_COUNTED = ("distance_px", "distance_unit")
OF_QUERIES = ("distance_px_raw", "prefix_mass", "entropy")
OF_FRAMES = ("query_std", "qk_nmi")
FULL = (
    "an image model attends within single frames: of clips --attention full would be zeros for the "
    "most part (take --attention rows, or extract the frames as images)"
)


def clip_layout(layout: TokenLayout, frames: int) -> TokenLayout:
    """The layout of a clip whose frames have this one."""
    prefix = tuple(f"{name}.{k}" for name in layout.prefix for k in range(frames))
    if layout.grid is None:
        return dataclasses.replace(layout, prefix=prefix, rows=frames * layout.rows)
    return dataclasses.replace(layout, prefix=prefix, frames=frames, stride_frames=1.0)


def frame_layout(layout: TokenLayout, frames: int) -> TokenLayout:
    """The layout of one frame of a clip, which `clip_layout` made a clip's."""
    prefix = tuple(name.rpartition(".")[0] for name in layout.prefix[::frames])
    rows = layout.rows // frames
    return dataclasses.replace(
        layout, prefix=prefix, rows=rows, frames=None, stride_frames=None
    )


def clip_site(site: SiteSpec, frames: int) -> SiteSpec:
    """A site as a store of clips has it."""
    if site.layout is not None:
        layout = clip_layout(site.layout, frames)
        return dataclasses.replace(site, layout=layout, shape=(layout.n_tokens, site.dim))
    if site.kind == "raw":
        return dataclasses.replace(
            site, shape=(frames, *site.shape), dim=frames * site.dim
        )
    return site


def clip_table(table: SiteTable, frames: int) -> SiteTable:
    """The sites, sublayers and attention that a store of clips has of an image model."""
    attention = []
    for block in table.attention:
        assert block.layout.grid is not None
        window = (1, *(block.window or block.layout.grid))
        layout = clip_layout(block.layout, frames)
        attention.append(dataclasses.replace(block, layout=layout, window=window))
    return dataclasses.replace(
        table,
        sites=tuple(clip_site(site, frames) for site in table.sites),
        sublayers=tuple(
            dataclasses.replace(one, layout=clip_layout(one.layout, frames))
            for one in table.sublayers
        ),
        attention=tuple(attention),
    )


def check_by_frame(attention: str | None, interventions: Sequence[object]) -> None:
    """Refuse what an image model cannot do on clips. Raises VitseeError: names the option."""
    if attention == "full":
        raise VitseeError(f"--attention full is not supported: {FULL}")
    if interventions:
        raise VitseeError(
            "--frames with an image model and interventions is not supported: what replaces a "
            "value is that of an image (extract the frames as images)"
        )


class FrameObserver(SlabObserver):
    """Assembles the frames of a batch of clips: what it observes has (clips x frames, ...), clip by
    clip. Memory on the device, beside that of `SlabObserver`: the attention rows of one block."""

    @property
    def _frames(self) -> int:
        clip = self._plan.clip
        assert clip is not None
        return clip.frames

    def images_of_pass(self, n_rows: int) -> list[int]:
        return [row // self._frames for row in range(n_rows)]

    def _reducer(self, group: AttentionGroup) -> AttentionReducer:
        return AttentionReducer(
            frame_layout(group.layout, self._frames),
            self._device,
            rollout=self._plan.rollout,
            rows=True,
        )

    def _rolled(self, means: list[Tensor], layout: TokenLayout) -> Tensor:
        of_frame = frame_layout(layout, self._frames)
        return self._joined(rollout(means, of_frame), of_frame.n_prefix) / self._frames

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        stored = self._stored[site.name]
        name = site.name
        if stored.kind == "vector":
            self._note_peak(name, largest_magnitude(body))
            self._keep(f"vectors/{name}", self._over_frames(body))
            return
        parts = [self._by_clip(body)]
        if prefix is not None:
            parts.insert(0, self._prefix(prefix))
        self._sums |= self._grams.of_batch(name, parts, self._valid)
        if stored.kind == "raw" or stored.layout is None:
            self._note_peak(name, *map(largest_magnitude, filter(Tensor.numel, parts)))
        else:
            of_frame = frame_layout(stored.layout, self._frames)
            summary = pass_over(prefix, body, of_frame)
            self._note_peak(name, summary.peak)
            if summary.cls is not None:
                self._keep(f"pooled/{name}/cls", self._over_frames(summary.cls))
            self._keep(f"pooled/{name}/mean", self._over_frames(summary.mean))
        paths = self._paths(stored)
        for path, value in zip(paths, parts, strict=bool(paths)):
            self._keep(path, value)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        with self._exactly():
            products = residual_products(z, f)
            n_prefix = sublayer.layout.n_prefix
            self._keep(f"residual/{sublayer.name}", self._joined(products, n_prefix))

    def _attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        group, reducer, row = self._place[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        frames = self._frames
        summary = reducer.reduce(call, self._mask.repeat_interleave(frames))
        rows = {
            name: self._joined(value, reducer.layout.n_prefix, 2) / frames
            for name in ("received_rows", "cls_rows")
            if (value := getattr(summary, name)) is not None
        }
        values = self._of_clips(summary, rows["received_rows"])
        for name, value in values.items():
            self._stage(folder + name, value, row, heads)
        self._stage(folder + "head_std", self._over_frames(summary.head_std), row)
        aligned = summary.aligned / frames
        self._sums[folder + "aligned"][row, heads] += aligned
        self._sums[folder + "aligned_frames"][row, heads, frames - 1] += aligned.sum(
            (-2, -1)
        )
        for name, path in (("received_rows", "received"), ("cls_rows", "cls_map")):
            if name in rows:
                valid = rows[name][self._mask].to(self._sum_dtype)
                self._sums[folder + path][row, heads] += valid.sum(0)
                if self._plan.attention_level == "rows":
                    self._stage(folder + name, rows[name], row, heads)
        if summary.head_mean is not None:
            self._head_means[block.name] = summary.head_mean

    def _of_clips(self, summary: AttentionSummary, received: Tensor) -> dict[str, Tensor]:
        """Name -> (clips, heads) of each of the summary's numbers."""
        wide = self._sum_dtype
        n_queries = self._by_clip(summary.n_queries)
        counts = n_queries.to(wide)
        out = {"n_queries": n_queries.sum(1)}
        counted = counts.sum(1)
        for name in OF_COUNTED:
            each = self._by_clip(getattr(summary, name)).to(wide)
            out[name] = torch.where(counts > 0, each * counts, 0.0).sum(1) / counted
        for name in OF_QUERIES:
            out[name] = self._over_frames(getattr(summary, name))
        for name in OF_FRAMES:
            out[name] = self._by_clip(getattr(summary, name)).to(wide).nanmean(1)
        # A comes from the query's own frame alone.
        nothing = counted == 0
        out["distance_frames"] = torch.zeros_like(counted).masked_fill(nothing, torch.nan)
        out["frame_mass"] = torch.ones_like(counted).masked_fill(nothing, torch.nan)
        largest = received.max(-1)
        broken = largest.values.isnan()
        out["received_max"] = largest.values
        out["received_argmax"] = largest.indices.masked_fill(broken, -1)
        return out

    def _by_clip(self, x: Tensor) -> Tensor:
        """(clips, frames, ...) of (clips x frames, ...)."""
        return x.reshape(len(x) // self._frames, self._frames, *x.shape[1:])

    def _over_frames(self, x: Tensor) -> Tensor:
        """The mean over frames, (clips, ...) of (clips x frames, ...)."""
        return self._by_clip(x).to(self._sum_dtype).mean(1)

    def _prefix(self, x: Tensor) -> Tensor:
        """(clips, prefix tokens x frames, ...) of (clips x frames, prefix tokens, ...)."""
        return self._by_clip(x).transpose(1, 2).flatten(1, 2)

    def _joined(self, x: Tensor, n_prefix: int, axis: int = 1) -> Tensor:
        """Numbers of all tokens in a clip's order: (clips, tokens, ...) of (clips x frames, tokens
        of a frame, ...), the tokens on this axis."""
        x = x.movedim(axis, 1)
        parts = (
            self._prefix(x[:, :n_prefix]),
            self._by_clip(x[:, n_prefix:]).flatten(1, 2),
        )
        return torch.cat(parts, 1).movedim(1, axis)
