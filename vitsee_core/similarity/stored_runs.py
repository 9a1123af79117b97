"""Stacks that stay in memory as they are stored, for much work on the CPU.

Half precision and bytes are a half and a quarter of float32. What a product needs is made single,
shifted and scaled just before, in memory that stays in the core's cache: features in float32 come
from further away, which takes longer where matrices have some hundred columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams.arithmetic import Arithmetic
from vitsee_core.grams.fused import shift_bytes, shift_half
from vitsee_core.grams.halves import InPanels, Panels
from vitsee_core.grams.panels import shift_bytes_into_panels, shift_into_panels
from vitsee_core.grams.scratch import Scratch
from vitsee_core.progress import Progress
from vitsee_core.similarity.comparison import Rows
from vitsee_core.similarity.patch_pixels import PatchPixels
from vitsee_core.similarity.stacks import MEAN_ROWS, Runs, Stack, TokenStack
from vitsee_core.types import Float32

NO_SUMS, NO_VALUES = np.zeros((0, 2), np.float32), np.zeros((0, 0, 0))


class StoredRuns(Runs):
    """As `Runs`, of one matrix at a time. Of patches the mean is that of the pixels' values, which
    are scaled as the model's normalisation does: it shifts all of a channel alike, which changes
    nothing either.

    order: (n,) in which order the images are wanted, each run's a permutation of its own places;
    None for the store's. _runs: slab by slab which of the run's images it has, and (matrices,
    images, features); of images in another order all of them.
    """

    _scratch = Scratch()
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(
        self,
        stack: Stack,
        images: Rows,
        kept: int,
        backend: Arithmetic,
        progress: Progress,
        order: Rows | None = None,
    ) -> None:
        super().__init__(stack, images, kept, backend, progress)
        self._order = order
        self._means: dict[int, Float32] = {}

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored so."""
        if isinstance(stack, TokenStack):
            return stack.is_half
        return isinstance(stack, PatchPixels) and stack.scale is not None

    def of(self, k: int, run: slice, name: str) -> Float32:
        """In float32."""
        shape = run.stop - run.start, self.stack.n_features
        x: Float32 = self._scratch.take(name, math.prod(shape), np.float32)
        x = x[: math.prod(shape)].reshape(shape)
        mean = self._mean_of(k)
        for some, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                shift_half(raw.view(np.uint16), mean, x[some], 0, NO_SUMS)
            else:
                shift_bytes(raw, mean, self._scale, x[some])
        return x

    def sides(self, k: int, i: slice, j: slice, unit: InPanels) -> tuple[Panels, Panels]:
        """The factors of a Gram matrix, or of a multiple of it, for the matrix unit.

        Differences of bytes have eight bits and a sign: one part has them all. Where the channels
        are scaled differently, the right factor has the squares of the scales.
        """
        parts, weights = (2, 2), None
        if isinstance(self.stack, PatchPixels):
            alike = (self._scale == self._scale[0]).all()
            parts, weights = ((1, 1), None) if alike else ((1, 2), self._scale**2)
        x = self._panels(k, i, unit, "left", parts, None)
        if i == j and weights is None:
            return x, x
        return x, self._panels(k, j, unit, "right", parts[::-1], weights)

    def _panels(
        self,
        k: int,
        run: slice,
        unit: InPanels,
        name: str,
        parts: tuple[int, int],
        weights: Float32 | None,
    ) -> Panels:
        """In memory of this name; parts: of each number, and of those that they are multiplied
        with."""
        mean, n = self._mean_of(k), run.stop - run.start
        panels = unit.panels(name, n, self.stack.n_features, *parts)
        by = np.ones_like(mean) if weights is None else weights
        for some, values in self._runs[run.start]:
            if values.dtype == np.float16:
                bits = values[k].view(np.uint16)
                shift_into_panels(bits, mean, panels.values, some.start, 0, NO_SUMS)
            else:
                shift_bytes_into_panels(values[k], mean, by, panels.values, some.start)
        return panels

    def _mean_of(self, k: int) -> Float32:
        """What is subtracted of a matrix: the mean over the first rows of the first run, which is
        there when it is asked for first; of bytes a whole number."""
        if k not in self._means:
            x = self._runs[0][0][1][k][:MEAN_ROWS].astype(np.float32)
            # Of equal rows it is these, to the bit.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    @property
    def _scale(self) -> Float32:
        """Of the pixels of a patch."""
        assert isinstance(self.stack, PatchPixels) and self.stack.scale is not None
        return self.stack.scale

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        """Slab by slab."""
        spans = self.spans(run)
        if self._order is None:
            slabs = self._runs[run.start] = [(some, NO_VALUES) for some, _ in spans]

            def keep(k: int) -> None:
                slabs[k] = slabs[k][0], self._read_rows(spans[k][1])

            return [partial(keep, k) for k in range(len(spans))]
        places = np.argsort(self._order[run])  # of each image, where it is wanted
        kind = np.float16 if isinstance(self.stack, TokenStack) else np.uint8
        whole = np.empty((self.stack.n_matrices, len(places), self.stack.n_features), kind)
        self._runs[run.start] = [(slice(0, len(places)), whole)]

        def put(some: slice, rows: Rows) -> None:
            whole[:, places[some]] = self._read_rows(rows)

        return [partial(put, *span) for span in spans]

    def _read_rows(self, rows: Rows) -> NDArray[Any]:
        """(matrices, images, features) of rows of one slab."""
        stack, span = self.stack, slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(stack, PatchPixels):
            values = stack.read_stored(span)
        else:
            values = stack.read(span).swapaxes(0, 1)
        self._progress.advance(0, values.nbytes)
        return values[:, rows - rows[0]] if values.shape[1] > len(rows) else values
