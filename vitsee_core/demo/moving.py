"""Clips of one moving shape, labelled by the direction of its motion, drawn from a seed.

    train/<direction>/<clip>/00000.png, ...    down, left, right, up; and val/ alike
    model.safetensors                          a VideoMAE that tells the directions

Each clip is a folder with its frames. A shape of random form, size, colours and speed crosses a
smooth background; its path is as likely as the same path backwards. So the set of a clip's frames,
without their order, says along which axis the shape moves and never which way: whoever tells up
from down better than by a coin has used the order of the frames. One frame says nothing of it.

The model was trained on other clips of the same kind (tools/train_moving_model.py says how).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Frames = NDArray[np.uint8]

DIRECTIONS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}
SHAPES = ("square", "disc", "triangle")
SIZE = 32  # pixels of a side
FRAMES = 8  # of a clip
CLIPS = {"train": 240, "val": 160}
SEEDS = {"train": 1, "val": 2}  # the model was trained on those of another seed
MODEL = Path(__file__).with_name("moving.safetensors")


def write_moving(folder: str | Path) -> None:
    """Write the set and the model below `folder`, which is made; always the same files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(MODEL, folder / "model.safetensors")
    for split, n_clips in CLIPS.items():
        for i, (direction, frames) in enumerate(clips(n_clips, SEEDS[split])):
            clip_folder = folder / split / direction / f"{i:04d}"
            clip_folder.mkdir(parents=True, exist_ok=True)
            for k, frame in enumerate(frames):
                Image.fromarray(frame).save(clip_folder / f"{k:05d}.png")


def clips(n: int, seed: int) -> Iterator[tuple[str, Frames]]:
    """Yield n clips, the directions in turn: a direction's name, (frames, height, width, rgb)."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        name = tuple(DIRECTIONS)[i % len(DIRECTIONS)]
        yield name, _draw_clip(DIRECTIONS[name], rng)


def _draw_clip(step: tuple[int, int], rng: np.random.Generator) -> Frames:
    """Return (frames, height, width, rgb) of a shape that moves.

    Args:
        step: rows and columns of the direction, -1, 0 or 1.
        rng: draws all else.
    """
    # A background whose colours change slowly.
    coarse = rng.uniform(80, 176, (3, 3, 3)).astype(np.uint8)
    smooth = Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    background = np.asarray(smooth, np.float64)
    # Each channel of the shape is brighter or darker than the background, and never like it.
    contrast = rng.choice([-1, 1], 3) * rng.uniform(70, 120, 3)
    colour = background.mean((0, 1)) + contrast
    shape = SHAPES[rng.integers(len(SHAPES))]
    side = int(rng.integers(8, 13))
    speed = rng.uniform(1.5, 2.5)  # pixels a frame
    reach = speed * (FRAMES - 1) / 2  # from the middle of the path to its ends
    # The middle of the path is drawn, not its start: forwards and backwards are equally likely.
    middle = rng.uniform(side / 2, SIZE - side / 2, 2)
    axis = 0 if step[0] else 1
    # Along the path it stays so far inside that the shape's centre never leaves the frame.
    lowest = min(reach + 3, SIZE / 2)
    middle[axis] = rng.uniform(lowest, max(SIZE - reach - 3, SIZE / 2))
    frames = np.empty((FRAMES, SIZE, SIZE, 3), np.uint8)
    for k in range(FRAMES):
        centre = middle + (k - (FRAMES - 1) / 2) * speed * np.array(step)
        coverage = _coverage(shape, centre, side)[..., np.newaxis]
        # Fresh noise for each frame, so that no frame is another one's copy.
        noise = rng.normal(0, 4, (SIZE, SIZE, 3))
        pixels = background * (1 - coverage) + colour * coverage + noise
        frames[k] = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return frames


def _coverage(kind: str, centre: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """Return (height, width) the share of each pixel that a shape covers, by 4 x 4 points in each.

    Args:
        kind: of `SHAPES`.
        centre: row and column, in pixels.
        side: of the square around the shape, in pixels.
    """
    points = (np.arange(4 * SIZE) + 0.5) / 4
    y = points[:, np.newaxis] - centre[0]
    x = points - centre[1]
    half = side / 2
    if kind == "square":
        inside = (abs(y) <= half) & (abs(x) <= half)
    elif kind == "disc":
        inside = y**2 + x**2 <= half**2
    else:  # a triangle with its tip above
        inside = (abs(y) <= half) & (abs(x) <= (y + half) / 2)
    return inside.reshape(SIZE, 4, SIZE, 4).mean((1, 3))
