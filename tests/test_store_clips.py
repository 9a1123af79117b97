"""Stores of clips: tokens in space and time; and stores of images, which are what they were."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.random_stores import BY_FRAME, CLIP, PLANS, expected, make_manifest, write
from tests.stores import Site, write_model, write_sites
from vitsee_core.features.reader import choose_features
from vitsee_stores import StoreError, describe, manifest, open_store, validate
from vitsee_stores.errors import SiteError
from vitsee_stores.layout import StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Manifest
from vitsee_stores.plan import Clip
from vitsee_stores.selectors import layout_tokens


def numbered(layout: TokenLayout, n: int = 3, dim: int = 2) -> np.ndarray[Any, Any]:
    """(n, tokens, dim): value 1000 image + 10 token + channel."""
    image, token, channel = np.ogrid[:n, : layout.n_tokens, :dim]
    return (1000 * image + 10 * token + channel).astype(np.float32)


def test_tokens_of_a_clip_lie_in_time_rows_and_columns(tmp_path: Path) -> None:
    """Written by hand: a class token and 4 times of 2 x 3 cells; (t, r, c) is token 1 + 6 t + 3 r +
    c."""
    x = numbered(CLIP)
    store = write_sites(tmp_path / "a.zarr", {"s": x}, layout=CLIP, slab=2, clip=Clip(8))
    assert store.acts("s", "patches").shape == (3, 4, 2, 3, 2)
    assert_array_equal(store.acts("s")[:], x)
    assert_array_equal(
        store.acts("s", "patches")[1, 2, 1, 0], [1000 + 10 * (1 + 12 + 3), 1161]
    )
    for cell in ((2, 1, 0), "2,1,0", "2, 1, 0"):
        assert_array_equal(store.acts("s", cell)[:], x[:, 16])
        assert [
            t.name for t in choose_features(store, store.site("s"), "2,1,0").tokens
        ] == ["2,1,0"]
    assert_array_equal(store.acts("s", "cls")[:], x[:, 0])
    assert_array_equal(store.pooled("s")[:], x[:, 1:].mean(1))
    names = [token.name for token in layout_tokens(CLIP)]
    assert (names[0], names[16], len(names)) == ("cls", "2,1,0", 25)
    token = layout_tokens(CLIP)[16]
    assert (token.frame, token.row, token.col) == (2, 1, 0)
    for wrong in ("1,0", "4,0,0", "0,2,0", "0,0,3"):
        with pytest.raises(
            SiteError, match=r"a grid of 2 x 3 at 4 times, counted from 0"
        ):
            store.acts("s", wrong)
    image = write_sites(tmp_path / "b.zarr", {"s": x[:, :7]}, layout=replace(CLIP, frames=None,
                        stride_frames=None))  # fmt: skip
    with pytest.raises(
        SiteError, match=r"no token 0,1,1: it has .* a grid of 2 x 3, counted"
    ):
        image.acts("s", "0,1,1")


@pytest.mark.parametrize("n_tokens", [1, 5, 6, 13, 100])
def test_the_reader_takes_groups_of_tokens_of_clips(
    tmp_path: Path, n_tokens: int
) -> None:
    x = numbered(CLIP)
    store = write_sites(tmp_path / "a.zarr", {"s": x}, layout=CLIP, slab=2, clip=Clip(8))
    for tokens, start in (("all", 0), ("patches", 1)):
        features = choose_features(store, store.site("s"), tokens)
        parts = [features.load(slice(0, 3), part) for part in features.groups(n_tokens)]
        assert_array_equal(np.concatenate(parts, 1), x[:, start:])
    mean = choose_features(store, store.site("s"), "mean").vectors(np.ones(3, bool))
    assert_array_equal(np.concatenate(list(mean)), x[:, 1:].mean(1))


def test_stages_are_matched_in_every_frame(tmp_path: Path) -> None:
    """A grid of 4 x 4 to the last stage's 2 x 2, with room for two by two cells of 3 channels: each
    place has its four cells side by side, at each time by itself."""
    early = TokenLayout((), (4, 4), stride_px=(8.0, 8.0), frames=2, stride_frames=1.0)
    late = replace(early, grid=(2, 2), stride_px=(16.0, 16.0))
    x = np.random.default_rng(0).normal(size=(3, 32, 3)).astype(np.float32)
    sites: dict[str, Site] = {
        "layer1.0.out": (x, early),
        "layer2.0.out": (np.ones((3, 8, 12)), late),
    }
    store = write_model(tmp_path / "a.zarr", sites, clip=Clip(2))
    site = store.site("layer1.0.out")
    features = choose_features(store, site, "patches", match_last_stage=True)
    found = features.load(slice(0, 3), slice(0, 8))
    for image, time, row, col in itertools.product(
        range(3), range(2), range(2), range(2)
    ):
        cells = x[image].reshape(2, 4, 4, 3)[time]
        wanted = cells[2 * row : 2 * row + 2, 2 * col : 2 * col + 2].reshape(-1)
        assert_array_equal(found[image, 4 * time + 2 * row + col], wanted)
    assert [token.name for token in features.tokens][4] == "1,0,0"


def test_class_tokens_of_frames(tmp_path: Path) -> None:
    """Frames one by one: prefix tokens kind by kind, `cls` their mean over the frames."""
    assert list(BY_FRAME.cls_tokens) == [0, 1]
    assert BY_FRAME.cls is None
    plan = PLANS["by-frame"]
    write(tmp_path / "a.zarr", plan)
    store, whole = open_store(tmp_path / "a.zarr"), expected(plan)
    assert_array_equal(
        store.acts("blocks.0.out", "cls")[:], whole["pooled/blocks.0.out/cls"]
    )
    assert choose_features(store, store.site("blocks.0.out")).selection == "cls"
    assert choose_features(store, store.site("stage")).selection == "mean"
    assert store.acts("blocks.0.out", "prefix").shape == (3, 4, 4)


@pytest.mark.parametrize("name", ["clips", "by-frame"])
def test_a_description_says_what_a_clip_is(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.zarr", PLANS[name])
    assert validate(tmp_path / "a.zarr", deep=True) == []
    record = describe(tmp_path / "a.zarr")
    assert record["features"] == ["window", "clips"]
    if name == "clips":
        clip = {"frames": 8, "every": 4, "time": "shuffled", "by_frame": False}
        assert record["clip"] == clip
        assert record["sites"]["embed"]["frames"] == 4
        assert record["sites"]["embed"]["stride_frames"] == 2.0
        assert record["attention"]["groups"][0]["window"] == [4, 1, 1]
        store = open_store(tmp_path / "a.zarr")
        pixels = expected(PLANS[name])["input"]
        assert store.inputs().shape == pixels.shape == (5, 8, 3, 6, 10)
        wanted = (
            pixels[2, 7, 1, 5, 9] / np.float32(255) - np.float32(0.25)
        ) / np.float32(0.3)
        assert store.inputs()[2, 7, 1, 5, 9] == wanted


def test_an_older_reader_refuses_clips_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.zarr", PLANS["clips"])
    monkeypatch.setattr(manifest, "FEATURES", ("box", "canvas", "window"))
    with pytest.raises(StoreError, match="the store uses 'clips', which this vitsee"):
        open_store(tmp_path / "a.zarr")


Change = Callable[[dict[str, Any]], Any]
REFUSED: list[tuple[Change, str]] = [
    (
        lambda plan: plan.pop("clip"),
        "plan.sites[0].layout.frames is 4 without a plan.clip",
    ),
    (lambda plan: plan["clip"].update(time="later"), "plan.clip.time is"),
    (lambda plan: plan["clip"].update(frames=0), "plan.clip.frames is 0"),
    (
        lambda plan: plan["sites"][0]["layout"].pop("frames"),
        "stride_frames is 2 without frames",
    ),
    (
        lambda plan: plan["attention"][0].update(window=[2, 3]),
        "windows of [2, 3] cells, expected some within a grid of [4, 2, 3] cells",
    ),
    (
        lambda plan: plan["attention"][0].update(window=[5, 1, 1]),
        "windows of [5, 1, 1] cells",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_damaged_plans_of_clips_are_refused(change: Change, said: str) -> None:
    data = json.loads(json.dumps(make_manifest(PLANS["clips"]).to_json()))
    data["checksums"] = {
        path: 0 for path, s in arrays(PLANS["clips"]).items() if s.per == "once"
    }
    change(data["plan"])
    if "clip" not in data["plan"]:
        data["features"] = ["window"]
    with pytest.raises(StoreError) as error:
        Manifest.from_json(data)
    assert said in str(error.value)


def test_stores_of_images_are_what_they_were_before_clips(tmp_path: Path) -> None:
    """The plan in the manifest and every file of the arrays, as written before there were clips."""
    found = {}
    for name in ("vit", "cnn", "two-grids", "registers"):
        plan = write(tmp_path / f"{name}.zarr", PLANS[name]).plan
        text = json.dumps(make_manifest(plan).to_json()["plan"], sort_keys=True)
        whole = hashlib.sha256(text.encode())
        for file in sorted((tmp_path / f"{name}.zarr").rglob("*")):
            # The root and commit markers hold a random id and times.
            inside = file.relative_to(tmp_path / f"{name}.zarr")
            if file.is_file() and inside.parts[0] not in ("zarr.json", "commits"):
                whole.update(str(inside).encode() + b"\0" + file.read_bytes())
        found[name] = whole.hexdigest()[:16]
    assert found == BEFORE


BEFORE = {
    "vit": "8d9cb1090b1a6426",
    "cnn": "3a3ffcf303176c6f",
    "two-grids": "888e95465009fd9b",
    "registers": "8625bd4d0692324d",
}


def test_plans_without_clips_have_no_field_of_clips() -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    for name, plan in PLANS.items():
        there = keys(make_manifest(plan).to_json()["plan"]) & set(manifest.LATER_FIELDS)
        of_clips = there - {"pixel_hashes"}  # which plans of images may have, too
        assert bool(of_clips) == (name in ("clips", "by-frame"))
    assert isinstance(PLANS["vit"], StorePlan)
