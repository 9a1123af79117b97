"""Class maps: the class of every pixel, in the files that the authors of data sets distribute.

PNG files hold one map each, see `png_maps`. COCO files give class maps from panoptic segments,
stuff and objects.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from vitsee_core.truth.masks.coco import CocoMasks
from vitsee_core.truth.masks.labels import MaskSource, PixelSource
from vitsee_core.truth.masks.panoptic import PanopticMasks
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap, open_png_maps
from vitsee_core.truth.masks.sources import (
    Several,
    check_once,
    open_masks,
)
from vitsee_stores.errors import VitseeError


class ClassMaps(PixelSource, Protocol):
    """The class of every pixel.

    Attributes:
        classes: names by class, empty where the source names none.
        layout: whose files these are, in words.
        rules: how pixels become classes, for a sidecar.
    """

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def layout(self) -> str: ...

    @property
    def rules(self) -> dict[str, str]: ...

    def read(self, i: int) -> ClassMap:
        """(height, width): classes, `IGNORED` for pixels that have none."""


class SeveralMaps(Several[ClassMaps]):
    """Sources of the same classes and rules; see `ClassMaps`."""

    @property
    def classes(self) -> Sequence[str]:
        return self.sources[0].classes

    @property
    def layout(self) -> str:
        return ", ".join(dict.fromkeys(source.layout for source in self.sources))

    @property
    def rules(self) -> dict[str, str]:
        return self.sources[0].rules


def join_maps(sources: Sequence[ClassMaps]) -> ClassMaps:
    """Return several sources of class maps as a single one.

    Raises:
        VitseeError: their classes differ, or an image is in two of them.
    """
    first, *others = sources
    for other in others:
        # In the same order: the number of a class is its place.
        if list(other.classes) != list(first.classes):
            raise VitseeError(
                f"{first.name} and {other.name} have different classes ({len(first.classes)} and "
                f"{len(other.classes)} names); expected splits of one data set"
            )
    check_once(sources)
    return SeveralMaps(tuple(sources)) if others else first


BACKGROUND = "background"


@dataclass(frozen=True)
class SegmentMaps:
    """Class maps of a COCO file: its segments painted over one another in the file's order.

    Pixels of no segment have no class in a panoptic file; in a file of objects or stuff they are
    of the class `background`, the first. Crowds have no class where no object lies over them.

    Attributes:
        source: the segments.
        ignore: names of categories whose pixels have no class.
    """

    source: MaskSource
    ignore: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def keys(self) -> Sequence[str]:
        return self.source.keys

    @cached_property
    def classes(self) -> list[str]:
        """The categories that are not ignored, with the background first where there is one."""
        return [name for name in self._all_classes if name not in self.ignore]

    @property
    def layout(self) -> str:
        if self._panoptic:
            return "COCO panoptic"
        return "COCO objects or stuff"

    @property
    def rules(self) -> dict[str, str]:
        rest = "no class" if self._panoptic else f"the class {BACKGROUND}"
        return {
            "layout": self.layout,
            "pixels of no annotation": rest,
            "ignored": ", ".join(("crowds", *self.ignore)),
            **(self.source.left_out if isinstance(self.source, CocoMasks) else {}),
        }

    def where(self, i: int) -> str:
        return self.source.where(i)

    def read(self, i: int) -> ClassMap:
        """Return (height, width) classes of an image, `IGNORED` for pixels without a class."""
        class_number = {name: number for number, name in enumerate(self.classes)}
        segments = self.source.segments(i)
        # An image without segments takes its size from the foreground mask.
        shape = segments[0].mask.shape if segments else self.source.read(i).shape
        unannotated = IGNORED
        # Panoptic files annotate every pixel that has a class, so the rest has none.
        if not self._panoptic:
            unannotated = class_number.get(BACKGROUND, IGNORED)
        class_map = np.full(shape, unannotated, np.uint8)
        # Crowds first: objects lie over them.
        for segment in segments:
            if segment.crowd:
                class_map[segment.mask] = IGNORED
        for segment in segments:
            if not segment.crowd:
                # Ignored categories have no number.
                class_map[segment.mask] = class_number.get(segment.category, IGNORED)
        return class_map

    @property
    def _panoptic(self) -> bool:
        return isinstance(self.source, PanopticMasks)

    @cached_property
    def _all_classes(self) -> list[str]:
        """The categories, ignored ones among them, with the background first if there is one."""
        categories = list(self.source.categories)
        if self._panoptic:
            return categories
        return [BACKGROUND, *categories]


def open_segment_maps(source: MaskSource, ignore: Sequence[str]) -> SegmentMaps:
    """Return the class maps of a COCO file.

    Args:
        source: the file's segments.
        ignore: names of categories whose pixels do not count.

    Raises:
        VitseeError: the file names no categories or too many, or lacks an ignored one.
    """
    maps = SegmentMaps(source, tuple(ignore))
    if not source.categories:
        raise VitseeError(
            f"{source.name} names no categories; expected a COCO file with them"
        )
    all_classes = maps._all_classes
    unknown = [name for name in ignore if name not in all_classes]
    if unknown:
        raise VitseeError(
            f"--ignore {unknown[0]}: no category of {source.name}; expected a name like "
            f"{all_classes[0]} or {all_classes[-1]}"
        )
    # 255 is IGNORED in 8 bits, so numbers end at 254.
    if len(maps.classes) > IGNORED:
        raise VitseeError(
            f"{source.name} has {len(maps.classes)} categories; at most {IGNORED} are read"
        )
    return maps


_EXPECTED = (
    "a folder of PNG class maps, the root of VOC, ADE20K or Cityscapes, or a COCO .json"
)


def open_class_maps(
    paths: Path | Sequence[Path],
    ignore: Sequence[str] = (),
    void: int | str | None = None,
) -> ClassMaps:
    """Return class maps from folders of PNG files, roots of data sets, or COCO files.

    Args:
        paths: a source, or several sources of the same classes.
        ignore: pixel values, or names of classes, that do not count.
        void: of plain folders of PNG files, the value that is no class, or "none"; by default 255.

    Raises:
        VitseeError: there is none, one is neither, they do not go together, or `void` is given of
            another source.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not paths:
        raise VitseeError(f"no masks were given; expected {_EXPECTED}")
    return join_maps([_open_maps_at(Path(path), ignore, void) for path in paths])


def _open_maps_at(path: Path, ignore: Sequence[str], void: int | str | None) -> ClassMaps:
    """Return the class maps of a folder or a COCO file; raise VitseeError if there is none."""
    if not path.exists():
        raise VitseeError(f"no file or folder {path}; expected {_EXPECTED}")
    if path.is_dir():
        return open_png_maps(path, ignore, void)
    if void is not None:
        raise VitseeError(
            f"--void is a value of PNG pixels; {path} is a COCO file: leave it out"
        )
    return open_segment_maps(open_masks(path), ignore)
