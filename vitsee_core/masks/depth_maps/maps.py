"""Sources of depth maps: a folder of 16-bit PNG files, or the labelled file of NYU Depth V2.

A pixel has no depth where its value is 0 or not finite, or where its depth is not between
`MIN_DEPTH` and the source's `max_depth`, both left out, as in the released evaluation of
Siméoni et al. 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from vitsee_core.images.sources.nyu import is_hdf5
from vitsee_core.masks.depth_maps.nyu_file import NyuFile
from vitsee_core.masks.depth_maps.png_depths import PngDepths
from vitsee_core.masks.labels import PixelSource
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
        """(height, width) metres, NaN for pixels without a depth.

        Raises:
            VitseeError: the map cannot be read, or no pixel of it has a depth; names the file.
        """
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
        raise VitseeError(f"--depth-scale belongs to PNG files; {path} holds metres, leave it out")
    else:
        files = NyuFile.open(path)
    if max_depth is not None:
        return DepthMaps(files, max_depth)
    return DepthMaps(files, NYU_MAX if "NYU" in files.layout else files.deepest)
