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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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


class Sprite(NamedTuple):
    """An object that has no place yet.

    Attributes:
        pixels: (height, width, 3), black outside of the object.
        mask: (height, width), with a pixel of the object in its first and last row and column.
        category: its class.
    """

    pixels: Pixels
    mask: Mask
    category: int


class Placed(NamedTuple):
    """A sprite in a scene.

    Attributes:
        sprite: the object; it may be partly or wholly beyond the frame.
        top: row of the scene that is the sprite's first.
        left: column of the scene that is the sprite's first.
    """

    sprite: Sprite
    top: int
    left: int


class Scene(NamedTuple):
    """A scene as it was rendered: its pixels and what they show.

    Attributes:
        pixels: (height, width, 3).
        masks: (objects, height, width), the visible part of each object; disjoint.
        classes: (objects,) numbers of `class_names`.
    """

    pixels: Pixels
    masks: Mask
    classes: NDArray[np.int64]


def class_names() -> list[str]:
    """Return the names of the bundled classes, by their numbers."""
    return list(_bundled()[1])


def sprite(category: int | str, instance: int = 0, size: int = 28) -> Sprite:
    """Return one object of a class.

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
    longer_side = max(grey.shape)
    height = max(1, round(grey.shape[0] * size / longer_side))
    width = max(1, round(grey.shape[1] * size / longer_side))
    scaled = Image.fromarray(grey).resize((width, height), Image.Resampling.BILINEAR)
    # The rim of the scaled image is fainter than the rim of the bundled one.
    shades = _cropped(np.asarray(scaled))
    mask = shades > THRESHOLD
    rng = np.random.default_rng((number, instance))
    jitter, saturation = rng.uniform(-1, 1, 2).tolist()
    # Classes are spread evenly over the colour wheel.
    hue = (number / N_CLASSES + _HUE_JITTER * jitter) % 1
    colour = np.array(colorsys.hsv_to_rgb(hue, 0.85 + 0.1 * saturation, 1.0))
    # (height, width, 1) brightness: the bundled image's folds and seams are kept.
    light = _DARKEST + (1 - _DARKEST) * shades[..., None] / 255
    pixels = np.where(mask[..., None], 255 * light * colour, 0).astype(np.uint8)
    return Sprite(pixels, mask, number)


def background(size: tuple[int, int], seed: int | Sequence[int] = 0) -> Pixels:
    """Return (height, width, 3) random colours that change smoothly and are paler than objects."""
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
    for mask, item in zip(masks, placed, strict=True):
        item_rows, item_cols = item.sprite.mask.shape
        scene_rows, sprite_rows = _overlap(item.top, item_rows, size[0])
        scene_cols, sprite_cols = _overlap(item.left, item_cols, size[1])
        visible = item.sprite.mask[sprite_rows, sprite_cols]
        colours = item.sprite.pixels[sprite_rows, sprite_cols]
        # What this object covers is no longer visible of those before it.
        masks[:, scene_rows, scene_cols] &= ~visible
        mask[scene_rows, scene_cols] = visible
        pixels[scene_rows, scene_cols][visible] = colours[visible]
    classes = np.array([item.sprite.category for item in placed], np.int64)
    return Scene(pixels, masks, classes)


def random_scene(
    size: tuple[int, int],
    n_objects: int,
    seed: int | Sequence[int] = 0,
    categories: Sequence[int] | None = None,
) -> Scene:
    """Return a scene of objects wholly inside, a quarter to a half of its shorter side long.

    Args:
        size: (height, width) of the scene.
        n_objects: number of objects; they may occlude one another.
        seed: of objects, positions and background.
        categories: the classes to draw from; all by default.
    """
    rng = np.random.default_rng(seed)
    if categories is None:
        categories = range(N_CLASSES)
    shorter_side = min(size)
    placed = []
    for _ in range(n_objects):
        category = int(rng.choice(categories))
        shortest = max(1, shorter_side // 4)
        length = int(rng.integers(shortest, max(1, shorter_side // 2) + 1))
        item = sprite(category, int(rng.integers(PER_CLASS)), length)
        n_rows, n_cols = item.mask.shape
        top = int(rng.integers(0, size[0] - n_rows + 1))
        left = int(rng.integers(0, size[1] - n_cols + 1))
        placed.append(Placed(item, top, left))
    return compose(size, placed, int(rng.integers(2**32)))


def box_of(mask: Mask) -> tuple[int, int, int, int]:
    """Return x0, y0, x1, y1 around the pixels of a mask; the ends are past the last pixel."""
    rows = np.flatnonzero(mask.any(1))
    cols = np.flatnonzero(mask.any(0))
    return int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1


def save_image(
    pixels: NDArray[Any], path: Path, palette: Sequence[int] | None = None
) -> None:
    """Write an image in a folder that is made.

    Args:
        pixels: (height, width, 3) colours, or (height, width) numbers.
        path: its ending says the format.
        palette: red, green and blue of each number, whose index the pixels become.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    if palette is not None:
        image.putpalette(palette)
    image.save(path, quality=95)  # PNG ignores it


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _overlap(start: int, length: int, frame: int) -> tuple[slice, slice]:
    """Return the overlap of a sprite and a scene along one axis.

    Args:
        start: the scene's index that is the sprite's first; below 0 before the frame.
        length: of the sprite.
        frame: length of the scene.

    Returns:
        The overlap as indices of the scene, and as indices of the sprite; empty without one.
    """
    first = max(0, start)
    end = max(0, start, min(frame, start + length))
    return slice(first, end), slice(first - start, end - start)


def _cropped(grey: Pixels) -> Pixels:
    """Return the rows and columns from the first to the last with a pixel of the object."""
    is_object = grey > THRESHOLD
    # Scaled down until it is fainter than the threshold.
    if not is_object.any():
        return np.full((1, 1), 255, np.uint8)
    left, top, right, bottom = box_of(is_object)
    return grey[top:bottom, left:right]


@cache
def _bundled() -> tuple[Pixels, list[str]]:
    """Return (class, instance, 28, 28) images in the file's order, and the classes' names."""
    with np.load(data_file(), allow_pickle=False) as file:
        images = file["images"]
        labels = file["labels"]
        names = file["class_names"].tolist()
    by_class = [images[labels == number] for number in range(N_CLASSES)]
    return np.stack(by_class), names
