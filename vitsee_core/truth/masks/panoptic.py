"""Panoptic segments in COCO files: a number of each pixel in a PNG file, and what it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.truth.masks.annotations import (
    AnnotationFile,
    category_names,
    category_of,
    checked_images,
    entries_of,
    flag,
    id_by_alias,
    read_annotations,
)
from vitsee_core.truth.masks.labels import BACKGROUND, FOREGROUND, VOID, Labels, Segment
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class PanopticMasks(AnnotationFile):
    """Images of one panoptic file; see `MaskSource`. For a mask of the foreground things are
    foreground, stuff is background; crowds and pixels without a segment are void.

    folder: of the PNG files. annotations: of each image. things: the categories that are things.
    exif: whether the PNG files are turned as their images are, see `oriented_as`.
    """

    void = "those of no segment and of crowds"

    folder: str
    annotations: list[dict[str, Any]]
    things: frozenset[Any]
    exif: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the file itself."""
        return open_panoptic, (Path(self.name), None, Path(self.folder), self.exif)

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
            # Segments of a panoptic file do not overlap: their order does not matter.
            labels[numbers == one["id"]] = VOID if flag(one, "iscrowd") else kind
        return labels

    def segments(self, i: int) -> list[Segment]:
        numbers = self._numbers(i)
        where = self.where(i)
        return [
            Segment(
                category_of(one, self.names, where),
                numbers == one["id"],
                flag(one, "iscrowd"),
            )
            for one in self.annotations[i]["segments_info"]
        ]

    def _numbers(self, i: int) -> NDArray[np.uint32]:
        """(height, width): of each pixel's segment, R + 256 G + 65536 B; 0 for none."""
        image, _ = FileOpener(self.folder, exif=self.exif).load(
            self.annotations[i]["file_name"]
        )
        if image.mode not in ("RGB", "RGBA"):
            raise VitseeError(
                f"{self.where(i)} has mode {image.mode}; expected colours (RGB) that number the "
                "segments"
            )
        # RGBA's last band says nothing; uint32, as 255 x 65536 does not fit 8 bits.
        bands = np.asarray(image)[..., :3].astype(np.uint32)
        numbers: NDArray[np.uint32] = bands @ np.array([1, 256, 65536], np.uint32)
        # Black pixels belong to no segment; all other numbers have to be listed.
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


def open_panoptic(
    path: Path,
    found: dict[str, Any] | None,
    folder: Path | None,
    exif: bool = False,
) -> PanopticMasks:
    """The segments of a panoptic file.

    Args:
        path: of the JSON file.
        found: what it holds, see `read_annotations`; None: it is read now.
        folder: of its PNG files; by default the one beside it that is called as it is.
        exif: whether the PNG files are turned as their images are.

    Raises:
        VitseeError: there is no such folder, or an entry is not as COCO has it.
    """
    # panoptic_val2017.json and the folder panoptic_val2017/, as COCO unpacks.
    folder = path.with_suffix("") if folder is None else folder
    if not folder.is_dir():
        raise VitseeError(
            f"no folder {folder}; expected the PNG files of {path}: say where with --panoptic DIR"
        )
    found = read_annotations(path) if found is None else found
    with entries_of(path, "annotations with image_id, file_name and segments_info"):
        images = {image["id"]: image for image in checked_images(found["images"])}
        # Ids may be numbers here and text there.
        id_of = id_by_alias(images)
        annotations = dict[Any, dict[str, Any]]()  # image id -> its annotation
        for annotation in found["annotations"]:
            _check(annotation)
            name = annotation["file_name"]
            number = annotation["image_id"]
            if number not in id_of:
                raise ValueError(f"{name} is of image {number}, which is none")
            earlier = annotations.setdefault(id_of[number], annotation)
            if earlier is not annotation:
                raise ValueError(
                    f"{earlier['file_name']} and {name} are of the image {number}"
                )
        categories = found.get("categories") or []
        names = category_names(categories)
        things = id_by_alias(one["id"] for one in categories if flag(one, "isthing"))
    # In the order of the file's images, those without an annotation left out.
    known = [number for number in images if number in annotations]
    return PanopticMasks(
        name=str(path),
        images=[images[number] for number in known],
        names=names,
        folder=str(folder),
        annotations=[annotations[number] for number in known],
        things=frozenset(things),
        exif=exif,
    )


def _check(annotation: dict[str, Any]) -> None:
    """Refuse a file that is not below the folder, and numbers that no colour has."""
    if not isinstance(annotation["file_name"], str):
        raise ValueError(f"the file {annotation['file_name']!r} has no name")
    name = Path(annotation["file_name"])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the file {name} is not below the folder of PNG files")
    seen = set()
    for one in annotation["segments_info"]:
        # Three bytes of colour, of which black is no segment.
        if not isinstance(one["id"], int) or not 0 < one["id"] < 2**24:
            raise ValueError(f"a segment of {name} has the number {one['id']!r}")
        if one["id"] in seen:
            raise ValueError(f"the segment {one['id']} of {name} is there twice")
        seen.add(one["id"])
        flag(one, "iscrowd")
        if not isinstance(one.get("category_id"), (int, str)):
            raise ValueError(
                f"a segment of {name} has the category {one.get('category_id')!r}"
            )
