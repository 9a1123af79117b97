"""Pictures in a sidecar: lossless WebP in base64, so that a figure can be drawn from its table
alone. Those of earlier versions are PNG."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray

MAX_PIXELS = 16383  # of a side of a WebP


def encode(pixels: NDArray[np.uint8]) -> str:
    """Pixels (height, width) or (height, width, 3) as text; PNG where Pillow has no WebP, or the
    picture is larger than one may be."""
    from PIL import Image, features

    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    if features.check("webp") and max(image.size) <= MAX_PIXELS:
        # A quarter to a third smaller than PNG of level 2, in hardly more time.
        image.convert("RGB").save(buffer, "WEBP", lossless=True, quality=0, method=1)
    else:
        image.save(buffer, "PNG", compress_level=2)
    return base64.b64encode(buffer.getvalue()).decode()


def decode(text: str) -> NDArray[np.uint8]:
    """(height, width, 3) from what `encode` wrote."""
    from PIL import Image

    encoded = io.BytesIO(base64.b64decode(text))
    return np.asarray(Image.open(encoded, formats=["WEBP", "PNG"]).convert("RGB"))
