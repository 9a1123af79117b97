"""Versions of what decides the numbers."""

from __future__ import annotations

import platform
from importlib.metadata import version

from PIL import features

PACKAGES = ("vitsee", "torch", "timm", "zarr", "numpy", "pillow")
DECODERS = ("pillow", "libjpeg", "timm")


def versions() -> dict[str, str]:
    """Of Python, the packages, and the library that decodes JPEG."""
    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "libjpeg": libjpeg or "none",
    }
