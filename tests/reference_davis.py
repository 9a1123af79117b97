"""Slow oracles of propagation and of DAVIS-2017's scores: loops over tokens and pixels, in float64,
and the dilation by a disk that the official evaluation makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Array = NDArray[Any]


def propagated(
    tokens: Array,
    seeds: Array,
    *,
    context: int = 7,
    radii: tuple[float, float] | None = (12, 12),
    circle: bool = False,
    top: int = 5,
    temperature: float = 0.1,
) -> list[Array]:
    """Soft labels (rows, cols, classes) of every frame, the first's among them.

    tokens: (frames, rows, cols, dim). seeds: (rows, cols, classes).
    """
    x = tokens.astype(np.float64)
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    n_frames, rows, cols = x.shape[:3]
    labels = [seeds.astype(np.float64)]
    for t in range(1, n_frames):
        frames = [0, *range(max(1, t - context), t)]
        found = np.zeros_like(labels[0])
        for y, z in np.ndindex(rows, cols):
            near = []
            for s in frames:
                for v, w in np.ndindex(rows, cols):
                    if inside(abs(v - y), abs(w - z), radii, circle):
                        near.append((float(x[t, y, z] @ x[s, v, w]), labels[s][v, w]))
            last = sorted((cosine for cosine, _ in near), reverse=True)[:top][-1]
            kept = [(math.exp(c / temperature), of) for c, of in near if c > last - 1e-9]
            found[y, z] = sum(a * of for a, of in kept) / sum(a for a, _ in kept)
        labels.append(found)
    return labels


def inside(dy: int, dx: int, radii: tuple[float, float] | None, circle: bool) -> bool:
    """Whether a token that far away is within the window."""
    if radii is None:
        return True
    if circle:
        return math.hypot(dy / max(radii[0], 1e-9), dx / max(radii[1], 1e-9)) <= 1
    return dy <= radii[0] and dx <= radii[1]


def pixels_of(soft: Array, cell: int, size: tuple[int, int]) -> Array:
    """Labels of pixels as the released code makes them, of a grid that covers the frame: bilinear,
    each class by its minimum and maximum, the largest, Pillow's nearest."""
    import torch

    maps = torch.from_numpy(soft.astype(np.float32)).permute(2, 0, 1)[None]
    maps = torch.nn.functional.interpolate(maps, scale_factor=cell, mode="bilinear")[0]
    for one in maps:
        if one.max() > 0:
            one -= one.min()
            one /= one.max()
    labels = maps.max(0)[1].numpy().astype(np.uint8)
    image = Image.fromarray(labels).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return np.asarray(image)


# ------------------------------------------------------------------------------------------ scores


def boundary(mask: Array) -> Array:
    """(height, width) pixels that differ from the right, the lower or the lower right one."""
    height, width = mask.shape
    edge = np.zeros((height, width), bool)
    for y, x in np.ndindex(height, width):
        for v, w in ((y, x + 1), (y + 1, x), (y + 1, x + 1)):
            if v < height and w < width and mask[v, w] != mask[y, x]:
                edge[y, x] = True
    return edge


def disk(radius: int) -> Array:
    """The pixels within a distance of the middle one."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.asarray(y**2 + x**2 <= radius**2)


def f_by_dilation(found: Array, truth: Array, edges: Any = boundary) -> float:
    """F as the official evaluation computes it."""
    radius = math.ceil(0.008 * math.sqrt(found.shape[0] ** 2 + found.shape[1] ** 2))
    a, b = edges(found), edges(truth)
    near = [
        ndimage.binary_dilation(edge, disk(radius)) if edge.any() else edge
        for edge in (a, b)
    ]
    return _f(a & near[1], a, b & near[0], b)


def f_by_distance(found: Array, truth: Array, edges: Any = boundary) -> float:
    """The same by an exact distance transform."""
    radius = math.ceil(0.008 * math.sqrt(found.shape[0] ** 2 + found.shape[1] ** 2))
    a, b = edges(found), edges(truth)
    near = [
        ndimage.distance_transform_edt(~edge) <= radius if edge.any() else edge
        for edge in (a, b)
    ]
    return _f(a & near[1], a, b & near[0], b)


def _f(a_near: Array, a: Array, b_near: Array, b: Array) -> float:
    n, m = int(a.sum()), int(b.sum())
    if n == 0 and m > 0:
        precision, recall = 1.0, 0.0
    elif n > 0 and m == 0:
        precision, recall = 0.0, 1.0
    elif n == m == 0:
        precision = recall = 1.0
    else:
        precision, recall = int(a_near.sum()) / n, int(b_near.sum()) / m
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def j_by_pixels(found: Array, truth: Array) -> float:
    """Intersection over union."""
    both = sum(bool(a and b) for a, b in zip(found.flat, truth.flat, strict=True))
    either = sum(bool(a or b) for a, b in zip(found.flat, truth.flat, strict=True))
    return both / either if either else 1.0


def decay_of(values: Sequence[float]) -> float:
    """The mean of the first of four bins that overlap by a frame, less that of the last."""
    n = len(values)
    ids = [round(1 + (n - 1) * i / 4 + 1e-10) - 1 for i in range(5)]
    first, last = values[ids[0] : ids[1] + 1], values[ids[3] : ids[4] + 1]
    return sum(first) / len(first) - sum(last) / len(last)


def evaluated(results: Path, truth: Path, videos: Sequence[str]) -> dict[str, float]:
    """Metric -> value of a folder of PNG files, as the official evaluation reads it: means over the
    frames but the first and the last, then over the objects of all videos."""
    lists: dict[str, list[float]] = {}
    for video in videos:
        masks = [
            np.asarray(Image.open(p)).copy()
            for p in sorted((truth / video).glob("*.png"))
        ]
        found = [
            np.asarray(Image.open(p)) for p in sorted((results / video).glob("*.png"))
        ]
        assert len(masks) == len(found)
        for mask in masks:
            mask[mask == 255] = 0
        for number in range(1, int(masks[0].max()) + 1):
            pairs = [
                (a == number, b == number) for a, b in zip(found, masks, strict=True)
            ][1:-1]
            scores = {
                "j": [j_by_pixels(*pair) for pair in pairs],
                "f": [f_by_dilation(*pair) for pair in pairs],
            }
            for name, values in scores.items():
                lists.setdefault(name, []).append(sum(values) / len(values))
                share = sum(value > 0.5 for value in values) / len(values)
                lists.setdefault(f"{name}_recall", []).append(share)
                lists.setdefault(f"{name}_decay", []).append(decay_of(values))
    means = {name: sum(values) / len(values) for name, values in lists.items()}
    return means | {"jf": (means["j"] + means["f"]) / 2}
