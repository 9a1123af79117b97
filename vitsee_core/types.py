"""Arrays by what they hold; shapes stand in docstrings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Float32 = NDArray[np.float32]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
