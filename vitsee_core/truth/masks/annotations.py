"""The entries of COCO's annotation files: read, and checked for what would make labels vanish."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitsee_stores.errors import VitseeError, reason, reason_of_text

EXPECTED = "a COCO file with 'images' and 'annotations'"
LONGEST_ID = 40  # characters of an id in a message
LONGEST_REASON = 200  # characters of an entry's error in a message
MAX_PIXELS = 178_956_970  # of an image that Pillow opens


@dataclass(frozen=True)
class AnnotationFile:
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
    """The contents of an annotation file, parsed from JSON. Raises VitseeError: it cannot be read,
    or is no annotation file."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise VitseeError(f"{path} is not JSON: {reason_of_text(error)}") from None
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
            f"{path} has an entry that cannot be read ({_why(error)}); expected "
            f"{EXPECTED}, images with id, file_name, height and width, {annotations}"
        ) from None


def _why(error: Exception) -> str:
    """What is wrong with an entry, in words where Python's have none."""
    text = str(error)[:LONGEST_REASON]
    if isinstance(error, KeyError):
        return f"it has no field {text}"
    if type(error) is ValueError:
        return text
    return f"{type(error).__name__}: {text}"


def checked_images(images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The images by their ids, if these can be ordered.

    Raises:
        KeyError, TypeError, ValueError: one has no id, name or size that can be read, or a name or
            an id occurs twice; in words.
    """
    seen = set()
    file_names = dict[Any, Any]()  # image id -> its file
    for image in images:
        number = image["id"]
        name = image["file_name"]
        if name in seen:
            raise ValueError(f"the image {name} is there twice")
        seen.add(name)
        if number in file_names:
            # Both would get the annotations of both.
            raise ValueError(f"{file_names[number]} and {name} have the id {number!r}")
        file_names[number] = name
        height, width = size_of(image)
        if min(height, width) < 1 or height * width > MAX_PIXELS:
            raise ValueError(
                f"{image['file_name']} is {width:.9g} x {height:.9g} pixels; 1 to {MAX_PIXELS} "
                "are read"
            )
    numbered = all(isinstance(image["id"], int) for image in images)
    if numbered:
        return sorted(images, key=lambda image: image["id"])
    return list(images)


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    return int(image["height"]), int(image["width"])


def id_by_alias(ids: Iterable[Any]) -> dict[Any, Any]:
    """An id, as a number or as its digits -> the id as the file has it: programs that write JSON
    make text of numbers."""
    exact = {number: number for number in ids}
    aliases = dict[Any, Any]()
    for number in exact:
        if isinstance(number, int):
            aliases[str(number)] = number
        elif (
            isinstance(number, str) and number.isdecimal() and str(int(number)) == number
        ):
            aliases[int(number)] = number
    return aliases | exact


def flag(entry: Mapping[str, Any], name: str) -> bool:
    """A field that is 0 or 1, also as text; without it 0. Raises ValueError: it is neither."""
    value = entry.get(name)
    text = str(value).strip().lower()
    if text in ("1", "1.0", "true"):
        return True
    if value is None or text in ("0", "0.0", "false", ""):
        return False
    raise ValueError(
        f"{name} is {value!r} in the annotation {entry.get('id')}, expected 0 or 1"
    )


def category_names(categories: Sequence[dict[str, Any]]) -> dict[Any, str]:
    """Category id, as a number or as its digits -> its name; of categories that share one, with the
    id: two kinds of parts may both be called "Head" (PartImageNet). Raises ValueError: an id has
    two names, as where files were merged."""
    names = dict[Any, Any]()
    for category in categories:
        number = category["id"]
        name = category.get("name")
        if name and names.setdefault(number, name) != name:
            raise ValueError(
                f"the category {number} is called {names[number]} and {name}"
            )
    times = Counter(names.values())
    shown = {
        number: str(name) if times[name] == 1 else f"{name} ({number})"
        for number, name in names.items()
    }
    return {alias: shown[number] for alias, number in id_by_alias(names).items()}


def category_of(entry: Mapping[str, Any], names: Mapping[Any, str], where: str) -> str:
    """The name of an annotation's category. Raises VitseeError: it has none, or its category has no
    name."""
    number = entry.get("category_id")
    if isinstance(number, (int, str)) and number in names:
        return names[number]
    raise VitseeError(
        f"{where}: the annotation {str(entry.get('id'))[:LONGEST_ID]} is of category "
        f"{str(number)[:LONGEST_ID]}, which has no name "
        "among the file's categories"
    )
