"""Objects of COCO files as pixels: outlines by pycocotools, run lengths by numpy.

Sizes and numbers are checked before memory is allocated or compiled code is called:
pycocotools crashes the process on outlines far outside of the image, and on runs beyond its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitsee_core.types import Float, Mask
from vitsee_stores.errors import VitseeError

Size = tuple[int, int]  # height, width

# pycocotools walks along an outline in fifths of a pixel and keeps 16 bytes of each: 134 MB.
MOST_STEPS = 1 << 23
FEWEST = 6  # numbers of an outline: three points
FARTHEST = 4  # how far outside a point may lie, in the image's longer side
LONGEST_COUNT = 7  # characters of five bits that a count of 32 bits takes


def pixels_of(shape: Any, size: Size) -> Mask:
    """(height, width) which pixels a segmentation covers: a list of outlines, or runs.

    Raises:
        ValueError: it is none, or reaches too far out of the image; in words.
    """
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
    """pycocotools' module of masks.

    Raises:
        VitseeError: it is not installed.
    """
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
    fourth on as the difference to the last but one.

    Raises:
        ValueError: it is no such string.
    """
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
