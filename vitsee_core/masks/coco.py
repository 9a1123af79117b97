"""Masks in a COCO annotation file: polygons and run lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.masks.labels import FOREGROUND, VOID, Labels
from vitsee_core.masks.shapes import coder, pixels_of
from vitsee_stores.errors import VitseeError, reason

MOST_PIXELS = 178_956_970  # of an image that Pillow opens


@dataclass(frozen=True)
class CocoMasks:
    """Images of one file; see `MaskSource`. The objects of an image are its annotations of every
    category. Crowd regions are void, as COCO's own evaluation ignores them; an object
    in a crowd region stays foreground.

    images: those of the file. objects: image id -> its annotations.
    """

    name: str
    images: list[dict[str, Any]]
    objects: dict[Any, list[dict[str, Any]]]

    @cached_property
    def keys(self) -> list[str]:
        """The file names of the images."""
        return [str(image["file_name"]) for image in self.images]

    @property
    def void(self) -> str:
        """What makes a pixel void."""
        return "those of crowd regions"

    @property
    def rules(self) -> dict[str, str]:
        """How pixels become labels."""
        return {
            "background": "no annotation",
            "void": "crowd regions (iscrowd 1) outside of every object",
            "foreground": "annotations of every category",
        }

    def where(self, i: int) -> str:
        """The image's entry."""
        return f"{self.keys[i]} in {self.name}"

    def read(self, i: int) -> Labels:
        """(height, width); see `MaskSource`."""
        image = self.images[i]
        size = _size(image)
        labels = np.zeros(size, np.uint8)
        own = self.objects.get(image["id"], [])
        # Objects last: they lie over crowd regions.
        for crowd in (True, False):
            for annotation in own:
                if bool(annotation.get("iscrowd", 0)) == crowd:
                    inside = self._inside(i, annotation, size)
                    labels[inside] = VOID if crowd else FOREGROUND
        return labels

    def _inside(
        self, i: int, annotation: dict[str, Any], size: tuple[int, int]
    ) -> NDArray[np.bool_]:
        try:
            return pixels_of(annotation["segmentation"], size)
        except Exception as error:  # compiled code raises what it likes
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise VitseeError(
                f"cannot read the annotation {annotation.get('id')} of {self.where(i)}: {why}"
            ) from None


def open_coco(path: Path) -> CocoMasks:
    """The images and annotations of a COCO file.

    Raises:
        VitseeError: it is not one, or pycocotools is not installed.
    """
    coder(str(path))
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise VitseeError(f"{path} is not JSON: {error}") from None
    expected = "a COCO file with 'images' and 'annotations'"
    if not isinstance(found, dict) or not {"images", "annotations"} <= found.keys():
        held = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise VitseeError(f"{path} has {held or 'nothing'}; expected {expected}")
    objects: dict[Any, list[dict[str, Any]]] = {}
    try:
        for image in found["images"]:
            _ = hash(image["id"]), image["file_name"]
            height, width = _size(image)
            if min(height, width) < 1 or height * width > MOST_PIXELS:
                raise ValueError(
                    f"{image['file_name']} is {width:.9g} x {height:.9g} pixels; 1 to "
                    f"{MOST_PIXELS} are read"
                )
        for annotation in found["annotations"]:
            if annotation.get("segmentation"):
                objects.setdefault(annotation["image_id"], []).append(annotation)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VitseeError(
            f"{path} has an entry that cannot be read ({type(error).__name__}: {error}); expected "
            f"{expected}, images with id, file_name, height and width, annotations with image_id "
            "and segmentation"
        ) from None
    if not objects:
        raise VitseeError(f"{path} has no segmentation in any annotation; expected {expected}")
    return CocoMasks(str(path), found["images"], objects)


def _size(image: dict[str, Any]) -> tuple[int, int]:
    """Height and width of an entry."""
    return int(image["height"]), int(image["width"])
