"""Which pixels of a class map are near a boundary, for `boundary_iou`."""

from __future__ import annotations

import numpy as np

from vitsee_core.masks.class_maps import ClassMap
from vitsee_core.types import Mask

BOUNDARY_SHARE = 0.02  # of the image's diagonal, as in Cheng et al. 2021


def near_boundary(labels: ClassMap) -> Mask:
    """Which pixels are near the boundary of the region of their class: a pixel of another class, or
    the image's border, is within `BOUNDARY_SHARE` of the diagonal, counted in pixels along the rows
    or columns, whichever is farther (the erosion by a square of Cheng et al. 2021). Pixels that are
    ignored are a region as others are."""
    from scipy.ndimage import maximum_filter, minimum_filter

    reach = max(1, round(BOUNDARY_SHARE * float(np.hypot(*labels.shape))))
    framed = np.pad(labels.astype(np.int16), 1, constant_values=-1)
    size = 2 * reach + 1
    low, high = (f(framed, size, mode="nearest") for f in (minimum_filter, maximum_filter))
    found: Mask = (low != high)[1:-1, 1:-1]
    return found
