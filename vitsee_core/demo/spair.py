"""A miniature of SPair-71k: its folders and files, with clothes in place of animals and cars.

    SPair-71k/JPEGImages/trouser/2008_000000.jpg
    SPair-71k/ImageAnnotation/trouser/2008_000000.json         box and keypoints, null where hidden
    SPair-71k/Segmentation/trouser/2008_000000.png
    SPair-71k/PairAnnotation/test/000001-2008_000000-2008_000001:trouser.json
    SPair-71k/Layout/large/test.txt                            names of pairs, one a line

Keypoints are the left and right rim of an object at a tenth, a half and nine tenths of its height:
the same places of every object of a class. Those beyond the frame are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.demo.scenes import (
    Placed,
    Sprite,
    box_of,
    class_names,
    compose,
    save_image,
    sprite,
    write_json,
)

CATEGORIES = ("Trouser", "Dress", "Bag")
SIZES = (
    (96, 128),
    (128, 96),
    (112, 112),
    (80, 120),
)  # (height, width) of images, in turn
N_IMAGES = 6  # of a category
HEIGHTS = (0.1, 0.5, 0.9)  # of an object, where its rims are keypoints
SLOTS = 30  # keypoints that an image annotation has room for
VOC = 1  # the first class number in the segmentation files
CUT = 2  # of a category's images this one shows its object cut off by the frame
SCALES = (1.2, 1.6)  # ratios of sizes that separate the scale variations 0, 1 and 2


@dataclass(frozen=True)
class SpairImage:
    """An image of the set. size: (height, width). box: x0, y0, x1, y1 of what is seen. points: x, y
    by slot, None where hidden. cut: whether the frame cuts the object off. length: of the whole
    object's longer side, in pixels."""

    name: str
    size: tuple[int, int]
    box: list[int]
    points: list[list[int] | None]
    cut: bool
    length: int


def write_spair(folder: str | Path, seed: int = 0, separator: str = ":") -> None:
    """Write the set below `folder`, the same for the same seed.

    Args:
        folder: becomes SPair-71k; made where it is missing.
        seed: of objects, places and backgrounds.
        separator: before the category in the names of pairs; some unpackers write `_`.
    """
    root = Path(folder)
    shown = {
        category.lower(): [
            _write_image(root, category, i, (seed, c, i)) for i in range(N_IMAGES)
        ]
        for c, category in enumerate(CATEGORIES)
    }
    # Of the published splits only test is scored here; the others have a pair of each category.
    for split, n in (("trn", 1), ("val", 1), ("test", N_IMAGES)):
        names: list[str] = []
        for category, images in shown.items():
            for source, target in permutations(images[: max(n, 2)], 2):
                number = len(names) + 1
                stem = f"{number:06d}-{source.name}-{target.name}"
                names.append(f"{stem}:{category}")
                path = (
                    root / "PairAnnotation" / split / f"{stem}{separator}{category}.json"
                )
                write_json(path, _pair(number, category, source, target))
        for size, listed in (("large", names), ("small", names[::2])):
            path = root / "Layout" / size / f"{split}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name}\n" for name in listed))


def _write_image(root: Path, category: str, i: int, seed: tuple[int, ...]) -> SpairImage:
    rng = np.random.default_rng(seed)
    size = SIZES[i % len(SIZES)]
    length = int(rng.integers(3 * min(size) // 5, 19 * min(size) // 20))
    one = sprite(category, int(rng.integers(100)), length)
    rows, cols = one.mask.shape
    top = int(rng.integers(0, size[0] - rows + 1))
    left = int(rng.integers(0, size[1] - cols + 1))
    if i == CUT:
        left = size[1] - cols // 2 - cols // 4
    scene = compose(size, [Placed(one, top, left)], seed)
    word = category.lower()
    name = f"2008_{CATEGORIES.index(category) * N_IMAGES + i:06d}"
    mask = scene.masks[0]
    shown = SpairImage(
        name, size, list(box_of(mask)), _points(one, top, left, size), i == CUT, length
    )
    number = class_names().index(category) + VOC
    save_image(scene.pixels, root / "JPEGImages" / word / f"{name}.jpg")
    save_image(
        (mask * number).astype(np.uint8), root / "Segmentation" / word / f"{name}.png"
    )
    slots = shown.points + [None] * (SLOTS - len(shown.points))
    write_json(
        root / "ImageAnnotation" / word / f"{name}.json",
        {
            "filename": f"{name}.jpg",
            "category": word,
            "azimuth_id": 0,
            "pose": "Unspecified",
            "image_width": size[1],
            "image_height": size[0],
            "bndbox": shown.box,
            "kps": {str(slot): point for slot, point in enumerate(slots)},
            "truncated": int(shown.cut),
            "occluded": 0,
            "difficult": 0,
            "mirror": 0,
        },
    )
    return shown


def _points(
    one: Sprite, top: int, left: int, size: tuple[int, int]
) -> list[list[int] | None]:
    """x, y of both rims at each of `HEIGHTS`, None beyond the frame."""
    found: list[list[int] | None] = []
    for part in HEIGHTS:
        row = round(part * (len(one.mask) - 1))
        cols = np.flatnonzero(one.mask[row])
        for col in (cols[0], cols[-1]) if len(cols) else ():
            x = left + int(col)
            y = top + row
            found.append([x, y] if 0 <= x < size[1] and 0 <= y < size[0] else None)
        if not len(cols):
            found += [None, None]
    return found


def _pair(
    number: int, category: str, source: SpairImage, target: SpairImage
) -> dict[str, Any]:
    """The annotation of a pair, with the keys of the published files."""
    both = [
        (slot, a, b)
        for slot, (a, b) in enumerate(zip(source.points, target.points, strict=True))
        if a is not None and b is not None
    ]
    ratio = max(source.length, target.length) / min(source.length, target.length)
    file = f"{source.name}-{target.name}:{category}"
    return {
        "filename": f"{number:06d}-{file}",
        "src_imname": f"{source.name}.jpg",
        "trg_imname": f"{target.name}.jpg",
        "src_imsize": [*source.size[::-1], 3],
        "trg_imsize": [*target.size[::-1], 3],
        "src_bndbox": source.box,
        "trg_bndbox": target.box,
        "category": category,
        "src_pose": "Unspecified",
        "trg_pose": "Unspecified",
        "src_kps": [a for _, a, _ in both],
        "trg_kps": [b for _, _, b in both],
        "kps_ids": [str(slot) for slot, _, _ in both],
        "mirror": 0,
        "viewpoint_variation": 0,
        "scale_variation": sum(ratio > step for step in SCALES),
        "truncation": int(source.cut) + 2 * int(target.cut),
        "occlusion": 0,
        "pair_id": number,
    }
