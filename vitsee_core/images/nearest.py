"""Which pixel Pillow's nearest resize takes, its rounding included."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitsee_core.types import Integers


def nearest_places(n: int, n_out: int, low: float, high: float) -> Integers:
    """(n_out,) which of n places contains the middle of each of `n_out` equal parts of `low` to
    `high`, by Pillow's nearest resize; below 0 or at least n beyond them."""
    begin, end = min(0, int(np.floor(low))), max(n, int(np.ceil(high)))
    ramp = Image.fromarray(np.arange(begin, end, dtype=np.int32)[None])
    box = (low - begin, 0, high - begin, 1)
    resized = ramp.resize((n_out, 1), Image.Resampling.NEAREST, box)
    return np.asarray(resized)[0].astype(np.int64)
