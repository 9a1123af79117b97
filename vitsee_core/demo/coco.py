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
    Pixels,
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

SIZES = ((96, 128), (128, 96), (112, 112))  # of images, in turn
N_OBJECTS = 4
# categories of stuff, numbered as COCO numbers its own
WALL = 171
FLOOR = 190
PART_SPLITS = {"train": (0, 1, 5), "val": (2, 7), "test": (8, 9)}  # classes
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
)  # of a class
HALVES = ("Upper", "Lower")


def write_coco(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write all of it below `folder`. n_images: of each of the two splits of COCO; half as many
    for each class of parts."""
    folder = Path(folder)
    annotations = folder / "annotations"
    for number, split in enumerate(("train2017", "val2017")):
        _write_split(folder, annotations, split, (seed, number), n_images)
    for split, classes in PART_SPLITS.items():
        _write_parts(folder / "parts", split, classes, seed, max(1, n_images // 2))


def category_id(number: int) -> int:
    """COCO's number of a class: from 1 on, with gaps."""
    return 2 * number + 1


def outlines(mask: Mask) -> list[list[int]]:
    """A mask as rectangles that together cover exactly its pixels: x and y of their corners."""
    found: list[list[int]] = []
    open_: dict[tuple[int, int], int] = {}  # run of columns -> the row where it began
    for row in range(len(mask) + 1):
        runs = _runs(mask[row]) if row < len(mask) else []
        for (left, right), top in list(open_.items()):
            if (left, right) not in runs:
                found.append([left, top, right, top, right, row, left, row])
                del open_[left, right]
        for run in runs:
            open_.setdefault(run, row)
    return found


def run_lengths(mask: Mask) -> dict[str, Any]:
    """A mask as run lengths down its columns, background first."""
    flat = mask.T.ravel()
    ends = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *ends.tolist(), len(flat)]).tolist()
    return {"counts": [0, *lengths] if flat[0] else lengths, "size": list(mask.shape)}


def _runs(row: Mask) -> list[tuple[int, int]]:
    """First and past-the-last columns of the runs of a row."""
    edges = np.flatnonzero(
        np.diff(np.concatenate([[False], row, [False]]).astype(np.int8))
    )
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _write_split(
    folder: Path, annotations: Path, split: str, seed: tuple[int, int], n_images: int
) -> None:
    images, objects, panoptic = (list[dict[str, Any]]() for _ in range(3))
    names = class_names()
    things = [
        {"id": category_id(i), "name": name, "supercategory": "clothes"}
        for i, name in enumerate(names)
    ]
    stuff = [
        {"id": number, "name": name, "supercategory": "building", "isthing": 0}
        for number, name in ((WALL, "wall"), (FLOOR, "floor"))
    ]
    for k in range(n_images):
        number = 139 + 17 * k + 1000 * seed[1]
        size = SIZES[k % len(SIZES)]
        scene = random_scene(size, N_OBJECTS, (*seed, k))
        floor = _floor(size)
        pixels = _with_floor(scene, floor)
        name = f"{number:012d}"
        save_image(pixels, folder / split / f"{name}.jpg")
        about = {
            "id": number,
            "file_name": f"{name}.jpg",
            "height": size[0],
            "width": size[1],
        }
        images.append(about)
        crowded = k % 4 == 3  # the first two objects of every fourth image
        objects += _objects(scene, number, crowded, first=len(objects) + 1)
        panoptic.append(
            _panoptic(scene, floor, number, annotations / f"panoptic_{split}")
        )
    content = {"images": images, "annotations": objects, "categories": things}
    write_json(annotations / f"instances_{split}.json", content)
    every = [*(one | {"isthing": 1} for one in things), *stuff]
    content = {"images": images, "annotations": panoptic, "categories": every}
    write_json(annotations / f"panoptic_{split}.json", content)


def _floor(size: tuple[int, int]) -> Mask:
    """The lower third of a scene."""
    return np.repeat(np.arange(size[0])[:, None] >= 2 * size[0] // 3, size[1], 1)


def _with_floor(scene: Scene, floor: Mask) -> Pixels:
    dark = floor & ~scene.masks.any(0)
    return np.where(dark[..., None], scene.pixels // 2, scene.pixels).astype(np.uint8)


def _objects(scene: Scene, image: int, crowded: bool, first: int) -> list[dict[str, Any]]:
    """The annotations of an image; what cannot be seen has none."""
    found: list[dict[str, Any]] = []
    masks = list(scene.masks)
    classes = scene.classes.tolist()
    if crowded:
        masks = [masks[0] | masks[1], *masks[2:]]
        classes = classes[1:]
    for at, (mask, number) in enumerate(zip(masks, classes, strict=True)):
        if mask.any():
            crowd = crowded and at == 0
            about = {"id": first + len(found), "image_id": image} | _part(
                mask, category_id(number)
            )
            shape = run_lengths(mask) if crowd else outlines(mask)
            found.append(about | {"iscrowd": int(crowd), "segmentation": shape})
    return found


def _panoptic(scene: Scene, floor: Mask, image: int, folder: Path) -> dict[str, Any]:
    """The annotation of an image, whose PNG file is written too; every pixel has a segment."""
    rest = ~scene.masks.any(0)
    masks = [*scene.masks, rest & floor, rest & ~floor]
    categories = [*map(category_id, scene.classes.tolist()), FLOOR, WALL]
    numbers = np.zeros(rest.shape, np.int64)
    segments = []
    for at, (mask, category) in enumerate(zip(masks, categories, strict=True)):
        if mask.any():
            number = 65536 * (image % 200) + 256 * (at + 1) + 7 * at + 1
            numbers[mask] = number
            segments.append({"id": number} | _part(mask, category))
    colours = np.stack([numbers % 256, numbers // 256 % 256, numbers // 65536], -1)
    name = f"{image:012d}.png"
    save_image(colours.astype(np.uint8), folder / name)
    return {"image_id": image, "file_name": name, "segments_info": segments}


def _part(mask: Mask, category: int) -> dict[str, Any]:
    """Fields of every annotation; bbox is x, y, width, height."""
    left, top, right, low = box_of(mask)
    box = [left, top, right - left, low - top]
    return {"category_id": category, "iscrowd": 0, "area": int(mask.sum()), "bbox": box}


def _write_parts(
    folder: Path, split: str, classes: tuple[int, ...], seed: int, n_images: int
) -> None:
    kinds = list(dict.fromkeys(KINDS))
    categories = [
        {"id": 2 * k + h, "name": f"{kind} {half}", "supercategory": kind}
        for k, kind in enumerate(kinds)
        for h, half in enumerate(HALVES)
    ]
    images, parts = (list[dict[str, Any]]() for _ in range(2))
    for number in classes:
        wnid = f"n{number + 1:08d}"
        for k in range(n_images):
            size = SIZES[k % len(SIZES)]
            rng = np.random.default_rng((seed, 9, number, k))
            one = sprite(number, int(rng.integers(400)), int(0.6 * min(size)))
            free = [whole - own for whole, own in zip(size, one.mask.shape, strict=True)]
            top, left = (int(rng.integers(0, n + 1)) for n in free)
            scene = compose(size, [Placed(one, top, left)], (seed, 8, number, k))
            mask = scene.masks[0]
            below = np.arange(size[0])[:, None] >= top + len(one.mask) // 2
            halves = mask & ~below, mask & below
            pixels = np.where(halves[1][..., None], scene.pixels // 2, scene.pixels)
            name = f"{wnid}_{17 * k + 3}"
            save_image(pixels.astype(np.uint8), folder / split / wnid / f"{name}.JPEG")
            about = {"id": len(images), "file_name": f"{name}.JPEG"}
            images.append(about | {"height": size[0], "width": size[1]})
            for h, half in enumerate(halves):
                category = 2 * kinds.index(KINDS[number]) + h
                shape = outlines(half)
                if k == 0:  # the published files have some outlines of two points
                    shape = [[left, top, left + 1, top], *shape]
                own = {"id": len(parts), "image_id": about["id"], "segmentation": shape}
                parts.append(own | _part(half, category))
    content = {"images": images, "annotations": parts, "categories": categories}
    write_json(folder / f"{split}.json", content)
