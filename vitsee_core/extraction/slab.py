"""An observer that fills one slab's host buffers batch by batch.

Casts and reductions run on the device, in float32 whatever the model runs in. On CUDA the results
leave through pinned buffers on a side stream, without synchronisation per site or sum: the host
waits once per batch, for the results of the batch before last, and the writer once per slab.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitsee_core.extraction.buffers import PER_HEAD, SlabBuffers, feature_paths, is_sum
from vitsee_core.extraction.outcome import Clock
from vitsee_core.extraction.slab_grams import SlabGrams
from vitsee_core.extraction.transfer import HostCopies
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.runtime.device import precision_context, to_device
from vitsee_core.runtime.threads import by_chunks
from vitsee_core.summaries import (
    AttentionReducer,
    is_by_token,
    largest_magnitude,
    pass_over,
    residual_products,
    rollout,
    take_tokens,
)
from vitsee_core.summaries.summary import PER_CLIP
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays

if TYPE_CHECKING:
    from vitsee_core.images import Batch
    from vitsee_core.models.attention_watch import AttentionCall
    from vitsee_core.models.sites import AttentionBlock, Sublayer

FLOAT16_MAX = 65504.0
SUMS = ("aligned", "aligned_frames", "cls_map", "received")


class Overflow(VitseeError):
    """An activation does not fit its stored type."""


class SlabObserver:
    """Writes what `Capture` observes into a slab's buffers.

    For each slab the order of calls is `start(buffers)`; for each batch `begin_batch`, a
    captured forward pass, `end_batch`; then `finish()`. Memory: the buffers, and on the device
    the attention sums of one slab, the head means of one batch, and the memory of `HostCopies`
    and `grams`.
    """

    def __init__(
        self,
        plan: StorePlan,
        device: torch.device,
        grams: SlabGrams,
        precision: str = "fp32",
        clock: Clock | None = None,
    ):
        """Prepare an observer for the slabs of a plan.

        Args:
            plan: contents of the store.
            device: where the model runs.
            grams: computes the Gram matrices of a slab.
            precision: precision of the model's forward passes.
            clock: gets the time of the reductions, which is within the model's pass; None on
                an asynchronous device, whose calls return before the work is done.
        """
        self._plan = plan
        self._device = device
        self._grams = grams
        self._precision = precision
        self._clock = clock
        self._copies = HostCopies(device)
        self._lock = threading.Lock()
        # MPS has no float64. Sums over the images of a slab need more digits than its
        # values.
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._sum_shapes = {
            path: spec.shape[1:]
            for path, spec in arrays(plan).items()
            if is_sum(path, spec) and not spec.pairs
        }
        self._sum_dtype = wide
        self._stored = {site.name: site for site in plan.sites}
        self._groups = [(group, self._reducer(group)) for group in plan.attention]
        # Block -> its group, its reducer and its row in the group's arrays.
        self._slots: dict[str, tuple[AttentionGroup, AttentionReducer, int]] = {
            block: (group, reducer, row)
            for group, reducer in self._groups
            for row, block in enumerate(group.blocks)
        }

    def _reducer(self, group: AttentionGroup) -> AttentionReducer:
        """Return the reducer of the attention of a group's blocks."""
        level = self._plan.attention_level
        return AttentionReducer(
            group.layout,
            self._device,
            rollout=self._plan.rollout,
            rows=level in ("rows", "full"),
            full=level == "full",
        )

    def start(self, buffers: SlabBuffers) -> None:
        """Begin a slab in these buffers, with sums of 0."""
        buffers.begin()
        self._buffers = buffers
        self._sums = {
            path: torch.zeros(shape, dtype=self._sum_dtype, device=self._device)
            for path, shape in self._sum_shapes.items()
        }
        # Site -> its largest |x| so far, a 0-d tensor on the device.
        self._peaks: dict[str, Tensor] = {}

    def begin_batch(self, first: int, batch: Batch) -> None:
        """Begin a batch, whose first row within the slab is `first`."""
        self._rows = slice(first, first + len(batch.valid))
        self._images: Any = slice(None)  # of the batch, that values are staged for
        self._batch = batch
        self._valid = torch.from_numpy(batch.valid)
        # If all images count the mask stays on the host, and nothing waits for the device; else
        # it is copied there once, and not once for each block.
        all_valid = bool(batch.valid.all())
        self._mask = self._valid if all_valid else to_device(batch.valid, self._device)
        self._head_means: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._keep("valid", torch.from_numpy(batch.valid.astype(np.uint8)))
        # torch has no arithmetic for uint64, but copies it bit by bit
        self._keep("hash", torch.from_numpy(batch.hash))
        self._keep("size", torch.from_numpy(batch.size))
        if self._plan.pixel_hashes:
            self._keep("pixel_hash", torch.from_numpy(batch.pixel_hash))
        if self._plan.clip is not None:
            self._keep("seconds", torch.from_numpy(batch.seconds))

    def images_of_pass(self, n_rows: int) -> Sequence[int]:
        """Return, for each row of the current forward pass, the index of its image in the batch.

        Args:
            n_rows: rows of the pass.
        """
        return range(n_rows)

    def end_batch(self) -> None:
        """Compute what needs all blocks of a batch: the rollout, and numbers with a block axis."""
        with self._exactly():
            if self._plan.rollout:
                # Rollout is stored only where all blocks are of one group.
                group = self._plan.attention[0]
                means = [self._head_means[block] for block in group.blocks]
                self._keep("attention/rollout", self._rollout(means, group.layout))
            for path, value in self._staged.items():
                self._keep(path, value)
        self._head_means = {}
        self._staged = {}
        # Last, as the device need not wait for pixels, which are on the host.
        if self._plan.inputs is not None:
            self._keep("input", self._batch.pixels)
        self._copies.end_batch()

    def _rollout(self, means: list[Tensor], layout: TokenLayout) -> Tensor:
        """Return the rollout of each image from the blocks' means over heads."""
        return rollout(means, layout)

    def finish(self) -> None:
        """Send the slab's sums and peaks; the buffers are complete once their `wait` returns."""
        self._sums |= self._grams.device_matrices(
            self._buffers, self._rows.stop, self._copies
        )
        for path, value in self._sums.items():
            self._copies.copy(self._buffers.sum(path, value.shape), value)
        if self._peaks:
            largest = torch.stack(list(self._peaks.values()))
            self._copies.copy(self._buffers.largest(list(self._peaks)), largest)
        self._buffers.done = self._copies.mark()

    def close(self) -> None:
        """Wait for pending copies, so that their memory can be freed."""
        self._copies.wait()

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Store a site's tokens and pooled vectors, and its largest value."""
        with self._exactly():
            self._site(site, prefix, body)

    def _site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Store one site of a batch.

        Args:
            site: the site as it was captured.
            prefix: (images, prefix tokens, dim), None without prefix tokens.
            body: (images, ..., dim) grid or rows; (images, dim) of a vector.
        """
        stored = self._stored[site.name]
        if stored.kind == "vector":
            self._note_peak(site.name, largest_magnitude(body))
            self._keep(f"vectors/{site.name}", body)
            return
        parts = [body] if prefix is None else [prefix, body]
        # Of the whole batch at once; the chunks below are of some images each.
        self._sums |= self._grams.batch_matrices(site.name, parts, self._valid)
        paths = self._paths(stored)
        layout = None if stored.kind == "raw" else stored.layout
        if layout is not None and is_by_token(body):
            self._take_tokens(site.name, prefix, body, layout, paths)
            return

        def take(images: slice) -> None:
            """Store some of the batch's images."""
            image_parts = [part[images] for part in parts]
            if layout is None:
                self._note_peak(
                    site.name, *map(largest_magnitude, filter(Tensor.numel, image_parts))
                )
            else:
                image_prefix = None if prefix is None else image_parts[0]
                summary = pass_over(image_prefix, image_parts[-1], layout)
                self._note_peak(site.name, summary.peak)
                if summary.cls is not None:
                    self._keep(f"pooled/{site.name}/cls", summary.cls, images)
                self._keep(f"pooled/{site.name}/mean", summary.mean, images)
            for path, value in zip(paths, image_parts, strict=bool(paths)):
                self._keep(path, value, images)

        image_bytes = sum(part[:1].numel() for part in parts) * 4  # in float32
        by_chunks(take, len(body), image_bytes, self._device)

    def _paths(self, site: SiteSpec) -> list[str]:
        """The arrays of a site's activations that are kept, prefix first."""
        if site.name in self._grams.host_sites:
            return feature_paths(site)
        return []

    def _take_tokens(
        self,
        name: str,
        prefix: Tensor | None,
        body: Tensor,
        layout: TokenLayout,
        paths: Sequence[str],
    ) -> None:
        """Store a site's tokens, their mean and their largest value in one compiled pass."""
        out = None
        if paths:
            out = self._buffers[paths[-1]][self._rows]
        mean = self._buffers[f"pooled/{name}/mean"][self._rows]
        self._note_peak(name, take_tokens(body, mean, out))
        if prefix is not None and prefix.numel():
            self._note_peak(name, largest_magnitude(prefix))
            if layout.cls is not None:
                self._keep(f"pooled/{name}/cls", prefix[:, layout.cls])
            for path in paths[:-1]:
                self._keep(path, prefix)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Store the dot products of a skip and its branch."""
        with self._exactly():
            self._keep(f"residual/{sublayer.name}", residual_products(z, f))

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Store a block's attention summaries; its sums are added to the slab's."""
        with self._exactly():
            self._attention(block, call)

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Context of float32 precision, whatever the model runs in, and of the time it takes."""
        with ExitStack() as stack:
            if self._clock is not None:
                stack.enter_context(self._clock("reductions"))
            if self._precision != "fp32":
                stack.enter_context(precision_context(self._device, "fp32"))
            yield

    def _attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Reduce one call of a block's attention, and stage its numbers of each image."""
        group, reducer, row = self._slots[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        summary = reducer.reduce(call, self._mask)
        names = [*PER_HEAD]
        if block.layout.frames is not None:
            names += PER_CLIP
        for name in names:
            self._stage(folder + name, getattr(summary, name), row, heads)
        self._stage(folder + "head_std", summary.head_std, row)
        for name in SUMS:
            value = getattr(summary, name)
            if value is not None:
                # (heads, ...) of this block, summed over the images that count
                self._sums[folder + name][row, heads] += value
        if summary.cls_rows is not None:
            self._stage(folder + "cls_rows", summary.cls_rows, row, heads)
        if summary.received_rows is not None:
            self._stage(folder + "received_rows", summary.received_rows, row, heads)
        if summary.full is not None:
            self._keep(f"attention/full/{block.name}", summary.full)
        if summary.head_mean is not None:
            self._head_means[block.name] = summary.head_mean

    def _stage(self, path: str, value: Tensor, *index: int | slice) -> None:
        """Collect one block's numbers with those of the others, on the device.

        They are copied together at the end of the batch: a copy into strided host memory would
        wait for the device.

        Args:
            path: array of the numbers, (images, blocks, ...).
            value: (images, ...) numbers of one block.
            index: position of the block, and of its heads, along the axes after the first.
        """
        if path not in self._staged:
            out = self._buffers.arrays[path][self._rows]
            self._staged[path] = torch.empty(
                out.shape, dtype=out.dtype, device=self._device
            )
        self._staged[path][(self._images, *index)] = value.to(self._staged[path].dtype)

    def _keep(self, path: str, value: Tensor, images: slice = slice(None)) -> None:
        """Copy the values of some of the batch's images to their rows of the buffers."""
        self._copies.copy(self._buffers[path][self._rows][images], value)

    def _note_peak(self, name: str, *peaks: Tensor) -> None:
        """Raise a site's largest |x| to these, on the device: nothing waits for the numbers."""
        # Chunks are taken by several threads.
        for peak in peaks:
            with self._lock:
                before = self._peaks.get(name)
                self._peaks[name] = (
                    peak if before is None else torch.maximum(before, peak)
                )


def check_peaks(
    peaks: Mapping[str, Tensor],
    sites: Sequence[SiteSpec],
    where: str,
    host_sites: Collection[str],
    precision: str = "fp32",
) -> None:
    """Stop at the first site whose values were not finite or did not fit their stored type.

    Args:
        peaks: site -> its largest |x|.
        sites: sites in the order of the model.
        where: rows of the slab, in words.
        host_sites: names of the sites whose tokens went to host memory in their stored type.
        precision: precision of the model's forward passes.

    Raises:
        Overflow: names the site, its largest |x| and the option that stores it.
        NotFinite: the site is NaN or inf.
    """
    for site in sites:
        if site.name not in peaks:
            continue
        peak = float(peaks[site.name])
        stored_half = site.name in host_sites and site.dtype == "float16"
        if not np.isfinite(peak):
            advice = ""
            if precision == "fp16":
                advice = "try --precision bf16 or fp32"
            raise NotFinite(
                f"{site.name} has {peak} in {where}: the model's own output is broken",
                advice,
            )
        if stored_half and peak > FLOAT16_MAX:
            way_on = ""
            if site.tokens != "all":  # kept for Gram matrices alone
                way_on = ", or go on with whole slabs as --batch-size"
            raise Overflow(
                f"{site.name} reaches |x| = {peak:.6g} in {where}, more than float16 holds "
                "(65504); nothing was clipped: extract anew with --dtype "
                f"{site.name}=float32{way_on}"
            )
