"""Geometry of resize and crop: sizes and corners in whole pixels, as (height, width) and (top,
left). `transform` moves pixels by them, `placement` moves points."""

from __future__ import annotations

from vitsee_stores.plan import canvas_size

Size = tuple[int, int]
__all__ = ["Size", "canvas_size", "crop_corner", "resized", "resized_keep_ratio", "trimmed"]


def resized(size: Size, edges: tuple[int, ...]) -> Size:
    """The size of a resized image: one edge is the shorter side's length, and the longer one's is
    rounded down; else both are given."""
    if len(edges) == 2:
        return edges[0], edges[1]
    height, width = size
    long = int(edges[0] * max(size) / min(size))
    return (edges[0], long) if height <= width else (long, edges[0])


def resized_keep_ratio(size: Size, target: Size, longest: float) -> Size:
    """Inside the target (`longest` 1) or around it (0), in the image's own proportions."""
    ratios = size[0] / target[0], size[1] / target[1]
    ratio = max(ratios) * longest + min(ratios) * (1.0 - longest)
    return round(size[0] / ratio), round(size[1] / ratio)


def crop_corner(side: int, target: int, down: bool = False) -> int:
    """Start of a centred crop along a side of an image; negative if it is padded. A half is rounded
    to the even pixel, as torchvision does, or `down`, as transformers does."""
    if side < target:
        return -((target - side) // 2)
    return (side - target) // 2 if down else round((side - target) / 2.0)


def trimmed(size: Size, border: int) -> tuple[Size, Size]:
    """The corner of the rest, and its size, after cutting a border off all around."""
    corner = min(border, size[0]), min(border, size[1])
    return corner, (max(0, size[0] - 2 * border), max(0, size[1] - 2 * border))
