"""Depths in 16-bit PNG files, in units that a scale turns into metres.

- NYU Depth V2 as monocular depth estimation distributes it: `SCENE/sync_depth_00045.png`, in
  millimetres, of the image `SCENE/rgb_00045.jpg`;
- any other folder: named as the images are, with a scale that the user gives (1000 of millimetres,
  256 of KITTI).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.masks.png_files import png_files
from vitsee_stores.errors import VitseeError

NYU_SCALE = 1000.0
LARGEST = 65535
_NYU_FILE = re.compile(r"(^|/)sync_depth_(\d+)\.png$")


@dataclass(frozen=True)
class PngDepths:
    """PNG files below a folder; see `DepthFiles`. files: paths below it. scale: per metre."""

    name: str
    files: tuple[str, ...]
    keys: tuple[str, ...]
    scale: float
    layout: str

    @classmethod
    def open(cls, path: Path, scale: float | None) -> PngDepths:
        """The depth maps below a folder.

        Raises:
            VitseeError: there are none, or nothing says their scale.
        """
        files = png_files(path, "16-bit depth map")
        nyu = [name for name in files if _NYU_FILE.search(name)]
        if nyu:
            keys = [_NYU_FILE.sub(r"\1rgb_\2.png", name) for name in nyu]
            layout = "NYU Depth V2, sync_depth_*.png"
            return cls(str(path), tuple(nyu), tuple(keys), scale or NYU_SCALE, layout)
        if scale is None:
            raise VitseeError(
                f"nothing in {path} says how many units of its PNG files are a metre; give "
                "--depth-scale, e.g. 1000 of millimetres, 256 of KITTI"
            )
        return cls(str(path), tuple(files), tuple(files), scale, "a folder of PNG files")

    @property
    def deepest(self) -> float:
        return (LARGEST + 1) / self.scale

    def where(self, i: int) -> str:
        return str(Path(self.name, self.files[i]))

    def read(self, i: int) -> NDArray[Any]:
        image, _ = FileOpener(self.name).load(self.files[i])
        if len(image.getbands()) > 1 or image.mode not in ("I", "I;16", "I;16B"):
            raise VitseeError(
                f"{self.where(i)} is an image of mode {image.mode}; expected one channel of 16 "
                "bits (a depth map as its authors distribute it, not a picture of it)"
            )
        return np.asarray(image).astype(np.float64) / self.scale
