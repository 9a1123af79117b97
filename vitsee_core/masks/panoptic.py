"""COCO's panoptic segments: a PNG file per image whose colours are segments' numbers, and a JSON
file that says what each of them is (Kirillov et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.masks.annotations import (
    Annotated,
    category_names,
    category_of,
    checked_images,
    entries_of,
    read_annotations,
)
from vitsee_core.masks.labels import BACKGROUND, FOREGROUND, VOID, Labels, Segment
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class PanopticMasks(Annotated):
    """Images of one panoptic file; see `MaskSource`. For a mask of the foreground things are
    foreground, stuff is background; crowds and pixels without a segment are void.

    folder: of the PNG files. annotations: of each image. things: the categories that are things.
    """

    void = "those of no segment and of crowds"

    folder: str
    annotations: list[dict[str, Any]]
    things: frozenset[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the file itself."""
        return _at, (self.name, self.folder)

    @property
    def rules(self) -> dict[str, str]:
        return {
            "background": "segments of categories that are stuff",
            "void": "pixels of no segment, and crowds",
            "foreground": "segments of categories that are things",
        }

    def where(self, i: int) -> str:
        return str(Path(self.folder, self.annotations[i]["file_name"]))

    def read(self, i: int) -> Labels:
        numbers = self._numbers(i)
        labels = np.full(numbers.shape, VOID, np.uint8)
        for one in self.annotations[i]["segments_info"]:
            kind = FOREGROUND if one["category_id"] in self.things else BACKGROUND
            labels[numbers == one["id"]] = VOID if one.get("iscrowd") else kind
        return labels

    def segments(self, i: int) -> list[Segment]:
        numbers, where = self._numbers(i), self.where(i)
        return [
            Segment(
                category_of(one, self.names, where), numbers == one["id"], bool(one.get("iscrowd"))
            )
            for one in self.annotations[i]["segments_info"]
        ]

    def _numbers(self, i: int) -> NDArray[np.uint32]:
        """(height, width): of each pixel's segment, R + 256 G + 65536 B; 0 for none."""
        image, _ = FileOpener(self.folder).load(self.annotations[i]["file_name"])
        if image.mode not in ("RGB", "RGBA"):
            raise VitseeError(
                f"{self.where(i)} has mode {image.mode}; expected colours (RGB) that number the "
                "segments"
            )
        bands = np.asarray(image)[..., :3].astype(np.uint32)
        numbers: NDArray[np.uint32] = bands @ np.array([1, 256, 65536], np.uint32)
        known = numbers == 0
        for one in self.annotations[i]["segments_info"]:
            known |= numbers == one["id"]
        if not known.all():
            unknown = np.unique(numbers[~known])
            raise VitseeError(
                f"{self.where(i)} has segment {unknown[0]}, which {self.name} does not list for "
                f"this image ({len(unknown)} such)"
            )
        return numbers


def is_panoptic(found: dict[str, Any]) -> bool:
    annotations = found["annotations"]
    first = annotations[0] if isinstance(annotations, list) and annotations else None
    return isinstance(first, dict) and "segments_info" in first


def _at(name: str, folder: str) -> PanopticMasks:
    return open_panoptic(Path(name), read_annotations(Path(name)), Path(folder))


def open_panoptic(path: Path, found: dict[str, Any], folder: Path | None) -> PanopticMasks:
    """The segments of a panoptic file.

    Args:
        path: of the JSON file.
        found: what it holds, see `read_annotations`.
        folder: of its PNG files; by default the one beside it that is called as it is.

    Raises:
        VitseeError: there is no such folder, or an entry is not as COCO has it.
    """
    folder = path.with_suffix("") if folder is None else folder
    if not folder.is_dir():
        raise VitseeError(
            f"no folder {folder}; expected the PNG files of {path}: say where with --panoptic DIR"
        )
    with entries_of(path, "annotations with image_id, file_name and segments_info"):
        by_id = {image["id"]: image for image in checked_images(found["images"])}
        for one in found["annotations"]:
            _check(one)
            if one["image_id"] not in by_id:
                raise ValueError(f"{one['file_name']} is of image {one['image_id']}, which is none")
        of_image = {one["image_id"]: one for one in found["annotations"]}
        known = [number for number in by_id if number in of_image]
        categories = found.get("categories") or []
        names = category_names(categories)
        things = frozenset(one["id"] for one in categories if one.get("isthing"))
    images, annotations = [by_id[n] for n in known], [of_image[n] for n in known]
    return PanopticMasks(str(path), images, names, str(folder), annotations, things)


def _check(annotation: dict[str, Any]) -> None:
    """Refuse a file that is not below the folder, and numbers that no colour has."""
    name = Path(str(annotation["file_name"]))
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the file {name} is not below the folder of PNG files")
    for one in annotation["segments_info"]:
        if not isinstance(one["id"], int) or not 0 < one["id"] < 2**24:
            raise ValueError(f"a segment of {name} has the number {one['id']!r}")
        if not isinstance(one.get("category_id"), (int, str)):
            raise ValueError(f"a segment of {name} has the category {one.get('category_id')!r}")
