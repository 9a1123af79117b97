"""A miniature DAVIS-2017 in exactly the published layout, drawn from the bundled images.

    JPEGImages/480p/<video>/00000.jpg, ...
    Annotations/480p/<video>/00000.png, ...    palette PNGs: 0 background, 1, 2, ... objects
    ImageSets/2017/train.txt, val.txt          names of videos

What the published data has and code trips over is in it: videos of different sizes and lengths, an
object that leaves the frame, one that is partly hidden, void pixels, videos that no list but train
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.demo.indexed_masks import VOID, write_mask
from vitsee_core.demo.scenes import PER_CLASS, Placed, compose, sprite

QUALITY = 95  # of the JPEG files


class Moving(NamedTuple):
    """An object of a video.

    Attributes:
        category: its class.
        length: its longer side, in pixels.
        start: row and column of its upper left corner in the first frame.
        step: rows and columns that it moves between frames.
    """

    category: int
    length: int
    start: tuple[int, int]
    step: tuple[int, int]


@dataclass(frozen=True)
class Clip:
    """One video.

    Attributes:
        name: of its folders.
        n_frames: number of frames.
        size: height and width.
        objects: what moves; later ones occlude earlier ones.
        lists: lists that name it.
        void: a frame with a void strip.
    """

    name: str
    n_frames: int
    size: tuple[int, int]
    objects: Sequence[Moving]
    lists: tuple[str, ...]
    void: int | None = None


CLIPS = (
    # The second object leaves the frame: its last masks are empty.
    Clip(
        name="a",
        n_frames=8,
        size=(48, 80),
        objects=[
            Moving(category=1, length=30, start=(9, 4), step=(0, 4)),
            Moving(category=8, length=18, start=(20, 58), step=(1, 5)),
        ],
        lists=("val",),
    ),
    # The second passes before the first; void along its edge in one frame.
    Clip(
        name="b",
        n_frames=6,
        size=(48, 80),
        objects=[
            Moving(category=3, length=34, start=(7, 26), step=(0, 1)),
            Moving(category=5, length=16, start=(26, 6), step=(0, 6)),
        ],
        lists=("val",),
        void=3,
    ),
    Clip(
        name="c",
        n_frames=5,
        size=(48, 64),
        objects=[Moving(category=9, length=26, start=(4, 6), step=(3, 5))],
        lists=("val",),
    ),
    Clip(
        name="train-only",
        n_frames=3,
        size=(48, 80),
        objects=[Moving(category=7, length=24, start=(12, 10), step=(0, 4))],
        lists=("train",),
    ),
)


def write_davis(folder: str | Path, seed: int = 0) -> None:
    """Write the set.

    Args:
        folder: made where it is missing.
        seed: of the objects' shapes and the backgrounds; the same seed gives the same files.
    """
    folder = Path(folder)
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for number, clip in enumerate(CLIPS):
        images = folder / "JPEGImages" / "480p" / clip.name
        masks = folder / "Annotations" / "480p" / clip.name
        images.mkdir(parents=True, exist_ok=True)
        masks.mkdir(parents=True, exist_ok=True)
        for frame, (pixels, labels) in enumerate(_frames(clip, (seed, number))):
            image = Image.fromarray(pixels)
            # Without subsampling: edges of objects keep their colours.
            image.save(images / f"{frame:05d}.jpg", quality=QUALITY, subsampling=0)
            write_mask(masks / f"{frame:05d}.png", labels)
        for name in clip.lists:
            lists[name].append(clip.name)
    sets = folder / "ImageSets" / "2017"
    sets.mkdir(parents=True, exist_ok=True)
    for name, videos in lists.items():
        (sets / f"{name}.txt").write_text("".join(f"{video}\n" for video in videos))


def _frames(
    clip: Clip, seed: tuple[int, int]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield (height, width, 3) pixels and (height, width) numbers of objects of each frame."""
    rng = np.random.default_rng(seed)
    sprites = [
        sprite(item.category, int(rng.integers(PER_CLASS)), item.length)
        for item in clip.objects
    ]
    for frame in range(clip.n_frames):
        placed = []
        for item_sprite, item in zip(sprites, clip.objects, strict=True):
            top = item.start[0] + frame * item.step[0]
            left = item.start[1] + frame * item.step[1]
            placed.append(Placed(item_sprite, top, left))
        # The same seed for each frame: the background stands still.
        scene = compose(clip.size, placed, (*seed, 1))
        labels = np.zeros(clip.size, np.uint8)
        for number, mask in enumerate(scene.masks, 1):
            labels[mask] = number
        if frame == clip.void:
            labels[labels != np.roll(labels, 1, axis=1)] = VOID
        yield scene.pixels, labels
