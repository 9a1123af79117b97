"""A miniature set in the layout of NYU Depth V2 as monocular depth estimation distributes it.

    FOLDER/nyu/{train,test}/SCENE/rgb_00000.jpg, sync_depth_00000.png

Depths are 16-bit millimetres, 0 for none: a room whose floor comes nearer towards the lower edge,
and objects that stand before it, the nearer the lower their feet. The frame has no depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitsee_core.demo.scenes import Pixels, Scene, random_scene, save_image
from vitsee_core.types import Float

SIZE = (72, 96)
N_OBJECTS = 3
SCENES = ("bedroom_0001", "kitchen_0002")  # in turn
# metres, of the floor at the lower edge and of the wall
NEAR = 1.2
FAR = 7.5
HORIZON = 0.4  # of the height
FRAME = 3  # pixels


class Miniature(NamedTuple):
    """One image. name: path below the root without its kind and ending; depths: (height, width)
    metres, 0 for none."""

    name: str
    pixels: Pixels
    depths: Float


def write_depths(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write the set below `folder`; n_images: of each split."""
    for one in miniatures(seed, n_images):
        place = Path(folder, "nyu", one.name).parent
        number = one.name[-5:]
        save_image(one.pixels, place / f"rgb_{number}.jpg")
        values = np.rint(one.depths * 1000).astype(np.uint16)
        save_image(values, place / f"sync_depth_{number}.png")


def miniatures(seed: int, n_images: int) -> Iterator[Miniature]:
    """`n_images` that train, then as many that test."""
    for k, split in enumerate(("train", "test")):
        for number in range(n_images):
            scene = random_scene(SIZE, N_OBJECTS, (seed, 30 + k, number))
            name = f"{split}/{SCENES[number % len(SCENES)]}/{number:05d}"
            yield Miniature(name, scene.pixels, _depths(scene))


def _depths(scene: Scene) -> Float:
    height, width = scene.pixels.shape[:2]
    down = np.clip((np.arange(height) / height - HORIZON) / (1 - HORIZON), 0, 1)
    floor = 1 / ((1 - down) / FAR + down / NEAR)  # a plane: its inverse depth is linear
    found = np.repeat(floor[:, None], width, 1)
    for mask in scene.masks:  # later ones lie over earlier ones
        feet = int(np.flatnonzero(mask.any(1)).max(initial=0))
        found[mask] = 0.9 * floor[feet]
    for edge in (np.s_[:FRAME], np.s_[-FRAME:], np.s_[:, :FRAME], np.s_[:, -FRAME:]):
        found[edge] = 0
    return found
