"""Keypoints: what a user sees. Refusals in one line, hostile files, remarks, the command, the
figure, and the miniature SPair-71k from its files to both."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from tests.extractions import extracted
from tests.printed_text import flat
from tests.spair_sets import (
    GRID,
    LAYOUT,
    all_pairs,
    annotation,
    transform,
    write_pairs,
    write_store,
)
from tests.stores import write_sites
from tests.tables import having
from vitsee_cli.main import main
from vitsee_core.analyses.keypoints import plot, run, spair
from vitsee_core.analyses.keypoints.positions import locate
from vitsee_core.analyses.keypoints.protocol import ProtocolOptions, choose_protocol
from vitsee_core.analyses.keypoints.search import search
from vitsee_core.analyses.keypoints.spair import draw_pairs, read_pairs
from vitsee_core.demo.spair import CATEGORIES, write_spair
from vitsee_core.tables.results import Table
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, VitseeError


def command(*args: object) -> Result:
    return CliRunner().invoke(main, ["keypoints", *map(str, args)])


def a_store(folder: Path, **more: Any) -> Store:
    """Of the images a0 and a1, 60 x 40 pixels."""
    grids = np.random.default_rng(0).standard_normal((2, GRID, GRID, 4))
    given = {"ids": ["cat/a0.jpg", "cat/a1.jpg"], "sizes": (40, 60), **more}
    return write_store(folder / "a.zarr", {"blocks.0.out": grids}, **given)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return a_store(tmp_path)


def one_line(store: Store | None, pairs: Path, *args: object) -> str:
    """The line with which the command refuses; nothing else is printed or written."""
    path = pairs.parent / "none.zarr" if store is None else store.path
    output = pairs.parent / "out.csv"
    result = command(path, "--pairs", pairs, "-o", output, *args)
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and not output.exists()
    (line,) = result.stderr.strip().splitlines()
    assert not line.endswith(".")
    return line


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trg_kps": [[1, 1]]}, "src_kps has 2 keypoints and trg_kps 1"),
        (
            {"trg_kps": [[1, 1], [62, 3]]},
            r"trg_kps\[1\] is \(62, 3\), outside of the image of 60 x",
        ),
        ({"src_kps": [[1, -2], [4, 3]]}, r"src_kps\[0\] is \(1, -2\), outside"),
        (
            {"trg_bndbox": [10, 5, 10, 35]},
            r"trg_bndbox is \[10.0, 5.0, 10.0, 35.0\].*with an area",
        ),
        ({"trg_bndbox": [10, 5, 35]}, "with an area"),
        ({"mirror": 1}, "mirror is set"),
        ({"trg_kps": [[1, 1], None]}, r"trg_kps\[1\] is null, expected a list"),
        (
            {"trg_kps": [[1, 1], [1, float("nan")]]},
            r"trg_kps\[1\]\[1\] is NaN, expected a number",
        ),
        ({"trg_kps": [[1, 1], [True, 1]]}, r"is true, expected a number"),
        ({"trg_kps": {"0": [1, 1]}}, "trg_kps is an object, expected a list"),
        ({"trg_imsize": [0, 40, 3]}, "expected a whole number >= 1"),
        ({"trg_imsize": 7}, "trg_imsize is 7, expected a list"),
        ({"src_imname": "../../etc/passwd"}, "expected a name without slashes"),
        ({"src_imname": "a\x1b[31m.jpg"}, "expected a name without slashes"),
        ({"scale_variation": "1"}, "scale_variation is"),
    ],
)
def test_pairs_that_contradict_themselves(
    store: Store, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    (file,) = (folder / "PairAnnotation/test").iterdir()
    file.write_text(json.dumps(annotation(**changes)))
    with pytest.raises(VitseeError, match=words) as caught:
        run(store, pairs=folder)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"mirror": 0}', b"[" * 100_000,
        b'{"trg_imsize": ' + b"9" * 5000 + b"}", b'{"a": ' * 50_000,
        b" " * (spair.MAX_ANNOTATION_BYTES + 1),
    ],
)  # fmt: skip
def test_hostile_annotations_are_one_line(
    store: Store, tmp_path: Path, content: bytes
) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    (file,) = (folder / "PairAnnotation/test").iterdir()
    file.write_bytes(content)
    line = one_line(store, folder)
    assert file.name in line and len(line) < 600


def test_a_pipe_is_not_waited_for_and_a_pair_occurs_once(
    store: Store, tmp_path: Path
) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    (file,) = (folder / "PairAnnotation/test").iterdir()
    write_pairs(folder, [annotation()], separator="_")
    assert "are one pair" in one_line(store, folder)
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in one_line(store, folder)


def test_folders_lists_and_splits(store: Store, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "s", [annotation(), annotation("a1", "a0")])
    write_pairs(folder, [annotation()], split="val")
    for path in (folder, folder / "PairAnnotation", folder / "PairAnnotation/test"):
        assert len(read_pairs(path)) == 2
    assert len(read_pairs(folder, "val")) == 1
    listed = folder / "Layout/large/test.txt"
    assert [p.name for p in read_pairs(listed)] == [p.name for p in read_pairs(folder)]
    assert len(read_pairs(folder / "Layout/large/val.txt")) == 1
    mine = folder / "mine.txt"
    mine.write_text("000002-a1-a0_cat\n\n")
    assert [p.name for p in read_pairs(mine)] == ["000002-a1-a0:cat"]
    assert "no pairs of the split trn below" in one_line(store, folder, "--split", "trn")
    assert "it has the splits test, val" in one_line(store, folder, "--split", "trn")
    mine.write_text("000002-a1-a0_cat\nx\n")
    assert "line 2: no pair 'x' in" in one_line(store, mine)
    mine.write_text("\n")
    assert "names no pair" in one_line(store, mine)
    mine.write_bytes(b"\xff\xfe\x00")
    assert "it is not text" in one_line(store, mine)
    loose = tmp_path / "loose.txt"
    loose.write_text("x")
    assert "lies in no folder with PairAnnotation" in one_line(store, loose)
    assert "no file or folder" in one_line(store, tmp_path / "gone")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no pairs of the split test" in one_line(store, empty)


def test_images_that_the_store_lacks(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = [
        annotation("a0", "gone"),
        annotation(),
        annotation("a1", "a0", src_kps=[], trg_kps=[]),
    ]
    folder = write_pairs(tmp_path / "s", more)
    with caplog.at_level(logging.INFO):
        table = run(store, pairs=folder)
    assert (
        "a: 1 of the pairs' 3 images are missing or could not be read (cat/gone.jpg): 1 of 3 pairs "
        "are left out"
    ) in caplog.text
    assert "a: 1 pairs without a keypoint are left out" in caplog.text
    assert set(table["n_pairs"].tolist()) == {1}
    assert table.notes["pairs"]["a"] == {
        "pairs": 1, "images": 2, "points": 2, "left_out_without_image": 1,
        "left_out_without_keypoint": 1,
    }  # fmt: skip
    most = [annotation("x", "y"), annotation("y", "z"), annotation()]
    line = one_line(store, write_pairs(tmp_path / "t", most))
    assert "3 of the 5 images of the pairs are not in a (cat/x.jpg" in line
    assert "its images are called cat/a0.jpg" in line
    only_half = [annotation("a0", "x"), annotation("a1", "y")]
    line = one_line(store, write_pairs(tmp_path / "u", only_half))
    assert "none of the 2 pairs has both images" in line


def test_unreadable_images_are_left_out(tmp_path: Path) -> None:
    ids = ["cat/a0.jpg", "cat/a1.jpg", "cat/a2.jpg"]
    grids = {"blocks.0.out": np.ones((3, GRID, GRID, 2))}
    store = write_store(tmp_path / "a.zarr", grids, ids, (40, 60), valid=[1, 1, 0])
    folder = write_pairs(tmp_path / "s", [annotation(), annotation("a0", "a2")])
    assert set(run(store, pairs=folder)["n_pairs"].tolist()) == {1}


def test_images_are_known_by_their_folder(tmp_path: Path) -> None:
    pairs = [annotation(), annotation(category="dog")]
    folder = write_pairs(tmp_path / "s", pairs)
    grids = {"blocks.0.out": np.random.default_rng(0).standard_normal((4, GRID, GRID, 2))}
    ids = ["S/cat/a0.png", "S/cat/a1.png", "S/dog/a0.png", "S/dog/a1.png"]

    def write(name: str, ids: list[str]) -> Store:
        return write_store(tmp_path / name, grids, ids, (40, 60))

    assert set(run(write("a.zarr", ids), pairs=folder)["n_images"].tolist()) == {4}
    flat = write("b.zarr", ["a0.jpg", "a1.jpg", "x", "y"])
    assert set(run(flat, pairs=folder)["n_images"].tolist()) == {
        4
    }  # twice in their categories
    line = one_line(write("c.zarr", ["p/a0.jpg", "q/a0.jpg", "a1.jpg", "x"]), folder)
    assert "c has several images called cat/a0.jpg" in line
    # a dog of that name is no cat
    line = one_line(write("d.zarr", ["dog/a0", "dog/a1", "x", "y"]), write_pairs(tmp_path / "t", [
        annotation(), annotation("a1", "a2"), annotation(category="dog")]))  # fmt: skip
    assert "3 of the 5 images" in line


def test_images_of_another_size(tmp_path: Path) -> None:
    store = a_store(tmp_path, sizes=(41, 60))
    line = one_line(store, write_pairs(tmp_path / "s", [annotation()]))
    assert "a0.jpg has 60 x 41 pixels in a, 60 x 40 in the pair 000001-a0-a1:cat" in line


def test_cropped_images_and_missing_sizes(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    store = a_store(tmp_path, transform=transform("center"))
    # 60 x 40 becomes 96 x 64, of which 16 are cut off on both sides: x below 10 and above 50
    assert set(run(store, pairs=folder)["n_points"].tolist()) == {2}
    out = write_pairs(tmp_path / "t", [annotation(src_kps=[[9, 8], [30, 20]])])
    line = one_line(store, out)
    assert "1 of 2 keypoints lie outside of what the model of a saw" in line
    assert "--crop-mode border --crop-pct 1" in line
    (tmp_path / "more").mkdir()
    assert "extract anew" in one_line(a_store(tmp_path / "more", sizes=None), folder)
    (tmp_path / "bare").mkdir()
    bare = a_store(tmp_path / "bare", transform={})
    assert "does not say how its images were resized" in one_line(bare, folder)


def test_tokens_that_are_pooled_or_not_finite(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    tokens = np.ones((2, 1 + GRID * GRID, 2))
    pooled = write_sites(
        tmp_path / "p.zarr", {"blocks.0.out": tokens}, layout=LAYOUT, tokens="pooled",
        ids=["cat/a0.jpg", "cat/a1.jpg"], sizes=(40, 60), transform=transform(),
    )  # fmt: skip
    with pytest.raises(MissingInput, match=r"--tokens blocks\.0\.out=all"):
        run(pooled, pairs=folder)
    grids = np.ones((2, GRID, GRID, 2))
    grids[1, 3, 3] = np.inf
    broken = write_store(
        tmp_path / "b.zarr",
        {"blocks.0.out": grids},
        ["cat/a0.jpg", "cat/a1.jpg"],
        (40, 60),
    )
    assert "not finite, in row 1 (look at it with vitsee validate)" in one_line(
        broken, folder
    )


def test_choices_that_do_not_exist(store: Store, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "s", [annotation()])
    for option, word in (
        ("--alpha", "0"), ("--alpha", "-1"), ("--alpha", "nan"), ("--match", "x"),
        ("--pairs-per-class", "0"), ("--by-group", "x"), ("--preset", "x"), ("--candidates", "x"),
    ):  # fmt: skip
        assert command(store.path, "--pairs", folder, option, word).exit_code == 2
    for choice in (
        {"alphas": [0.0]}, {"alphas": [float("inf")]}, {"match": "x"}, {"preset": "x"},
        {"by_group": ["x"]}, {"alpha_of": "x"}, {"pairs_per_class": 0},
    ):  # fmt: skip
        with pytest.raises(VitseeError):
            run(store, pairs=folder, **choice)
    with pytest.raises(VitseeError, match="no store was given"):
        run(pairs=folder)
    pair = annotation()
    del pair["occlusion"]
    line = one_line(store, write_pairs(tmp_path / "t", [pair]), "--by-group", "occlusion")
    assert line.endswith("has no occlusion; leave out --by-group occlusion")


# ---------------------------------------------------------------- the miniature set


@pytest.mark.slow
def test_the_miniature_set_has_the_published_layout(tmp_path: Path) -> None:
    write_spair(tmp_path / "a")
    write_spair(tmp_path / "b", separator="_")
    published = {
        "filename", "src_imname", "trg_imname", "src_imsize", "trg_imsize", "src_bndbox",
        "trg_bndbox", "category", "src_pose", "trg_pose", "src_kps", "trg_kps", "kps_ids", "mirror",
        "viewpoint_variation", "scale_variation", "truncation", "occlusion", "pair_id",
    }  # fmt: skip
    files = sorted((tmp_path / "a/PairAnnotation/test").iterdir())
    assert len(files) == 90
    for file in files:
        pair = json.loads(file.read_text())
        assert set(pair) == published
        number, both = file.stem.split("-", 1)
        source, target = (
            pair[f"{side}_imname"].removesuffix(".jpg") for side in ("src", "trg")
        )
        assert (
            both == f"{source}-{target}:{pair['category']}"
            and int(number) == pair["pair_id"]
        )
        for side in ("src", "trg"):
            folder = tmp_path / "a/JPEGImages" / pair["category"]
            with Image.open(folder / pair[f"{side}_imname"]) as image:
                assert [*image.size, 3] == pair[f"{side}_imsize"]
            own = json.loads(
                (tmp_path / "a/ImageAnnotation" / pair["category"] / pair[f"{side}_imname"])
                .with_suffix(".json").read_text()
            )  # fmt: skip
            assert len(own["kps"]) == 30 and own["bndbox"] == pair[f"{side}_bndbox"]
            assert pair[f"{side}_kps"] == [own["kps"][slot] for slot in pair["kps_ids"]]
            mask = np.asarray(
                Image.open(
                    (tmp_path / "a/Segmentation" / pair["category"] / pair[f"{side}_imname"])
                    .with_suffix(".png")
                )
            )  # fmt: skip
            for x, y in pair[f"{side}_kps"]:
                assert mask[y, x] > 0  # on the object
            rows, cols = np.nonzero(mask)
            assert own["bndbox"] == [
                cols.min(),
                rows.min(),
                cols.max() + 1,
                rows.max() + 1,
            ]
    colon, plain = (read_pairs(tmp_path / name) for name in "ab")
    assert [p.name.replace(":", "_") for p in colon] == [p.name for p in plain]
    assert {p.category for p in colon} == {name.lower() for name in CATEGORIES}
    assert {p.variations["truncation"] for p in colon} == {0, 1, 2}
    listed = read_pairs(tmp_path / "b/Layout/small/test.txt")
    assert len(listed) == 45 and {p.name for p in listed} < {p.name for p in plain}
    again = tmp_path / "c"
    write_spair(again)
    for file in again.rglob("*.*"):
        assert (
            file.read_bytes() == (tmp_path / "a" / file.relative_to(again)).read_bytes()
        )


@pytest.mark.slow
def test_from_files_to_a_table_and_a_figure(tmp_path: Path) -> None:
    """Extracted whole into the input, with both protocols, and into best-layer."""
    root = tmp_path / "SPair-71k"
    write_spair(root)
    stores = []
    for seed in ("0", "1"):
        stores.append(tmp_path / f"vit{seed}.zarr")
        extracted(
            "test_vit", "--random-init", seed, "--data", root / "JPEGImages", "--attention", "none",
            "--crop-mode", "border", "--fill", "black", "--crop-pct", "1", "-o", stores[-1],
        )  # fmt: skip
    csv_file, png = tmp_path / "pck.csv", tmp_path / "pck.png"
    args = [
        "--pairs",
        root,
        "-o",
        csv_file,
        "--png",
        png,
        "--by-group",
        "class",
        "--replicates",
    ]
    result = command(*stores, *args)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(csv_file.open()))
    assert {row["n_pairs"] for row in rows if not row["class"]} == {"90"}
    assert {row["store"] for row in rows} == {"vit0", "vit1"}
    metrics = {f"{name}@{alpha}" for name in ("pck", "pck_point", "pck_image")
               for alpha in ("0.1", "0.05", "0.01")}  # fmt: skip
    assert {row["metric"] for row in rows} == metrics
    assert {row["baseline"] for row in rows} == {"", "chance", "still", "grid"}
    notes = json.loads((tmp_path / "pck.csv.json").read_text())["notes"]
    assert notes["protocol"]["match"].startswith("smooth: ")
    with Image.open(png) as image:
        assert min(image.size) > 300
    best = CliRunner().invoke(main, ["best-layer", str(csv_file), "--paired", "layers"])
    assert best.exit_code == 0, best.output
    other = command(stores[0], "--pairs", root, "--preset", "walmer", "--alpha", "0.1")
    assert other.exit_code == 0, other.output
    walmer = list(csv.DictReader(other.stdout.splitlines()))
    assert {row["metric"] for row in walmer} == {
        "pck@0.1",
        "pck_point@0.1",
        "pck_image@0.1",
    }


def test_panels_of_the_figure() -> None:
    """A panel per alpha from the highest to the lowest, the ceiling as a line where it is near, in
    words where it is far, and only rows of all pairs."""
    rows = []
    for baseline, values in (("", (0.3, 0.02)), ("grid", (0.45, 0.9)), ("chance", (0.1, 0.001)),
                             ("still", (0.2, 0.001))):  # fmt: skip
        for depth in range(3):
            for metric, value in zip(("pck@0.1", "pck@0.01"), values, strict=True):
                rows.append(
                    {"store": "a", "site": f"blocks.{depth}.out", "rel_depth": depth / 2,
                     "class": "", "metric": metric, "value": value, "low": value / 2,
                     "high": value * 1.2, "n_pairs": 7, "baseline": baseline}
                )  # fmt: skip
    rows.append({**rows[0], "class": "cat", "value": 0.99})
    figure = plot(Table.from_rows(rows))
    near, far = figure.axes
    assert [flat(axes.get_ylabel()) for axes in (near, far)] == [
        "keypoints found (PCK at 0.1)", "keypoints found (PCK at 0.01)",
    ]  # fmt: skip
    assert {axes.get_title(loc="right") for axes in (near, far)} == {"n = 7 pairs"}
    drawn = [
        sorted(
            {
                y
                for line in axes.lines
                for y in np.asarray(line.get_ydata(), float).tolist()
            }
        )
        for axes in (near, far)
    ]
    assert drawn == [[0.1, 0.2, 0.3, 0.45], [0.001, 0.02]]
    assert [text.get_text() for text in far.texts] == ["ceiling (grid): 0.90 ↑"]
    assert not near.texts and far.get_ylim()[1] < 0.04


def test_draws_of_the_command_are_those_of_the_seed(tmp_path: Path) -> None:
    pairs, ids, sizes = all_pairs()
    grids = {"blocks.0.out": np.random.default_rng(0).standard_normal((6, GRID, GRID, 4))}
    store = write_store(tmp_path / "a.zarr", grids, ids, sizes)
    folder = write_pairs(tmp_path / "s", pairs)
    table = run(store, pairs=folder, pairs_per_class=2, seed=3, alphas=[0.2])
    drawn = {p.name for p in draw_pairs(read_pairs(folder), 2, 3)}
    for file in (folder / "PairAnnotation/test").iterdir():
        if file.stem not in drawn:
            file.unlink()
    shutil.rmtree(folder / "Layout")
    alone = run(store, pairs=folder, alphas=[0.2])
    assert table["value"].tolist() == alone["value"].tolist()
    assert set(table["n_pairs"].tolist()) == {4}


@pytest.mark.slow
def test_images_of_several_sizes_on_one_canvas(tmp_path: Path) -> None:
    """Tiles give more tokens, and so a higher ceiling; no keypoint is found beside an image."""
    root = tmp_path / "SPair-71k"
    write_spair(root)
    data = ["--data", root / "JPEGImages", "--attention", "none", "--sites", "blocks"]
    whole, tiles = tmp_path / "whole.zarr", tmp_path / "tiles.zarr"
    model = ["test_vit", "--random-init", "0", "--img-size", "48"]
    extracted(*model, *data, "--crop-mode", "border", "--crop-pct", "1", "-o", whole)
    extracted(*model, *data, "--short-side", "96", "--tiles", "-o", tiles)
    store = open_store(tiles)
    assert not store.fills.all()
    table = run(open_store(whole), store, pairs=root, match="token", alphas=[0.05])
    low, high = (
        having(table, store=name, baseline="grid", metric="pck@0.05", site="embed")[
            "value"
        ][0]
        for name in ("whole", "tiles")
    )
    assert high > 3 * low > 0
    located = locate(store, read_pairs(root), choose_protocol(ProtocolOptions()))
    (site,) = store.select("last")
    found = search(store, site, located, "smooth", device=torch.device("cpu"))
    assert (found > located.window[:, :2]).all() and (found < located.window[:, 2:]).all()
    assert len(np.unique(located.window, axis=0)) > 1
