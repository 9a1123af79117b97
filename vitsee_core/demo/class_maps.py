"""Miniature sets in the layouts of Pascal VOC, ADE20K and Cityscapes: scenes with class maps.

    FOLDER/VOC2012/{JPEGImages,SegmentationClass}, ImageSets/Segmentation/{train,val}.txt
    FOLDER/ADEChallengeData2016/{images,annotations}/{training,validation}, objectInfo150.txt
    FOLDER/cityscapes/leftImg8bit/{train,val}/CITY/*_leftImg8bit.png, gtFine/.../*_labelIds.png

The same scenes in each, with numbers of their own: of the ten classes of the bundled images VOC has
its classes 1 to 10 with a border of 255 around objects, ADE20K 2 to 11 with 1 (wall) for the rest
and 0 in a corner, Cityscapes ten of its label numbers with 4 (static, not evaluated) for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.demo.scenes import (
    N_CLASSES,
    Pixels,
    class_names,
    random_scene,
    save_image,
)
from vitsee_core.types import Mask

SIZES = ((64, 96), (96, 64), (80, 80))  # (height, width) of images, in turn
N_OBJECTS = 3
BORDER = 255  # VOC's number for pixels that are not scored
ADE_CLASSES = 150
# Numbers of labels, evaluated in Cityscapes, for the ten classes; and of what is not evaluated.
CITYSCAPES = (7, 8, 11, 21, 23, 24, 26, 28, 31, 33)
STATIC = 4
CITIES = ("hemburg", "trouserville")  # of train and of val


class Miniature(NamedTuple):
    """One image of a miniature data set with its class map.

    Attributes:
        split: 0 trains, 1 tests.
        number: within the split.
        pixels: (height, width, 3).
        classes: (height, width) 0 for the background, then the ten classes from 1 on.
    """

    split: int
    number: int
    pixels: Pixels
    classes: NDArray[np.uint8]


def write_class_maps(folder: str | Path, seed: int = 0, n_images: int = 12) -> None:
    """Write all three sets.

    Args:
        folder: in which the sets are made.
        seed: of all scenes.
        n_images: of each split of each set.
    """
    folder = Path(folder)
    miniatures = []
    for split in (0, 1):
        for number in range(n_images):
            size = SIZES[number % len(SIZES)]
            # 20 and 21 keep these scenes apart from those of other sets with the same seed.
            scene = random_scene(size, N_OBJECTS, (seed, 20 + split, number))
            classes = np.zeros(size, np.uint8)
            for mask, category in zip(scene.masks, scene.classes.tolist(), strict=True):
                classes[mask] = category + 1
            miniatures.append(Miniature(split, number, scene.pixels, classes))
    _write_voc(folder / "VOC2012", miniatures)
    _write_ade20k(folder / "ADEChallengeData2016", miniatures)
    _write_cityscapes(folder / "cityscapes", miniatures)


def _border(classes: NDArray[np.uint8]) -> Mask:
    """Return (height, width) the pixels with a neighbour of another class, on both sides."""
    border = np.zeros(classes.shape, bool)
    changes_down = classes[1:] != classes[:-1]
    changes_across = classes[:, 1:] != classes[:, :-1]
    border[1:] |= changes_down
    border[:-1] |= changes_down
    border[:, 1:] |= changes_across
    border[:, :-1] |= changes_across
    return border


def _write_voc(root: Path, miniatures: Sequence[Miniature]) -> None:
    """Write the set as Pascal VOC has it: palette PNGs with a void border around objects."""
    names: dict[str, list[str]] = {"train": [], "val": []}
    # Colours do not matter, but readers must not take the palette's colours for classes.
    palette = np.random.default_rng(0).integers(0, 256, 768).tolist()
    for miniature in miniatures:
        name = f"2007_{1000 * miniature.split + miniature.number:06d}"
        names[("train", "val")[miniature.split]].append(name)
        save_image(miniature.pixels, root / "JPEGImages" / f"{name}.jpg")
        classes = miniature.classes
        values = np.where(_border(classes), BORDER, classes).astype(np.uint8)
        save_image(values, root / "SegmentationClass" / f"{name}.png", palette)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for split, split_names in names.items():
        text = "".join(f"{name}\n" for name in split_names)
        (lists / f"{split}.txt").write_text(text)


def _write_ade20k(root: Path, miniatures: Sequence[Miniature]) -> None:
    """Write the set as ADE20K has it: classes from 1 on, 0 for pixels without one."""
    for miniature in miniatures:
        split = ("training", "validation")[miniature.split]
        prefix = ("train", "val")[miniature.split]
        name = f"ADE_{prefix}_{miniature.number + 1:08d}"
        save_image(miniature.pixels, root / "images" / split / f"{name}.jpg")
        values = miniature.classes + 1
        values[:8, :8] = 0
        save_image(values, root / "annotations" / split / f"{name}.png")
    names = ["wall", *class_names()]
    names += [f"class {k}" for k in range(len(names) + 1, ADE_CLASSES + 1)]
    lines = ["Idx\tRatio\tTrain\tVal\tStuff\tName"]
    lines += [f"{k}\t0.1\t1\t1\t0\t{name}" for k, name in enumerate(names, 1)]
    (root / "objectInfo150.txt").write_text("\n".join(lines) + "\n")


def _write_cityscapes(root: Path, miniatures: Sequence[Miniature]) -> None:
    """Write the set as Cityscapes has it: numbers of labels, of which some are not evaluated."""
    label_ids = np.array([STATIC, *CITYSCAPES], np.uint8)
    assert len(CITYSCAPES) == N_CLASSES
    for miniature in miniatures:
        split = ("train", "val")[miniature.split]
        city = CITIES[miniature.split]
        name = f"{city}_{miniature.number:06d}_000019"
        image_folder = root / "leftImg8bit" / split / city
        save_image(miniature.pixels, image_folder / f"{name}_leftImg8bit.png")
        folder = root / "gtFine" / split / city
        labels = label_ids[miniature.classes]
        save_image(labels, folder / f"{name}_gtFine_labelIds.png")
        # Lies beside the labels in the published set; readers have to tell both apart.
        save_image(miniature.classes, folder / f"{name}_gtFine_instanceIds.png")
