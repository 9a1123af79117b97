"""Subtract the mean of the first rows from each strip of columns, on its way to a product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.kernels.backend import Cast
from vitsee_core.kernels.compiled import shift_half
from vitsee_core.similarity.representation import FeatureOffset
from vitsee_core.types import Integers

if TYPE_CHECKING:
    from vitsee_core.kernels.backend import Staging

MEAN_ROWS = 128  # rows that the mean of a strip is taken over
PIECE = 1 << 18  # elements shifted and summed while in cache
HALF_TO_SINGLE = np.dtype(np.float16), np.dtype(np.float32)
NO_SUMS = np.zeros((0, 2), np.float32)


class StripMeans:
    """The mean of each strip over the rows that are read first, subtracted from all rows.

    Args:
        centred: whether means are subtracted at all.
        origin: records the means and the rows' products with them; None records nothing.
        cast: converts features as stored to float32, on the host.
        fused: cast and shift half-precision features in one compiled loop.
        scale: factor of all features, a power of two; means and the records of `origin` are of
            scaled features.
    """

    def __init__(
        self,
        centred: bool,
        origin: FeatureOffset | None,
        cast: Cast,
        fused: bool = False,
        scale: float = 1.0,
    ) -> None:
        self._centred = centred
        self._origin = origin
        self._cast = cast
        self._fused = fused
        self._scale = np.float64(scale)
        self._means: dict[int, NDArray[np.float32]] = {}  # strip -> (columns,)
        self._sums: dict[
            int, NDArray[np.float32]
        ] = {}  # strip -> (rows, 2), see `_weights`

    def has_mean(self, strip: int) -> bool:
        """Return whether a strip can be filled in pieces: its mean is known or not needed."""
        return not self._centred or strip in self._means

    def fill(
        self, x: Any, raw: NDArray[Any], strip: int, rows: slice, columns: slice
    ) -> None:
        """Write scale * raw less the strip's mean to x[rows, columns].

        The first call for a strip has all of its columns, as its mean is taken from them.

        Args:
            x: (rows, columns) of the strip, changed.
            raw: features as stored, of these rows and columns.
            strip: number of the strip.
            rows: rows of x to fill.
            columns: columns of x to fill.
        """
        if not self._centred:
            self._cast_scaled(x[rows, columns], raw)
            return
        self.take_mean(raw, strip)
        mean = self._means[strip][columns]
        sums = NO_SUMS
        if self._records_sums:
            if strip not in self._sums:
                self._sums[strip] = np.zeros((len(x), 2), np.float32)
            sums = self._sums[strip][rows]
        if self._fused and (raw.dtype, x.dtype) == HALF_TO_SINGLE:
            bits = np.ascontiguousarray(raw).view(np.uint16)
            shift_half(bits, mean, x[rows], columns.start, sums)
            return
        # Cast, shift and sum a piece at a time, so that it is still in the cache for each.
        weights = _weights(mean)
        step = max(1, PIECE // raw.shape[1])
        for start in range(0, len(raw), step):
            piece = x[rows, columns][start : start + step]
            self._cast_scaled(piece, raw[start : start + step])
            piece -= mean
            if len(sums):
                sums[start : start + step] += piece @ weights

    def _cast_scaled(self, out: Any, raw: NDArray[Any]) -> None:
        """Write raw * scale to `out`, scaled before the cast: float32 overflows or underflows at
        unscaled features that are far from 1."""
        if self._scale == 1:
            self._cast(out, raw)
        else:
            self._cast(out, raw * self._scale)

    @property
    def _records_sums(self) -> bool:
        """Whether rows' products with the mean are recorded."""
        return self._origin is not None and bool(self._origin.n_rows)

    def take_mean(self, raw: NDArray[Any], strip: int) -> None:
        """Compute a strip's mean from the rows that are read first; later calls do nothing.

        raw: (rows, columns), all columns of the strip.
        """
        if not self._centred or strip in self._means:
            return
        # Rows spread over the slab, as neighbouring images may be of one class.
        chosen = raw[:: max(1, len(raw) // MEAN_ROWS)]
        sample = np.empty(chosen.shape, np.float32)
        self._cast_scaled(sample, chosen)
        mean: NDArray[np.float32] = sample.mean(0)
        if self._origin is not None:
            sample -= mean
            self._origin.centre(strip, mean, sample)
        self._means[strip] = mean

    def shift(self, x: Any, strip: int, staging: Staging) -> None:
        """Scale x, (rows, columns) on the device, and subtract its strip's mean, in place."""
        if self._scale != 1:
            x *= float(self._scale)
        if self._centred:
            mean = self._means[strip]
            staging.shift(x, mean)
            if self._records_sums:
                self._sums[strip] = staging.times(x, _weights(mean))

    def done(self, strip: int, row_indices: Integers, fresh: NDArray[np.bool_]) -> None:
        """Pass the sums of a complete strip to `origin`; to be called in the strips' order.

        Args:
            strip: number of the strip.
            row_indices: (fresh rows,) their indices among all rows of the matrix.
            fresh: (rows,) which of the strip's rows were not read for an earlier group of tiles.
        """
        sums = self._sums.pop(strip, None)
        if self._origin is not None and sums is not None:
            self._origin.add(row_indices, sums[fresh])


def _weights(mean: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return factors (columns, 2) that give a row's product with the mean, and its sum."""
    return np.stack([mean, np.ones_like(mean)], 1)
