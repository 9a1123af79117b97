"""Stacks that stay in memory as they are stored, for much work on the CPU.

Half precision and bytes are a half and a quarter of float32. What a product needs is made single,
shifted and scaled just before, in memory that stays in the core's cache: features in float32 come
from further away, which takes longer where matrices have some hundred columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.grams.fused import shift_bytes, shift_half
from vitsee_core.grams.halves import InPanels
from vitsee_core.grams.panels import shift_bytes_into_panels, shift_into_panels
from vitsee_core.grams.scratch import Scratch
from vitsee_core.similarity.patch_pixels import PatchPixels
from vitsee_core.similarity.stacks import MEAN_ROWS, Runs, Stack, TokenStack
from vitsee_core.types import Float32

NO_SUMS = np.zeros((0, 2), np.float32)


class StoredRuns(Runs):
    """As `Runs`; `both` gives what `single` takes. Of patches the mean is that of the pixels'
    values, which are scaled as the model's normalisation does: it shifts all of a channel alike,
    which changes nothing either."""

    _scratch = Scratch()

    @staticmethod
    def takes(stack: Stack) -> bool:
        """Whether a stack is stored so."""
        if isinstance(stack, TokenStack):
            return stack.is_half
        return isinstance(stack, PatchPixels) and stack.scale is not None

    def single(self, stored: NDArray[Any], k: int, name: str) -> Any:
        """(images, features) of one matrix of a run, in memory that this thread takes again for the
        next of this name; `Panels` where the backend multiplies these."""
        assert self._mean is not None
        shape, mean = stored.shape[1:], self._mean[k]
        if isinstance(self.backend, InPanels):
            panels = self.backend.panels(name, *shape)
            if stored.dtype == np.float16:
                bits = stored[k].view(np.uint16)
                shift_into_panels(bits, mean, panels.values, 0, 0, NO_SUMS)
            else:
                shift_bytes_into_panels(stored[k], mean, self._scale, panels.values, 0)
            return panels
        size = math.prod(shape)
        x: Float32 = self._scratch.take(name, size, np.float32)[:size].reshape(shape)
        if stored.dtype == np.float16:
            shift_half(stored[k].view(np.uint16), mean, x, 0, NO_SUMS)
        else:
            shift_bytes(stored[k], mean, self._scale, x)
        return x

    @property
    def _scale(self) -> Float32:
        """Of the pixels of a patch."""
        assert isinstance(self.stack, PatchPixels) and self.stack.scale is not None
        return self.stack.scale

    def _read(self, run: slice) -> NDArray[Any]:
        """(matrices, images, features): patches in bytes, tokens in half precision."""
        stack = self.stack
        shape = stack.n_matrices, run.stop - run.start, stack.n_features
        out: NDArray[Any]
        if isinstance(stack, PatchPixels):
            out = np.empty(shape, np.uint8)
            for some, values in self.pieces(
                run, lambda rows: stack.read_stored(rows).swapaxes(0, 1)
            ):
                out[:, some] = values.swapaxes(0, 1)
        else:
            out = np.empty(shape, np.float16)
            for some, values in self.pieces(run, stack.read):
                out[:, some] = values.swapaxes(0, 1)
        if self._mean is None:
            self._mean = np.stack([_mean(x[:MEAN_ROWS]) for x in out])
        return out


def _mean(stored: NDArray[Any]) -> Float32:
    """Over the rows; of equal ones it is these, to the bit."""
    x = stored.astype(np.float32)
    mean: Float32 = x[0] + (x - x[0]).mean(0)
    return mean
