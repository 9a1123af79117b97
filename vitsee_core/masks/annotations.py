"""The images and categories that COCO's files of objects and of panoptic segments both have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitsee_stores.errors import VitseeError, reason

EXPECTED = "a COCO file with 'images' and 'annotations'"
MOST_PIXELS = 178_956_970  # of an image that Pillow opens


@dataclass(frozen=True)
class Annotated:
    """Images and categories of an annotation file. names: category id -> its name."""

    name: str
    images: list[dict[str, Any]]
    names: dict[Any, str]

    @cached_property
    def keys(self) -> list[str]:
        return [str(image["file_name"]) for image in self.images]

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(self.names.values()))


def read_annotations(path: Path) -> dict[str, Any]:
    """The contents of an annotation file, parsed from JSON.

    Raises:
        VitseeError: it cannot be read, or is no annotation file.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise VitseeError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or not {"images", "annotations"} <= found.keys():
        held = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise VitseeError(f"{path} has {held or 'nothing'}; expected {EXPECTED}")
    return found


@contextmanager
def entries_of(path: Path, annotations: str) -> Iterator[None]:
    """Around the work on a file's entries: one that is not as expected is a VitseeError.

    Args:
        path: of the file.
        annotations: what its annotations are expected to have, in words.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise VitseeError(
            f"{path} has an entry that cannot be read ({type(error).__name__}: {error}); expected "
            f"{EXPECTED}, images with id, file_name, height and width, {annotations}"
        ) from None


def checked_images(images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The images by their ids, if these can be ordered. Refused are images without an id, a name or
    a size that can be read, and a name that occurs twice.

    Raises:
        KeyError, TypeError, ValueError: what is wrong with one.
    """
    seen = set()
    for image in images:
        _ = hash(image["id"]), image["file_name"]
        if image["file_name"] in seen:
            raise ValueError(f"the image {image['file_name']} is there twice")
        seen.add(image["file_name"])
        height, width = size_of(image)
        if min(height, width) < 1 or height * width > MOST_PIXELS:
            raise ValueError(
                f"{image['file_name']} is {width:.9g} x {height:.9g} pixels; 1 to {MOST_PIXELS} "
                "are read"
            )
    numbered = all(isinstance(image["id"], int) for image in images)
    return sorted(images, key=lambda image: image["id"]) if numbered else list(images)


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    return int(image["height"]), int(image["width"])


def category_names(categories: Sequence[dict[str, Any]]) -> dict[Any, str]:
    """Category id -> its name; of categories that share one, with the id: two kinds of parts may
    both be called "Head" (PartImageNet)."""
    names = {one["id"]: one["name"] for one in categories if one.get("name")}
    times = Counter(names.values())
    return {
        number: str(name) if times[name] == 1 else f"{name} ({number})"
        for number, name in names.items()
    }


def category_of(entry: Mapping[str, Any], names: Mapping[Any, str], where: str) -> str:
    """The name of an annotation's category.

    Raises:
        VitseeError: it has none, or its category has no name.
    """
    number = entry.get("category_id")
    if isinstance(number, (int, str)) and number in names:
        return names[number]
    raise VitseeError(
        f"{where}: the annotation {entry.get('id')} is of category {number}, which has no name "
        "among the file's categories"
    )
