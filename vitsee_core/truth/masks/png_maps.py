"""Class maps that are PNG files, pixel by pixel a number, in four published layouts.

- Pascal VOC: `SegmentationClass/`, palette images whose indices are classes, 255 for borders;
- ADE20K as SceneParsing distributes it: `annotations/{training,validation}/` beside
  `objectInfo150.txt`; 0 is no class, 1 to 150 are classes 0 to 149;
- Cityscapes: `*_gtFine_labelIds.png`, of whose 34 numbers 19 are classes (the `trainId` of its
  scripts), or `*_gtFine_labelTrainIds.png` where there are only these; the image is the file with
  `leftImg8bit` in place of what follows the frame;
- any other folder: values are classes, and 255 is none unless the user says otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitsee_core.truth.masks.sources import png_files, read_numbers
from vitsee_core.types import Mask
from vitsee_stores.errors import VitseeError, reason

ClassMap = NDArray[np.uint8]
IGNORED = 255  # a pixel without a class; so there are at most 255 classes, 0 to 254
PLAIN = "a folder of PNG files"
BOUNDARY_SHARE = 0.02  # of the image's diagonal, as in Cheng et al. 2021

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
ADE_FOLDER = "ADEChallengeData2016"
ADE_FILE = re.compile(r"ADE_(train|val)_\d{8}\.png")


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
        # (height, width): the table is indexed by each pixel's value.
        class_map = np.array(self.table)[values.astype(np.intp)]
        refused = class_map == REFUSED
        if refused.any():
            wrong = int(values[refused].min())
            if self.layout == PLAIN:
                raise VitseeError(
                    f"{self.where(i)} has the value {wrong}, and at most {IGNORED} classes are "
                    f"read: with --void none the values 0 to {wrong - 1} and {IGNORED}; give the "
                    "value to leave out with --void VALUE"
                )
            raise VitseeError(
                f"{self.where(i)} has the value {wrong}, which is no class of {self.layout} (of "
                f"its {len(self.classes)}); give --ignore {wrong} if these pixels do not count"
            )
        return class_map.astype(np.uint8)


def open_png_maps(
    path: Path, ignore: Sequence[str], void: int | str | None = None
) -> PngMaps:
    """Return the PNG files below a folder, in the layout that its structure shows.

    Args:
        path: the folder, or the root of a data set.
        ignore: values of pixels, or names of classes, that have no class, beside the layout's own.
        void: of a folder in no layout, the value that is no class in place of 255, or "none".

    Raises:
        VitseeError: there are none, an ignored class that is none, or `void` of a layout that says
            itself which pixels have no class.
    """
    # Cityscapes by its files' names, the others by folders; at most one of them fits.
    maps = _open_cityscapes(path) or _open_ade20k(path) or _open_voc(path)
    if maps is not None and void is not None:
        raise VitseeError(
            f"{path} has the layout of {maps.layout}, which says itself which pixels have no "
            "class; leave out --void (--ignore takes further values)"
        )
    if maps is None:
        # Every value but 255 is the class of its number.
        maps = _png_maps(path, path, range(VALUES - 1), (), PLAIN)
        if void is None:
            _refuse_ade20k_without_names(path, maps)
        maps = _with_void(maps, IGNORED if void is None else void)
    table = list(maps.table)
    for word in ignore:
        table[_value_of(word, maps)] = IGNORED
    return replace(maps, table=tuple(table))


def _with_void(maps: PngMaps, void: int | str) -> PngMaps:
    """Return the maps of a plain folder with another value than 255, or none, without a class.

    Class numbers end at 254, so that 255 takes the number of the value that has no class; with
    "none" that of 254, which is refused where it occurs.

    Raises:
        VitseeError: no pixel of 8 bits has the value.
    """
    if void == IGNORED:
        return maps
    table = list(maps.table)
    names = [str(value) for value in range(IGNORED)]
    if void == "none":
        number = IGNORED - 1
        table[number] = REFUSED
    else:
        number = int(void)
        if number >= VALUES:
            raise VitseeError(
                f"--void {number}: no value of {maps.name}; expected 0 to {VALUES - 1}, or none"
            )
        table[number] = IGNORED
    # Swapped: 255 is a class under the number that became free.
    table[IGNORED] = number
    names[number] = str(IGNORED)
    return replace(maps, table=tuple(table), classes=tuple(names))


def _value_of(word: str, maps: PngMaps) -> int:
    """Return the pixel value that a word names: a number, or a class's name.

    Raises:
        VitseeError: it is neither.
    """
    if word.isdigit() and int(word) < VALUES:
        return int(word)
    if word in maps.classes:
        return maps.table.index(maps.classes.index(word))
    known = "0 to 255"
    if maps.layout != PLAIN:
        known += f", or a name like {maps.classes[0]}"
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
            # The files' 0 is no class; 1 is class 0, and on.
            values = (IGNORED, *range(len(names)))
            return _png_maps(path, folder, values, names, "ADE20K (SceneParsing)")
    return None


def _refuse_ade20k_without_names(path: Path, maps: PngMaps) -> None:
    """Refuse ADE20K's maps without the table of its classes: in a plain folder their 0, which is no
    class, would be one.

    Raises:
        VitseeError: a folder or a file is called as ADE20K's are.
    """
    folders = {*path.absolute().parts[-3:], *Path(maps.files[0]).parts}
    is_named = any(ADE_FILE.fullmatch(Path(file).name) for file in maps.files)
    if is_named or ADE_FOLDER in folders:
        raise VitseeError(
            f"{path} holds class maps of ADE20K (SceneParsing), but {ADE_NAMES} is not beside "
            "annotations/; expected that file, or --void 0 for numbers as names and 0 as no class "
            "(--void 255: 0 is a class)"
        )


def _ade20k_names(path: Path) -> tuple[str, ...]:
    """Return the names in the table that comes with the data: number, ratio, counts, name.

    Raises:
        VitseeError: the file cannot be read, or is not that table.
    """
    try:
        # utf-8-sig drops a byte order mark; the first line is the table's head.
        lines = path.read_text("utf-8-sig").splitlines()[1:]
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise VitseeError(f"cannot read {path}: {why}") from None
    rows = [
        # Tabs as distributed, or columns of blanks, in which names may have blanks.
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


def near_boundary(labels: ClassMap) -> Mask:
    """Return a mask of the pixels near the boundary of the region of their class.

    A pixel of another class, or the image's border, is within `BOUNDARY_SHARE` of the diagonal,
    counted in pixels along the rows or columns, whichever is farther (the erosion by a square of
    Cheng et al. 2021). Pixels that are ignored are a region as others are.
    """
    from scipy.ndimage import maximum_filter, minimum_filter

    radius = max(1, round(BOUNDARY_SHARE * float(np.hypot(*labels.shape))))
    # A frame of a class of its own, so that the border is a boundary.
    framed = np.pad(labels.astype(np.int16), 1, constant_values=-1)
    size = 2 * radius + 1
    # Two classes within the square exactly if its least and largest differ.
    lowest = minimum_filter(framed, size, mode="nearest")
    highest = maximum_filter(framed, size, mode="nearest")
    return (lowest != highest)[1:-1, 1:-1]
