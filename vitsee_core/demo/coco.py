"""Miniature sets in the layouts of COCO and PartImageNet: objects, panoptic segments, parts.

    FOLDER/{train2017,val2017}/000000000001.jpg                 as COCO has them
    FOLDER/annotations/instances_{train2017,val2017}.json
    FOLDER/annotations/panoptic_{train2017,val2017}.json
    FOLDER/annotations/panoptic_{train2017,val2017}/000000000001.png
    FOLDER/parts/{train,val,test}/<wnid>/<wnid>_<n>.JPEG        as PartImageNet (OOD) has them
    FOLDER/parts/{train,val,test}.json

Objects are outlines, crowds are run lengths, category numbers have gaps, and no class of parts is
in two of the three files, as in the published sets. Masks are exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.demo.scenes import (
    Placed,
    Scene,
    box_of,
    class_names,
    compose,
    random_scene,
    save_image,
    sprite,
    write_json,
)
from vitsee_core.types import Mask

SIZES = ((96, 128), (128, 96), (112, 112))  # (height, width) of images, in turn
N_OBJECTS = 4
# Categories of stuff, numbered as COCO numbers its own.
WALL = 171
FLOOR = 190
PART_SPLITS = {"train": (0, 1, 5), "val": (2, 7), "test": (8, 9)}  # split -> its classes
# The supercategory of each class of `class_names`, whose halves are the parts.
KINDS = (
    "Top",
    "Trouser",
    "Top",
    "Top",
    "Top",
    "Shoe",
    "Top",
    "Shoe",
    "Bag",
    "Shoe",
)
HALVES = ("Upper", "Lower")

Fields = dict[str, Any]  # an entry of an annotation file


def write_coco(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write both sets.

    Args:
        folder: in which they are made.
        seed: of all scenes.
        n_images: of each of the two splits of COCO; half as many for each class of parts.
    """
    folder = Path(folder)
    _write_split(folder, "train2017", (seed, 0), n_images)
    _write_split(folder, "val2017", (seed, 1), n_images)
    for split, classes in PART_SPLITS.items():
        _write_parts(folder / "parts", split, classes, seed, max(1, n_images // 2))


def category_id(number: int) -> int:
    """Return the number in COCO's files of a class of `class_names`: from 1 on, with gaps."""
    return 2 * number + 1


def outlines(mask: Mask) -> list[list[int]]:
    """Return a mask as rectangles that together cover exactly its pixels: x and y of their
    corners, one after the other."""
    rectangles: list[list[int]] = []
    # Run of columns -> the row where its rectangle began. A run that goes on in the next row, with
    # the same columns, makes the rectangle longer.
    top_of_run: dict[tuple[int, int], int] = {}
    for row in range(len(mask) + 1):
        runs: list[tuple[int, int]] = []
        if row < len(mask):
            # First and past-the-last columns of the runs of this row.
            padded = np.concatenate([[False], mask[row], [False]])
            edges = np.flatnonzero(np.diff(padded.astype(np.int8))).tolist()
            runs = list(zip(edges[::2], edges[1::2], strict=True))
        for (left, right), top in list(top_of_run.items()):
            if (left, right) not in runs:
                rectangles.append([left, top, right, top, right, row, left, row])
                del top_of_run[left, right]
        for run in runs:
            top_of_run.setdefault(run, row)
    return rectangles


def run_lengths(mask: Mask) -> Fields:
    """Return a mask as COCO's run lengths down its columns, background first."""
    flat = mask.T.ravel()
    ends = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *ends.tolist(), len(flat)]).tolist()
    if flat[0]:
        lengths = [0, *lengths]
    return {"counts": lengths, "size": list(mask.shape)}


def _write_split(folder: Path, split: str, seed: tuple[int, int], n_images: int) -> None:
    """Write the images of a split, its objects and its panoptic segments.

    Args:
        folder: of the set.
        split: its name in the set.
        seed: of its scenes; the second number is also that of the split.
        n_images: of the split.
    """
    annotations = folder / "annotations"
    images: list[Fields] = []
    objects: list[Fields] = []
    panoptic: list[Fields] = []
    for k in range(n_images):
        # The published numbers have gaps too.
        image_id = 139 + 17 * k + 1000 * seed[1]
        height, width = SIZES[k % len(SIZES)]
        scene = random_scene((height, width), N_OBJECTS, (*seed, k))
        # The floor is the lower third of a scene, and darker than the wall.
        is_low = np.arange(height)[:, None] >= 2 * height // 3
        floor = np.repeat(is_low, width, axis=1)
        dark = floor & ~scene.masks.any(0)
        pixels = np.where(dark[..., None], scene.pixels // 2, scene.pixels)
        name = f"{image_id:012d}"
        save_image(pixels.astype(np.uint8), folder / split / f"{name}.jpg")
        images.append(
            {"id": image_id, "file_name": f"{name}.jpg", "height": height, "width": width}
        )
        # The first two objects of every fourth image.
        is_crowded = k % 4 == 3
        objects += _object_entries(scene, image_id, is_crowded, len(objects) + 1)
        png_folder = annotations / f"panoptic_{split}"
        panoptic.append(_write_panoptic(scene, floor, image_id, png_folder))
    things = [
        {"id": category_id(i), "name": name, "supercategory": "clothes"}
        for i, name in enumerate(class_names())
    ]
    stuff: Fields = {"supercategory": "building", "isthing": 0}
    categories = [
        *(thing | {"isthing": 1} for thing in things),
        {"id": WALL, "name": "wall", **stuff},
        {"id": FLOOR, "name": "floor", **stuff},
    ]
    content = {"images": images, "annotations": objects, "categories": things}
    write_json(annotations / f"instances_{split}.json", content)
    content = {"images": images, "annotations": panoptic, "categories": categories}
    write_json(annotations / f"panoptic_{split}.json", content)


def _object_entries(
    scene: Scene, image_id: int, is_crowded: bool, first_id: int
) -> list[Fields]:
    """Return the annotations of an image's objects; what cannot be seen has none.

    Args:
        scene: the image.
        image_id: its number.
        is_crowded: whether the first two objects are annotated as one crowd.
        first_id: number of the first annotation.
    """
    masks = list(scene.masks)
    classes = scene.classes.tolist()
    if is_crowded:
        masks = [masks[0] | masks[1], *masks[2:]]
        classes = classes[1:]
    entries: list[Fields] = []
    for i, (mask, number) in enumerate(zip(masks, classes, strict=True)):
        if not mask.any():
            continue
        is_crowd = is_crowded and i == 0
        # COCO has crowds as run lengths, all else as outlines.
        shape = run_lengths(mask) if is_crowd else outlines(mask)
        entry = {"id": first_id + len(entries), "image_id": image_id}
        entry |= _shared_fields(mask, category_id(number))
        entries.append(entry | {"iscrowd": int(is_crowd), "segmentation": shape})
    return entries


def _write_panoptic(scene: Scene, floor: Mask, image_id: int, folder: Path) -> Fields:
    """Write the PNG file of an image's segments, and return its annotation.

    Every pixel has a segment: objects, floor and wall.
    """
    rest = ~scene.masks.any(0)
    masks = [*scene.masks, rest & floor, rest & ~floor]
    categories = [*map(category_id, scene.classes.tolist()), FLOOR, WALL]
    segment_ids = np.zeros(rest.shape, np.int64)
    segments = []
    for i, (mask, category) in enumerate(zip(masks, categories, strict=True)):
        if not mask.any():
            continue
        # Such numbers need all three bytes of a colour.
        segment_id = 65536 * (image_id % 200) + 256 * (i + 1) + 7 * i + 1
        segment_ids[mask] = segment_id
        segments.append({"id": segment_id} | _shared_fields(mask, category))
    # A segment's number is red + 256 green + 65536 blue.
    red = segment_ids % 256
    green = segment_ids // 256 % 256
    colours = np.stack([red, green, segment_ids // 65536], axis=-1)
    name = f"{image_id:012d}.png"
    save_image(colours.astype(np.uint8), folder / name)
    return {"image_id": image_id, "file_name": name, "segments_info": segments}


def _shared_fields(mask: Mask, category: int) -> Fields:
    """Return the fields of every annotation; bbox is x, y, width, height."""
    left, top, right, bottom = box_of(mask)
    box = [left, top, right - left, bottom - top]
    return {"category_id": category, "iscrowd": 0, "area": int(mask.sum()), "bbox": box}


def _write_parts(
    folder: Path, split: str, classes: tuple[int, ...], seed: int, n_images: int
) -> None:
    """Write a split of PartImageNet: images of one object, whose halves are its parts.

    Args:
        folder: of the set.
        split: its name in the set.
        classes: of its objects.
        seed: of its scenes.
        n_images: of each class.
    """
    kinds = list(dict.fromkeys(KINDS))
    categories: list[Fields] = []
    for kind in kinds:
        for half in HALVES:
            category = {"id": len(categories), "name": f"{kind} {half}"}
            categories.append(category | {"supercategory": kind})
    images: list[Fields] = []
    parts: list[Fields] = []
    for number in classes:
        wnid = f"n{number + 1:08d}"
        for k in range(n_images):
            height, width = SIZES[k % len(SIZES)]
            rng = np.random.default_rng((seed, 9, number, k))
            instance = int(rng.integers(400))
            item = sprite(number, instance, int(0.6 * min(height, width)))
            n_rows, n_cols = item.mask.shape
            top = int(rng.integers(0, height - n_rows + 1))
            left = int(rng.integers(0, width - n_cols + 1))
            placed = Placed(item, top, left)
            scene = compose((height, width), [placed], (seed, 8, number, k))
            mask = scene.masks[0]
            is_below = np.arange(height)[:, None] >= top + n_rows // 2
            halves = [mask & ~is_below, mask & is_below]
            # The lower half is darker, so that pixels tell the parts apart.
            pixels = np.where(halves[1][..., None], scene.pixels // 2, scene.pixels)
            name = f"{wnid}_{17 * k + 3}"
            save_image(pixels.astype(np.uint8), folder / split / wnid / f"{name}.JPEG")
            image_id = len(images)
            image = {"id": image_id, "file_name": f"{name}.JPEG"}
            images.append(image | {"height": height, "width": width})
            for h, half in enumerate(halves):
                category_number = 2 * kinds.index(KINDS[number]) + h
                shape = outlines(half)
                # The published files have some outlines of two points.
                if k == 0:
                    shape = [[left, top, left + 1, top], *shape]
                part: Fields = {"id": len(parts), "image_id": image_id}
                part |= {"segmentation": shape} | _shared_fields(half, category_number)
                parts.append(part)
    content = {"images": images, "annotations": parts, "categories": categories}
    write_json(folder / f"{split}.json", content)
