"""The attention of some images on a CPU, by the compiled loops of the modules beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitsee_core.reductions.buffers import Buffers
from vitsee_core.reductions.cpu_numbers import numbers_of
from vitsee_core.reductions.cpu_products import Product, multiply_images
from vitsee_core.reductions.cpu_sums import TOTALS, padded, sum_heads, sum_images, sum_queries
from vitsee_core.reductions.grid_distances import GridDistances
from vitsee_core.reductions.summary import AttentionScores
from vitsee_core.threads import run_split
from vitsee_core.types import Float32

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

# Up to so many tokens the loops make products themselves, without a call for each head. At 197 an
# extraction took as long with a library's products, which are faster but called one by one.
FEW_TOKENS = 256
# Their scores at a time, which stay near a core.
BLOCK_BYTES = 1 << 20
NO_CLS = np.empty((0, 0, 0), np.float32)
# By head of each image, as `sum_heads` has them.
SUMMED = ("totals", "received", "renormalised", "offsets")


class CpuPasses:
    """Fills the summaries of images from their scores; see `DevicePasses`, whose methods these are.

    The scores of small images are made by compiled loops too, if they are a product of queries and
    keys alone; others are taken image by image. Keeps each thread's buffers: A of one image, and
    the scores of one image, or of a part of a batch of small ones.
    """

    pairs_dtype = torch.float64

    def __init__(self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances) -> None:
        self._n, self._grid = layout.n_prefix, grid
        self._cls = -1 if layout.cls is None else layout.cls
        self._px, self._unit = (x.float().flatten().numpy() for x in (apart.px, apart.unit))
        self._unit_per_px = apart.unit_per_px or 0.0
        if self._unit_per_px:
            self._unit = self._unit[:0]
        self._buffers = Buffers(torch.device("cpu"))

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Of what is summed over images for `aligned`."""
        gh, gw = self._grid
        return n_heads, 2 * gh - 1, 2 * gw - 1

    def reduce(
        self,
        call: AttentionScores,
        images: range,
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        thread: int,
        n_threads: int,
    ) -> None:
        """As `DevicePasses.reduce`; the threads take heads, then queries."""
        n_heads, n_tokens = call.n_heads, call.n_tokens
        a = self._buffers.get(f"a {thread}", n_heads, n_tokens, padded(n_tokens)).numpy()
        arrays = {name: tensor.numpy() for name, tensor in out.items()}
        of_cls = arrays.get("cls_rows", NO_CLS)
        of_queries = arrays["head_mean"], arrays["spread"], of_cls
        totals, received, renormalised, offsets = (arrays[name] for name in SUMMED)
        summed = totals, received, renormalised, offsets
        about = self._n, self._grid, self._px, self._unit
        product = self._product(call)
        if product is not None and n_threads == 1 and "full" not in out:
            n_at_once = max(1, BLOCK_BYTES // (4 * n_heads * n_tokens**2))
            for first in range(images.start, images.stop, n_at_once):
                run = first, min(first + n_at_once, images.stop)
                room = self._room(call, run[1] - first, thread)
                multiply_images(*product, first, room)
                sum_images(room, first, *about, self._cls, run, a, *summed, *of_queries)
        else:
            for image in images:
                room = self._room(call, 1, thread)
                given = call.scores(slice(image, image + 1), out=torch.from_numpy(room)).numpy()

                def some_heads(
                    _: int, heads: range, image: int = image, given: Float32 = given
                ) -> None:
                    run = heads.start, heads.stop
                    sum_heads(given, image, *about, image, run, a, *summed)

                def some_queries(_: int, queries: range, image: int = image) -> None:
                    run = queries.start, queries.stop
                    sum_queries(a, self._n, self._cls, run, image, *of_queries)

                run_split(some_heads, n_heads, min(n_threads, n_heads))
                run_split(some_queries, n_tokens, min(n_threads, n_tokens))
                if "full" in out:
                    out["full"][image] = torch.from_numpy(a[:, :, :n_tokens])
        numbers_of(
            (images.start, images.stop),
            self._n,
            self._unit_per_px,
            np.ones(call.n_images, np.bool_) if valid is None else valid.numpy(),
            *summed,
            of_cls,
            arrays["numbers"],
            arrays["counts"],
            arrays["received_rows"],
            sums["pairs"].numpy().reshape(n_heads, -1),
            sums["received_rows"].numpy(),
            sums.get("cls_rows", sums["received_rows"]).numpy(),
        )

    def _product(self, call: AttentionScores) -> Product | None:
        """The call's scores as a product for the loops, where that is all there is to them."""
        factors = call.factors() if call.n_tokens <= FEW_TOKENS else None
        return None if factors is None else Product.of(*factors)

    def _room(self, call: AttentionScores, n_images: int, thread: int) -> Float32:
        shape = n_images, call.n_heads, call.n_tokens, call.n_tokens
        return self._buffers.get(f"scores {thread}", *shape).numpy()

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Of `SUMMED`, float64: what `reduce` needs in `out` for itself."""
        (gh, gw), n_tokens = self._grid, self._n + self._grid[0] * self._grid[1]
        last = len(TOTALS), n_tokens, n_tokens, (2 * gh - 1) * (2 * gw - 1)
        return {name: (n_images, n_heads, n) for name, n in zip(SUMMED, last, strict=True)}

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """As `DevicePasses.finish`."""
        torch.mean(out["spread"][:, self._n :], -1, out=out["head_std"])
        return pairs
