"""Stacks that stay in memory as they are stored, for much work on the CPU.

Half precision and bytes are a half and a quarter of float32. What a product needs is made single,
shifted and scaled just before, in memory that stays in the core's cache: features in float32 come
from further away, which takes longer where matrices have some hundred columns.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams.fused import shift_bytes, shift_half
from vitsee_core.similarity.patch_pixels import PatchPixels
from vitsee_core.similarity.stacks import MEAN_ROWS, Runs, Stack, TokenStack
from vitsee_core.types import Float32

NO_SUMS = np.zeros((0, 2), np.float32)


class StoredRuns(Runs):
    """As `Runs`; `both` gives what `single` takes. Of patches the mean is that of the pixels'
    values, which are scaled as the model's normalisation does: it shifts all of a channel alike,
    which changes nothing either."""

    _scratch = threading.local()

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored so."""
        if isinstance(stack, TokenStack):
            return stack.is_half
        return isinstance(stack, PatchPixels) and stack.scale is not None

    def single(self, stored: NDArray[Any], k: int, name: str) -> Float32:
        """(images, features) of one matrix of a run, in memory that this thread takes again for the
        next of this name."""
        assert self._mean is not None
        axis = 1 if isinstance(self.stack, PatchPixels) else 0
        size = stored.shape[axis] * self.stack.n_features
        memory = getattr(self._scratch, name, None)
        if memory is None or len(memory) < size:
            memory = np.empty(size, np.float32)
            setattr(self._scratch, name, memory)
        x: Float32 = memory[:size].reshape(-1, self.stack.n_features)
        if isinstance(self.stack, PatchPixels):
            scale = self.stack.scale
            assert scale is not None
            shift_bytes(stored[k], self._mean[k], scale, x)
        else:
            shift_half(stored.view(np.uint16), k, self._mean[k], x, 0, NO_SUMS)
        return x

    def _read(self, run: slice) -> NDArray[Any]:
        """Patches: (matrices, images, features) bytes; tokens: (images, matrices, features)."""
        n, stack = run.stop - run.start, self.stack
        if isinstance(stack, PatchPixels):
            out: NDArray[Any] = np.empty((stack.n_matrices, n, stack.n_features), np.uint8)

            def read(rows: slice) -> NDArray[Any]:
                return stack.read_stored(rows).swapaxes(0, 1)

            for some, values in self.pieces(run, read):
                out[:, some] = values.swapaxes(0, 1)
        else:
            out = np.empty((n, stack.n_matrices, stack.n_features), np.float16)
            for some, values in self.pieces(run, stack.read):
                out[some] = values
        if self._mean is None:
            by_matrix = out if isinstance(stack, PatchPixels) else out.swapaxes(0, 1)
            self._mean = np.stack([_mean(x[:MEAN_ROWS]) for x in by_matrix])
        return out


def _mean(stored: NDArray[Any]) -> Float32:
    """Over the rows; of equal ones it is these, to the bit."""
    x = stored.astype(np.float32)
    mean: Float32 = x[0] + (x - x[0]).mean(0)
    return mean
