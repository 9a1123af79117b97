"""Scenes with known objects: clothes of the bundled Fashion-MNIST on smooth backgrounds.

What the miniature data sets of this package are drawn from. An object is the silhouette of one
bundled image (its pixels above `THRESHOLD`), scaled and coloured: objects of a class have nearly
one hue. Everything follows from the seeds, to the bit, and the masks are exact: what is hidden or
beyond the frame is not in them.

    shirt = sprite("Shirt", instance=3, size=40)
    scene = compose((96, 128), [Placed(shirt, top=20, left=70)], seed=0)
    scene.pixels, scene.masks[0]
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.demo import data_file
from vitsee_core.types import Mask
from vitsee_stores.errors import VitseeError

Pixels = NDArray[np.uint8]

THRESHOLD = 32  # of 255: fainter pixels of a bundled image are no part of the object
N_CLASSES = 10
PER_CLASS = 400
_COARSE = 5  # random colours along each side of a background
_DARKEST = 0.35  # an object's shading, where its bundled image is black
_HUE_JITTER = 0.02  # of the colour wheel; classes are 0.1 apart


@dataclass(frozen=True)
class Sprite:
    """An object without a place."""

    pixels: Pixels  # (height, width, 3), black outside of the object
    mask: Mask  # (height, width), with a pixel of the object in its first and last row and column
    category: int  # its class


@dataclass(frozen=True)
class Placed:
    """A sprite whose first row and column are `top`, `left` of the scene; it may be partly or
    wholly beyond the frame."""

    sprite: Sprite
    top: int
    left: int


@dataclass(frozen=True)
class Scene:
    """A scene as it was rendered: its pixels and what they show."""

    pixels: Pixels  # (height, width, 3)
    masks: Mask  # (objects, height, width), the visible part of each object; disjoint
    classes: NDArray[np.int64]  # (objects,) numbers of `class_names`


def class_names() -> list[str]:
    return list(_bundled()[1])


def sprite(category: int | str, instance: int = 0, size: int = 28) -> Sprite:
    """One object of a class.

    Args:
        category: its number or name.
        instance: which of the class's `PER_CLASS` bundled images; its shade of the class's colour
            follows from it.
        size: the longer side, in pixels.

    Raises:
        VitseeError: no such class or instance, or a size below 1.
    """
    images, names = _bundled()
    number = names.index(category) if category in names else category
    if not isinstance(number, int) or not 0 <= number < N_CLASSES:
        raise VitseeError(
            f"no class {category!r} in the demo; its classes: {', '.join(names)}"
        )
    if not 0 <= instance < PER_CLASS:
        raise VitseeError(
            f"no instance {instance} of a class; expected 0 to {PER_CLASS - 1}"
        )
    if size < 1:
        raise VitseeError(
            f"an object of {size} pixels was asked for; expected at least 1"
        )
    grey = _cropped(images[number, instance])
    height, width = (max(1, round(side * size / max(grey.shape))) for side in grey.shape)
    scaled = Image.fromarray(grey).resize((width, height), Image.Resampling.BILINEAR)
    # The rim of the scaled image is fainter than the rim of the bundled one.
    shades = _cropped(np.asarray(scaled))
    mask = shades > THRESHOLD
    jitter, saturation = (
        np.random.default_rng((number, instance)).uniform(-1, 1, 2).tolist()
    )
    hue = (number / N_CLASSES + _HUE_JITTER * jitter) % 1
    colour = np.array(colorsys.hsv_to_rgb(hue, 0.85 + 0.1 * saturation, 1.0))
    light = _DARKEST + (1 - _DARKEST) * shades[..., None] / 255
    return Sprite(
        np.where(mask[..., None], 255 * light * colour, 0).astype(np.uint8), mask, number
    )


def background(size: tuple[int, int], seed: int | Sequence[int] = 0) -> Pixels:
    """(height, width, 3): random colours that change smoothly and are paler than objects."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(90, 190, (_COARSE, _COARSE, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.asarray(smooth)


def compose(
    size: tuple[int, int], placed: Sequence[Placed], seed: int | Sequence[int] = 0
) -> Scene:
    """Place objects on a background; later ones occlude earlier ones.

    Args:
        size: (height, width) of the scene.
        placed: the objects. An invisible one has an empty mask.
        seed: of the background.
    """
    pixels = background(size, seed).copy()
    masks = np.zeros((len(placed), *size), bool)
    for mask, one in zip(masks, placed, strict=True):
        inside, part = _overlap(size, one)
        shown = one.sprite.mask[part]
        masks[:, *inside] &= ~shown
        mask[inside] = shown
        pixels[inside][shown] = one.sprite.pixels[part][shown]
    return Scene(
        pixels, masks, np.array([one.sprite.category for one in placed], np.int64)
    )


def random_scene(
    size: tuple[int, int],
    n_objects: int,
    seed: int | Sequence[int] = 0,
    categories: Sequence[int] | None = None,
) -> Scene:
    """A scene of objects wholly inside, a quarter to a half of its shorter side long.

    Args:
        size: (height, width) of the scene.
        n_objects: number of objects; they may occlude one another.
        seed: of objects, places and background.
        categories: the classes to draw from; all by default.
    """
    rng = np.random.default_rng(seed)
    short = min(size)
    placed = []
    for _ in range(n_objects):
        category = int(rng.choice(range(N_CLASSES) if categories is None else categories))
        length = int(rng.integers(max(1, short // 4), max(1, short // 2) + 1))
        one = sprite(category, int(rng.integers(PER_CLASS)), length)
        top, left = (
            int(rng.integers(0, whole - own + 1))
            for whole, own in zip(size, one.mask.shape, strict=True)
        )
        placed.append(Placed(one, top, left))
    return compose(size, placed, int(rng.integers(2**32)))


def box_of(mask: Mask) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1 around the pixels of a mask."""
    rows, cols = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1


def save_image(
    pixels: NDArray[Any], path: Path, palette: Sequence[int] | None = None
) -> None:
    """Write pixels, of which those with a palette become its indices, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    if palette is not None:
        image.putpalette(palette)
    image.save(path, quality=95)  # which PNG has no use for


def write_json(path: Path, content: Any) -> None:
    """The same of a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _overlap(
    size: tuple[int, int], placed: Placed
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The pixels of the scene that the sprite's array covers, and the same of the sprite."""
    inside = []
    part = []
    for start, own, whole in zip(
        (placed.top, placed.left), placed.sprite.mask.shape, size, strict=True
    ):
        first = max(0, start)
        last = max(0, start, min(whole, start + own))
        inside.append(slice(first, last))
        part.append(slice(first - start, last - start))
    return (inside[0], inside[1]), (part[0], part[1])


def _cropped(grey: Pixels) -> Pixels:
    """The rows and columns from the first to the last with a pixel of the object."""
    on = grey > THRESHOLD
    if not on.any():  # scaled down until it is fainter than the threshold
        return np.full((1, 1), 255, np.uint8)
    rows, cols = (np.flatnonzero(on.any(axis)) for axis in (1, 0))
    return grey[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


@cache
def _bundled() -> tuple[Pixels, list[str]]:
    """(class, instance, 28, 28) images in the file's order, and the classes' names."""
    with np.load(data_file(), allow_pickle=False) as file:
        images = file["images"]
        labels = file["labels"]
        names = file["class_names"].tolist()
    return np.stack([images[labels == number] for number in range(N_CLASSES)]), names
