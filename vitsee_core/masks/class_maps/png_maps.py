"""Class maps in PNG files, one a pixel number for number, in four published layouts.

- Pascal VOC: `SegmentationClass/`, palette images whose indices are classes, 255 for borders;
- ADE20K as SceneParsing distributes it: `annotations/{training,validation}/` beside
  `objectInfo150.txt`; 0 is no class, 1 to 150 are classes 0 to 149;
- Cityscapes: `*_gtFine_labelIds.png`, of whose 34 numbers 19 are classes (the `trainId` of its
  scripts); the image is the file with `leftImg8bit` in place of what follows the frame;
- any other folder: values are classes.

A value of 255 is never a class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitsee_core.masks.class_maps.maps import IGNORED, ClassMap
from vitsee_core.masks.png_files import png_files, read_numbers
from vitsee_stores.errors import VitseeError, reason

REFUSED = -1  # in a table of values: a file with this one is damaged, or of another data set
VALUES = 256
VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat"),
    *("chair", "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
    *("sheep", "sofa", "train", "tvmonitor"),
)
# labelId -> class, in the order of the trainIds.
CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
    19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
    24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle",
    33: "bicycle",
}  # fmt: skip
CITYSCAPES_VALUES = 34
ADE_NAMES = "objectInfo150.txt"
_CITYSCAPES_FILE = re.compile(r"_gt(Fine|Coarse)_labelIds\.png$")


@dataclass(frozen=True)
class PngMaps:
    """PNG files below a folder; see `ClassMaps`. files: paths below it. table: (256,) the class of
    each value, `IGNORED` or `REFUSED`."""

    name: str
    folder: str
    files: tuple[str, ...]
    keys: tuple[str, ...]
    table: tuple[int, ...]
    classes: tuple[str, ...]
    layout: str

    @property
    def rules(self) -> dict[str, str]:
        ignored = [str(value) for value, own in enumerate(self.table) if own == IGNORED]
        return {"layout": self.layout, "ignored values": ", ".join(ignored)}

    def where(self, i: int) -> str:
        return str(Path(self.folder, self.files[i]))

    def read(self, i: int) -> ClassMap:
        hint = " (a palette image as its authors distribute it, not its colours)"
        values = read_numbers(self.folder, self.files[i], hint)
        if values.size and (int(values.max()) >= VALUES or int(values.min()) < 0):
            raise VitseeError(
                f"{self.where(i)} has the value {int(values.max())}; expected classes up to "
                f"{VALUES - 1}"
            )
        found = np.array(self.table)[values.astype(np.intp)]
        if (found == REFUSED).any():
            wrong = int(values[found == REFUSED].min())
            raise VitseeError(
                f"{self.where(i)} has the value {wrong}, which is no class of {self.layout} (of "
                f"its {len(self.classes)}); give --ignore {wrong} if these pixels do not count"
            )
        return found.astype(np.uint8)


def open_png_maps(path: Path, ignore: Sequence[str]) -> PngMaps:
    """The PNG files below a folder, in the layout that its structure shows.

    Args:
        path: the folder, or the root of a data set.
        ignore: values of pixels, or names of classes, that have no class, beside the layout's own.

    Raises:
        VitseeError: there are none, or an ignored class that is none.
    """
    found = _cityscapes(path) or _ade20k(path) or _voc(path)
    if found is None:
        found = _maps(path, path, range(VALUES - 1), (), "a folder of PNG files")
    ignored = {_value_of(word, found) for word in ignore}
    table = (IGNORED if value in ignored else own for value, own in enumerate(found.table))
    return replace(found, table=tuple(table))


def _value_of(word: str, maps: PngMaps) -> int:
    if word.isdigit() and int(word) < VALUES:
        return int(word)
    if word in maps.classes:
        return maps.table.index(maps.classes.index(word))
    known = "0 to 255" + (", or a name like " + maps.classes[0] if maps.classes else "")
    raise VitseeError(f"--ignore {word}: no class of {maps.name}; expected a pixel value, {known}")


def _voc(path: Path) -> PngMaps | None:
    folder = path / "SegmentationClass"
    folder = folder if folder.is_dir() else path
    if folder.name != "SegmentationClass":
        return None
    return _maps(path, folder, range(len(VOC_CLASSES)), VOC_CLASSES, "Pascal VOC")


def _ade20k(path: Path) -> PngMaps | None:
    for root, folder in ((path, path / "annotations"), (path.parent, path)):
        if (root / ADE_NAMES).is_file() and folder.is_dir():
            names = _ade20k_names(root / ADE_NAMES)
            values = (IGNORED, *range(len(names)))
            return _maps(path, folder, values, names, "ADE20K (SceneParsing)")
    return None


def _ade20k_names(path: Path) -> tuple[str, ...]:
    """The names in the table that comes with the data: number, share, counts, name."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()[1:]
    except (OSError, UnicodeDecodeError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        raise VitseeError(f"cannot read {path}: {what}") from None
    rows = [line.split("\t") if "\t" in line else line.split(None, 5) for line in lines if line]
    numbers = [row[0].strip() for row in rows]
    if numbers != [str(i + 1) for i in range(len(rows))] or not 0 < len(rows) < VALUES - 1:
        raise VitseeError(
            f"{path} is not the table of ADE20K's classes; expected lines that begin with 1, 2, ..."
        )
    return tuple(row[-1].strip() for row in rows)


def _cityscapes(path: Path) -> PngMaps | None:
    folder = path / "gtFine" if (path / "gtFine").is_dir() else path
    if not _any_labelled(folder):
        return None
    order = {value: number for number, value in enumerate(CITYSCAPES)}
    values = [order.get(value, IGNORED) for value in range(CITYSCAPES_VALUES)]
    found = _maps(path, folder, values, tuple(CITYSCAPES.values()), "Cityscapes")
    files = tuple(filter(_CITYSCAPES_FILE.search, found.files))
    keys = tuple(_CITYSCAPES_FILE.sub("_leftImg8bit.png", name) for name in files)
    return replace(found, files=files, keys=keys)


def _any_labelled(folder: Path) -> bool:
    """Whether the first PNG files that are met are Cityscapes' (of a city all are alike)."""
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(".png") for name in names):
            return any(map(_CITYSCAPES_FILE.search, names))
    return False


def _maps(
    path: Path, folder: Path, values: Sequence[int], classes: tuple[str, ...], layout: str
) -> PngMaps:
    """The class maps below a folder. values: the classes of 0, 1, ...; further ones are refused."""
    files = tuple(png_files(folder, "class map"))
    table = (*values, *[REFUSED] * (VALUES - 1 - len(values)), IGNORED)
    return PngMaps(str(path), str(folder), files, files, table, classes, layout)
