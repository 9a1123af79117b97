"""Masks in COCO files: objects or parts as outlines and run lengths.

Outlines become pixels by pycocotools, run lengths by numpy. Sizes and numbers are checked before
memory is allocated or compiled code is called: pycocotools crashes the process on outlines far
outside of the image, and on runs beyond its end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.truth.masks.annotations import (
    EXPECTED,
    LONGEST_ID,
    LONGEST_REASON,
    AnnotationFile,
    category_names,
    category_of,
    checked_images,
    entries_of,
    flag,
    id_by_alias,
    read_annotations,
    size_of,
)
from vitsee_core.truth.masks.labels import FOREGROUND, VOID, Labels, Segment
from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError
from vitsee_stores.manifest import abbreviate

Size = tuple[int, int]  # height, width

log = logging.getLogger(__name__)

# pycocotools walks along an outline in fifths of a pixel and keeps 16 bytes of each: 134 MB.
MAX_STEPS = 1 << 23
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
        raise ValueError(
            f"is of {width} x {height} pixels; expected {size[1]} x {size[0]}"
        )
    counts = shape["counts"]
    return _from_runs(
        counts if isinstance(counts, list) else list(unpack_counts(counts)), size
    )


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
    checked = [
        _check_outline(np.asarray(outline, np.float64), size) for outline in outlines
    ]
    checked = [outline for outline in checked if len(outline) >= FEWEST]
    if not checked:
        return np.zeros(size, np.bool_)
    mask = coder("an outline")
    found = mask.decode(
        mask.merge(mask.frPyObjects([c.tolist() for c in checked], *size))
    )
    return np.asarray(found, np.bool_)


def _check_outline(points: Float, size: Size) -> Float:
    if points.ndim != 1 or len(points) % 2:
        raise ValueError(
            f"an outline has {points.size} numbers; expected x and y of 3 points"
        )
    farthest = FARTHEST * max(size)
    outside = ~(np.abs(points) <= farthest)  # NaN too
    if outside.any():
        raise ValueError(
            f"an outline goes to {points[outside][0]:g}; the image has {size[1]} x {size[0]} pixels"
        )
    corners = points.reshape(-1, 2)
    lengths = np.abs(corners - np.roll(corners, 1, 0)).max(1)
    if 5 * lengths.sum() + len(corners) > MAX_STEPS:
        raise ValueError(
            f"an outline is {lengths.sum():.0f} pixels long; at most {MAX_STEPS // 5} are read"
        )
    return points


def _from_runs(counts: Sequence[Any], size: Size) -> Mask:
    """The pixels of run lengths down the columns, background first."""
    runs = np.array(counts, np.float64)  # before any is taken for a length
    if runs.ndim != 1 or not (runs >= 0).all() or (runs != np.floor(runs)).any():
        raise ValueError("its run lengths are no whole numbers from 0 on")
    if runs.sum() != size[0] * size[1]:
        raise ValueError(
            f"its runs cover {runs.sum():.0f} pixels, of {size[0] * size[1]}"
        )
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


FARTHEST_READ = 1e9  # pixels: larger numbers are refused where the mask is read
SHORTEST_CODE = 12  # characters: run lengths of no pixel at all are fewer


def has_area(shape: Any) -> bool:
    """Whether a segmentation can cover pixels: an outline of three points that reaches over a
    pixel, or runs that are not background alone. What is damaged, and refused where it is read,
    counts as one that can."""
    if isinstance(shape, list):
        return any(_encloses(outline) for outline in shape)
    if not isinstance(shape, dict) or "counts" not in shape:
        return bool(shape)
    counts = shape["counts"]
    try:
        if isinstance(counts, str) and len(counts) < SHORTEST_CODE:
            counts = list(unpack_counts(counts))
        return not isinstance(counts, list) or any(counts[1::2])
    except ValueError:
        return True


def _encloses(outline: Any) -> bool:
    """Whether an outline's points do not all lie within a pixel, or on a line."""
    try:
        corners = np.asarray(outline, np.float64).reshape(-1, 2)
    except (ValueError, TypeError):
        return True
    if 2 * len(corners) < FEWEST:
        return False
    if not (np.abs(corners) < FARTHEST_READ).all():  # NaN too
        return True
    from_first = corners - corners[0]
    lengths = np.hypot(from_first[:, 0], from_first[:, 1])
    far = from_first[lengths.argmax()]
    # The distance from the line through the first and the farthest point, times its length.
    aside = np.abs(from_first[:, 0] * far[1] - from_first[:, 1] * far[0]).max()
    on_a_line = aside <= 1e-9 * float(far @ far)
    return bool(np.ptp(corners, axis=0).max() >= 1 and not on_a_line)


def lies_outside(shape: Any, size: Size) -> bool:
    """Whether all outlines of a segmentation lie beside, above or below the image.

    Run lengths are of the image's pixels, and never do. What is damaged, and refused where it is
    read, counts as inside.
    """
    if not isinstance(shape, list):
        return False
    return all(_is_beside(outline, size) for outline in shape)


def _is_beside(outline: Any, size: Size) -> bool:
    """Whether an outline has all its points to one side of the image."""
    try:
        corners = np.asarray(outline, np.float64).reshape(-1, 2)
    except (ValueError, TypeError):
        return False
    if not (np.abs(corners) < FARTHEST_READ).all():  # NaN too
        return False
    x_and_y = corners.T
    extents = size[::-1]  # width of x, height of y
    return any(
        values.max() <= 0 or values.min() >= extent
        for values, extent in zip(x_and_y, extents, strict=True)
    )


@dataclass(frozen=True)
class CocoMasks(AnnotationFile):
    """Images of one file, by their ids; see `MaskSource`. The objects of an image are its
    annotations of every category. Crowd regions are void, as COCO's own evaluation ignores them; an
    object in a crowd region stays foreground.

    objects: image id -> its annotations. left_out: which annotations are in no mask, in words ->
    how many.
    """

    void = "those of crowd regions"

    objects: dict[Any, list[dict[str, Any]]]
    left_out: dict[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the file, which may be of hundreds of MB, itself."""
        return open_coco, (Path(self.name),)

    @property
    def rules(self) -> dict[str, str]:
        return {
            "background": "no annotation",
            "void": "crowd regions (iscrowd 1) outside of every object",
            "foreground": "annotations of every category",
            **self.left_out,
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
        size = size_of(self.images[i])
        where = self.where(i)
        return [
            Segment(
                category_of(one, self.names, where),
                self._inside(i, one, size),
                _is_crowd(one),
            )
            for one in self._objects(i)
        ]

    def _objects(self, i: int) -> list[dict[str, Any]]:
        return self.objects.get(self.images[i]["id"], [])

    def _inside(self, i: int, annotation: dict[str, Any], size: tuple[int, int]) -> Mask:
        try:
            return pixels_of(annotation["segmentation"], size)
        except Exception as error:  # compiled code raises what it likes
            text = str(error)[:LONGEST_REASON]
            why = text if type(error) is ValueError else f"{type(error).__name__}: {text}"
            raise VitseeError(
                f"cannot read the annotation {str(annotation.get('id'))[:LONGEST_ID]} of "
                f"{self.where(i)}: {why}"
            ) from None


def _is_crowd(annotation: dict[str, Any]) -> bool:
    return flag(annotation, "iscrowd")


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
    lost = _Lost()
    with entries_of(path, "annotations with image_id and segmentation"):
        images = checked_images(found["images"])
        names = category_names(found.get("categories") or [])
        id_of = id_by_alias(image["id"] for image in images)
        size_by_id = {image["id"]: size_of(image) for image in images}
        annotations: list[dict[str, Any]] = found["annotations"]
        for annotation in annotations:
            flag(annotation, "iscrowd")
            if annotation["image_id"] not in id_of:
                lost.of_no_image.append(annotation["image_id"])
                continue
            image_id = id_of[annotation["image_id"]]
            segmentation = annotation.get("segmentation")
            if not has_area(segmentation):
                lost.without_mask.append(annotation.get("id"))
            elif lies_outside(segmentation, size_by_id[image_id]):
                lost.outside.append(annotation.get("id"))
            if segmentation:
                objects.setdefault(image_id, []).append(annotation)
    n = len(annotations)
    if lost.of_no_image and len(lost.of_no_image) == n:
        raise VitseeError(
            f"{path}: none of its {n} annotations is of an image of it: they have image_id "
            f"{_few_ids(lost.of_no_image)}, its images the ids {_few_ids(id_of.values())}"
        )
    if not objects:
        raise VitseeError(
            f"{path} has no segmentation in any annotation; expected {EXPECTED}"
        )
    lost.refuse_all(path, n)
    return CocoMasks(str(path), images, names, objects, lost.report(path, n))


@dataclass
class _Lost:
    """Annotations of a file that give no pixel.

    Attributes:
        of_no_image: the `image_id` of those that belong to none of its images.
        without_mask: the ids of those whose segmentation encloses nothing.
        outside: the ids of those whose outlines lie wholly outside of their image.
    """

    of_no_image: list[Any] = field(default_factory=list)
    without_mask: list[Any] = field(default_factory=list)
    outside: list[Any] = field(default_factory=list)

    def refuse_all(self, path: Path, n: int) -> None:
        """Raise VitseeError if none of a file's `n` annotations gives a pixel."""
        n_in_images = n - len(self.of_no_image)
        if len(self.without_mask) + len(self.outside) < n_in_images:
            return
        if self.outside:
            raise VitseeError(
                f"{path}: no outline reaches into its image (annotations "
                f"{_few_ids(self.outside)}); expected x and y in pixels of images of the height "
                "and width that the file gives"
            )
        raise VitseeError(
            f"{path}: no outline encloses a pixel (annotations {_few_ids(self.without_mask)}); "
            "expected x and y in pixels, not as shares of the image's width and height"
        )

    def report(self, path: Path, n: int) -> dict[str, str]:
        """Warn of what is lost of a file's `n` annotations; return it for a sidecar."""
        counts = dict[str, str]()
        if self.of_no_image:
            counts["annotations of no image"] = f"{len(self.of_no_image)} of {n}"
            log.warning(
                "%s: %d of %d annotations are of none of its images (image_id %s) and left out",
                path,
                len(self.of_no_image),
                n,
                _few_ids(self.of_no_image),
            )
        if self.without_mask:
            counts["annotations without a mask"] = f"{len(self.without_mask)} of {n}"
            log.warning(
                "%s: %d of %d annotations have no mask (%s): their objects count as what lies "
                "around them",
                path,
                len(self.without_mask),
                n,
                _few_ids(self.without_mask),
            )
        if self.outside:
            counts["annotations outside of their image"] = f"{len(self.outside)} of {n}"
            log.warning(
                "%s: %d of %d annotations lie wholly outside of their image (%s), whose height "
                "and width the file gives, and are left out",
                path,
                len(self.outside),
                n,
                _few_ids(self.outside),
            )
        return counts


def _few_ids(ids: Iterable[Any]) -> str:
    """The first of these ids as JSON has them, which tells `"7"` from `7`."""
    texts = [json.dumps(number, default=str)[:LONGEST_ID] for number in ids]
    return abbreviate([*dict.fromkeys(texts)])
