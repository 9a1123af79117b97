"""Versions of everything that affects numbers and files, for manifests and sidecars."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitsee_core.runtime.registry import code_digest

STORE_PACKAGES = ("vitsee", "torch", "timm", "zarr", "numpy", "pillow")
RESULT_PACKAGES = (
    "vitsee",
    "numpy",
    "torch",
    "timm",
    "zarr",
    "scikit-learn",
    "matplotlib",
)
# What workers of a cluster must share beside the package's code: how they talk, and what decides
# numbers.
WORKER_PACKAGES = (
    "dask",
    "distributed",
    "numpy",
    "scipy",
    "torch",
    "timm",
    "numba",
    "scikit-learn",
    "pillow",
)
DECODERS = ("pillow", "libjpeg", "timm")


def store_versions() -> dict[str, str]:
    """Return versions of Python, of the packages that make a store, and of the JPEG decoder."""
    from PIL import features

    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return {**_installed_versions(STORE_PACKAGES), "libjpeg": libjpeg or "none"}


def result_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that make a table or a figure.

    None of them is imported.
    """
    return _installed_versions(RESULT_PACKAGES)


@functools.cache
def worker_versions(modules: tuple[str, ...] = ()) -> Mapping[str, str]:
    """Return versions of all that a worker's numbers depend on, as of the first call here.

    These are vitsee's code (a digest of its source files), `WORKER_PACKAGES`, and Python (major
    and minor). modules: modules of guests, whose code counts, too.
    """
    import vitsee_core
    import vitsee_stores

    code = hashlib.sha256()
    # A digest in place of a version: a checkout changes without one.
    for package in (vitsee_core, vitsee_stores):
        (folder,) = map(Path, package.__path__)
        for file in sorted(folder.rglob("*.py")):
            code.update(
                f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes()
            )
    installed = _installed_versions(WORKER_PACKAGES)
    minor = installed["python"].rpartition(".")[0]
    guests = {f"the code of {module}": code_digest(module) for module in modules}
    return {
        "vitsee's code": code.hexdigest()[:12],
        **guests,
        **installed,
        "python": minor,
    }


def _installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of these packages, without those not installed."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
