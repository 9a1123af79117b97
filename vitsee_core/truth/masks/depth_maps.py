"""Depth maps: the depth of every pixel in metres, in the files that authors distribute.

A pixel has no depth where its value is 0 or not finite, or where its depth is not between
`MIN_DEPTH` and the source's `max_depth`, both left out, as in the released evaluation of
Siméoni et al. 2025.

16-bit PNG files are in units that a scale turns into metres:

- NYU Depth V2 as monocular depth estimation distributes it: `SCENE/sync_depth_00045.png`, in
  millimetres, of the image `SCENE/rgb_00045.jpg`;
- any other folder: named as the images are, with a scale that the user gives (1000 of millimetres,
  256 of KITTI).

The labelled file of NYU Depth V2 (`images.sources.arrays` has its images) holds `depths` of
(height, width, images) in MATLAB's order, so (images, width, height) in HDF5's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.sources.arrays import is_hdf5, nyu_ids, open_hdf5
from vitsee_core.truth.masks.labels import PixelSource
from vitsee_core.truth.masks.sources import png_files
from vitsee_core.types import Float32
from vitsee_stores.errors import VitseeError

DepthMap = Float32  # metres, NaN for pixels that have none
MIN_DEPTH = 0.001
NYU_MAX = 10.0


class DepthFiles(PixelSource, Protocol):
    """Depths in metres, as they are in the files.

    Attributes:
        layout: whose files these are, in words.
        deepest: metres, the most that a value stands for.
    """

    @property
    def layout(self) -> str: ...

    @property
    def deepest(self) -> float: ...


@dataclass(frozen=True)
class DepthMaps:
    """Depth maps by number, each with the name of an image. max_depth: metres."""

    files: DepthFiles
    max_depth: float

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def keys(self) -> Sequence[str]:
        return self.files.keys

    @cached_property
    def rules(self) -> dict[str, str]:
        """Which pixels have a depth, for a sidecar."""
        between = f"between {MIN_DEPTH:g} and {self.max_depth:g} m"
        return {"layout": self.files.layout, "pixels with a depth": between}

    def where(self, i: int) -> str:
        return self.files.where(i)

    def read(self, i: int) -> DepthMap:
        """(height, width) metres, NaN for pixels without a depth. Raises VitseeError: the map
        cannot be read, or no pixel of it has a depth; names the file."""
        # A new array in float32, so that the file's own values are not overwritten.
        found = self.files.read(i).astype(np.float32)
        there = np.isfinite(found) & (found > MIN_DEPTH) & (found < self.max_depth)
        if not there.any():
            raise VitseeError(
                f"{self.where(i)}: no pixel has a depth between {MIN_DEPTH:g} and "
                f"{self.max_depth:g} m (0 and infinite are none); expected metres (--depth-scale, "
                "--max-depth)"
            )
        found[~there] = np.nan
        return found


def open_depth_maps(
    path: Path, scale: float | None = None, max_depth: float | None = None
) -> DepthMaps:
    """The depth maps of a folder, or of a .mat file.

    Args:
        path: of it.
        scale: values per metre in PNG files; None: what the layout says.
        max_depth: metres; None: 10 of NYU, else all that the files can hold.

    Raises:
        VitseeError: there are none, or their scale is not known.
    """
    if not path.exists():
        raise VitseeError(
            f"no file or folder {path}; expected a folder of 16-bit PNG files, or "
            "nyu_depth_v2_labeled.mat"
        )
    files: DepthFiles
    if path.is_dir():
        files = PngDepths.open(path, scale)
    elif not is_hdf5(path):
        raise VitseeError(
            f"{path} is no MATLAB file of version 7.3 (HDF5); expected nyu_depth_v2_labeled.mat, "
            "or a folder of 16-bit PNG files"
        )
    elif scale is not None:
        raise VitseeError(
            f"--depth-scale belongs to PNG files; {path} holds metres, leave it out"
        )
    else:
        files = NyuFile.open(path)
    if max_depth is not None:
        return DepthMaps(files, max_depth)
    return DepthMaps(files, NYU_MAX if "NYU" in files.layout else files.deepest)


DEPTHS = "depths"


@dataclass(frozen=True)
class NyuFile:
    """Depths of the file at `name`; see `DepthFiles`. n: images."""

    name: str
    n: int
    layout: str = "NYU Depth V2, labelled .mat"

    @classmethod
    def open(cls, path: Path) -> NyuFile:
        """Open a file. Raises VitseeError: h5py is missing, or the file is damaged or of another
        kind."""
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
                # (width, height) in HDF5's order -> (height, width)
                return np.asarray(file[DEPTHS][i]).T
            except OSError as error:
                raise VitseeError(f"{self.where(i)} cannot be read: {error}") from None


NYU_SCALE = 1000.0
LARGEST = 65535
_NYU_FILE = re.compile(r"(^|/)sync_depth_(\d+)\.png$")


@dataclass(frozen=True)
class PngDepths:
    """PNG files below a folder; see `DepthFiles`.

    files: paths below it. scale: values per metre. exif: whether maps are turned as their images
    are, see `oriented_as`.
    """

    name: str
    files: tuple[str, ...]
    keys: tuple[str, ...]
    scale: float
    layout: str
    exif: bool = False

    @classmethod
    def open(cls, path: Path, scale: float | None) -> PngDepths:
        """The depth maps below a folder. Raises VitseeError: there are none, or nothing says their
        scale."""
        files = png_files(path, "16-bit depth map")
        nyu = [name for name in files if _NYU_FILE.search(name)]
        if nyu:
            # The image of the depth map; its ending does not count when names are
            # matched.
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
        # One more than the largest value: the bound itself is left out.
        return (LARGEST + 1) / self.scale

    def where(self, i: int) -> str:
        return str(Path(self.name, self.files[i]))

    def read(self, i: int) -> NDArray[Any]:
        image, _ = FileOpener(self.name, exif=self.exif).load(self.files[i])
        # The modes in which Pillow opens 16-bit PNG files, by its version.
        if len(image.getbands()) > 1 or image.mode not in ("I", "I;16", "I;16B"):
            raise VitseeError(
                f"{self.where(i)} is an image of mode {image.mode}; expected one channel of 16 "
                "bits (a depth map as its authors distribute it, not a picture of it)"
            )
        # float64: 16-bit values over a scale, rounded once to float32 by the caller.
        return np.asarray(image).astype(np.float64) / self.scale
