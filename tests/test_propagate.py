"""Propagation: known tokens, the released algorithm as loops, controls, intervals."""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitsee
from tests.reference_davis import evaluated, pixels_of, propagated
from tests.tables import check_chosen_metrics, having, unique
from tests.videos import CELL, METRICS, Array, plant, store_of, two_videos, value
from vitsee_core.analyses.propagate import COLUMNS, plot, run
from vitsee_core.analyses.propagate.davis import find_masks, find_videos
from vitsee_core.analyses.propagate.work import group_videos
from vitsee_core.demo.indexed_masks import write_mask
from vitsee_core.runtime.device import current_precision, precision_context
from vitsee_core.runtime.progress import Silent
from vitsee_core.statistics.jackknife import interval
from vitsee_core.statistics.shares import jackknife_share


def scene(n_frames: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """A video of two squares that move by whole cells of 8 pixels over a patterned ground; tokens
    are its colours: (frames, 48, 80) numbers of objects, (frames, 6, 10, dim)."""
    cells = np.zeros((n_frames, 6, 10), np.int64)
    for t in range(n_frames):
        cells[t, 1:4, t : t + 3] = 1
        cells[t, 4:6, 6:9] = 2
    ground = (
        np.random.default_rng(seed)
        .permutation(np.repeat(np.arange(6), 10))
        .reshape(6, 10)
    )
    colours = np.where(cells > 0, cells + 5, ground)
    labels = np.repeat(np.repeat(cells, CELL, 1), CELL, 2)
    return labels, np.eye(8)[colours]


# ------------------------------------------------------------------------------- known tokens


def test_tokens_that_tell_objects_reach_the_grids_ceiling(tmp_path: Path) -> None:
    labels, tokens = scene()
    store = store_of(tmp_path / "s.zarr", {"a": tokens}, (48, 80))
    table = run(store, masks=plant(tmp_path / "D", {"a": labels}))
    assert tuple(table.written.columns) == tuple(
        c for c in COLUMNS if c not in ("video", "object")
    )
    assert having(table, baseline="")["metric"].tolist() == METRICS
    for metric in METRICS:
        assert value(table, metric) == value(table, metric, baseline="grid")
    assert value(table, "j") > 0.85  # corners are rounded
    exact = run(store, masks=tmp_path / "D", upsample="nearest")
    assert [value(exact, m) for m in METRICS] == [1, 1, 1, 1, 1, 0, 0]
    assert value(exact, "j", baseline="still") < 0.9
    assert value(exact, "jf", baseline="random") < 0.6


def test_metrics_are_chosen(tmp_path: Path) -> None:
    labels, tokens = scene()
    store = store_of(tmp_path / "s.zarr", {"a": tokens}, (48, 80))
    masks = plant(tmp_path / "D", {"a": labels})
    work = partial(run, store, masks=masks, baselines=["still"])
    check_chosen_metrics(
        work, plot, {metric: [metric] for metric in METRICS}, "propagate"
    )
    assert "decay" in plot(work(metrics=["j_decay"])).axes[0].get_ylabel()


def test_a_leak_becomes_a_whole_object(tmp_path: Path) -> None:
    """The published flaw: a colour of fewer tokens than are taken is filled up with unlike ones, at
    exp(0); where that is all a class gets, its minimum and maximum make it a full object."""
    cells = np.zeros((3, 6, 10), np.int64)
    cells[:, 2, 4] = 1  # one token of its colour; gone from the second frame on
    labels = np.repeat(np.repeat(cells, CELL, 1), CELL, 2)
    cells[1:] = 0
    cells[1:, 0, 0] = 2  # of a colour that no frame had
    store = store_of(tmp_path / "s.zarr", {"a": np.eye(3)[cells]}, (48, 80))
    masks = plant(tmp_path / "D", {"a": labels})
    run(store, masks=masks, save=tmp_path / "saved")
    found = np.asarray(Image.open(tmp_path / "saved" / "a" / "00001.png"))
    assert (
        found == 1
    ).any()  # all of its 60 tokens tie at a cosine of 0: 1/60 of it is the object
    run(store, masks=masks, save=tmp_path / "clean", context=0, radius=1.0)
    assert not np.asarray(Image.open(tmp_path / "clean" / "a" / "00001.png")).any()


def test_random_tokens_against_the_loop(tmp_path: Path) -> None:
    """Scores of the loop's labels, made pixels by the released code's steps."""
    store, masks = two_videos(tmp_path)
    table = run(store, masks=masks, per_video=True, radius=2.0, save=tmp_path / "saved")
    seeds_of = Image.Resampling.NEAREST
    for name, n in (("a", 7), ("b", 5)):
        first = Image.open(masks / "Annotations/480p" / name / "00000.png")
        small = np.asarray(first.resize((10, 6), seeds_of))
        seeds = np.eye(small.max() + 1)[small]
        rows = slice(0, 7) if name == "a" else slice(7, 12)
        tokens = store.acts("blocks.0.out", "patches")[rows]
        for frame, soft in enumerate(propagated(tokens, seeds, radii=(2, 2))):
            saved = np.asarray(Image.open(tmp_path / "saved" / name / f"{frame:05d}.png"))
            if frame == 0:
                assert (saved == np.asarray(first)).all()
            else:
                # A pixel where two classes are equal may go either way by rounding.
                assert (saved != pixels_of(soft, CELL, (48, 80))).mean() < 2e-3
        assert len(list((tmp_path / "saved" / name).iterdir())) == n
    expected = evaluated(tmp_path / "saved", masks / "Annotations/480p", ["a", "b"])
    for metric in METRICS:
        assert value(table, metric, video="") == pytest.approx(
            expected[metric], abs=1e-12
        )


def test_a_notebook_gives_paths_as_text(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    (tmp_path / "only.txt").write_text("b\n")
    paths = {"masks": masks, "only": tmp_path / "only.txt", "save": tmp_path / "saved"}
    given = {name: str(path) for name, path in paths.items()}
    table = vitsee.propagate(str(store.path), sites="blocks", **given)
    assert table["n_videos"].tolist()[0] == 1
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["b"]


@pytest.mark.slow
def test_rows_of_videos_and_objects(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    table = run(store, masks=masks, per_video=True, save=tmp_path / "saved")
    assert tuple(table.written.columns) == COLUMNS
    of_a = evaluated(tmp_path / "saved", masks / "Annotations/480p", ["a"])
    of_b = evaluated(tmp_path / "saved", masks / "Annotations/480p", ["b"])
    for metric in METRICS:
        a, b = (value(table, metric, video=name, object=None) for name in "ab")
        assert [a, b] == pytest.approx([of_a[metric], of_b[metric]])
        both = [value(table, metric, video="a", object=i) for i in (1, 2)]
        assert np.mean(both) == pytest.approx(a)
        # three objects, of which a has two: its video counts twice
        assert value(table, metric, video="") == pytest.approx((2 * a + b) / 3)
        row = having(table, metric=metric, baseline="", video="")
        std = np.std([*both, b], ddof=1)
        assert row["std"][0] == pytest.approx(std)
        # the jackknife: without b, without a
        assert table.replicates is not None
        without = table.replicates[
            (table["metric"] == metric) & (table["baseline"] == "")
        ][0]
        assert without.tolist() == pytest.approx([b, a])
        limits = (-1.0, 1.0) if metric.endswith("decay") else (0.0, 1.0)
        _, *ends = interval(np.asarray(row["value"][0]), np.array([b, a]), limits)
        if metric.endswith("recall"):
            ends = [
                *map(np.asarray, jackknife_share(row["value"][0], np.array([b, a]), 2))
            ]
        assert [row["low"][0], row["high"][0]] == pytest.approx([*map(float, ends)])
    counts = having(table, metric="j", baseline="")
    assert counts["n_objects"].tolist() == [3, 2, 1, 1, 1, 1]
    assert counts["n_videos"].tolist() == [2, 1, 1, 1, 1, 1]
    assert counts["n_images"].tolist() == [8, 5, 5, 5, 3, 3]
    assert counts["video"].tolist() == ["", "a", "a", "a", "b", "b"]
    spread = having(table, metric="j", baseline="", video="a", object=1)["std"]
    assert 0 < float(spread[0]) < 1


def test_swapping_objects_swaps_their_rows(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    table = run(store, masks=masks, per_video=True)
    for path in (masks / "Annotations/480p/a").iterdir():
        labels = np.asarray(Image.open(path))
        write_mask(path, np.array([0, 2, 1], np.uint8)[labels])
    other = run(store, masks=masks, per_video=True)
    for metric in METRICS:
        for i in (1, 2):
            mine = value(table, metric, video="a", object=i)
            assert value(other, metric, video="a", object=3 - i) == mine


@pytest.mark.slow
def test_controls(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    table = run(store, masks=masks)
    still = tmp_path / "still"
    shutil.copytree(masks / "Annotations/480p", still)
    for video in still.iterdir():
        first = (video / "00000.png").read_bytes()
        for path in video.iterdir():
            path.write_bytes(first)
    expected = evaluated(still, masks / "Annotations/480p", ["a", "b"])
    for metric in METRICS:
        assert value(table, metric, baseline="still") == pytest.approx(
            expected[metric], abs=1e-12
        )
    # the grid: each frame's own mask by the released code's steps
    for path in still.rglob("*.png"):
        own = Image.open(masks / "Annotations/480p" / path.parent.name / path.name)
        small = np.asarray(own.resize((10, 6), Image.Resampling.NEAREST))
        write_mask(path, pixels_of(np.eye(3)[small], CELL, (48, 80)))
    expected = evaluated(still, masks / "Annotations/480p", ["a", "b"])
    for metric in METRICS:
        assert value(table, metric, baseline="grid") == pytest.approx(
            expected[metric], abs=1e-12
        )
    # random tokens are those of the seed, whatever the store's are
    again = run(store, masks=masks, baselines=["random"], seed=0)
    assert value(again, "jf", baseline="random") == value(table, "jf", baseline="random")
    assert unique(again, "baseline") == ["", "random"]
    other = run(store, masks=masks, baselines=["random"], seed=1)
    assert value(other, "jf", baseline="random") != value(table, "jf", baseline="random")
    assert unique(run(store, masks=masks, baselines=[]), "baseline") == [""]


@pytest.mark.slow
def test_results_do_not_depend_on_slabs_jobs_and_processes(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    expected = run(store, masks=masks, per_video=True)

    def pickled(function: Callable[[Any], Any], items: Any) -> Any:
        return [pickle.loads(pickle.dumps(function))(item) for item in items]

    for slab, more in ((1, {"jobs": 1}), (4, {"jobs": 3}), (5, {"map": ThreadPoolExecutor(2).map}),
                       (64, {"map": pickled})):  # fmt: skip
        other = two_videos(tmp_path / str(slab), slab=slab)[0]
        table = run(other, masks=masks, per_video=True, **more)
        assert expected["value"].tolist() == table["value"].tolist()


def test_videos_of_a_slab_go_together(tmp_path: Path) -> None:
    store, masks = two_videos(tmp_path)
    videos = find_videos([store], find_masks(masks))
    names = [[v.name for v in group] for group in group_videos(videos, 64, 1)]
    assert names == [["a", "b"]]
    assert len(group_videos(videos, 64, 5)) == len(group_videos(videos, 7, 1)) == 2


@pytest.mark.slow
def test_several_stores_and_sites(tmp_path: Path) -> None:
    """The random row is one number for every site of a width, and each store has its own rows."""
    store, masks = two_videos(tmp_path)
    other = two_videos(tmp_path / "b", slab=7)[0]
    other.label = "b"
    table = run(store, other, masks=masks)
    assert unique(table, "store") == ["s", "b"]
    for metric in METRICS:
        for baseline in ("", "grid", "random"):
            rows = having(table, metric=metric, baseline=baseline)
            assert rows["value"][0] == rows["value"][1]
    figure = plot(table)
    assert [axes.get_ylabel().split()[-1] for axes in figure.axes] == ["F", "J", "F"]
    assert figure.axes[0].get_title(loc="right") == "n = 2 videos"


class Precision(Silent):
    """What products run in whenever a frame is done; the first thread is through before others."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.unit, self.first = "", 0
        self.both = threading.Event()

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        self.unit = unit

    def advance(self, count: int, size_bytes: int = 0) -> None:
        if self.unit == "frames":
            self.first = self.first or threading.get_ident()
            if threading.get_ident() == self.first:
                self.both.wait(10)
            else:
                self.both.set()
                time.sleep(0.1)
            self.seen.append(current_precision(torch.device("cuda")))


def test_no_thread_changes_the_precision_of_others(tmp_path: Path) -> None:
    """A caller who has switched TF32 on has it on afterwards, and never while the work goes on."""
    store, masks = two_videos(tmp_path)
    progress = Precision()
    with precision_context(torch.device("cuda"), "tf32"):
        run(store, masks=masks, jobs=2, progress=progress, baselines=[])
        assert current_precision(torch.device("cuda")) == "tf32"
    assert set(progress.seen) == {"fp32"}
