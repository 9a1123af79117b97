"""Class maps: the class of every pixel, in the files that the authors of data sets distribute.

PNG files hold one map each, pixel by pixel as a number, in four published layouts:

- Pascal VOC: `SegmentationClass/`, palette images whose indices are classes, 255 for borders;
- ADE20K as SceneParsing distributes it: `annotations/{training,validation}/` beside
  `objectInfo150.txt`; 0 is no class, 1 to 150 are classes 0 to 149;
- Cityscapes: `*_gtFine_labelIds.png`, of whose 34 numbers 19 are classes (the `trainId` of its
  scripts), or `*_gtFine_labelTrainIds.png` where there are only these; the image is the file with
  `leftImg8bit` in place of what follows the frame;
- any other folder: values are classes.

A value of 255 is never a class. COCO files give class maps from panoptic segments, stuff and
objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vitsee_core.truth.masks.coco import CocoMasks
from vitsee_core.truth.masks.labels import MaskSource, PixelSource
from vitsee_core.truth.masks.panoptic import PanopticMasks
from vitsee_core.truth.masks.sources import (
    Several,
    check_once,
    open_masks,
    png_files,
    read_numbers,
)
from vitsee_stores.errors import VitseeError, reason

ClassMap = NDArray[np.uint8]
IGNORED = 255  # a pixel without a class; so there are at most 255 classes, 0 to 254


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
        shape = segments[0].mask.shape if segments else self.source.read(i).shape
        unannotated = IGNORED
        if not self._panoptic:
            unannotated = class_number.get(BACKGROUND, IGNORED)
        class_map = np.full(shape, unannotated, np.uint8)
        # Crowds first: objects lie over them.
        for segment in segments:
            if segment.crowd:
                class_map[segment.mask] = IGNORED
        for segment in segments:
            if not segment.crowd:
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
    if len(maps.classes) > IGNORED:
        raise VitseeError(
            f"{source.name} has {len(maps.classes)} categories; at most {IGNORED} are read"
        )
    return maps


# In a table of values: a file with this value is damaged, or belongs to another data set.
REFUSED = -1
VALUES = 256
# The second is that of Hariharan et al.'s additional annotations, as they are commonly distributed.
VOC_FOLDERS = ("SegmentationClass", "SegmentationClassAug")
VOC_OBJECTS = "SegmentationObject"
VOC_CLASSES = (
    *(
        "background",
        "aeroplane",
        "bicycle",
        "bird",
        "boat",
        "bottle",
        "bus",
        "car",
        "cat",
    ),
    *(
        "chair",
        "cow",
        "diningtable",
        "dog",
        "horse",
        "motorbike",
        "person",
        "pottedplant",
    ),
    *("sheep", "sofa", "train", "tvmonitor"),
)
# labelId -> class, in the order of the trainIds.
CITYSCAPES = {
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
CITYSCAPES_VALUES = 34
ADE_NAMES = "objectInfo150.txt"


@dataclass(frozen=True)
class PngMaps:
    """Class maps that are PNG files below a folder.

    Attributes:
        name: the folder as the user named it, for messages.
        folder: the folder's path.
        files: paths of the PNG files below it.
        keys: the name of each file's image.
        table: (256,) the class of each value, `IGNORED` or `REFUSED`.
        classes: the classes' names.
        layout: the data set whose layout the folder has, in words.
        exif: whether maps are turned as their images are, see `oriented_as`.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    keys: tuple[str, ...]
    table: tuple[int, ...]
    classes: tuple[str, ...]
    layout: str
    exif: bool = False

    @property
    def rules(self) -> dict[str, str]:
        ignored = [
            str(value)
            for value, class_number in enumerate(self.table)
            if class_number == IGNORED
        ]
        return {"layout": self.layout, "ignored values": ", ".join(ignored)}

    def where(self, i: int) -> str:
        return str(Path(self.folder, self.files[i]))

    def read(self, i: int) -> ClassMap:
        hint = " (a palette image as its authors distribute it, not its colours)"
        values = read_numbers(self.folder, self.files[i], hint, self.exif)
        if values.size and (int(values.max()) >= VALUES or int(values.min()) < 0):
            raise VitseeError(
                f"{self.where(i)} has the value {int(values.max())}; expected classes up to "
                f"{VALUES - 1}"
            )
        class_map = np.array(self.table)[values.astype(np.intp)]
        refused = class_map == REFUSED
        if refused.any():
            wrong = int(values[refused].min())
            raise VitseeError(
                f"{self.where(i)} has the value {wrong}, which is no class of {self.layout} (of "
                f"its {len(self.classes)}); give --ignore {wrong} if these pixels do not count"
            )
        return class_map.astype(np.uint8)


def open_png_maps(path: Path, ignore: Sequence[str]) -> PngMaps:
    """Return the PNG files below a folder, in the layout that its structure shows.

    Args:
        path: the folder, or the root of a data set.
        ignore: values of pixels, or names of classes, that have no class, beside the layout's own.

    Raises:
        VitseeError: there are none, or an ignored class that is none.
    """
    maps = _open_cityscapes(path) or _open_ade20k(path) or _open_voc(path)
    if maps is None:
        maps = _png_maps(path, path, range(VALUES - 1), (), "a folder of PNG files")
    table = list(maps.table)
    for word in ignore:
        table[_value_of(word, maps)] = IGNORED
    return replace(maps, table=tuple(table))


def _value_of(word: str, maps: PngMaps) -> int:
    """Return the pixel value that a word names: a number, or a class's name.

    Raises:
        VitseeError: it is neither.
    """
    if word.isdigit() and int(word) < VALUES:
        return int(word)
    if word in maps.classes:
        return maps.table.index(maps.classes.index(word))
    known = "0 to 255" + (", or a name like " + maps.classes[0] if maps.classes else "")
    raise VitseeError(
        f"--ignore {word}: no class of {maps.name}; expected a pixel value, {known}"
    )


def _open_voc(path: Path) -> PngMaps | None:
    """Return the class maps of Pascal VOC in its root or a folder of it, None for another folder.

    Raises:
        VitseeError: it is VOC's folder of objects, not of classes.
    """
    folder = path / "SegmentationClass"
    if not folder.is_dir():
        folder = path
    name = folder.absolute().name
    if name == VOC_OBJECTS:
        raise VitseeError(
            f"{path} numbers the objects of each image, not classes; expected the folder "
            f"{VOC_FOLDERS[0]} beside it"
        )
    if name not in VOC_FOLDERS:
        return None
    return _png_maps(path, folder, range(len(VOC_CLASSES)), VOC_CLASSES, "Pascal VOC")


def _open_ade20k(path: Path) -> PngMaps | None:
    """Return the class maps of ADE20K in its root or a folder of it, None for another folder."""
    # The root, its annotations/, or one of the folders below that.
    folder_by_root = {
        path: path / "annotations",
        path.absolute().parent: path,
        path.absolute().parent.parent: path,
    }
    for root, folder in folder_by_root.items():
        if (root / ADE_NAMES).is_file() and folder.is_dir():
            names = _ade20k_names(root / ADE_NAMES)
            values = (IGNORED, *range(len(names)))
            return _png_maps(path, folder, values, names, "ADE20K (SceneParsing)")
    return None


def _ade20k_names(path: Path) -> tuple[str, ...]:
    """Return the names in the table that comes with the data: number, ratio, counts, name.

    Raises:
        VitseeError: the file cannot be read, or is not that table.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()[1:]
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise VitseeError(f"cannot read {path}: {why}") from None
    rows = [
        line.split("\t") if "\t" in line else line.split(None, 5)
        for line in lines
        if line
    ]
    numbers = [row[0].strip() for row in rows]
    if (
        numbers != [str(i + 1) for i in range(len(rows))]
        or not 0 < len(rows) < VALUES - 1
    ):
        raise VitseeError(
            f"{path} is not the table of ADE20K's classes; expected lines that begin with 1, 2, ..."
        )
    return tuple(row[-1].strip() for row in rows)


def _open_cityscapes(path: Path) -> PngMaps | None:
    """Return the class maps of Cityscapes in its root or a folder of it, None for another one."""
    folder = path / "gtFine"
    if not folder.is_dir():
        folder = path
    order = {value: number for number, value in enumerate(CITYSCAPES)}
    values_by_kind: dict[str, Sequence[int]] = {
        "labelIds": [order.get(value, IGNORED) for value in range(CITYSCAPES_VALUES)],
        "labelTrainIds": range(len(CITYSCAPES)),
    }
    for kind, values in values_by_kind.items():
        file_name = re.compile(rf"_gt(Fine|Coarse)_{kind}\.png$")
        if not _any_called(folder, file_name):
            continue
        maps = _png_maps(path, folder, values, tuple(CITYSCAPES.values()), "Cityscapes")
        files = tuple(filter(file_name.search, maps.files))
        keys = tuple(file_name.sub("_leftImg8bit.png", name) for name in files)
        return replace(maps, files=files, keys=keys)
    return None


def _any_called(folder: Path, file_name: re.Pattern[str]) -> bool:
    """Return whether the PNG files of the first folder that has any match a pattern.

    One folder is enough, since all cities have the same kinds of files.
    """
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(".png") for name in names):
            return any(map(file_name.search, names))
    return False


def _png_maps(
    path: Path, folder: Path, values: Sequence[int], classes: tuple[str, ...], layout: str
) -> PngMaps:
    """Return the class maps below a folder.

    Args:
        path: the folder as the user named it.
        folder: the folder with the PNG files.
        values: the class of each pixel value 0, 1, ...; further values are refused, 255 is ignored.
        classes: the classes' names.
        layout: the data set, in words.
    """
    files = tuple(png_files(folder, "class map"))
    table = (*values, *[REFUSED] * (VALUES - 1 - len(values)), IGNORED)
    return PngMaps(
        name=str(path),
        folder=str(folder),
        files=files,
        keys=files,
        table=table,
        classes=classes,
        layout=layout,
    )


_EXPECTED = (
    "a folder of PNG class maps, the root of VOC, ADE20K or Cityscapes, or a COCO .json"
)


def open_class_maps(
    paths: Path | Sequence[Path], ignore: Sequence[str] = ()
) -> ClassMaps:
    """Return class maps from folders of PNG files, roots of data sets, or COCO files.

    Args:
        paths: a source, or several sources of the same classes.
        ignore: pixel values, or names of classes, that do not count.

    Raises:
        VitseeError: there is none, one is neither, or they do not go together.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not paths:
        raise VitseeError(f"no masks were given; expected {_EXPECTED}")
    return join_maps([_open_maps_at(Path(path), ignore) for path in paths])


def _open_maps_at(path: Path, ignore: Sequence[str]) -> ClassMaps:
    """Return the class maps of a folder or a COCO file; raise VitseeError if there is none."""
    if not path.exists():
        raise VitseeError(f"no file or folder {path}; expected {_EXPECTED}")
    if path.is_dir():
        return open_png_maps(path, ignore)
    return open_segment_maps(open_masks(path), ignore)
