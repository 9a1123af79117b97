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

SIZE = (72, 96)  # height and width
N_OBJECTS = 3
SCENES = ("bedroom_0001", "kitchen_0002")  # in turn
NEAR = 1.2  # metres, the floor at the lower edge
FAR = 7.5  # metres, the wall
HORIZON = 0.4  # share of the height above the floor
FRAME = 3  # pixels along each edge without a depth


class Miniature(NamedTuple):
    """One image.

    Attributes:
        name: path below the root without its kind and ending.
        pixels: (height, width, 3).
        depths: (height, width) metres, 0 for none.
    """

    name: str
    pixels: Pixels
    depths: Float


def write_depths(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write the set.

    Args:
        folder: in which it is made.
        seed: of all scenes.
        n_images: of each split.
    """
    for miniature in miniatures(seed, n_images):
        scene_folder = Path(folder, "nyu", miniature.name).parent
        number = miniature.name[-5:]
        save_image(miniature.pixels, scene_folder / f"rgb_{number}.jpg")
        millimetres = np.rint(miniature.depths * 1000).astype(np.uint16)
        save_image(millimetres, scene_folder / f"sync_depth_{number}.png")


def miniatures(seed: int, n_images: int) -> Iterator[Miniature]:
    """Yield `n_images` that train, then as many that test."""
    for k, split in enumerate(("train", "test")):
        for number in range(n_images):
            # 30 and 31 keep these scenes apart from those of other sets with the same seed.
            scene = random_scene(SIZE, N_OBJECTS, (seed, 30 + k, number))
            name = f"{split}/{SCENES[number % len(SCENES)]}/{number:05d}"
            yield Miniature(name, scene.pixels, _scene_depths(scene))


def _scene_depths(scene: Scene) -> Float:
    """Return (height, width) depths of a scene in metres, 0 along its frame."""
    height, width = scene.pixels.shape[:2]
    # 0 at the horizon and above, 1 at the lower edge.
    down = np.clip((np.arange(height) / height - HORIZON) / (1 - HORIZON), 0, 1)
    # The inverse depth of a plane is linear in the image.
    floor = 1 / ((1 - down) / FAR + down / NEAR)
    depths = np.repeat(floor[:, None], width, axis=1)
    # Later objects lie over earlier ones, whatever their depths.
    for mask in scene.masks:
        feet_row = int(np.flatnonzero(mask.any(1)).max(initial=0))
        depths[mask] = 0.9 * floor[feet_row]
    depths[:FRAME] = 0
    depths[-FRAME:] = 0
    depths[:, :FRAME] = 0
    depths[:, -FRAME:] = 0
    return depths
