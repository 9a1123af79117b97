"""Errors of predicted depths per image, with jackknife intervals over blocks of images.

Of an image with depths d > 0 and predictions p > 0 of the pixels that count:

    rmse = sqrt(mean (p - d)^2)    abs_rel = mean |p - d| / d    a1 = share of max(p/d, d/p) < 1.25

and of a data set the mean over images (Eigen et al. 2014, as the released code of Siméoni et al.
2025 averages them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitsee_core.analyses.dense_probe.metrics import spread_cells
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels, has_label
from vitsee_core.statistics.jackknife import SHARE
from vitsee_core.types import Float

MEANS = ("rmse", "abs_rel", "a1")
CLOSE = 1.25


@dataclass
class DepthErrors:
    """sums: (blocks, 4) over images: of each of `MEANS`, and of 1."""

    sums: Float

    @classmethod
    def empty(cls, n_blocks: int) -> DepthErrors:
        """Of no image."""
        return cls(np.zeros((n_blocks, len(MEANS) + 1)))

    def count(self, block: int, found: Labels, pixels: Pixels) -> None:
        """See `scoring.Tally`; an image without a pixel that counts has no part."""
        there = has_label(pixels.labels)
        if there.any():
            p, d = (own[there].astype(np.float64) for own in (found, pixels.labels))
            self.sums[block] += [*errors(p, d), 1]

    def add(self, other: DepthErrors) -> None:
        """See `scoring.Tally`."""
        self.sums += other.sums

    def __bool__(self) -> bool:
        return bool(self.sums[:, -1].any())


def errors(p: Float, d: Float) -> tuple[float, float, float]:
    """`MEANS` of an image, see the module's text; p, d: (pixels,)."""
    off = np.abs(p - d)
    close = np.maximum(p / d, d / p) < CLOSE
    return float(np.sqrt((off**2).mean())), float((off / d).mean()), float(close.mean())


def error_cells(tally: DepthErrors, metrics: Sequence[str]) -> Iterator[dict[str, object]]:
    """The cells of each row: metric, value and interval, and its replicates."""
    whole = tally.sums.sum(0)
    others = whole - tally.sums
    with np.errstate(invalid="ignore"):
        for metric in metrics:
            i = MEANS.index(metric)
            value, replicates = whole[i] / whole[-1], others[:, i] / others[:, -1]
            limits = SHARE if metric == "a1" else (0.0, np.inf)
            yield {"metric": metric, **spread_cells(value, replicates, limits)}
