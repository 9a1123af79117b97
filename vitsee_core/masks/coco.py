"""Masks in a COCO annotation file: outlines and run lengths of objects or parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.masks.annotations import (
    EXPECTED,
    Annotated,
    category_names,
    category_of,
    checked_images,
    entries_of,
    read_annotations,
    size_of,
)
from vitsee_core.masks.labels import FOREGROUND, VOID, Labels, Segment
from vitsee_core.masks.shapes import coder, pixels_of
from vitsee_core.types import Mask
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class CocoMasks(Annotated):
    """Images of one file, by their ids; see `MaskSource`. The objects of an image are its
    annotations of every category. Crowd regions are void, as COCO's own evaluation ignores them; an
    object in a crowd region stays foreground.

    objects: image id -> its annotations.
    """

    void = "those of crowd regions"

    objects: dict[Any, list[dict[str, Any]]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the file, which may be of hundreds of MB, itself."""
        return _at, (self.name,)

    @property
    def rules(self) -> dict[str, str]:
        return {
            "background": "no annotation",
            "void": "crowd regions (iscrowd 1) outside of every object",
            "foreground": "annotations of every category",
        }

    def where(self, i: int) -> str:
        return f"{self.keys[i]} in {self.name}"

    def read(self, i: int) -> Labels:
        size = size_of(self.images[i])
        labels = np.zeros(size, np.uint8)
        # Objects last: they lie over crowd regions.
        for one in sorted(self._objects(i), key=_is_crowd, reverse=True):
            labels[self._inside(i, one, size)] = VOID if _is_crowd(one) else FOREGROUND
        return labels

    def segments(self, i: int) -> list[Segment]:
        size, where = size_of(self.images[i]), self.where(i)
        return [
            Segment(category_of(one, self.names, where), self._inside(i, one, size), _is_crowd(one))
            for one in self._objects(i)
        ]

    def _objects(self, i: int) -> list[dict[str, Any]]:
        return self.objects.get(self.images[i]["id"], [])

    def _inside(self, i: int, annotation: dict[str, Any], size: tuple[int, int]) -> Mask:
        try:
            return pixels_of(annotation["segmentation"], size)
        except Exception as error:  # compiled code raises what it likes
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise VitseeError(
                f"cannot read the annotation {annotation.get('id')} of {self.where(i)}: {why}"
            ) from None


def _is_crowd(annotation: dict[str, Any]) -> bool:
    return bool(annotation.get("iscrowd", 0))


def _at(name: str) -> CocoMasks:
    return open_coco(Path(name), read_annotations(Path(name)))


def open_coco(path: Path, found: dict[str, Any]) -> CocoMasks:
    """The images and annotations of a COCO file.

    Args:
        path: of the file.
        found: what it holds, see `read_annotations`.

    Raises:
        VitseeError: an entry is not as COCO has it, no annotation has a segmentation, or
            pycocotools is not installed.
    """
    coder(str(path))
    objects: dict[Any, list[dict[str, Any]]] = {}
    with entries_of(path, "annotations with image_id and segmentation"):
        images = checked_images(found["images"])
        names = category_names(found.get("categories") or [])
        for annotation in found["annotations"]:
            if annotation.get("segmentation"):
                objects.setdefault(annotation["image_id"], []).append(annotation)
    if not objects:
        raise VitseeError(f"{path} has no segmentation in any annotation; expected {EXPECTED}")
    return CocoMasks(str(path), images, names, objects)
