"""Wrong inputs of dense-probe: each gets one line on stderr that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.printed_text import flat
from tests.stores import write_sites
from tests.test_dense_probe import command, layout, made, transform
from vitsee_stores import Store

SITE = "blocks.0.out"
Case = Callable[[Path], tuple[list[object], str]]


def _layout(folder: Path, masks: str, value: int) -> tuple[Store, Path]:
    """A store, and its masks in the folder of a published layout, one with a wrong value."""
    store, plain = made(folder, 4, classes=(7, 8))
    place = folder / masks
    place.mkdir(parents=True)
    for i in range(4):
        name = f"a{i}_gtFine_labelIds.png" if "gtFine" in masks else f"a{i}.png"
        values = np.asarray(Image.open(plain / f"a{i}.png")).copy()
        values[values == 255] = 7
        values[0, 0] = value if i == 0 else 7
        Image.fromarray(values).save(place / name)
    return store, place


def voc(folder: Path) -> tuple[list[object], str]:
    store, _ = _layout(folder, "VOC2012/SegmentationClass", 22)
    return [store.path, "--masks", folder / "VOC2012"], "a0.png has the value 22, which is no class"


def ade20k(folder: Path) -> tuple[list[object], str]:
    store, _ = _layout(folder, "ade/annotations", 12)
    names = "".join(f"{k}\t0.1\t1\t1\t0\tclass {k}\n" for k in range(1, 11))
    (folder / "ade/objectInfo150.txt").write_text(f"Idx\tRatio\tTrain\tVal\tStuff\tName\n{names}")
    return [store.path, "--masks", folder / "ade"], "a0.png has the value 12, which is no class"


def damaged_names(folder: Path) -> tuple[list[object], str]:
    store, _ = _layout(folder, "ade/annotations", 7)
    (folder / "ade/objectInfo150.txt").write_text("Idx\tName\n7\twall\n")
    return [store.path, "--masks", folder / "ade"], "objectInfo150.txt is not the table of ADE20K's"


def cityscapes(folder: Path) -> tuple[list[object], str]:
    store, _ = _layout(folder, "gtFine", 34)
    renamed = write_sites(
        folder / "c.zarr", {SITE: (np.ones((4, 12, 2), np.float32), layout(3, 4))},
        sizes=store.sizes, ids=[f"a{i}_leftImg8bit.png" for i in range(4)],
        transform=transform(12, 16),
    )  # fmt: skip
    return [renamed.path, "--masks", folder / "gtFine"], "labelIds.png has the value 34, which is"


def truncated(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    whole = (masks / "a0.png").read_bytes()
    (masks / "a0.png").write_bytes(whole[: len(whole) // 2])
    return [store.path, "--masks", masks], "a0.png"


def transparent(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    for i in range(4):
        Image.new("RGBA", (5, 5)).save(masks / f"a{i}.png")
    return [
        store.path,
        "--masks",
        masks,
    ], "holds colours (mode RGBA); expected one channel"


def no_png(folder: Path) -> tuple[list[object], str]:
    store, _ = made(folder, 4)
    Image.new("L", (5, 5)).save(folder / "only.jpg")
    pictures = folder / "pictures"
    pictures.mkdir()
    (folder / "only.jpg").rename(pictures / "a0.jpg")
    return [store.path, "--masks", pictures], f"no .png files below {pictures}"


def no_json(folder: Path) -> tuple[list[object], str]:
    store, _ = made(folder, 4)
    (folder / "x.json").write_text("{")
    return [store.path, "--masks", folder / "x.json"], "x.json"


def no_categories(folder: Path) -> tuple[list[object], str]:
    store, _ = made(folder, 4)
    images = [{"id": 1, "file_name": "a0.jpg", "height": 17, "width": 23}]
    (folder / "x.json").write_text(json.dumps({"images": images, "annotations": []}))
    return [store.path, "--masks", folder / "x.json"], "x.json"


def a_list_of_others(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    (folder / "val.txt").write_text("elsewhere/9\n")
    return [store.path, "--masks", masks, "--split", folder / "val.txt"], "val.txt"


def a_list_of_all(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    (folder / "val.txt").write_text("a0\na1\na2\na3\n")
    more = ["--masks", masks, "--split", folder / "val.txt"]
    return [store.path, *more], "no image is left to train"


def other_models(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    other, more = made(folder, 4, name="b", seed=1, dim=7)
    both = ["--masks", masks, "--masks", more]
    return [store.path, other.path, *both], "blocks.0.out differs between a and b"


def a_site_of_one(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    other, more = made(folder, 4, name="b", seed=1, sites=[SITE])
    both = ["--masks", masks, "--masks", more]
    return [store.path, other.path, *both], "blocks.1.out"


def not_finite(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    tokens = np.full((4, 12, 2), np.nan, np.float32)
    other = write_sites(
        folder / "n.zarr", {SITE: (tokens, layout(3, 4))}, sizes=store.sizes,
        ids=store.samples.id.tolist(), transform=transform(12, 16),
    )  # fmt: skip
    return [other.path, "--masks", masks], "n holds numbers in blocks.0.out that are not finite"


def uneven_cells(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    other = write_sites(
        folder / "u.zarr", {SITE: (np.ones((4, 12, 2), np.float32), layout(3, 4, 3.5))},
        sizes=store.sizes, ids=store.samples.id.tolist(), transform=transform(12, 14),
    )  # fmt: skip
    more = ["--masks", masks, "--solver", "knn"]
    return [other.path, *more], "are not of equal whole pixels of the input"


def an_untrained_store_of_other_sites(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 8)
    other, _ = made(folder / "more", 8, sites=["blocks.0.out"], name="a", seed=3)
    more = ["--masks", masks, "--untrained", other.path, "--l2", 1]
    return [store.path, *more], "lacks the site blocks.1.out, which is probed"


def no_store(folder: Path) -> tuple[list[object], str]:
    _, masks = made(folder, 4)
    return [folder / "none.zarr", "--masks", masks], "none.zarr"


def an_untrained_store_that_is_none(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 8)
    return [store.path, "--masks", masks, "--untrained", folder / "none.zarr"], "none.zarr"


def a_metric_of_depth(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    return [store.path, "--masks", masks, "--metric", "rmse"], "no metric 'rmse'; metrics of dense"


def a_scale_of_masks(folder: Path) -> tuple[list[object], str]:
    store, masks = made(folder, 4)
    return [store.path, "--masks", masks, "--eigen-crop"], "--eigen-crop"


CASES: list[Case] = [
    *(
        voc,
        ade20k,
        damaged_names,
        cityscapes,
        truncated,
        transparent,
        no_png,
        no_json,
        no_categories,
    ),
    *(a_list_of_others, a_list_of_all, other_models, a_site_of_one, not_finite, uneven_cells),
    *(an_untrained_store_of_other_sites, no_store, an_untrained_store_that_is_none),
    *(a_metric_of_depth, a_scale_of_masks),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_line_names_what_is_wrong(case: Case, tmp_path: Path) -> None:
    args, text = case(tmp_path)
    words = [str(word) for word in args]
    two = len([word for word in words[:2] if word.endswith(".zarr")]) == 2
    if not two and "--split" not in words:
        words += ["--holdout", "0.5"]
    result: Any = command(*words, "-o", "-")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output
    assert text in flat(result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("last0", "'last0'; expected lastN, like last4"),
        ("four", "'four'; expected lastN"),
    ],
)
def test_wrong_words_are_refused(word: str, text: str, tmp_path: Path) -> None:
    store, masks = made(tmp_path, 4)
    result = command(store.path, "--masks", masks, "--holdout", 0.5, "--concat", word)
    assert result.exit_code == 2
    assert text in flat(result.stderr)
