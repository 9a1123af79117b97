"""Class maps: the class of every pixel, in the files that the authors of data sets distribute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitsee_core.masks.class_maps.maps import IGNORED, ClassMap, ClassMaps, join_maps
from vitsee_core.masks.class_maps.png_maps import open_png_maps
from vitsee_core.masks.class_maps.segment_maps import open_segment_maps
from vitsee_core.masks.sources import open_masks
from vitsee_stores.errors import VitseeError

__all__ = ["IGNORED", "ClassMap", "ClassMaps", "open_class_maps"]

_EXPECTED = "a folder of PNG class maps, the root of VOC, ADE20K or Cityscapes, or a COCO .json"


def open_class_maps(paths: Path | Sequence[Path], ignore: Sequence[str] = ()) -> ClassMaps:
    """One or several sources of the same classes: folders of PNG files, roots of data sets, or COCO
    files.

    Args:
        paths: of them.
        ignore: pixel values, or names of classes, that do not count.

    Raises:
        VitseeError: there is none, one is neither, or they do not go together.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not paths:
        raise VitseeError(f"no masks were given; expected {_EXPECTED}")
    return join_maps([_open(Path(path), ignore) for path in paths])


def _open(path: Path, ignore: Sequence[str]) -> ClassMaps:
    if not path.exists():
        raise VitseeError(f"no file or folder {path}; expected {_EXPECTED}")
    if path.is_dir():
        return open_png_maps(path, ignore)
    return open_segment_maps(open_masks(path), ignore)
