"""Versions of what decides numbers and files, for manifests and sidecars."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

STORE_PACKAGES = ("vitsee", "torch", "timm", "zarr", "numpy", "pillow")
RESULT_PACKAGES = ("vitsee", "numpy", "torch", "timm", "zarr", "scikit-learn", "matplotlib")
# What processes that work together must share, and what decides their last digits.
SAME, SIMILAR = ("python", "vitsee", "dask", "distributed"), ("numpy", "scipy", "torch")
DECODERS = ("pillow", "libjpeg", "timm")


def store_versions() -> dict[str, str]:
    """Of Python, the packages that make a store, and the library that decodes JPEG."""
    from PIL import features

    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return {**_installed(STORE_PACKAGES), "libjpeg": libjpeg or "none"}


def result_versions() -> dict[str, str]:
    """Of Python and the packages that make a table or a figure; none of them is imported."""
    return _installed(RESULT_PACKAGES)


def worker_versions() -> dict[str, str]:
    """Of `SAME` and `SIMILAR`; of Python the minor version."""
    found = _installed((*SAME[1:], *SIMILAR))
    return found | {"python": found["python"].rpartition(".")[0]}


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
