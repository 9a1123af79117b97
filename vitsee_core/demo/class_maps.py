"""Miniature sets in the layouts of Pascal VOC, ADE20K and Cityscapes: scenes with class maps.

    FOLDER/VOC2012/{JPEGImages,SegmentationClass}, ImageSets/Segmentation/{train,val}.txt
    FOLDER/ADEChallengeData2016/{images,annotations}/{training,validation}, objectInfo150.txt
    FOLDER/cityscapes/leftImg8bit/{train,val}/CITY/*_leftImg8bit.png, gtFine/.../*_labelIds.png

The same scenes in each, with numbers of their own: of the ten classes of the bundled images VOC has
its classes 1 to 10 with a border of 255 around objects, ADE20K 2 to 11 with 1 (wall) for the rest
and 0 in a corner, Cityscapes ten of its label numbers with 4 (static, not evaluated) for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.demo.scenes import (
    N_CLASSES,
    Pixels,
    Scene,
    class_names,
    random_scene,
    save_image,
)
from vitsee_core.types import Mask

SIZES = ((64, 96), (96, 64), (80, 80))  # of images, in turn
N_OBJECTS = 3
BORDER = 255
ADE_CLASSES = 150
# Numbers of labels, evaluated in Cityscapes, for the ten classes; and of what is not evaluated.
CITYSCAPES = (7, 8, 11, 21, 23, 24, 26, 28, 31, 33)
STATIC = 4
CITIES = ("hemburg", "trouserville")  # of train and of val


class Miniature(NamedTuple):
    """One image of a miniature data set with its class map."""

    split: int  # 0 trains, 1 tests
    number: int  # within it
    pixels: Pixels
    classes: NDArray[
        np.uint8
    ]  # (height, width) 0 for the background, then the ten classes


def write_class_maps(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write all three sets below `folder`; n_images: of each split."""
    folder = Path(folder)
    every = list(_miniatures(seed, n_images))
    _write_voc(folder / "VOC2012", every)
    _write_ade20k(folder / "ADEChallengeData2016", every)
    _write_cityscapes(folder / "cityscapes", every)


def _miniatures(seed: int, n_images: int) -> Iterator[Miniature]:
    for split in (0, 1):
        for number in range(n_images):
            scene = random_scene(
                SIZES[number % len(SIZES)], N_OBJECTS, (seed, 20 + split, number)
            )
            yield Miniature(split, number, scene.pixels, _classes(scene))


def _classes(scene: Scene) -> NDArray[np.uint8]:
    found = np.zeros(scene.pixels.shape[:2], np.uint8)
    for mask, number in zip(scene.masks, scene.classes.tolist(), strict=True):
        found[mask] = number + 1
    return found


def _border(classes: NDArray[np.uint8]) -> Mask:
    found = np.zeros(classes.shape, bool)
    down = classes[1:] != classes[:-1]
    across = classes[:, 1:] != classes[:, :-1]
    found[1:] |= down
    found[:-1] |= down
    found[:, 1:] |= across
    found[:, :-1] |= across
    return found


def _write_voc(root: Path, every: list[Miniature]) -> None:
    names: tuple[list[str], list[str]] = ([], [])
    palette = np.random.default_rng(0).integers(0, 256, 768).tolist()
    for one in every:
        name = f"2007_{1000 * one.split + one.number:06d}"
        names[one.split].append(name)
        save_image(one.pixels, root / "JPEGImages" / f"{name}.jpg")
        values = np.where(_border(one.classes), BORDER, one.classes).astype(np.uint8)
        save_image(values, root / "SegmentationClass" / f"{name}.png", palette)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for split, own in zip(("train", "val"), names, strict=True):
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in own))


def _write_ade20k(root: Path, every: list[Miniature]) -> None:
    for one in every:
        split = ("training", "validation")[one.split]
        name = f"ADE_{('train', 'val')[one.split]}_{one.number + 1:08d}"
        save_image(one.pixels, root / "images" / split / f"{name}.jpg")
        values = one.classes + 1
        values[:8, :8] = 0
        save_image(values, root / "annotations" / split / f"{name}.png")
    known = ["wall", *class_names()]
    names = known + [f"class {k}" for k in range(len(known) + 1, ADE_CLASSES + 1)]
    lines = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    lines += [f"{k}\t0.1\t1\t1\t0\t{name}" for k, name in enumerate(names, 1)]
    (root / "objectInfo150.txt").write_text("\n".join(lines) + "\n")


def _write_cityscapes(root: Path, every: list[Miniature]) -> None:
    table = np.array([STATIC, *CITYSCAPES], np.uint8)
    assert len(CITYSCAPES) == N_CLASSES
    for one in every:
        split = ("train", "val")[one.split]
        city = CITIES[one.split]
        name = f"{city}_{one.number:06d}_000019"
        save_image(
            one.pixels, root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png"
        )
        folder = root / "gtFine" / split / city
        save_image(table[one.classes], folder / f"{name}_gtFine_labelIds.png")
        save_image(one.classes, folder / f"{name}_gtFine_instanceIds.png")
