"""vitsee propagate: what is refused and remarked, the command, and the miniature DAVIS."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from tests.extractions import extracted
from tests.reference_davis import evaluated
from tests.stores import write_sites
from tests.tables import having, unique
from tests.videos import CELL, METRICS, plant, store_of, two_videos, value
from vitsee_cli.main import main
from vitsee_core.analyses.propagate import run
from vitsee_core.analyses.propagate.davis import find_masks, find_videos
from vitsee_core.analyses.propagate.work import VideoWork
from vitsee_core.demo.davis import CLIPS, write_davis
from vitsee_core.demo.indexed_masks import palette
from vitsee_core.runtime.progress import Silent
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.errors import MissingInput, SiteError, StoreMismatch, VitseeError
from vitsee_stores.layout import TokenLayout


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["propagate", *map(str, args)])


# ------------------------------------------------------------------------------- what is refused


def change_mask(path: Path, change: Callable[[Image.Image], Image.Image]) -> None:
    with Image.open(path) as image:
        image.load()
    change(image).save(path)


def emptied(image: Image.Image) -> Image.Image:
    void = np.full((image.height, image.width), 255, np.uint8)
    return Image.fromarray(np.where(np.asarray(image) > 0, void, 0))


def claim_pixels(path: Path) -> None:
    """A header that claims more pixels than memory holds."""
    data = bytearray(path.read_bytes())
    data[16:24] = (10**6).to_bytes(4, "big") * 2
    path.write_bytes(bytes(data))


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# A mask of video a, what happens to it, and the line.
REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("00000", Path.unlink, "no mask .*a/00000.png of the first frame of a"),
    ("00003", Path.unlink,
     r"a has 7 frames and no mask of 1 of them \(00003\): only videos with a mask per frame"),
    ("00000", lambda path: shutil.copy(path, path.with_stem("00007")),
     r"masks of frames that are not in the store \(00007\); expected all frames of a"),
    ("00002", lambda path: change_mask(path, lambda image: image.convert("RGB")),
     "a/00002.png has mode RGB; expected a mask of numbers of objects"),
    ("00002", lambda path: change_mask(path, lambda image: image.resize((40, 24))),
     "00002.png is 40 x 24 pixels, its frame 80 x 48; expected masks of the frames' size"),
    ("00000", lambda path: change_mask(path, emptied),
     r"a/00000.png shows no object; expected numbers from 1 .* \(255 is void; .*none"),
    ("00001", lambda path: path.write_bytes(b"\x89PNG\r\n"), "a/00001.png: "),
    ("00000", claim_pixels, r"a/00000\.png"),
    ("00001", become_pipe, r"a/00001\.png: not a regular file"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "change", "line"), REFUSED)
def test_masks_that_are_refused(
    tmp_path: Path, mask: str, change: Callable[[Path], object], line: str
) -> None:
    store, masks = two_videos(tmp_path)
    change(masks / f"Annotations/480p/a/{mask}.png")
    with pytest.raises(VitseeError, match=line):
        run(store, masks=masks, save=tmp_path / "saved")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["DAVIS", "s.zarr"]


def renumbered(masks: Path, values: dict[int, int]) -> None:
    """Give objects of all masks other numbers."""
    for path in masks.rglob("*.png"):
        with Image.open(path) as image:
            numbers = np.array(image)
        changed = numbers.copy()
        for number, value_in_file in values.items():
            changed[numbers == number] = value_in_file
        Image.fromarray(changed).save(path)


@pytest.mark.parametrize(
    ("values", "void", "usual"),
    [
        # DAVIS-2016: 0 and 255. The other object becomes background in both.
        ({1: 255, 2: 0}, "none", {2: 0}),
        ({2: 255}, "none", {}),
        ({1: 7, 2: 255}, 7, {1: 0, 2: 1}),
        ({2: 9}, 9, {2: 255}),
    ],
)
def test_another_value_is_void_or_none(
    tmp_path: Path, values: dict[int, int], void: int | str, usual: dict[int, int]
) -> None:
    """Masks whose 255 is an object score as the same masks with the numbers 1, 2, ..."""
    store, masks = two_videos(tmp_path / "usual")
    _, other_masks = two_videos(tmp_path / "other")
    if 1 in usual:
        shutil.rmtree(masks / "Annotations/480p/b")
        shutil.rmtree(other_masks / "Annotations/480p/b")
        only = tmp_path / "only.txt"
        only.write_text("a\n")
    else:
        only = None
    renumbered(masks, usual)
    renumbered(other_masks, values)
    expected = run(store, masks=masks, only=only)
    table = run(store, masks=other_masks, void=void, only=only)
    assert table.frame.equals(expected.frame)
    assert table.notes["void"] == str(void)
    assert "void" not in expected.notes


def test_the_value_that_is_void(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    for void in (0, 256):
        with pytest.raises(VitseeError, match=f"--void {void}: .* 1 to 255, or none"):
            run(store, masks=masks, void=void)
    renumbered(masks, {1: 255, 2: 0})
    with pytest.raises(VitseeError, match="--void none makes it an object"):
        run(store, masks=masks)
    assert run(store, masks=masks, void="none", per_video=True).frame["object"].max() == 1
    result = invoke(store.path, "--masks", masks, "--void", "some")
    assert result.exit_code == 2
    assert "expected a pixel value like 255, or none" in result.stderr


def test_masks_of_one_bit(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    renumbered(masks, {2: 0})
    expected = run(store, masks=masks)
    for path in masks.rglob("*.png"):
        change_mask(path, lambda image: image.point(lambda number: 255 * number, "1"))
    assert run(store, masks=masks).frame.equals(expected.frame)


def ids(*names: object) -> dict[str, Any]:
    return {"ids": [f"{name}.jpg" for name in names]}


STORES: list[tuple[dict[str, Any], str]] = [
    ({"order": "shuffled"}, "s holds its images in random order; .* --order dataset"),
    (ids(*(f"a/{i:05d}" for i in (*range(7), *range(10, 15)))),
     r"a has 12 frames and no mask of 5 of them \(00010, 00011 and 3 more\)"),
    (ids(*(f"{'a' if i % 2 else 'b'}/{i:05d}" for i in range(12))),
     "s: the frames of b are not consecutive"),
    (ids(*(f"{'x' if i < 7 else 'y'}/a/{i:05d}" for i in range(12))),
     "s has two videos called a: x/a and y/a; give them different names"),
    (ids(*range(12)),
     "s: 0.jpg has no folder, which would name its video; expected ids like bear/00000.jpg"),
    (ids(*(f"a/{i}" for i in (0, 1, 10, 11, *range(2, 10)))),
     "s: in a frame 2 follows 11; expected frames in the order of their names"),
    (ids(*(f"{i // 2}/{i}" for i in range(12))),
     "s: 0 has 2 frames; expected at least 3, as the first and the last are not scored"),
    ({"valid": [1] * 8 + [0] + [1] * 3}, "s: b/00001.jpg could not be read; .* every frame of b"),
    ({"sizes": [[48, 80]] * 3 + [[40, 80]] * 9}, "s: the frames of a have different sizes"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "line"), STORES)
def test_stores_that_are_refused(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    store, masks = two_videos(tmp_path, **more)
    with pytest.raises(VitseeError, match=line):
        run(store, masks=masks)


def test_sites_that_are_refused(tmp_path: Path) -> None:
    _, masks = two_videos(tmp_path)
    rows = np.zeros((12, 60, 4))
    of: dict[str, Any] = {"order": "dataset", "sizes": (48, 80)}
    of |= ids(*(f"a/{i:05d}" for i in range(7)), *(f"b/{i:05d}" for i in range(5)))
    of["layout"] = TokenLayout((), (6, 10), stride_px=(CELL, CELL))
    vectors = write_sites(tmp_path / "v.zarr", {"out": rows, "pooled": rows[:, 0]}, **of)
    with pytest.raises(
        SiteError, match="v: pooled has no grid of tokens; propagate needs sites"
    ):
        run(vectors, masks=masks, sites=["blocks", "pooled"])
    pooled = write_sites(tmp_path / "p.zarr", {"out": rows}, tokens="pooled", **of)
    with pytest.raises(
        MissingInput, match="p keeps out pooled only: extract it with --tokens"
    ):
        run(pooled, masks=masks)


def test_stores_that_do_not_go_together(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    tokens = {"a": np.ones((7, 6, 10, 2)), "c": np.ones((5, 6, 10, 2))}
    other = store_of(tmp_path / "o.zarr", tokens, (48, 80))
    with pytest.raises(
        StoreMismatch, match=r"s and o hold other videos \(b, c in one of them"
    ):
        run(store, other, masks=masks)
    only = tmp_path / "only.txt"
    only.write_text("a\n")
    assert run(store, other, masks=masks, only=only)["n_videos"].tolist()[0] == 1
    tokens = {"a": np.ones((6, 6, 10, 2)), "b": np.ones((5, 6, 10, 2))}
    shorter = store_of(tmp_path / "q.zarr", tokens, (48, 80))
    with pytest.raises(StoreMismatch, match="s and q hold other frames of a"):
        run(store, shorter, masks=masks)


def test_only(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    only = tmp_path / "only.txt"
    only.write_text("b\n\n")
    table = run(store, masks=masks, only=only, per_video=True)
    assert list(dict.fromkeys(table["video"])) == ["", "b"]
    both = run(store, masks=masks, per_video=True)
    for metric in METRICS:
        assert value(table, metric, video="") == value(
            both, metric, video="b", object=None
        )
    only.write_text("a/00002\n")
    with pytest.raises(
        VitseeError, match="names some frames of a and not all; expected the names"
    ):
        run(store, masks=masks, only=only)
    only.write_text("b\nzebra\n")
    with pytest.raises(VitseeError, match="zebra"):
        run(store, masks=masks, only=only)


def test_folders_of_masks(tmp_path: Path) -> None:
    _, masks = two_videos(tmp_path)
    for path in (masks, masks / "Annotations", masks / "Annotations/480p"):
        assert find_masks(path).root == masks / "Annotations/480p"
    (tmp_path / "none").mkdir()
    with pytest.raises(
        VitseeError, match=r"no masks in .*none; expected files like Annotations"
    ):
        find_masks(tmp_path / "none")
    with pytest.raises(VitseeError, match=r"no folder .*nowhere; expected that of DAVIS"):
        find_masks(tmp_path / "nowhere")


def test_an_unfinished_store(tmp_path: Path) -> None:
    """Only whole videos of committed slabs."""
    store, masks = two_videos(tmp_path, slab=4, slabs=[0, 1])
    assert not store.complete
    table = run(store, masks=masks, per_video=True)
    assert list(dict.fromkeys(table["video"])) == ["", "a"]
    none, _ = two_videos(tmp_path / "none", slab=4, slabs=[1])
    with pytest.raises(VitseeError, match="s holds no whole video"):
        run(none, masks=masks)


def test_other_refusals(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    for more, line in (
        ({"baselines": ["chance"]}, "no baseline 'chance'; expected still, grid, random"),
        ({"images": 3}, "whole videos; choose them with only=, not images="),
        ({"save": masks}, "DAVIS exists; --save makes a folder: give another name"),
        ({"save": tmp_path / "no" / "saved"}, "there is no folder"),
        ({"save": store.path / "saved"}, "results do not go into a store"),
    ):
        with pytest.raises(VitseeError, match=line):
            run(store, masks=masks, **more)
    other = two_videos(tmp_path / "b")[0]
    other.label = "../x"
    with pytest.raises(
        VitseeError, match="--save makes folders called as the stores are"
    ):
        run(store, other, masks=masks, save=tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ------------------------------------------------------------------------------- remarks


def test_what_a_reader_should_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost objects, hidden parts, a window that is smaller than what is taken."""
    labels = np.zeros((4, 48, 80), np.uint8)
    labels[:, 8:40, 8:40] = 1
    labels[:, 0, 70] = 2  # one pixel, in no cell's middle
    store = store_of(
        tmp_path / "s.zarr",
        {"a": np.random.default_rng(0).normal(size=(4, 6, 10, 3))},
        (48, 80),
    )
    masks = plant(tmp_path / "D", {"a": labels})
    with caplog.at_level(logging.INFO):
        table = run(store, masks=masks, radius=0.0, context=1)
    lost = (
        "s, 6 x 10 tokens: 1 of 2 objects of the first masks are lost: no token stands for them; "
        "--first-labels area keeps them"
    )
    capped = (
        "s blocks.0.out: the window has 2 tokens in all frames: --topk 5 takes them all"
    )
    assert table.notes["remarks"] == [capped, lost]
    assert {capped, lost} <= {record.getMessage() for record in caplog.records}
    assert any(
        "3 frames, 2 times (sites and noise)" in r.getMessage() for r in caplog.records
    )
    assert "remarks" not in run(store, masks=masks, first_labels="area").notes


def test_frames_that_were_cropped(tmp_path: Path) -> None:
    labels = np.zeros((4, 48, 160), np.uint8)
    labels[:, 8:40, 60:100] = 1
    transform = {
        "input_size": [3, 48, 80], "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "center", "mean": [0.5] * 3, "std": [0.5] * 3,
    }  # fmt: skip
    cells = np.zeros((4, 6, 10), np.int64)
    cells[:, 1:5, 2:8] = 1
    store = store_of(
        tmp_path / "s.zarr", {"a": np.eye(2)[cells]}, (48, 160), transform=transform
    )
    table = run(store, masks=plant(tmp_path / "D", {"a": labels}), upsample="nearest")
    assert table.notes["remarks"] == [
        "s, 6 x 10 tokens: no token sees 50 % of the frames of a, which is taken for background "
        "(extract --crop-mode squash keeps it all)"
    ]
    # 48 of the 40 columns, all 32 rows: the object begins and ends within a cell
    assert value(table, "j") == pytest.approx(40 / 48)


# ------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature DAVIS and the store of its validation videos."""
    folder = tmp_path_factory.mktemp("davis")
    write_davis(folder / "DAVIS")
    extracted(
        "test_vit", "--random-init", 0, "--data", folder / "DAVIS/JPEGImages/480p", "--only",
        folder / "DAVIS/ImageSets/2017/val.txt", "--order", "dataset", "--crop-mode", "squash",
        "--img-size", "96x160", "--attention", "none", "--no-residual", "-o", folder / "s.zarr",
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_from_a_data_set_to_a_picture(demo: Path, tmp_path: Path) -> None:
    """Extract, propagate, the figure; and the saved masks score what the table has."""
    result = invoke(
        demo / "s.zarr", "--masks", demo / "DAVIS", "--only", demo / "DAVIS/ImageSets/2017/val.txt",
        "-o", tmp_path / "r.csv", "--png", tmp_path / "r.png", "--save", tmp_path / "saved",
        "--sites", "last", "--sites", "first", "--per-video", "--replicates",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "(sites and noise), at" in result.stderr
    assert (tmp_path / "r.png").stat().st_size > 10_000
    table = Table.read(tmp_path / "r.csv")
    store = open_store(demo / "s.zarr")
    for site in unique(table, "site"):
        saved = tmp_path / "saved" / "s" / str(site)
        expected = evaluated(saved, demo / "DAVIS/Annotations/480p", ["a", "b", "c"])
        for metric in METRICS:
            rows = having(table, site=site, metric=metric, video="", baseline="")
            assert float(rows["value"][0]) == pytest.approx(expected[metric], abs=1e-12)
    image = Image.open(saved / "a" / "00002.png")
    assert (image.mode, image.size) == ("P", (80, 48))
    assert (image.getpalette() or [])[:12] == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
    assert len(list(saved.rglob("*.png"))) == store.n_images
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["notes"]["videos"] == {"a": 8, "b": 6, "c": 5}
    assert sidecar["notes"]["replicates"]["s"]["n_blocks"] == 3
    with (tmp_path / "r.replicates.csv").open() as file:
        assert {"without_0", "without_1", "without_2", "video", "object"} <= set(
            next(csv.reader(file))
        )


@pytest.mark.slow
def test_normal_and_dense_stores(tmp_path: Path) -> None:
    """Walmer et al. 2023, Table 4: squashed to the input, and tiles of frames of several sizes."""
    write_davis(tmp_path / "DAVIS")
    data = tmp_path / "DAVIS/JPEGImages/480p"
    only = tmp_path / "DAVIS/ImageSets/2017/val.txt"
    for name, how in (
        ("normal", ("--crop-mode", "squash", "--attention", "none", "--no-residual")),
        ("dense", ("--short-side", 64, "--tiles")),
    ):
        extracted(
            "demo:vit", "--data", data, "--only", only, "--order", "dataset", *how, "--sites",
            "embed", "--sites", "last", "-o", tmp_path / f"{name}.zarr",
        )  # fmt: skip
    result = invoke(
        tmp_path / "normal.zarr", tmp_path / "dense.zarr", "--masks", tmp_path / "DAVIS",
        "-o", tmp_path / "r.csv", "--png", tmp_path / "r.png", "--save", tmp_path / "saved",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "no token sees" not in result.stderr
    table = Table.read(tmp_path / "r.csv")
    for store in ("normal", "dense"):
        for site in unique(table, "site"):
            saved = tmp_path / "saved" / store / str(site)
            expected = evaluated(
                saved, tmp_path / "DAVIS/Annotations/480p", ["a", "b", "c"]
            )
            found = {m: value(table, m, store=store, site=site) for m in METRICS}
            assert found == pytest.approx(expected, abs=1e-12)
    for baseline in ("", "grid"):
        dense, normal = (
            value(table, "j", store=store, site="embed", baseline=baseline)
            for store in ("dense", "normal")
        )
        assert dense > normal + 0.1
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_one_site_is_saved_as_the_official_evaluation_reads_it(
    demo: Path, tmp_path: Path
) -> None:
    result = invoke(
        demo / "s.zarr", "--masks", demo / "DAVIS", "--sites", "last", "--baseline", "none",
        "--save", tmp_path / "saved", "--radius", "none", "--jobs", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["a", "b", "c"]
    assert not list(tmp_path.glob(".vitsee*"))
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["metric"] for row in rows] == METRICS
    again = invoke(
        demo / "s.zarr", "--masks", demo / "DAVIS", "--save", tmp_path / "saved"
    )
    assert (again.exit_code, again.stdout) == (1, "")
    assert "exists; --save makes a folder: give another name" in again.stderr


def test_settings_reach_the_sidecar(demo: Path, tmp_path: Path) -> None:
    result = invoke(
        demo / "s.zarr", "--masks", demo / "DAVIS", "--preset", "dinov3", "--radius", "64px",
        "--topk", 7, "-o", tmp_path / "r.csv", "--baseline", "still",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    notes = json.loads((tmp_path / "r.csv.json").read_text())["notes"]
    assert notes["settings"] == {
        "context": 7, "radius": None, "radius_px": 64.0, "neighbourhood": "circle", "topk": 7,
        "temperature": 0.2, "first_labels": "nearest", "upsample": "nearest",
    }  # fmt: skip
    assert notes["preset"].startswith("dinov3: ")
    assert unique(Table.read(tmp_path / "r.csv"), "site") == ["norm"]


def test_mistakes_are_one_line(demo: Path) -> None:
    masks: list[object] = ["--masks", demo / "DAVIS"]
    cases: list[tuple[list[object], int, str]] = [
        ([], 2, "Missing option '--masks'"),
        ([*masks, "--radius", "far"], 2, "'far'; expected tokens like 12, pixels"),
        ([*masks, "--temperature", 0], 2, "0 is not in the range x>0"),
        ([*masks, "--baseline", "none", "--baseline", "grid"], 2, "none excludes"),
        ([*masks, "--sites", "pooled"], 1, "pooled has no grid of tokens"),
        (["--masks", demo / "nothing"], 1, "no folder"),
        ([*masks, "--only", demo / "x.txt"], 1, "no file"),
    ]
    for given, code, line in cases:
        result = invoke(demo / "s.zarr", *given)
        assert (result.exit_code, result.stdout) == (code, "")
        assert line in result.stderr
        assert code == 2 or len(result.stderr.strip().splitlines()) == 1


# ------------------------------------------------------------------------------- the miniature


def test_the_miniature_is_laid_out_as_davis(tmp_path: Path) -> None:
    write_davis(tmp_path / "x")
    write_davis(tmp_path / "y")
    root = tmp_path / "x"
    files = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    for path in files:
        assert (root / path).read_bytes() == (tmp_path / "y" / path).read_bytes()
    assert (root / "ImageSets/2017/val.txt").read_text() == "a\nb\nc\n"
    assert (root / "ImageSets/2017/train.txt").read_text() == "train-only\n"
    for clip in CLIPS:
        frames = [f for f in files if f.startswith(f"JPEGImages/480p/{clip.name}/")]
        assert len(frames) == clip.n_frames
        masks = []
        for frame in frames:
            mask = Image.open(
                root / frame.replace("JPEGImages", "Annotations").replace("jpg", "png")
            )
            assert mask.mode == "P"
            assert mask.size == Image.open(root / frame).size == clip.size[::-1]
            masks.append(np.asarray(mask))
        assert np.unique(masks[0]).tolist() == list(range(len(clip.objects) + 1))
        assert ((np.stack(masks) == 255).any((1, 2)).nonzero()[0].tolist()) == (
            [] if clip.void is None else [clip.void]
        )
    gone = np.asarray(Image.open(root / "Annotations/480p/a/00007.png"))
    assert np.unique(gone).tolist() == [0, 1]  # the second object has left


def test_the_palette_is_that_of_voc() -> None:
    colours = np.array(palette()).reshape(256, 3).tolist()
    assert colours[:4] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert (colours[8], colours[15], colours[255]) == (
        [64, 0, 0],
        [192, 128, 128],
        [224, 224, 192],
    )


def test_work_without_folders_leaves_out_the_last_frame(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    videos = find_videos([store], find_masks(masks))
    work: Any = VideoWork([store], [], find_masks(masks), None, (), 0, None)  # type: ignore[arg-type]
    assert [work.n_frames(video) for video in videos] == [6, 4]
    work.folders = {(0, "x"): tmp_path}
    assert [work.n_frames(video) for video in videos] == [7, 5]


# ------------------------------------------------------------------------------- ends


class Interrupted(Silent):
    """A user who presses Ctrl-C while frames are counted; counts what happens afterwards, slowly:
    a thread that is to end has the time to hear of it."""

    def __init__(self) -> None:
        self.unit, self.n_frames, self._counting = "", 0, threading.Lock()

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        self.unit = unit

    def advance(self, count: int, size_bytes: int = 0) -> None:
        if self.unit == "frames":
            with self._counting:
                self.n_frames += 1
                if self.n_frames == 3:
                    raise KeyboardInterrupt
            if self.n_frames > 3:
                time.sleep(0.2)


def test_an_interrupt_ends_every_thread(tmp_path: Path) -> None:
    """What is left of the work is not done first; nothing is left behind."""
    store, masks = two_videos(tmp_path)
    progress = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run(store, masks=masks, jobs=2, progress=progress, save=tmp_path / "saved")
    assert progress.n_frames < 6  # of 22: the other thread may be at one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["DAVIS", "s.zarr"]


def test_masks_are_read_before_the_work(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    (masks / "Annotations/480p/b/00003.png").write_bytes(b"")
    progress = Interrupted()
    with pytest.raises(VitseeError, match=r"b/00003\.png"):
        run(store, masks=masks, progress=progress)
    assert (progress.unit, progress.n_frames) == ("masks", 0)
