"""The labelled file of NYU Depth V2, `nyu_depth_v2_labeled.mat`: MATLAB 7.3, which is HDF5.

Its `depths` are (height, width, images) in MATLAB's order, so (images, width, height) in HDF5's.
Image i of 1, 2, ... is called by its number in four digits: `0001`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import VitseeError

DEPTHS = "depths"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USER_BLOCK = 512  # MATLAB's header before HDF5 begins


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5, with or without MATLAB's header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(_USER_BLOCK + len(_SIGNATURE))
    return _SIGNATURE in (begin[: len(_SIGNATURE)], begin[_USER_BLOCK:])


@dataclass(frozen=True)
class NyuFile:
    """Depths of the file at `name`; see `DepthFiles`. n: images."""

    name: str
    n: int
    layout: str = "NYU Depth V2, labelled .mat"

    @classmethod
    def open(cls, path: Path) -> NyuFile:
        """Of a file.

        Raises:
            VitseeError: h5py is missing, or the file is damaged or of another kind.
        """
        with _opened(str(path)) as file:
            values = file.get(DEPTHS)
            shape = getattr(values, "shape", None)
            if shape is None or len(shape) != 3 or values.dtype.kind != "f":
                raise VitseeError(
                    f"{path} has no floats '{DEPTHS}' of (images, width, height); found: "
                    f"{', '.join(file) or 'nothing'}; expected nyu_depth_v2_labeled.mat"
                )
            return cls(str(path), int(shape[0]))

    @cached_property
    def keys(self) -> list[str]:
        return [f"{i + 1:04d}" for i in range(self.n)]

    @property
    def deepest(self) -> float:
        return float("inf")

    def where(self, i: int) -> str:
        return f"depth map {i + 1} of {self.name}"

    def metres(self, i: int) -> NDArray[Any]:
        """See `DepthFiles`."""
        with _opened(self.name) as file:
            try:
                return np.asarray(file[DEPTHS][i]).T
            except OSError as error:
                raise VitseeError(f"{self.where(i)} cannot be read: {error}") from None


def _opened(name: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise VitseeError(
            f"{name} needs the package h5py; run: pip install 'vitsee[depth]'"
        ) from None
    try:
        return h5py.File(name, "r")
    except OSError as error:
        what = " ".join(str(error).split())
        raise VitseeError(f"{name} cannot be read as HDF5: {what}") from None
