"""A miniature DAVIS-2017 in exactly the published layout, drawn from the bundled images.

    JPEGImages/480p/<video>/00000.jpg, ...
    Annotations/480p/<video>/00000.png, ...    palette PNGs: 0 background, 1, 2, ... objects
    ImageSets/2017/train.txt, val.txt          names of videos

What the published data has and code trips over is in it: videos of different sizes and lengths, an
object that leaves the frame, one that is partly hidden, void pixels, videos that no list but train
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.demo.indexed_masks import VOID, write_mask
from vitsee_core.demo.scenes import PER_CLASS, Placed, compose, sprite

QUALITY = 95  # of the JPEG files


@dataclass(frozen=True)
class Clip:
    """One video.

    Attributes:
        size: height and width.
        objects: class, size, start (row, column), movement per frame; later ones occlude earlier
            ones.
        void: a frame with a void strip.
    """

    name: str
    n_frames: int
    size: tuple[int, int]
    objects: Sequence[tuple[int, int, tuple[int, int], tuple[int, int]]]
    lists: tuple[str, ...]
    void: int | None = None


CLIPS = (
    # The second object leaves the frame: its last masks are empty.
    Clip(
        "a", 8, (48, 80), [(1, 30, (9, 4), (0, 4)), (8, 18, (20, 58), (1, 5))], ("val",)
    ),
    # The second passes before the first; void along its edge in one frame.
    Clip(
        "b",
        6,
        (48, 80),
        [(3, 34, (7, 26), (0, 1)), (5, 16, (26, 6), (0, 6))],
        ("val",),
        void=3,
    ),
    Clip("c", 5, (48, 64), [(9, 26, (4, 6), (3, 5))], ("val",)),
    Clip("train-only", 3, (48, 80), [(7, 24, (12, 10), (0, 4))], ("train",)),
)


def write_davis(folder: str | Path, seed: int = 0) -> None:
    """The miniature set below `folder`, which is made; the same files for the same seed."""
    folder = Path(folder)
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for number, clip in enumerate(CLIPS):
        for frame, (pixels, labels) in enumerate(_frames(clip, (seed, number))):
            name = f"{frame:05d}"
            image = _made(folder / "JPEGImages" / "480p" / clip.name) / f"{name}.jpg"
            Image.fromarray(pixels).save(image, quality=QUALITY, subsampling=0)
            write_mask(
                _made(folder / "Annotations" / "480p" / clip.name) / f"{name}.png", labels
            )
        for name in clip.lists:
            lists[name].append(clip.name)
    sets = _made(folder / "ImageSets" / "2017")
    for name, videos in lists.items():
        (sets / f"{name}.txt").write_text("".join(f"{video}\n" for video in videos))


def _frames(
    clip: Clip, seed: tuple[int, int]
) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """(height, width, 3) pixels and (height, width) numbers of objects of each frame."""
    rng = np.random.default_rng(seed)
    sprites = [
        sprite(kind, int(rng.integers(PER_CLASS)), size)
        for kind, size, *_ in clip.objects
    ]
    found = []
    for frame in range(clip.n_frames):
        placed = [
            Placed(one, top + frame * down, left + frame * right)
            for one, (_, _, (top, left), (down, right)) in zip(
                sprites, clip.objects, strict=True
            )
        ]
        scene = compose(clip.size, placed, (*seed, 1))
        labels = np.zeros(clip.size, np.uint8)
        for number, mask in enumerate(scene.masks, 1):
            labels[mask] = number
        if frame == clip.void:
            labels[labels != np.roll(labels, 1, axis=1)] = VOID
        found.append((scene.pixels, labels))
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
