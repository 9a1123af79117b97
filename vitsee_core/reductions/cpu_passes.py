"""The attention of some images on a CPU, by the compiled loops of the modules beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.reductions.buffers import Buffers
from vitsee_core.reductions.cpu_arrays import (
    Geometry,
    HeadSums,
    InCommon,
    OfHeads,
    OverImages,
    Scores,
)
from vitsee_core.reductions.cpu_numbers import numbers_of
from vitsee_core.reductions.cpu_products import Product, padded
from vitsee_core.reductions.cpu_sums import TOTALS, sum_heads, sum_queries
from vitsee_core.reductions.grid_distances import GridDistances
from vitsee_core.reductions.summary import AttentionScores
from vitsee_core.threads import run_split
from vitsee_core.types import Float32

if TYPE_CHECKING:
    from torch import Tensor

    from vitsee_stores.layout import TokenLayout

NO_CLS = np.empty((0, 0, 0), np.float32)
NOT_GIVEN = np.empty(0, np.float32)


class CpuPasses:
    """Fills the summaries of images from their scores; see `DevicePasses`, whose methods these are.

    Scores that are a product of queries and keys alone are made by compiled loops too; others are
    taken image by image. Keeps each thread's buffers: A of one image, and its scores where they are
    taken.
    """

    pairs_dtype = torch.float64

    def __init__(self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances) -> None:
        px, unit = (_padded_rows(x) for x in (apart.px, apart.unit))
        unit_per_px = apart.unit_per_px or 0.0
        cls = -1 if layout.cls is None else layout.cls
        unit = unit[:0] if unit_per_px else unit
        self._geometry = Geometry(layout.n_prefix, grid, cls, px, unit, unit_per_px)
        self._buffers = Buffers(torch.device("cpu"))

    def pairs_shape(self, n_heads: int) -> tuple[int, ...]:
        """Of what is summed over images for `aligned`."""
        gh, gw = self._geometry.grid
        return n_heads, 2 * gh - 1, 2 * gw - 1

    def reduce(
        self,
        call: AttentionScores,
        bounds: Sequence[int],
        valid: Tensor | None,
        out: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        n_threads: tuple[int, int],
    ) -> None:
        """As `DevicePasses.reduce`."""
        arrays: Any = {name: tensor.numpy() for name, tensor in out.items()}
        factors = call.factors()
        product = None if factors is None else Product.of(*factors)
        head_sums = HeadSums(*(arrays[name] for name in HeadSums._fields))
        common = InCommon(arrays["head_mean"], arrays["spread"], arrays.get("cls_rows", NO_CLS))
        at_once = product is not None and n_threads[1] == 1 and "full" not in out
        if not at_once:
            full = out.get("full")
            self._sum_by_image(call, product, bounds[-1], head_sums, common, full, n_threads)
        n_parts = len(bounds) - 1
        # By part, and then by head.
        pairs = sums["pairs"].numpy().reshape(n_parts, call.n_heads, -1)
        received = sums["received_rows"].numpy()
        of_cls = sums.get("cls_rows", sums["received_rows"]).numpy()
        counted = np.ones(call.n_images, np.bool_) if valid is None else valid.numpy()
        found = OfHeads(*(arrays[name] for name in OfHeads._fields))

        def arguments(thread: int, parts: range) -> Any:
            here = slice(parts.start, parts.stop)
            return (
                *(Scores(NOT_GIVEN, product or Product.none()), self._geometry),
                *(np.asarray(bounds[parts.start : parts.stop + 1]), at_once),
                *(self._room(call, thread).numpy(), head_sums, common, counted, found),
                OverImages(pairs[here], received[here], of_cls[here]),
            )

        # All is ready before a thread begins: in its one call none waits for the interpreter.
        n_runs = n_threads[0]
        starts = [n_parts * i // n_runs for i in range(n_runs + 1)]
        runs = [arguments(i, range(*starts[i : i + 2])) for i in range(n_runs)]
        run_split(lambda i, _: sum_images(*runs[i]), n_runs, n_runs, plain=True)

    def _sum_by_image(
        self,
        call: AttentionScores,
        product: Product | None,
        n_images: int,
        sums: HeadSums,
        common: InCommon,
        full: Tensor | None,
        n_threads: tuple[int, int],
    ) -> None:
        """`sum_heads` and `sum_queries` of each image, and A as a whole; threads take images, or of
        each of them heads and then queries."""
        n = self._geometry.n_prefix
        begin, end = padded(n), padded(n) + call.n_tokens - n

        def some_images(thread: int, images: range) -> None:
            room = self._room(call, thread)
            a = room.numpy()
            for image in images:
                given = NOT_GIVEN if product is not None else self._given(call, image, thread)
                scores = Scores(given, product or Product.none())

                def some_heads(
                    _: int, heads: range, image: int = image, scores: Scores = scores
                ) -> None:
                    run = heads.start, heads.stop
                    sum_heads(scores, self._geometry, image, run, a, sums)

                def some_queries(_: int, queries: range, image: int = image) -> None:
                    run = queries.start, queries.stop
                    sum_queries(a, self._geometry, run, image, common)

                run_split(some_heads, call.n_heads, min(n_threads[1], call.n_heads))
                run_split(some_queries, call.n_tokens, min(n_threads[1], call.n_tokens))
                if full is not None:
                    full[image, ..., :n] = room[..., :n]
                    full[image, ..., n:] = room[..., begin:end]

        run_split(some_images, n_images, n_threads[0])

    def _room(self, call: AttentionScores, thread: int) -> Tensor:
        """For A of an image, as from `sum_heads`."""
        width = padded(self._geometry.n_prefix) + padded(call.n_tokens - self._geometry.n_prefix)
        return self._buffers.get(f"a {thread}", call.n_heads, call.n_tokens, width)

    def _given(self, call: AttentionScores, image: int, thread: int) -> Float32:
        """Scores of an image that are more than a product."""
        shape = 1, call.n_heads, call.n_tokens, call.n_tokens
        room = self._buffers.get(f"scores {thread}", *shape)
        return call.scores(slice(image, image + 1), out=room).numpy().reshape(-1)

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Of `HeadSums`, float64: what `reduce` needs in `out` for itself."""
        gh, gw = self._geometry.grid
        n_tokens = self._geometry.n_prefix + gh * gw
        last = len(TOTALS), n_tokens, n_tokens, (2 * gh - 1) * (2 * gw - 1)
        of = zip(HeadSums._fields, last, strict=True)
        return {name: (n_images, n_heads, n) for name, n in of}

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """As `DevicePasses.finish`."""
        torch.mean(out["spread"][:, self._geometry.n_prefix :], -1, out=out["head_std"])
        return pairs


def _padded_rows(x: Tensor) -> Float32:
    """Rows of whole vectors, zeros beyond, as one."""
    more = padded(x.shape[1]) - x.shape[1]
    found: Float32 = torch.nn.functional.pad(x.float(), (0, more)).flatten().numpy()
    return found


@compiled
def sum_images(
    scores: Scores,
    geometry: Geometry,
    bounds: NDArray[np.int64],
    anew: bool,
    a: NDArray[np.float32],
    sums: HeadSums,
    common: InCommon,
    valid: NDArray[np.bool_],
    found: OfHeads,
    over: OverImages,
) -> None:
    """`numbers_of` some parts of a batch, after `sum_heads` and `sum_queries` of all of their heads
    and queries.

    Args of its own:
        bounds: the first image of each part, and the one after the last.
        anew: whether heads and queries are still to be summed up; the scores are a product then.
    """
    heads, queries = (0, a.shape[0]), (0, a.shape[1])
    for part in range(bounds.shape[0] - 1):
        images = bounds[part], bounds[part + 1]
        for image in range(images[0], images[1] if anew else images[0]):
            sum_heads(scores, geometry, image, heads, a, sums)
            sum_queries(a, geometry, queries, image, common)
        numbers_of(images, geometry, valid, sums, common.cls_rows, found, over, part)
