"""Masks in COCO files: objects or parts as outlines and run lengths, and panoptic segments.

Outlines become pixels by pycocotools, run lengths by numpy. Sizes and numbers are checked before
memory is allocated or compiled code is called: pycocotools crashes the process on outlines far
outside of the image, and on runs beyond its end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.masks.labels import BACKGROUND, FOREGROUND, VOID, Labels, Segment
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError, reason

Size = tuple[int, int]  # height, width

# pycocotools walks along an outline in fifths of a pixel and keeps 16 bytes of each: 134 MB.
MOST_STEPS = 1 << 23
FEWEST = 6  # numbers of an outline: three points
FARTHEST = 4  # how far outside a point may lie, in the image's longer side
LONGEST_COUNT = 7  # characters of five bits that a count of 32 bits takes


def pixels_of(shape: Any, size: Size) -> Mask:
    """(height, width) which pixels a segmentation covers: a list of outlines, or runs. Raises
    ValueError: it is none, or reaches too far out of the image; in words."""
    if isinstance(shape, list):
        return _inside(shape, size)
    if not isinstance(shape, dict) or not {"counts", "size"} <= shape.keys():
        raise ValueError("expected a list of outlines, or size and counts")
    height, width = (int(n) for n in shape["size"])
    if (height, width) != size:
        raise ValueError(f"is of {width} x {height} pixels; expected {size[1]} x {size[0]}")
    counts = shape["counts"]
    return _from_runs(counts if isinstance(counts, list) else list(unpack_counts(counts)), size)


def coder(name: str) -> Any:
    """pycocotools' module of masks. Raises VitseeError: it is not installed."""
    try:
        from pycocotools import mask
    except ImportError:
        raise VitseeError(
            f"{name} needs the package pycocotools; run: pip install 'vitsee[coco]'"
        ) from None
    return mask


def _inside(outlines: Sequence[Any], size: Size) -> Mask:
    """The pixels in the union of outlines, x and y in turn. Those of one or two points enclose
    nothing: they are left out (pycocotools would take four numbers for a box)."""
    checked = [_check_outline(np.asarray(outline, np.float64), size) for outline in outlines]
    checked = [outline for outline in checked if len(outline) >= FEWEST]
    if not checked:
        return np.zeros(size, np.bool_)
    mask = coder("an outline")
    found = mask.decode(mask.merge(mask.frPyObjects([c.tolist() for c in checked], *size)))
    return np.asarray(found, np.bool_)


def _check_outline(points: Float, size: Size) -> Float:
    if points.ndim != 1 or len(points) % 2:
        raise ValueError(f"an outline has {points.size} numbers; expected x and y of 3 points")
    farthest = FARTHEST * max(size)
    outside = ~(np.abs(points) <= farthest)  # NaN too
    if outside.any():
        raise ValueError(
            f"an outline goes to {points[outside][0]:g}; the image has {size[1]} x {size[0]} pixels"
        )
    corners = points.reshape(-1, 2)
    lengths = np.abs(corners - np.roll(corners, 1, 0)).max(1)
    if 5 * lengths.sum() + len(corners) > MOST_STEPS:
        raise ValueError(
            f"an outline is {lengths.sum():.0f} pixels long; at most {MOST_STEPS // 5} are read"
        )
    return points


def _from_runs(counts: Sequence[Any], size: Size) -> Mask:
    """The pixels of run lengths down the columns, background first."""
    runs = np.array(counts, np.float64)  # before any is taken for a length
    if runs.ndim != 1 or not (runs >= 0).all() or (runs != np.floor(runs)).any():
        raise ValueError("its run lengths are no whole numbers from 0 on")
    if runs.sum() != size[0] * size[1]:
        raise ValueError(f"its runs cover {runs.sum():.0f} pixels, of {size[0] * size[1]}")
    lengths = runs.astype(np.int64)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(size[::-1]).T


def unpack_counts(text: str | bytes) -> Iterator[int]:
    """The run lengths that a COCO string holds: five bits a character, the lowest first, from the
    fourth on as the difference to the last but one. Raises ValueError: it is no such string."""
    data = text.encode("ascii") if isinstance(text, str) else bytes(text)
    before: list[int] = []
    value = digits = 0
    for character in data:
        bits = character - 48
        if not 0 <= bits < 64 or digits == LONGEST_COUNT:
            raise ValueError("its run lengths are no COCO string")
        value |= (bits & 31) << 5 * digits
        digits += 1
        if not bits & 32:
            if bits & 16:
                value -= 1 << 5 * digits
            if len(before) > 2:
                value += before[-2]
            before.append(value)
            yield value
            value = digits = 0
    if digits:
        raise ValueError("its run lengths are cut short")


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
    """The contents of an annotation file, parsed from JSON. Raises VitseeError: it cannot be read,
    or is no annotation file."""
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
    a size that can be read, and a name that occurs twice. Raises KeyError, TypeError, ValueError:
    what is wrong with one."""
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
    """The name of an annotation's category. Raises VitseeError: it has none, or its category has no
    name."""
    number = entry.get("category_id")
    if isinstance(number, (int, str)) and number in names:
        return names[number]
    raise VitseeError(
        f"{where}: the annotation {entry.get('id')} is of category {number}, which has no name "
        "among the file's categories"
    )


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
        return open_coco, (Path(self.name),)

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


def open_coco(path: Path, found: dict[str, Any] | None = None) -> CocoMasks:
    """The images and annotations of a COCO file.

    Args:
        path: of the file.
        found: what it holds, see `read_annotations`; None: it is read now.

    Raises:
        VitseeError: an entry is not as COCO has it, no annotation has a segmentation, or
            pycocotools is not installed.
    """
    coder(str(path))
    found = read_annotations(path) if found is None else found
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
        return open_panoptic, (Path(self.name), None, Path(self.folder))

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


def open_panoptic(path: Path, found: dict[str, Any] | None, folder: Path | None) -> PanopticMasks:
    """The segments of a panoptic file.

    Args:
        path: of the JSON file.
        found: what it holds, see `read_annotations`; None: it is read now.
        folder: of its PNG files; by default the one beside it that is called as it is.

    Raises:
        VitseeError: there is no such folder, or an entry is not as COCO has it.
    """
    folder = path.with_suffix("") if folder is None else folder
    if not folder.is_dir():
        raise VitseeError(
            f"no folder {folder}; expected the PNG files of {path}: say where with --panoptic DIR"
        )
    found = read_annotations(path) if found is None else found
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
