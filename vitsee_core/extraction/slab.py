"""One slab's numbers while they are made: an observer that fills host buffers batch by batch.

Casts and reductions run on the device. On CUDA the results leave through pinned buffers on a side
stream and nothing waits for them until the whole slab is handed to the writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsee_core.extraction.grams import GramProducts, as_block
from vitsee_core.extraction.holding import GramRoute, feature_paths
from vitsee_core.extraction.timing import Clock
from vitsee_core.reductions import AttentionReducer, pool_sites, residual_products, rollout
from vitsee_core.reductions.summary import PER_IMAGE
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, arrays

if TYPE_CHECKING:
    from vitsee_core.images import Batch
    from vitsee_core.models.attention import AttentionCall
    from vitsee_core.models.sites import AttentionBlock, Sublayer

FLOAT16_MAX = 65504.0
PER_HEAD = tuple(name for name in PER_IMAGE if name != "head_std")
SUMS = ("aligned", "cls_map", "received")
# What stands where there is no head or no valid image, in arrays that cannot hold NaN.
MISSING = {"n_queries": 0, "received_argmax": -1}


class Overflow(VitseeError):
    """An activation does not fit the type it is stored in, or is not a number."""


class SlabBuffers:
    """Host memory for one slab: path -> tensor of (slab, ...), reused from slab to slab.

    held: what is kept until the slab's Gram matrices are made, and not stored.
    """

    def __init__(self, plan: StorePlan, pinned: bool):
        self.arrays = {
            path: torch.empty(
                (plan.slab, *spec.shape[1:]),
                dtype=getattr(torch, np.dtype(spec.dtype).name),
                pin_memory=pinned,
            )
            for path, spec in arrays(plan).items()
            if spec.per == "image"
        }
        self.held: dict[str, Tensor] = {}
        self.done: torch.cuda.Event | None = None

    def __getitem__(self, path: str) -> Tensor:
        """(slab, ...) of one array."""
        return self.arrays[path] if path in self.arrays else self.held[path]

    def grams(self, products: GramProducts, plan: StorePlan, n: int) -> dict[str, Tensor]:
        """Gram matrices of the valid images among the first `n`, from what is held and stored."""
        valid = self.arrays["valid"][:n] == 1
        return {
            f"grams/{site.name}/all": products.gram(
                [self[path][:n] for path in feature_paths(site)], valid
            )
            for site in plan.gram_sites
        }


class SlabObserver:
    """Takes what `Capture` shows and writes it into a slab's buffers.

    Per slab: `start(buffers)`, for each batch `begin_batch`, a captured forward, `end_batch`, and
    `finish()`. Memory: the buffers, plus on the device the attention sums of one slab and the
    head means of one batch. Time spent on Gram matrices is booked on `clock`.
    """

    def __init__(self, plan: StorePlan, device: torch.device, route: GramRoute, clock: Clock):
        self._plan, self._device, self._route, self._clock = plan, device, route, clock
        self._products = GramProducts(device)
        self._with_gram = {site.name for site in plan.gram_sites}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._sum_shapes = {
            path: spec.shape[1:]
            for path, spec in arrays(plan).items()
            if spec.per == "slab" and path.startswith("attention/")
        }
        self._sum_dtype = wide
        self._stored = {site.name: site for site in plan.sites}
        level = plan.attention_level
        self._groups = [
            (
                group,
                AttentionReducer(
                    group.layout,
                    device,
                    rollout=plan.rollout,
                    rows=level in ("rows", "full"),
                    full=level == "full",
                ),
            )
            for group in plan.attention
        ]
        self._place: dict[str, tuple[AttentionGroup, AttentionReducer, int]] = {
            block: (group, reducer, row)
            for group, reducer in self._groups
            for row, block in enumerate(group.blocks)
        }

    def start(self, buffers: SlabBuffers) -> None:
        """Begin a slab in these buffers."""
        self._buffers = buffers
        self._sums = {
            path: torch.zeros(shape, dtype=self._sum_dtype, device=self._device)
            for path, shape in self._sum_shapes.items()
        }
        self._peaks: dict[str, Tensor] = {}

    def begin_batch(self, first: int, batch: Batch) -> None:
        """`first`: the batch's first row within the slab."""
        self._rows = slice(first, first + len(batch.valid))
        self._valid = torch.from_numpy(batch.valid)
        self._head_means: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._keep("valid", torch.from_numpy(batch.valid.astype(np.uint8)))
        # torch has no arithmetic for uint64, but copies it bit by bit
        self._keep("hash", torch.from_numpy(batch.hash))
        self._keep("size", torch.from_numpy(batch.size))
        if self._plan.inputs is not None:
            self._keep("input", batch.pixels)

    def end_batch(self) -> None:
        """What needs all blocks of a batch: the rollout, and numbers with a block axis."""
        if self._plan.rollout:
            group = self._plan.attention[0]
            means = [self._head_means[block] for block in group.blocks]
            self._keep("attention/rollout", rollout(means, group.layout))
        for path, value in self._staged.items():
            self._keep(path, value)
        self._head_means, self._staged = {}, {}

    def finish(self) -> dict[str, Tensor]:
        """The slab's sums (still on the device); the buffers are whole once `done` has passed.

        On CUDA, what was held for Gram matrices may be taken again: copies to come wait for them.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            if self._route.holds:
                current.wait_stream(self._stream)
                n = self._rows.stop
                with self._clock("grams"):
                    self._sums |= self._buffers.grams(self._products, self._plan, n)
            self._stream.wait_stream(current)
            self._buffers.done = torch.cuda.Event()
            self._buffers.done.record(self._stream)
        return self._sums

    @property
    def peaks(self) -> dict[str, Tensor]:
        """Largest |x| of every stored site so far, NaN where one was met (device scalars)."""
        return self._peaks

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep a site's tokens and pooled vectors, and note its largest value."""
        stored = self._stored[site.name]
        self._note_peak(site.name, prefix, body)
        if stored.kind == "vector":
            self._keep(f"vectors/{site.name}", body)
            return
        if self._route.where == "forward" and site.name in self._with_gram:
            self._gram(site.name, prefix, body)
        if stored.kind != "raw" and stored.layout is not None:
            cls, mean = pool_sites(prefix, body, stored.layout)
            if cls is not None:
                self._keep(f"pooled/{site.name}/cls", cls)
            self._keep(f"pooled/{site.name}/mean", mean)
        if stored.tokens == "all" or self._route.holds:
            parts = [body] if prefix is None else [prefix, body]
            for path, value in zip(feature_paths(stored), parts, strict=True):
                self._keep(path, value)

    def branch(self, sublayer: Sublayer, z: Tensor, f: Tensor) -> None:
        """Keep the dot products of a skip and its branch."""
        self._keep(f"residual/{sublayer.name}", residual_products(z, f))

    def attention(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Keep a block's attention summaries; its sums add to the slab's."""
        group, reducer, row = self._place[block.name]
        folder = group.folder
        heads = slice(0, block.n_heads)
        summary = reducer.reduce(call, self._valid)
        for name in PER_HEAD:
            self._stage(folder + name, getattr(summary, name), row, heads)
        self._stage(folder + "head_std", summary.head_std, row)
        for name in SUMS:
            value = getattr(summary, name)
            if value is not None:
                self._sums[folder + name][row, heads] += value
        if summary.cls_rows is not None:
            self._stage(folder + "cls_rows", summary.cls_rows, row, heads)
        if summary.received_rows is not None:
            self._stage(folder + "received_rows", summary.received_rows, row, heads)
        if summary.full is not None:
            self._keep(f"attention/full/{block.name}", summary.full)
        if summary.head_mean is not None:
            self._head_means[block.name] = summary.head_mean

    def _gram(self, name: str, prefix: Tensor | None, body: Tensor) -> None:
        outer = "reductions" if self._device.type == "cpu" else "model"
        parts = [part for part in (prefix, body) if part is not None]
        with self._clock.within("grams", outer):
            self._sums[f"grams/{name}/all"] = self._products.gram(parts, self._valid)

    def _stage(self, path: str, value: Tensor, *place: int | slice) -> None:
        """Put one block's numbers beside the others' on the device, to leave it together: a copy
        into a strided part of host memory would wait for the device."""
        if path not in self._staged:
            out = self._buffers.arrays[path][self._rows]
            self._staged[path] = torch.empty(out.shape, dtype=out.dtype, device=self._device)
        self._staged[path][(slice(None), *place)] = value

    def _keep(self, path: str, value: Tensor) -> None:
        out = self._buffers[path][self._rows]
        if self._stream is None or not value.is_cuda:
            out.copy_(value)
            return
        # A copy always: the model may overwrite a live tensor before the side stream has read it.
        staged = torch.empty(value.shape, dtype=out.dtype, device=value.device).copy_(value)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(staged, non_blocking=True)
        staged.record_stream(self._stream)

    def _note_peak(self, name: str, prefix: Tensor | None, body: Tensor) -> None:
        for part in (prefix, body):
            if part is not None and part.numel():
                # Not every release of torch has aminmax on Metal.
                on_metal = part.device.type == "mps"
                low, high = (part.amin(), part.amax()) if on_metal else torch.aminmax(part)
                peak = torch.maximum(-low, high).float()
                before = self._peaks.get(name)
                self._peaks[name] = peak if before is None else torch.maximum(before, peak)


def check_peaks(
    peaks: Mapping[str, Tensor],
    sites: Sequence[SiteSpec],
    where: str,
    held: bool = False,
    precision: str = "fp32",
) -> None:
    """Stop at the first site whose values did not fit; `held`: sites kept pooled are held in
    their type for their Gram matrices; `precision`: what the model ran in.

    Raises:
        Overflow: names the site, its largest |x| and the option that keeps it.
    """
    for site in sites:
        if site.name not in peaks:
            continue
        peak = float(peaks[site.name])
        kept = site.kind != "vector" and (site.tokens == "all" or held)
        stored_half = kept and site.dtype == "float16"
        if not np.isfinite(peak):
            way_on = "; try --precision bf16 or fp32" if precision == "fp16" else ""
            raise Overflow(
                f"{site.name} holds {peak} in {where}: the model's own output is broken{way_on}"
            )
        if stored_half and peak > FLOAT16_MAX:
            way_on = "" if site.tokens == "all" else ", or go on with whole slabs as --batch-size"
            raise Overflow(
                f"{site.name} reaches |x| = {peak:.6g} in {where}, more than float16 holds "
                "(65504); nothing was clipped: extract anew with --dtype "
                f"{site.name}=float32{way_on}"
            )


def to_store(
    buffers: SlabBuffers, sums: Mapping[str, Tensor], n: int, plan: StorePlan
) -> dict[str, NDArray[Any]]:
    """The first `n` rows of the buffers and the slab's sums as arrays; invalid rows become NaN."""
    if buffers.done is not None:
        buffers.done.synchronize()
    out: dict[str, NDArray[Any]] = {k: v[:n].numpy() for k, v in buffers.arrays.items()}
    invalid = np.flatnonzero(out["valid"] == 0)
    if invalid.size:
        for path, array in out.items():
            if array.dtype.kind == "f":
                array[invalid] = np.nan
            elif (name := path.rpartition("/")[2]) in MISSING:
                array[invalid] = MISSING[name]
    for group in plan.attention:
        _blank_missing_heads(out, group)
    valid = out["valid"] == 1
    for path, value in sums.items():
        array = value.float().cpu().numpy()
        out[path] = as_block(array, valid, plan.slab) if path.startswith("grams/") else array
    out["n_valid"] = np.asarray(int(out["valid"].sum()), np.int64)
    return out


def _blank_missing_heads(out: dict[str, NDArray[Any]], group: AttentionGroup) -> None:
    """Beyond a block's own heads: NaN, or `MISSING` (buffers are reused and start undefined)."""
    widest = max(group.n_heads)
    for row, heads in enumerate(group.n_heads):
        if heads == widest:
            continue
        for name in (*PER_HEAD, "cls_rows", "received_rows"):
            if (array := out.get(group.folder + name)) is not None:
                array[:, row, heads:] = MISSING.get(name, np.nan)
