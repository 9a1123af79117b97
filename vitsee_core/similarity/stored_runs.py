"""Stacks kept in memory as stored, for large work on the CPU.

float16 and bytes take a half and a quarter of float32. They are cast, shifted and scaled just
before a product, into memory that stays in the core's cache: features in float32 come from main
memory, which takes longer for matrices of some hundred columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.fused import shift_bytes, shift_half
from vitsee_core.similarity.patch_pixels import PatchPixels
from vitsee_core.similarity.stacks import MEAN_ROWS, Runs, Stack, TokenStack
from vitsee_core.types import Float32, Integers

NO_SUMS, NO_VALUES = np.zeros((0, 2), np.float32), np.zeros((0, 0, 0))


class Scratch(threading.local):
    """Per-thread memory that is reused for the next piece of work: fresh memory costs page
    faults."""

    def __init__(self) -> None:
        self._found: dict[str, Float32] = {}

    def take(self, name: str, rows: int, columns: int) -> Float32:
        """(rows, columns) uninitialised, in the memory of the last call with this name."""
        n = rows * columns
        buffer = self._found.get(name)
        if buffer is None or len(buffer) < n:
            buffer = self._found[name] = np.empty(n, np.float32)
        return buffer[:n].reshape(rows, columns)


class StoredRuns(Runs):
    """`Runs` of one matrix at a time.

    Patches keep their pixels' values, scaled as the model's normalisation does; the mean that it
    subtracts is the same for all pixels of a channel and has no effect.

    _runs: for each slab, which of the run's images it has, and (matrices, images, features).
    """

    _scratch = Scratch()
    _runs: dict[int, list[tuple[slice, NDArray[Any]]]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._means: dict[int, Float32] = {}

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored in such a type."""
        return stack.is_half if isinstance(stack, TokenStack) else stack.scale is not None

    def of(self, k: int, run: slice, name: str) -> Float32:
        """A run of slab k's array `name`, in float32."""
        x = self._scratch.take(name, run.stop - run.start, self.stack.n_features)
        mean = self._mean_of(k)
        for some, values in self._runs[run.start]:
            raw = np.ascontiguousarray(values[k])
            if raw.dtype == np.float16:
                shift_half(raw.view(np.uint16), mean, x[some], 0, NO_SUMS)
            else:
                shift_bytes(raw, mean, self._scale, x[some])
        return x

    def _mean_of(self, k: int) -> Float32:
        """The mean to subtract from a matrix: over the first rows of the first run, which is loaded
        when first requested; an integer for bytes."""
        if k not in self._means:
            x = self._runs[0][0][1][k][:MEAN_ROWS].astype(np.float32)
            # For equal rows it equals these bitwise.
            mean = x[0] + (x - x[0]).mean(0)
            self._means[k] = mean if isinstance(self.stack, TokenStack) else np.rint(mean)
        return self._means[k]

    @property
    def _scale(self) -> Float32:
        """The scale of the pixels of a patch."""
        assert isinstance(self.stack, PatchPixels) and self.stack.scale is not None
        return self.stack.scale

    def _jobs(self, run: slice) -> list[Callable[[], None]]:
        spans = self.spans(run)
        slabs = self._runs[run.start] = [(some, NO_VALUES) for some, _ in spans]

        def keep(k: int) -> None:
            slabs[k] = slabs[k][0], self._read_rows(spans[k][1])

        return [partial(keep, k) for k in range(len(spans))]

    def _read_rows(self, rows: Integers) -> NDArray[Any]:
        """(matrices, images, features) of rows of one slab."""
        stack, span = self.stack, slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(stack, PatchPixels):
            values = stack.read_stored(span)
        else:
            values = stack.read(span).swapaxes(0, 1)
        self._progress.advance(0, values.nbytes)
        return values[:, rows - rows[0]] if values.shape[1] > len(rows) else values
