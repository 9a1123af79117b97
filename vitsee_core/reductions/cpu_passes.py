"""The attention of some images on a CPU, by the compiled loops of the modules beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.compiled import compiled
from vitsee_core.reductions.buffers import Buffers
from vitsee_core.reductions.cpu_numbers import numbers_of
from vitsee_core.reductions.cpu_products import Operands, Places, Product, padded
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
# By head of each image, as `sum_heads` has them.
SUMMED = ("totals", "received", "renormalised", "offsets")


class CpuPasses:
    """Fills the summaries of images from their scores; see `DevicePasses`, whose methods these are.

    Scores that are a product of queries and keys alone are made by compiled loops too; others are
    taken image by image. Keeps each thread's buffers: A of one image, and its scores where they are
    taken.
    """

    pairs_dtype = torch.float64

    def __init__(self, layout: TokenLayout, grid: tuple[int, int], apart: GridDistances) -> None:
        self._n, self._grid = layout.n_prefix, grid
        self._cls = -1 if layout.cls is None else layout.cls
        self._px, self._unit = (_padded_rows(x) for x in (apart.px, apart.unit))
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
        at_once = product is not None and n_threads[1] == 1 and "full" not in out
        if not at_once:
            self._sum_by_image(call, product, bounds, out, arrays, n_threads)
        n_parts = len(bounds) - 1
        # By part, and then by head.
        pairs = sums["pairs"].numpy().reshape(n_parts, call.n_heads, -1)
        received = sums["received_rows"].numpy()
        of_cls = sums.get("cls_rows", sums["received_rows"]).numpy()

        def arguments(thread: int, parts: range) -> Any:
            here = slice(parts.start, parts.stop)
            return (
                *(NOT_GIVEN, *(product or Product.none())),
                *(self._n, self._grid, self._px, self._unit, self._cls),
                np.asarray(bounds[parts.start : parts.stop + 1]),
                at_once,
                self._room(call, thread).numpy(),
                *(arrays[name] for name in SUMMED),
                *(arrays["head_mean"], arrays["spread"], arrays.get("cls_rows", NO_CLS)),
                self._unit_per_px,
                np.ones(call.n_images, np.bool_) if valid is None else valid.numpy(),
                *(arrays[name] for name in ("numbers", "counts", "received_rows")),
                *(pairs[here], received[here], of_cls[here]),
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
        bounds: Sequence[int],
        out: Mapping[str, Tensor],
        arrays: Any,
        n_threads: tuple[int, int],
    ) -> None:
        """`sum_heads` and `sum_queries` of each image; threads take images, or of each of them
        heads and then queries."""
        about: Any = self._n, self._grid, self._px, self._unit
        summed: Any = tuple(arrays[name] for name in SUMMED)
        of_queries = arrays["head_mean"], arrays["spread"], arrays.get("cls_rows", NO_CLS)
        begin, n_cells = padded(self._n), call.n_tokens - self._n

        def some_images(thread: int, images: range) -> None:
            room = self._room(call, thread)
            a = room.numpy()
            for image in images:
                given = NOT_GIVEN if product is not None else self._given(call, image, thread)
                scores = given, *(product or Product.none())

                def some_heads(
                    _: int, heads: range, image: int = image, scores: Any = scores
                ) -> None:
                    run = heads.start, heads.stop
                    every: Any = *scores, *about, image, run, a, *summed
                    sum_heads(*every)

                def some_queries(_: int, queries: range, image: int = image) -> None:
                    run = queries.start, queries.stop
                    sum_queries(a, self._n, self._cls, run, image, *of_queries)

                run_split(some_heads, call.n_heads, min(n_threads[1], call.n_heads))
                run_split(some_queries, call.n_tokens, min(n_threads[1], call.n_tokens))
                if "full" in out:
                    out["full"][image, ..., : self._n] = room[..., : self._n]
                    out["full"][image, ..., self._n :] = room[..., begin : begin + n_cells]

        run_split(some_images, bounds[-1], n_threads[0])

    def _room(self, call: AttentionScores, thread: int) -> Tensor:
        """For A of an image, as from `sum_heads`."""
        width = padded(self._n) + padded(call.n_tokens - self._n)
        return self._buffers.get(f"a {thread}", call.n_heads, call.n_tokens, width)

    def _given(self, call: AttentionScores, image: int, thread: int) -> Float32:
        """Scores of an image that are more than a product."""
        shape = 1, call.n_heads, call.n_tokens, call.n_tokens
        room = self._buffers.get(f"scores {thread}", *shape)
        return call.scores(slice(image, image + 1), out=room).numpy().reshape(-1)

    def shapes(self, n_images: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Of `SUMMED`, float64: what `reduce` needs in `out` for itself."""
        (gh, gw), n_tokens = self._grid, self._n + self._grid[0] * self._grid[1]
        last = len(TOTALS), n_tokens, n_tokens, (2 * gh - 1) * (2 * gw - 1)
        return {name: (n_images, n_heads, n) for name, n in zip(SUMMED, last, strict=True)}

    def finish(self, out: Mapping[str, Tensor], pairs: Tensor) -> Tensor:
        """As `DevicePasses.finish`."""
        torch.mean(out["spread"][:, self._n :], -1, out=out["head_std"])
        return pairs


def _padded_rows(x: Tensor) -> Float32:
    """Rows of whole vectors, zeros beyond, as one."""
    more = padded(x.shape[1]) - x.shape[1]
    found: Float32 = torch.nn.functional.pad(x.float(), (0, more)).flatten().numpy()
    return found


@compiled
def sum_images(
    given: NDArray[np.float32],
    operands: Operands,
    places: Places,
    n_prefix: int,
    grid: tuple[int, int],
    px: NDArray[np.float32],
    unit: NDArray[np.float32],
    cls: int,
    bounds: NDArray[np.int64],
    anew: bool,
    a: NDArray[np.float32],
    totals: NDArray[np.float64],
    received: NDArray[np.float64],
    renormalised: NDArray[np.float64],
    offsets: NDArray[np.float64],
    head_mean: NDArray[np.float32],
    spread: NDArray[np.float32],
    cls_rows: NDArray[np.float32],
    unit_per_px: float,
    valid: NDArray[np.bool_],
    numbers: NDArray[np.float32],
    counts: NDArray[np.int32],
    received_rows: NDArray[np.float32],
    aligned: NDArray[np.float64],
    received_sum: NDArray[np.float64],
    cls_sum: NDArray[np.float64],
) -> None:
    """`numbers_of` some parts of a batch, after `sum_heads` and `sum_queries` of all of their heads
    and queries.

    Args of its own:
        given: nothing.
        cls: the class token, -1 without one.
        bounds: the first image of each part, and the one after the last.
        anew: whether heads and queries are still to be summed up.
        cls_rows: (batch, heads, tokens), filled where there is a class token: its row.
        aligned: (parts, heads, offsets), added to; and so the two after it.
    """
    heads, queries = (0, a.shape[0]), (0, a.shape[1])
    for part in range(bounds.shape[0] - 1):
        images = bounds[part], bounds[part + 1]
        for image in range(images[0], images[1] if anew else images[0]):
            sum_heads(
                given, operands, places, n_prefix, grid, px, unit, image, heads, a, totals,
                received, renormalised, offsets,
            )  # fmt: skip
            sum_queries(a, n_prefix, cls, queries, image, head_mean, spread, cls_rows)
        numbers_of(
            images, n_prefix, unit_per_px, valid, totals, received, renormalised, offsets, cls_rows,
            numbers, counts, received_rows, aligned[part], received_sum[part], cls_sum[part],
        )  # fmt: skip
