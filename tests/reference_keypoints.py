"""Slow, obvious keypoints: features upsampled for every pixel, one keypoint at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

Array = NDArray[Any]
Box = tuple[float, float, float, float]


def upsampled(tokens: Array, size: int) -> Array:
    """(size, size, dim): unit tokens (rows, cols, dim), bilinear."""
    x = torch.from_numpy(tokens.astype(np.float64))
    x = x / x.norm(dim=2, keepdim=True).clamp_min(1e-12)
    x = interpolate(
        x.permute(2, 0, 1)[None], (size, size), mode="bilinear", align_corners=False
    )
    return np.asarray(x[0].permute(1, 2, 0).numpy())


def vit_analysis(
    source: Array, target: Array, xy: Sequence[float], size: int
) -> tuple[int, int]:
    """x, y of the pixel that the released algorithm finds; xy: on the source's input."""
    vector = upsampled(source, size)[
        min(round(xy[1]), size - 1), min(int(xy[0]), size - 1)
    ]
    similar = upsampled(target, size) @ vector
    place = int(similar.ravel().round(12).argmax())
    return place % size, place // size


def smooth(
    source: Array, target: Array, xy: Sequence[float], size: int, box: Box
) -> Array:
    """x, y of the pixel in `box` (left, top, right, bottom) with the largest cosine; the source is
    interpolated at its place between pixels."""
    vector = between(source, xy, size)
    field = upsampled(target, size)
    best, where = -np.inf, (0, 0)
    for y in range(size):
        for x in range(size):
            if box[0] <= x <= box[2] and box[1] <= y <= box[3]:
                f = field[y, x]
                cosine = f @ vector / (np.linalg.norm(f) * np.linalg.norm(vector))
                if cosine > best + 1e-12:
                    best, where = cosine, (x, y)
    return np.array(where, np.float64)


def between(tokens: Array, xy: Sequence[float], size: int) -> Array:
    """(dim,) unit tokens, bilinear at x, y, the border repeated."""
    rows, cols, _ = tokens.shape
    lengths = np.linalg.norm(tokens, axis=2, keepdims=True)
    unit = tokens / np.maximum(lengths, 1e-12)
    v = min(max((xy[1] + 0.5) * rows / size - 0.5, 0), rows - 1)
    u = min(max((xy[0] + 0.5) * cols / size - 0.5, 0), cols - 1)
    total = np.zeros(tokens.shape[2])
    for r in range(rows):
        for c in range(cols):
            total += max(0, 1 - abs(v - r)) * max(0, 1 - abs(u - c)) * unit[r, c]
    return total


def token(
    source: Array, target: Array, xy: Sequence[float], size: int, box: Box
) -> Array:
    """x, y of the centre of the most similar token whose centre is in `box`."""
    rows, cols, _ = source.shape
    step = size / rows
    at = [min(max(int((p + 0.5) / step), 0), rows - 1) for p in xy]
    vector = source[at[1], at[0]]
    best, where = -np.inf, (0.0, 0.0)
    for r in range(rows):
        for c in range(cols):
            x, y = (c + 0.5) * step - 0.5, (r + 0.5) * step - 0.5
            if box[0] <= x <= box[2] and box[1] <= y <= box[3]:
                f = target[r, c]
                cosine = f @ vector / (np.linalg.norm(f) * np.linalg.norm(vector))
                if cosine > best:
                    best, where = cosine, (x, y)
    return np.array(where)


Scored = tuple[
    str, str, str, list[float]
]  # category, source, target, 1 for each keypoint found


def pck(pairs: Sequence[Scored]) -> dict[str, float]:
    """The three means, of lists."""
    classes: dict[str, list[float]] = {}
    for category, _, _, found in pairs:
        classes.setdefault(category, []).extend(found)
    return {
        "pck": float(np.mean([np.mean(found) for found in classes.values()])),
        "pck_point": float(np.mean([one for *_, found in pairs for one in found])),
        "pck_image": float(np.mean([np.mean(found) for *_, found in pairs])),
    }


def jackknife(pairs: Sequence[Scored]) -> dict[str, float]:
    """Their standard errors: every image left out in turn, with its pairs, within its category."""
    variance = dict.fromkeys(pck(pairs), 0.0)
    for category in {pair[0] for pair in pairs}:
        images = {image for c, *both, _ in pairs if c == category for image in both}
        without = [
            pck([p for p in pairs if p[0] != category or image not in p[1:3]])
            for image in images
        ]
        n: int = len(images)
        for name in variance:
            values = [one[name] for one in without]
            variance[name] += (
                (n - 1) / n * float(sum((v - np.mean(values)) ** 2 for v in values))
            )
    return {name: float(np.sqrt(value)) for name, value in variance.items()}
