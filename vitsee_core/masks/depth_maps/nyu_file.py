"""The depths of the labelled file of NYU Depth V2; see `images.sources.nyu`, where its images are.

Its `depths` are (height, width, images) in MATLAB's order, so (images, width, height) in HDF5's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.sources.nyu import nyu_ids, open_hdf5
from vitsee_stores.errors import VitseeError

DEPTHS = "depths"


@dataclass(frozen=True)
class NyuFile:
    """Depths of the file at `name`; see `DepthFiles`. n: images."""

    name: str
    n: int
    layout: str = "NYU Depth V2, labelled .mat"

    @classmethod
    def open(cls, path: Path) -> NyuFile:
        """Open a file.

        Raises:
            VitseeError: h5py is missing, or the file is damaged or of another kind.
        """
        with open_hdf5(str(path)) as file:
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
        return nyu_ids(self.n)

    @property
    def deepest(self) -> float:
        return float("inf")

    def where(self, i: int) -> str:
        return f"depth map {i + 1} of {self.name}"

    def read(self, i: int) -> NDArray[Any]:
        with open_hdf5(self.name) as file:
            try:
                return np.asarray(file[DEPTHS][i]).T
            except OSError as error:
                raise VitseeError(f"{self.where(i)} cannot be read: {error}") from None
