"""The means that are subtracted from strips of features before products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.backend import Cast
from vitsee_core.kernels.fused import shift_half
from vitsee_core.similarity.shift import FeatureOffset
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from vitsee_core.kernels.staging import Staging

MEAN_ROWS = 128
PIECE = 1 << 18  # elements shifted and summed while in cache
HALF_TO_SINGLE = np.dtype(np.float16), np.dtype(np.float32)
NO_SUMS = np.zeros((0, 2), np.float32)


class StripMeans:
    """The mean of each strip over the rows that are read first."""

    def __init__(
        self, centred: bool, origin: FeatureOffset | None, cast: Cast, fused: bool = False
    ) -> None:
        """fused: shift half-precision features by compiled code."""
        self._centred, self._origin, self._cast, self._fused = centred, origin, cast, fused
        self._of: dict[int, NDArray[np.float32]] = {}
        self._sums: dict[int, NDArray[np.float32]] = {}

    def has_mean(self, strip: int) -> bool:
        """Whether a strip's mean is known, or none is wanted."""
        return not self._centred or strip in self._of

    def fill(self, x: Any, raw: NDArray[Any], strip: int, rows: slice, columns: slice) -> None:
        """x[rows, columns] = raw - its strip's mean, in cache-sized pieces. All columns of the
        first rows come first."""
        if not self._centred:
            self._cast(x[rows, columns], raw)
            return
        self.take_mean(raw, strip)
        mean, sums = self._of[strip][columns], NO_SUMS
        if self._sums_up:
            if strip not in self._sums:
                self._sums[strip] = np.zeros((len(x), 2), np.float32)
            sums = self._sums[strip][rows]
        if self._fused and (raw.dtype, x.dtype) == HALF_TO_SINGLE:
            bits = np.ascontiguousarray(raw).view(np.uint16)
            shift_half(bits, mean, x[rows], columns.start, sums)
            return
        weights, step = _weights(mean), max(1, PIECE // raw.shape[1])
        for at in range(0, len(raw), step):
            piece = x[rows, columns][at : at + step]
            self._cast(piece, raw[at : at + step])
            piece -= mean
            if len(sums):
                sums[at : at + step] += piece @ weights

    @property
    def _sums_up(self) -> bool:
        return self._origin is not None and bool(self._origin.n_rows)

    def take_mean(self, raw: NDArray[Any], strip: int) -> None:
        """Compute a strip's mean from the rows that are read first; later calls do nothing."""
        if self._centred and strip not in self._of:
            self._of[strip] = self._mean(raw, strip)

    def shift(self, x: Any, strip: int, staging: Staging) -> None:
        """x -= its strip's mean, on the device."""
        if self._centred:
            mean = self._of[strip]
            staging.shift(x, mean)
            if self._sums_up:
                self._sums[strip] = staging.times(x, _weights(mean))

    def done(self, strip: int, places: Integers, fresh: NDArray[np.bool_]) -> None:
        """Mark a strip as complete; called in the strips' order."""
        if self._origin is not None and (sums := self._sums.pop(strip, None)) is not None:
            self._origin.add(places, sums[fresh])

    def _mean(self, raw: NDArray[Any], strip: int) -> NDArray[np.float32]:
        chosen = raw[:: max(1, len(raw) // MEAN_ROWS)]
        sample = np.empty(chosen.shape, np.float32)
        self._cast(sample, chosen)
        mean: NDArray[np.float32] = sample.mean(0)
        if self._origin is not None:
            sample -= mean
            self._origin.centre(strip, mean, sample)
        return mean


def _weights(mean: NDArray[np.float32]) -> NDArray[np.float32]:
    """Factors that give the rows' products with the mean, and their sums."""
    return np.stack([mean, np.ones_like(mean)], 1)
