"""Estimated time of matrix products, logged before the work."""

from __future__ import annotations

import logging
import time

import numpy as np

from vitsee_core.runtime.lanes import n_lanes
from vitsee_core.runtime.one_thread import one_blas_thread

WORTH_SAYING = 5.0  # seconds
SHARE = 0.6  # fraction of the rate of large products that analyses reach
SIDE = 512

log = logging.getLogger(__name__)


def say_cost(label: str, n_images: int, multiplications: float) -> None:
    """Log the estimated time of comparing this many images of a store, from a short trial, and how
    it grows; silent if it is seconds."""
    seconds = multiplications / (SHARE * cpu_rate())
    log.log(
        logging.INFO if seconds >= WORTH_SAYING else logging.DEBUG,
        "%s: %.1e multiplications for %d images, %s on %d cores; four times as long for twice the "
        "images (--images N takes fewer)",
        *(label, multiplications, n_images, rough_time(seconds), n_lanes()),
    )


def cpu_rate() -> float:
    """Multiplications per second of large products on all cores, measured in milliseconds."""
    x = np.ones((SIDE, SIDE), np.float32)
    out = np.empty_like(x)
    best = np.inf
    with one_blas_thread():
        for _ in range(3):
            began = time.perf_counter()
            np.matmul(x, x, out=out)
            best = min(best, time.perf_counter() - began)
    return float(SIDE**3 / best * n_lanes())


def rough_time(seconds: float) -> str:
    """A rounded duration: about 40 s, about 12 min, about 3.5 h."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
