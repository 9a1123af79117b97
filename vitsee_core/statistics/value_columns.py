"""Value columns of a table's row: a statistic of images, its spread and its replicates."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vitsee_core.statistics.image_statistics import Estimates, statistic
from vitsee_core.statistics.jackknife import UNLIMITED, Limits, interval
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers

Cells = dict[str, Any]


def mean_cells(values: ArrayLike, labels: Integers) -> Cells:
    """Cells of a mean over images; see `image_statistics.METHODS`.

    Args:
        values: (images,), NaN for missing, which are left out.
        labels: (images,) blocks of the jackknife, for the replicates.
    """
    x = np.asarray(values, np.float64)[np.newaxis]
    return cells_of(statistic(x, "mean", labels).estimates(), 0)


def jackknife_cells(value: float, without: Float, n: int, limits: Limits = UNLIMITED) -> Cells:
    """Cells of a statistic other than a mean: its 95 % interval by the delete-a-block jackknife;
    std is sqrt(n) times the standard error. without: (blocks,) the value of the n images without
    each block of them; limits: least and largest possible value."""
    error, low, high = interval(np.array(value), without, limits)
    return {
        **{"value": float(value), "std": float(error) * np.sqrt(n)},
        **{"low": float(low), "high": float(high), "n_images": n, WORD: without},
    }


def interval_cells(value: ArrayLike, without: Float, limits: Limits = UNLIMITED) -> Cells:
    """Cells of a value whose rows have no std; see `jackknife_cells`."""
    value = np.asarray(value, np.float64)
    _, low, high = interval(value, without, limits)
    return {"value": float(value), "low": float(low), "high": float(high), WORD: without}


def columns_of(estimates: Estimates) -> Cells:
    """Value columns of a block of rows, one per entry of the estimates."""
    of = estimates
    columns = {"value": of.value, "std": of.std, "low": of.low, "high": of.high, "n_images": of.n}
    return columns if of.without is None else columns | {WORD: of.without}


def cells_of(estimates: Estimates, i: int) -> Cells:
    of = estimates
    return {
        **{"value": float(of.value[i]), "std": float(of.std[i])},
        **{"low": float(of.low[i]), "high": float(of.high[i]), "n_images": int(of.n[i])},
        WORD: None if of.without is None else of.without[i],
    }
