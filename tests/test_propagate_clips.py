"""Propagation from the tokens of clips: against stores of the same frames as images, and a moving
square by hand; what is refused."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.clip_files import write_frames
from tests.extractions import RESNET, extracted
from tests.stores import write_sites
from tests.tables import having
from tests.videos import CELL, METRICS, plant, store_of, value
from vitsee_core.analyses.propagate import BASELINES, run
from vitsee_core.images.videos import Sampling
from vitsee_stores import Store, open_store
from vitsee_stores.errors import StoreMismatch, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.plan import Clip

Array = NDArray[Any]
GRID, DIM = (4, 6), 5
SIZE = (GRID[0] * CELL, GRID[1] * CELL)


def clips_of(
    path: Path,
    tokens: Mapping[str, Array],
    frames: int,
    *,
    time: str = "ordered",
    **more: Any,
) -> Store:
    """A store of a clip for each video; tokens: (places in time, rows, cols, dim), in the order
    that the model saw."""
    path.parent.mkdir(exist_ok=True)
    every = list(tokens.values())
    of_time = len(every[0])
    layout = TokenLayout(
        (), GRID, stride_px=(CELL, CELL), frames=of_time, stride_frames=frames / of_time
    )
    values = np.stack([x.reshape(layout.n_tokens, -1) for x in every])
    sampling = {"frames": frames, "every": None, "time": time, "seed": 0}
    transform = {
        "input_size": [3, *SIZE], "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3, "clip": sampling,
    }  # fmt: skip
    about = {
        "ids": list(tokens),
        "sizes": SIZE,
        "transform": transform,
        "order": "shuffled",
    }
    clip = Clip(frames, time=time)
    return write_sites(
        path,
        {"blocks.0.out": values},
        layout=layout,
        slab=2,
        clip=clip,
        **{**about, **more},
    )


def moving(n: int) -> Array:
    """(frames, rows, cols) 1 where a square of 2 x 2 cells is, which moves a cell to the right."""
    cells = np.zeros((n, *GRID), np.int64)
    for t in range(n):
        cells[t, 1:3, t : t + 2] = 1
    return cells


def pixels(cells: Array) -> Array:
    return cells.repeat(CELL, 1).repeat(CELL, 2)


def noisy(cells: Array, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return 0.6 * np.eye(DIM)[cells] + 0.4 * rng.normal(size=(*cells.shape, DIM))


@pytest.fixture
def videos(tmp_path: Path) -> tuple[dict[str, Array], Path]:
    """Two videos of five frames: where the square is, and their masks."""
    cells = {"a": moving(5), "b": moving(5)[:, ::-1]}
    return cells, plant(
        tmp_path / "D", {name: pixels(own) for name, own in cells.items()}
    )


def test_a_token_a_frame_is_as_of_images(
    tmp_path: Path, videos: tuple[dict[str, Array], Path]
) -> None:
    cells, masks = videos
    tokens = {name: noisy(own, k) for k, (name, own) in enumerate(cells.items())}
    images = run(store_of(tmp_path / "s.zarr", tokens, SIZE), masks=masks, per_video=True)
    clips = run(
        clips_of(tmp_path / "t.zarr" / "s.zarr", tokens, 5), masks=masks, per_video=True
    )
    named = (
        "replicates",
        "weights",
    )  # of clips the weights' name says how frames were taken
    assert images.frame.drop(named).equals(clips.frame.drop(named))
    assert clips.frame["weights"].cast(str).str.contains("5 frames").all()
    assert "clips" not in images.notes
    assert clips.notes["clips"] == {"s": {"frames": 5, "time": "ordered"}}


def test_a_token_of_two_frames_by_hand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens show where the square is in the first of their two frames: there the mask is right, in
    the second it is a cell behind: of 2 x 2 cells 2 are shared, and 6 in one of both."""
    cells = moving(6)[:, :, : GRID[1]]
    cells[5] = 0
    cells[5, 1:3, 4:6] = 1
    masks = plant(tmp_path / "D", {"a": pixels(cells)})
    store = clips_of(tmp_path / "s.zarr", {"a": np.eye(DIM)[cells[::2]]}, 6)
    with caplog.at_level(logging.INFO):
        table = run(
            store, masks=masks, save=tmp_path / "saved", topk=4, upsample="nearest"
        )
    for frame in range(6):
        found = np.asarray(Image.open(tmp_path / "saved" / "a" / f"{frame:05d}.png"))
        assert (found == pixels(cells)[frame - frame % 2]).all()
    # Frames 1 to 4 are scored.
    assert value(table, "j") == pytest.approx((1 / 3 + 1 + 1 / 3 + 1) / 4)
    assert value(table, "j", baseline="grid") == 1.0
    assert "s: a token stands for 2 sampled frames" in caplog.text
    assert table.notes["videos"] == {"a": 6}


def test_noise_of_a_token_of_two_frames(tmp_path: Path) -> None:
    """The control has tokens that two frames share, as the model has."""
    masks = plant(tmp_path / "D", {"a": pixels(moving(4))})
    store = clips_of(tmp_path / "s.zarr", {"a": np.eye(DIM)[moving(4)[::2]]}, 4)
    rng = np.random.default_rng((0, zlib.crc32(b"a")))
    noise = np.stack([rng.standard_normal((*GRID, DIM), np.float32) for _ in range(2)])
    images = store_of(tmp_path / "i.zarr", {"a": noise.repeat(2, 0)}, SIZE)
    for metric in METRICS:
        expected = value(run(images, masks=masks), metric)
        found = value(run(store, masks=masks), metric, baseline="random")
        assert found == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_images_beside_clips_are_those_that_were_sampled(tmp_path: Path) -> None:
    """Four of eight frames are sampled: those in the middles of four equal parts."""
    every = np.concatenate([moving(4), moving(4)[::-1]])
    tokens = noisy(every)
    masks = plant(tmp_path / "D", {"a": pixels(every)})
    sampled = [1, 3, 5, 7]
    images = store_of(tmp_path / "images.zarr", {"a": tokens}, SIZE)
    clips = clips_of(tmp_path / "clips.zarr", {"a": tokens[sampled]}, 4)
    table = run(clips, images, masks=masks, save=tmp_path / "saved")
    assert table.notes["videos"] == {"a": 4}
    alone = plant(tmp_path / "E", {"a": pixels(every[sampled])})
    few = run(store_of(tmp_path / "few.zarr", {"a": tokens[sampled]}, SIZE), masks=alone)
    for metric in METRICS:
        for baseline in ("", *BASELINES):
            rows = having(table, metric=metric, baseline=baseline)
            expected = value(few, metric, baseline=baseline)
            assert np.allclose(rows["value"], expected, equal_nan=True)
    names = sorted(p.name for p in (tmp_path / "saved/clips/blocks.0.out/a").iterdir())
    assert names == [f"{frame:05d}.png" for frame in sampled]


def test_shuffled_frames_are_taken_from_where_the_model_saw_them(tmp_path: Path) -> None:
    cells = moving(5)
    masks = plant(tmp_path / "D", {"a": pixels(cells)})
    tokens = noisy(cells)
    order = Sampling(5, time="shuffled").order("a")
    assert order != sorted(order)
    shuffled = clips_of(tmp_path / "s.zarr", {"a": tokens[order]}, 5, time="shuffled")
    ordered = clips_of(tmp_path / "o" / "s.zarr", {"a": tokens}, 5)
    for metric in METRICS:
        assert value(run(shuffled, masks=masks), metric) == value(
            run(ordered, masks=masks), metric
        )


def test_what_is_refused(tmp_path: Path, videos: tuple[dict[str, Array], Path]) -> None:
    cells, masks = videos
    tokens = {name: noisy(own) for name, own in cells.items()}
    still = clips_of(tmp_path / "still.zarr", tokens, 5, time="still")
    with pytest.raises(VitseeError, match=r"still holds one frame .* \(--time still\)"):
        run(still, masks=masks)
    long = clips_of(tmp_path / "long.zarr", tokens, 10)
    with pytest.raises(
        VitseeError, match="a has 5 masks, too few for the frames that long"
    ):
        run(long, masks=masks)
    five = clips_of(tmp_path / "five.zarr", tokens, 5)
    four = clips_of(tmp_path / "four.zarr", {n: x[:4] for n, x in tokens.items()}, 4)
    with pytest.raises(StoreMismatch, match="five and four sampled other frames of a"):
        run(five, four, masks=masks)
    some = store_of(tmp_path / "some.zarr", {n: x[:3] for n, x in tokens.items()}, SIZE)
    with pytest.raises(
        StoreMismatch, match="some has no frame 00003 of a, which five sampled"
    ):
        run(five, some, masks=masks)
    unsaid = clips_of(tmp_path / "unsaid.zarr", tokens, 5, transform={})
    with pytest.raises(VitseeError, match="unsaid does not say which frames"):
        run(unsaid, masks=masks)
    broken = clips_of(tmp_path / "broken.zarr", tokens, 5, valid=[1, 0])
    with pytest.raises(VitseeError, match="broken: b could not be read"):
        run(broken, masks=masks)
    twice = clips_of(tmp_path / "twice.zarr", tokens, 5, ids=["x/a.mp4", "y/a"])
    with pytest.raises(VitseeError, match="twice has two videos called a"):
        run(twice, masks=masks)


@pytest.mark.slow
def test_extracted_clips_and_their_frames(tmp_path: Path) -> None:
    """An image model on clips frame by frame, beside the same model on the frames as images."""
    rng = np.random.default_rng(0)
    cells = {"a": moving(5), "b": moving(5)[:, ::-1]}
    masks = plant(tmp_path / "D", {name: pixels(own) for name, own in cells.items()})
    for name, own in cells.items():
        ground = rng.integers(0, 120, (5, *SIZE, 3))
        pictures = np.where(pixels(own)[..., None] == 1, 230, ground).astype(np.uint8)
        write_frames(masks / "JPEGImages" / "480p" / name, list(pictures))
    data = masks / "JPEGImages" / "480p"
    common = (*RESNET, "--data", data, "--sites", "blocks", "--crop-mode", "squash")
    extracted(*common, "--order", "dataset", "-o", tmp_path / "images.zarr")
    extracted(*common, "--frames", 3, "-o", tmp_path / "clips.zarr")
    extracted(
        *common, "--frames", 3, "--time", "shuffled", "-o", tmp_path / "shuffled.zarr"
    )
    stores = [
        open_store(tmp_path / f"{name}.zarr") for name in ("clips", "images", "shuffled")
    ]
    assert json.loads(json.dumps(stores[0].manifest.transform["clip"]))["frames"] == 3
    table = run(*stores, masks=masks)
    by_store = [
        table.frame.filter(store=s.label, metric="j")["value"].to_numpy() for s in stores
    ]
    # Frame by frame the order is nothing to an image model, and to the controls.
    for values in by_store[1:]:
        assert np.allclose(values, by_store[0], atol=1e-9)
