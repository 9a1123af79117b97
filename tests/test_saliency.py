"""Saliency: IoU of heads with masks against hand and loops, and what a user sees."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from PIL import Image

from tests.attention_rows import Rows, layout, random_rows, save_mask, write
from tests.command_line import refused, said
from tests.extractions import VIT, extracted, plant_images
from tests.printed_text import flat
from tests.tables import equal
from tests.test_masks import slow_iou
from vitsee_cli.main import main
from vitsee_core.analyses.saliency import COLUMNS, run
from vitsee_core.analyses.saliency.figure import ORACLE, plot
from vitsee_core.analyses.saliency.scoring import BASELINES
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import baseline_words
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, SiteError, VitseeError

Array = NDArray[Any]
F, V = 1, 255  # values in a PNG
GRID, SIZE = (2, 3), (8, 12)
NUMBERS = ("value", "std", "low", "high", "best")


def one(path: Path, maps: Any, prefix: Sequence[str] = (), **more: Any) -> Store:
    """A store of one block; maps: (images, heads, tokens), the attention of the class token where
    there is one and of the patches alike."""
    where = layout(more.pop("grid", GRID), prefix)
    a = np.asarray(maps, np.float16)
    cls = (a,) if where.cls is not None else None
    return write(
        path, [Rows(where, ("blocks.0",), (a,), cls)], size=more.pop("size", SIZE), **more
    )


def masks_of(folder: Path, tokens: Array) -> Path:
    """A folder with a mask for each image; tokens: (images, rows, cols) pixel values."""
    for i, values in enumerate(tokens):
        save_mask(folder / f"{i}.png", values)
    return folder


def heads(table: Table) -> Table:
    return table.filter(pl.col("baseline").is_null(), pl.col("best").ne_missing("image"))


# ---------------------------------------------------------------- by hand


def test_known_masks(tmp_path: Path) -> None:
    truth = np.array([[F, F, 0], [0, 0, 0]])
    on, off = [0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.2, 0.3, 0.3, 0.2]
    half, spread = [0.4, 0, 0.4, 0.1, 0.1, 0], [1 / 6] * 6
    store = one(tmp_path / "a.zarr", [[on, off, half, spread, [0, 0, 0, 0, 0, 1]]])
    table = run(store, masks=masks_of(tmp_path / "masks", truth[None]))
    assert tuple(table.written.columns) == COLUMNS
    found = heads(table)
    # half: 0.4 and 0.4 hold 80 %, of the two one is foreground; even: the last four of six, none
    assert found["value"].tolist() == [1, 0, pytest.approx(1 / 3), 0, 0]
    assert found["best"].tolist() == ["head", "", "", "", ""]
    assert found["head"].tolist() == [0, 1, 2, 3, 4]
    assert [*dict.fromkeys(found["token"])] == ["mean"]
    assert set(found["metric"].tolist()) == {"iou"}
    assert np.isnan(found["std"]).all()
    blind = table.filter(pl.col("baseline").is_not_null())
    assert blind["baseline"].tolist() == list(BASELINES)
    assert blind["head"].tolist() == [None] * 3
    # every mass above 0.5 needs both tokens, half of it only the later one
    small = heads(run(store, masks=tmp_path / "masks", mass=0.4))
    assert small["value"].tolist() == [0.5, 0, 0, 0, 0]


def test_prefix_tokens_are_dropped_and_the_rest_renormalised(tmp_path: Path) -> None:
    truth = np.array([[F, 0, 0], [0, 0, 0]])
    # register, class token, patches: of what the patches get, the first has 70 %
    a = [[[0.1, 0.5, 0.28, 0.06, 0.06, 0, 0, 0], [0.5, 0.5, 0, 0, 0, 0, 0, 0]]]
    store = one(tmp_path / "a.zarr", a, ("reg0", "cls"))
    table = run(store, masks=masks_of(tmp_path / "m", truth[None]))
    found = heads(table)
    assert found["token"].tolist() == ["cls", "cls", "mean", "mean"]
    # the second head looks at no patch: it counts nowhere
    assert found["value"].tolist() == pytest.approx([1, np.nan, 1, np.nan], nan_ok=True)
    assert found["n_images"].tolist() == [1, 0, 1, 0]
    assert found["best"].tolist() == ["head", "", "head", ""]


def test_void_tokens_count_on_neither_side(tmp_path: Path) -> None:
    truth = np.array([[F, V, 0], [0, 0, 0]])
    store = one(tmp_path / "a.zarr", [[[0.4, 0.4, 0.2, 0, 0, 0], [0, 1, 0, 0, 0, 0]]])
    masks = masks_of(tmp_path / "m", truth[None])
    assert heads(run(store, masks=masks))["value"].tolist() == [1, 0]
    assert heads(run(store, masks=masks, void="none"))["value"].tolist() == [1, 0.5]
    assert heads(run(store, masks=masks, background=[0, 255], void=7))[
        "value"
    ].tolist() == [0.5, 0]


def test_half_or_any(tmp_path: Path) -> None:
    pixels = np.zeros(SIZE, np.uint8)
    pixels[:4, :6] = F  # the first token, and half of the second
    pixels[:1, 8] = F  # one pixel of the third
    Image.fromarray(pixels).save(tmp_path / "0.png")
    store = one(tmp_path / "a.zarr", [[[0.5, 0.5, 0, 0, 0, 0]]])
    assert heads(run(store, masks=tmp_path))["value"].tolist() == [1]
    assert heads(run(store, masks=tmp_path, foreground="any"))["value"] == pytest.approx(
        2 / 3
    )


def test_best_head_and_oracle(tmp_path: Path) -> None:
    truth = np.array(
        [[[F, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, F]], [[0, F, 0], [0, 0, 0]]]
    )
    first, last = [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]
    store = one(tmp_path / "a.zarr", [[first, last]] * 3)
    masks = masks_of(tmp_path / "m", truth)
    table = run(store, masks=masks, best="image")
    assert heads(table)["value"] == pytest.approx([1 / 3, 1 / 3])
    assert heads(table)["best"].tolist() == ["head", ""]  # of equal ones the first
    oracle = table.filter(best="image")
    assert oracle["value"] == pytest.approx([2 / 3])
    assert oracle["head"].tolist() == [None]
    assert "image" not in run(store, masks=masks)["best"]


# ---------------------------------------------------------------- against a loop


def made(folder: Path, n: int = 9, seed: int = 0) -> tuple[list[Rows], Array, Path]:
    """Two grids, ragged heads, registers, masks of (n, 4, 6) tokens of the finer grid."""
    rng = np.random.default_rng(seed)
    groups = [
        random_rows(layout((4, 6), ("cls", "reg0"), 2), n, [2, 3], seed=seed),
        random_rows(
            layout((2, 3), ("cls",), 4), n, [4], seed=seed + 1, prefix="grid_2x3"
        ),
    ]
    truth = rng.choice([0, F, V], (n, 4, 6), p=[0.6, 0.3, 0.1])
    for i in range(n):
        save_mask(folder / f"{i}.png", truth[i], 2)
    return groups, truth, folder


def coarse(tokens: Array) -> Array:
    """2 x 3 tokens of four each: 1 where half of the known is foreground, 2 where most is void."""
    out = np.zeros((2, 3), int)
    for r, c in np.ndindex(2, 3):
        cell = tokens[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].ravel().tolist()
        known = [v for v in cell if v != V]
        if len(cell) - len(known) > len(known):
            out[r, c] = 2
        else:
            out[r, c] = known.count(F) > 0 and 2 * known.count(F) >= len(known)
    return out


def test_against_a_loop(tmp_path: Path) -> None:
    n, valid = 9, [1, 1, 0, 1, 1, 1, 1, 1, 1]
    groups, truth, masks = made(tmp_path / "m", n)
    truth[4], truth[5] = 0, 0
    truth[5, 0, 0] = F  # a foreground token on the finer grid only
    save_mask(masks / "4.png", truth[4], 2)
    save_mask(masks / "5.png", truth[5], 2)
    (masks / "7.png").unlink()
    store = write(tmp_path / "a.zarr", groups, size=SIZE, valid=valid, slab=4)
    table = run(store, masks=masks, best="image")
    counted = [i for i in range(n) if valid[i] and i != 7]
    for group, stride in zip(groups, (2, 4), strict=True):
        first = group.layout.n_prefix
        for row, site in enumerate(group.blocks):
            for token, rows in (("cls", group.cls), ("mean", group.mean)):
                assert rows is not None
                a = rows[row].astype(np.float64)[:, :, first:]
                ious = np.full((len(counted), a.shape[1]), np.nan)
                for k, i in enumerate(counted):
                    fine = np.where(truth[i] == V, 2, truth[i])
                    labels = fine if stride == 2 else coarse(truth[i])
                    for h in range(a.shape[1]):
                        ious[k, h] = slow_iou(a[i, h], labels.ravel(), 0.6)
                ious = ious[~np.isnan(ious).any(1)]
                own = heads(table).filter(site=site, token=token)
                assert own["value"] == pytest.approx(ious.mean(0), rel=1e-12)
                assert own["std"] == pytest.approx(ious.std(0, ddof=1), rel=1e-12)
                assert own["n_images"].tolist() == [len(ious)] * a.shape[1]
                assert len(ious) == (6 if stride == 2 else 5)
                assert own["best"].tolist().index("head") == ious.mean(0).argmax()
                assert (own["low"] < own["value"]).all() and (
                    own["value"] < own["high"]
                ).all()
                oracle = table.filter(site=site, token=token, best="image")
                assert oracle["value"] == pytest.approx([ious.max(1).mean()], rel=1e-12)
                assert oracle["value"][0] >= own["value"].max()
    assert table.notes["images"]["a"] == {
        "rows": 9, "left_out_invalid": 1, "chosen": "all",
        "with_mask": 7, "left_out_without_mask": 1, "left_out_without_foreground": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_the_cut_into_slabs_does_not_count(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    whole = run(
        write(tmp_path / "a.zarr", groups, size=SIZE, slab=9), masks=masks, best="image"
    )
    for slab in (1, 4):
        store = write(tmp_path / f"{slab}" / "a.zarr", groups, size=SIZE, slab=slab)
        for jobs in (1, 3):
            cut = run(store, masks=masks, best="image", jobs=jobs, memory=1)
            numbers = ("value", "std", "low", "high")
            assert equal(whole, cut, *numbers)
            for column in numbers:  # merged moments differ in the last digits
                assert cut[column] == pytest.approx(whole[column], rel=1e-12, nan_ok=True)
        assert equal(run(store, masks=masks, jobs=1), run(store, masks=masks, jobs=3))


def test_masks_in_several_places(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    path = tmp_path / "a.zarr"
    whole = run(write(path, groups, size=SIZE), masks=masks)
    (tmp_path / "rest").mkdir()
    for i in (1, 4, 8):
        (masks / f"{i}.png").rename(tmp_path / "rest" / f"{i}.png")
    places = [masks, tmp_path / "rest"]
    both = run(path, masks=places)
    assert equal(whole, both) and set(both["n_images"].tolist()) == set(
        whole["n_images"].tolist()
    )
    given = [arg for place in places for arg in ("--masks", str(place))]
    text = io.StringIO()
    whole.to_csv(text)
    assert said(tmp_path, "saliency", str(path), *given) == text.getvalue()
    assert "give each once" in refused("saliency", path, *given[:2], *given[:2])


def test_the_order_of_images_does_not_count(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    order = np.random.default_rng(1).permutation(9)
    other = [
        Rows(g.layout, g.blocks, tuple(a[order] for a in g.mean),
             None if g.cls is None else tuple(a[order] for a in g.cls), g.prefix)
        for g in groups
    ]  # fmt: skip
    a = run(write(tmp_path / "a.zarr", groups, size=SIZE), masks=masks)
    b = run(
        write(tmp_path / "b" / "a.zarr", other, size=SIZE, index=order.tolist()),
        masks=masks,
    )
    assert b["value"] == pytest.approx(a["value"], rel=1e-12)  # baselines, too
    assert b["n_images"].tolist() == a["n_images"].tolist()


def test_images_are_a_subset(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    store = write(tmp_path / "a.zarr", groups, size=SIZE)
    few = run(store, masks=masks, images=3)
    assert few["n_images"].max() == 3
    for i in range(3, 9):
        (masks / f"{i}.png").unlink()
    assert equal(few, run(store, masks=masks))


# ---------------------------------------------------------------- choices and refusals


def test_models_without_a_class_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vitsee_core")
    store = write(
        tmp_path / "a.zarr", [random_rows(layout(GRID, ("reg0",)), 2, [2])], size=SIZE
    )
    masks = masks_of(tmp_path / "m", np.array([[[F, 0, 0], [0, 0, 0]]] * 2))
    assert [*dict.fromkeys(heads(run(store, masks=masks))["token"])] == ["mean"]
    assert "no class token: only the mean over patches" in caplog.text
    with pytest.raises(MissingInput, match=r"no class token in blocks\.0"):
        run(store, masks=masks, tokens=["cls"])
    both = write(tmp_path / "b.zarr", [random_rows(layout(GRID), 2, [2])], size=SIZE)
    table = run(store, both, masks=masks)
    assert [*dict.fromkeys(heads(table.filter(store="b"))["token"])] == [
        "cls",
        "mean",
    ]
    assert [*dict.fromkeys(heads(run(both, masks=masks, tokens=["mean"]))["token"])] == [
        "mean"
    ]


def test_blocks_are_chosen(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    reason = {"blocks.9 attention": "windowed"}
    store = write(tmp_path / "a.zarr", groups, size=SIZE, left_out=reason)
    table = run(store, masks=masks, sites=["grid_2x3.*"])
    assert [*dict.fromkeys(table["site"])] == ["grid_2x3.0"]
    assert table["rel_depth"].tolist() == [1.0] * len(table)
    with pytest.raises(SiteError, match="nothing"):
        run(store, masks=masks, sites=["nothing"])
    with pytest.raises(SiteError, match=r"no attention of blocks\.9: windowed"):
        run(store, masks=masks, sites=["blocks.9"])


def test_choices_that_are_refused(tmp_path: Path) -> None:
    store = one(tmp_path / "a.zarr", np.ones((1, 1, 6)))
    masks = masks_of(tmp_path / "m", np.array([[[F, 0, 0], [0, 0, 0]]]))
    for options, phrase in (
        ({"tokens": ["patches"]}, "no token 'patches'; expected one of: cls, mean"),
        ({"foreground": "all"}, "no foreground 'all'; expected one of: half, any"),
        ({"best": "none"}, "no best 'none'"),
        ({"mass": 1.0}, "a mass of 1 was asked for; expected one between 0 and 1"),
    ):
        with pytest.raises(VitseeError, match=phrase):
            run(store, masks=masks, **options)  # type: ignore[arg-type]
    bare = one(tmp_path / "b.zarr", np.ones((1, 1, 6)), with_transform=False)
    with pytest.raises(MissingInput, match="does not say how its images were resized"):
        run(bare, masks=masks)


def test_masks_have_the_size_of_the_original_image(tmp_path: Path) -> None:
    store = one(tmp_path / "a.zarr", np.ones((2, 1, 6)), sizes=[SIZE, (24, 36)])
    masks = masks_of(tmp_path / "m", np.array([[[F, 0, 0], [0, 0, 0]]] * 2))
    with pytest.raises(
        VitseeError, match=r"1\.png is 12 x 8 pixels, its image 1\.jpg is 36 x 24;"
    ):
        run(store, masks=masks)
    save_mask(masks / "1.png", np.array([[F, 0, 0], [0, 0, 0]]), step=12)
    assert heads(run(store, masks=masks))["n_images"].tolist() == [2]
    unknown = one(tmp_path / "b.zarr", np.ones((2, 1, 6)), sizes=None)
    with pytest.raises(
        MissingInput, match="how large its original images are; extract anew"
    ):
        run(unknown, masks=masks)


def test_a_box_is_cut_out_of_its_file_s_mask(tmp_path: Path) -> None:
    """Two parts of one file and a whole one: the mask is the file's."""
    whole = np.zeros((2, 6))
    whole[0, 4] = whole[1, 0] = F
    masks = masks_of(tmp_path / "m", whole[None])  # 0.png: 8 x 24
    save_mask(masks / "1.png", np.array([[F, 0, 0], [0, 0, 0]]))
    boxes = np.array([[12, 0, 24, 8], [0, 0, 12, 8], [np.nan] * 4], np.float32)
    ids = ["0.jpg#12,0,24,8", "0.jpg#0,0,12,8", "1.jpg"]
    maps = np.full((3, 1, 6), 0.02)
    maps[0, 0, 1] = maps[1, 0, 3] = maps[2, 0, 0] = 0.9  # each on its own object
    store = one(tmp_path / "a.zarr", maps, ids=ids, boxes=boxes)
    assert store.samples.file.tolist() == ["0.jpg", "0.jpg", "1.jpg"]
    found = heads(run(store, masks=masks, mass=0.8))
    assert found["value"].tolist() == [1] and found["n_images"].tolist() == [3]
    outside = one(tmp_path / "b.zarr", maps, ids=ids, boxes=boxes + np.float32(1))
    with pytest.raises(
        VitseeError, match=r"0\.png: the box 13 1 25 9 reaches out of its image"
    ):
        run(outside, masks=masks)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_coco(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    store = one(tmp_path / "a.zarr", [[[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0, 0, 0.5]]])
    left = {
        "id": 1,
        "image_id": 3,
        "segmentation": [[0, 0, 8, 0, 8, 4, 0, 4]],
        "iscrowd": 0,
    }
    image = {"id": 3, "file_name": "train/0.jpg", "height": 8, "width": 12}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": [image], "annotations": [left]}))
    table = run(store, masks=path)
    assert heads(table)["value"].tolist() == [1, 0]
    assert "crowd" in table.notes["masks"]["void"]
    assert "float16" in table.notes["attention"]


# ---------------------------------------------------------------- attention recomputed


def geometry(folder: Path, n: int) -> tuple[Path, Path]:
    """Pictures of 50 x 60 pixels and masks of their lower right quarter or so."""
    images = plant_images(folder / "images", n)
    for path in sorted(images.rglob("*.png")):
        mask = np.zeros((50, 60), np.uint8)
        mask[20:, 25:] = F
        target = folder / "masks" / path.relative_to(images)
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(target)
    return images, folder / "masks"


@pytest.mark.slow
def test_rows_computed_once_more_are_those_kept(tmp_path: Path) -> None:
    images, masks = geometry(tmp_path, 6)
    common = [*VIT, "--data", images, "--tokens", "pooled", "--no-residual"]
    extracted(*common, "--attention", "rows", "-o", tmp_path / "a.zarr")
    extracted(*common, "-o", tmp_path / "b.zarr")
    result = saliency_command(tmp_path / "a.zarr", "--masks", masks)
    assert result.exit_code == 0, result.output
    assert "computing" not in result.stderr
    again = saliency_command(f"a={tmp_path / 'b.zarr'}", "--masks", masks)
    assert again.exit_code == 0, again.output
    assert "has no rows of attention" in again.stderr
    for kept, new in zip(parsed(result), parsed(again), strict=True):
        # attention of another batch size differs in the last digits: a token may change sides
        assert float(kept["value"]) == pytest.approx(float(new["value"]), abs=0.02)
        assert {**kept, **dict.fromkeys(NUMBERS)} == {**new, **dict.fromkeys(NUMBERS)}


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), [(48, 72), (70, 50)])
def test_objects_are_found_where_they_are(
    tmp_path: Path, height: int, width: int
) -> None:
    """Off-centre noisy squares: some head of even a random model tells them from the black ground,
    and none does so where the masks are turned over."""
    rng = np.random.default_rng(0)
    y, x = height // 8, width // 2
    mask = np.zeros((height, width), np.uint8)
    mask[y : y + height // 3, x : x + width // 3] = F
    truths = {"masks": mask, "across": mask[:, ::-1], "down": mask[::-1]}
    for folder in ("images", *truths):
        (tmp_path / folder).mkdir()
    for i in range(8):
        pixels = rng.integers(120, 256, (height, width, 3)) * mask[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / f"{i}.png")
        for folder, seen in truths.items():
            Image.fromarray(seen).save(tmp_path / folder / f"{i}.png")
    extracted(
        *VIT, "--data", tmp_path / "images", "--tokens", "pooled", "--attention", "rows",
        "--crop-pct", "0.9", "-o", tmp_path / "a.zarr",
    )  # fmt: skip
    store = open_store(tmp_path / "a.zarr")
    best = {
        name: np.nanmax(heads(run(store, masks=tmp_path / name, mass=0.3))["value"])
        for name in truths
    }
    # half as much again, at the least: 0.50 against 0.28 and 0.30, 0.38 against 0.20 and 0.22
    assert best["masks"] > 1.5 * max(best["across"], best["down"])


# ---------------------------------------------------------------- what a user sees


def saliency_command(*args: object) -> Result:
    return CliRunner().invoke(main, ["saliency", *map(str, args)])


def parsed(result: Result) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    (masks / "7.png").unlink()
    write(tmp_path / "a.zarr", groups, size=SIZE)
    table, png = tmp_path / "r.csv", tmp_path / "r.png"
    result = saliency_command(
        tmp_path / "a.zarr",
        "--masks",
        masks,
        "--best",
        "image",
        "-o",
        table,
        "--png",
        png,
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "a: 1 of 9 images are left out: without a mask" in " ".join(
        result.stderr.split()
    )
    written = Table.read(table)
    assert tuple(written.written.columns) == COLUMNS
    # 2 + 3 + 4 heads and an oracle of two tokens, and three baselines a block
    assert len(written) == 2 * (9 + 3) + 9
    assert json.loads(Path(f"{table}.json").read_text())["parameters"]["mass"] == 0.6
    assert written.notes["masks"]["source"] == str(masks)
    with Image.open(png) as image:
        assert image.width > 1000


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m", 3)
    write(tmp_path / "a.zarr", groups, size=SIZE)
    store, out = tmp_path / "a.zarr", tmp_path / "r.csv"
    (tmp_path / "other" / "x").mkdir(parents=True)
    save_mask(tmp_path / "other" / "cat.png", np.full((2, 3), F))

    def line(folder: Path) -> str:
        return refused("saliency", store, "--masks", folder, "-o", out)

    text = line(tmp_path / "other")
    assert "no image of a has a mask in" in text
    assert "images are called 0.jpg, 1.jpg and 1 more; masks cat.png;" in text
    assert "no file or folder" in line(tmp_path / "none")
    for i in range(3):
        save_mask(masks / f"{i}.png", np.full((2, 3), V))
    text = line(masks)
    assert "no token is foreground in any of the 3 images" in text
    assert "--void none makes them foreground" in text
    (masks / "1.png").write_bytes(b"no picture")
    assert "cannot read 1.png: not an image" in line(masks)
    assert not out.exists()
    assert "--masks" in refused("saliency", store, code=2)
    wrong = refused("saliency", store, "--masks", masks, "--void", "x", code=2)
    assert "expected a pixel value like 255, or none" in wrong
    refused("saliency", store, "--masks", masks, "--mass", "1", code=2)


def test_unfinished_stores(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    write(tmp_path / "a.zarr", groups, size=SIZE, slab=4, slabs=[0, 2])
    assert "incomplete: 2 of 3 slabs" in refused(
        "saliency", tmp_path / "a.zarr", "--masks", masks
    )
    result = saliency_command(tmp_path / "a.zarr", "--masks", masks, "--allow-partial")
    assert result.exit_code == 0, result.output
    assert max(int(row["n_images"]) for row in parsed(result)) <= 5


# ---------------------------------------------------------------- the figure


@pytest.mark.slow
def test_the_figure(tmp_path: Path) -> None:
    groups, _, masks = made(tmp_path / "m")
    a = write(tmp_path / "a.zarr", groups, size=SIZE)
    b = write(tmp_path / "b.zarr", [random_rows(layout(GRID, ()), 9, [2, 2])], size=SIZE)
    table = run(a, b, masks=masks, best="image")
    table.write(tmp_path / "r.csv")
    drawn = plot(Table.read(tmp_path / "r.csv"))
    titles = [axes.get_title(loc="left") for axes in drawn.axes]
    assert flat(titles[0]) == "class token: best head"
    assert flat(titles[3]) == "mean over patches: all heads"
    best = table.filter(store="a", token="cls", best="head")
    wanted = np.column_stack([best["rel_depth"], best["value"]])
    assert any(
        np.shape(line.get_xydata()) == wanted.shape
        and np.allclose(line.get_xydata(), wanted, atol=0.02)
        for line in drawn.axes[0].get_lines()
    )
    points = drawn.axes[3].collections
    assert [np.shape(p.get_offsets())[0] for p in points] == [9, 4]
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels[:2] == ["a", "b"]
    assert {baseline_words(name, "iou") for name in BASELINES} | {ORACLE} <= set(labels)
    assert len(plot(table.filter(pl.col("token").ne_missing("cls"))).axes) == 2
