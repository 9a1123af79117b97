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
# (height, width) of images, in turn.
SIZES = (
    (96, 128),
    (128, 96),
    (112, 112),
    (80, 120),
)
N_IMAGES = 6  # of a category
HEIGHTS = (0.1, 0.5, 0.9)  # of an object, where its rims are keypoints
SLOTS = 30  # keypoints that an image annotation has room for
VOC = 1  # the first class number in the segmentation files
CUT = 2  # of a category's images this one shows its object cut off by the frame
SCALES = (1.2, 1.6)  # ratios of sizes that separate the scale variations 0, 1 and 2
# Of the published splits only test is scored here; the others have a pair of each category.
IMAGES_OF_SPLIT = {"trn": 2, "val": 2, "test": N_IMAGES}

Points = list[list[int] | None]  # x, y by slot, None where hidden


@dataclass(frozen=True)
class SpairImage:
    """An image of the set.

    Attributes:
        name: of its files.
        size: (height, width).
        box: x0, y0, x1, y1 of the visible part.
        points: the keypoints.
        cut: whether the frame cuts the object off.
        length: the whole object's longer side, in pixels.
    """

    name: str
    size: tuple[int, int]
    box: list[int]
    points: Points
    cut: bool
    length: int


def write_spair(folder: str | Path, seed: int = 0, separator: str = ":") -> None:
    """Write the set below `folder`, the same for the same seed.

    Args:
        folder: becomes SPair-71k; made where it is missing.
        seed: of objects, positions and backgrounds.
        separator: before the category in the names of pairs; some unpackers write `_`.
    """
    root = Path(folder)
    images: dict[str, list[SpairImage]] = {}
    for c, category in enumerate(CATEGORIES):
        images[category.lower()] = [
            _write_image(root, category, i, (seed, c, i)) for i in range(N_IMAGES)
        ]
    for split, n_images in IMAGES_OF_SPLIT.items():
        names: list[str] = []
        for category, category_images in images.items():
            for source, target in permutations(category_images[:n_images], 2):
                number = len(names) + 1
                stem = f"{number:06d}-{source.name}-{target.name}"
                names.append(f"{stem}:{category}")
                pairs = root / "PairAnnotation" / split
                entry = _pair_entry(number, category, source, target)
                write_json(pairs / f"{stem}{separator}{category}.json", entry)
        _write_layout(root, "large", split, names)
        _write_layout(root, "small", split, names[::2])


def _write_layout(root: Path, size: str, split: str, names: list[str]) -> None:
    """Write the list of a split's pairs. size: "large" or "small"."""
    path = root / "Layout" / size / f"{split}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}\n" for name in names))


def _write_image(root: Path, category: str, i: int, seed: tuple[int, ...]) -> SpairImage:
    """Write an image, its segmentation and its annotation; return what they show.

    Args:
        root: of the set.
        category: class of the object.
        i: number of the image within the category.
        seed: of the object, its position and the background.
    """
    rng = np.random.default_rng(seed)
    size = SIZES[i % len(SIZES)]
    length = int(rng.integers(3 * min(size) // 5, 19 * min(size) // 20))
    item = sprite(category, int(rng.integers(100)), length)
    n_rows, n_cols = item.mask.shape
    top = int(rng.integers(0, size[0] - n_rows + 1))
    left = int(rng.integers(0, size[1] - n_cols + 1))
    if i == CUT:
        # A quarter of its width is beyond the right edge.
        left = size[1] - n_cols // 2 - n_cols // 4
    scene = compose(size, [Placed(item, top, left)], seed)
    mask = scene.masks[0]
    image = SpairImage(
        name=f"2008_{CATEGORIES.index(category) * N_IMAGES + i:06d}",
        size=size,
        box=list(box_of(mask)),
        points=_keypoints(item, top, left, size),
        cut=i == CUT,
        length=length,
    )
    folder = category.lower()
    save_image(scene.pixels, root / "JPEGImages" / folder / f"{image.name}.jpg")
    class_number = class_names().index(category) + VOC
    segments = (mask * class_number).astype(np.uint8)
    save_image(segments, root / "Segmentation" / folder / f"{image.name}.png")
    points = image.points + [None] * (SLOTS - len(image.points))
    write_json(
        root / "ImageAnnotation" / folder / f"{image.name}.json",
        {
            "filename": f"{image.name}.jpg",
            "category": folder,
            "azimuth_id": 0,
            "pose": "Unspecified",
            "image_width": size[1],
            "image_height": size[0],
            "bndbox": image.box,
            "kps": {str(slot): point for slot, point in enumerate(points)},
            "truncated": int(image.cut),
            "occluded": 0,
            "difficult": 0,
            "mirror": 0,
        },
    )
    return image


def _keypoints(item: Sprite, top: int, left: int, size: tuple[int, int]) -> Points:
    """Return the left and right rim of an object at each of `HEIGHTS`.

    Args:
        item: the object.
        top: its first row in the image.
        left: its first column in the image.
        size: (height, width) of the image.

    Returns:
        x, y of each rim; None beyond the frame, or where the object has no pixel.
    """
    points: Points = []
    for share in HEIGHTS:
        row = round(share * (len(item.mask) - 1))
        cols = np.flatnonzero(item.mask[row])
        if not len(cols):
            points += [None, None]
            continue
        y = top + row
        for col in (cols[0], cols[-1]):
            x = left + int(col)
            is_inside = 0 <= x < size[1] and 0 <= y < size[0]
            points.append([x, y] if is_inside else None)
    return points


def _pair_entry(
    number: int, category: str, source: SpairImage, target: SpairImage
) -> dict[str, Any]:
    """Return the annotation of a pair, with the keys of the published files."""
    source_points = []
    target_points = []
    slots = []
    # Only keypoints that are seen in both images.
    pairs = zip(source.points, target.points, strict=True)
    for slot, (source_point, target_point) in enumerate(pairs):
        if source_point is not None and target_point is not None:
            source_points.append(source_point)
            target_points.append(target_point)
            slots.append(str(slot))
    lengths = [source.length, target.length]
    ratio = max(lengths) / min(lengths)
    name = f"{source.name}-{target.name}:{category}"
    return {
        "filename": f"{number:06d}-{name}",
        "src_imname": f"{source.name}.jpg",
        "trg_imname": f"{target.name}.jpg",
        # width, height, channels
        "src_imsize": [*source.size[::-1], 3],
        "trg_imsize": [*target.size[::-1], 3],
        "src_bndbox": source.box,
        "trg_bndbox": target.box,
        "category": category,
        "src_pose": "Unspecified",
        "trg_pose": "Unspecified",
        "src_kps": source_points,
        "trg_kps": target_points,
        "kps_ids": slots,
        "mirror": 0,
        "viewpoint_variation": 0,
        "scale_variation": sum(ratio > limit for limit in SCALES),
        "truncation": int(source.cut) + 2 * int(target.cut),
        "occlusion": 0,
        "pair_id": number,
    }
