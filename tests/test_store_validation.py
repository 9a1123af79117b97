"""Damage is found, by readers and by `validate`, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.manifests import edited
from tests.random_stores import PLANS, create, expected, slab_of, write
from vitsee_stores import (
    IncompleteStore,
    StoreError,
    StoreMismatch,
    StoreWriter,
    describe,
    layout,
    open_store,
    remove_store,
    require_paired,
    validate,
)
from vitsee_stores.layout import CODECS, StorePlan, arrays

VIT = PLANS["vit"]
CHUNK = "acts/embed/grid/c.1.0.0.0"


def flip(path: Path, place: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 4
    path.write_bytes(data)


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


@pytest.mark.parametrize("name", PLANS)
def test_sound_stores(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.zarr", PLANS[name])
    assert validate(tmp_path / "a.zarr") == []
    assert validate(tmp_path / "a.zarr", deep=True) == []


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.zarr"
    write(path, StorePlan(**{**vars(VIT), "codec": codec}))
    for place in (0, 10, -1, -5):
        flip(path / CHUNK, place)
        line = only(validate(path, deep=True))
        assert line.startswith("acts/embed/grid, slab 1: c.1.0.0.0 ")
        assert "checksum" in line
        with pytest.raises(StoreError) as error:
            open_store(path).acts("embed")[:]
        said = str(error.value)
        assert str(path) in said
        assert "acts/embed/grid, slab 1" in said
        assert "vitsee validate" in said
        assert "\n" not in said
        # the other slabs and arrays are still read
        assert open_store(path).acts("embed")[:4].shape == (4, 16, 4)
        flip(path / CHUNK, place)
    assert validate(path, deep=True) == []


@pytest.mark.slow
def test_a_flipped_bit_in_every_file_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, VIT)
    for name, spec in arrays(VIT).items():
        file = next((path / name).glob("c*"))
        flip(file)
        lines = validate(path, deep=True)
        if name == "commits":
            assert "has no sound marker of slab" in lines[0]
        else:
            assert any(
                line.startswith((f"{name}, slab ", f"{name}:")) for line in lines
            ), name
        assert spec.path == name
        flip(file)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_missing_and_cut_chunks_are_found_without_reading(
    tmp_path: Path, codec: str
) -> None:
    path = tmp_path / "a.zarr"
    write(path, StorePlan(**{**vars(VIT), "codec": codec}))
    whole = (path / CHUNK).read_bytes()
    (path / CHUNK).unlink()
    assert "1 of 1 chunk files are missing: c.1.0.0.0" in only(validate(path))
    with pytest.raises(StoreError, match=r"slab 1: c\.1\.0\.0\.0 is missing"):
        open_store(path).acts("embed")[:]
    for size in (0, 3, 100):
        (path / CHUNK).write_bytes(whole[:size])
        line = only(validate(path, deep=codec != "none" and size == 100))
        assert f"{size} bytes" in line or "checksum" in line
        with pytest.raises(StoreError, match="slab 1"):
            open_store(path).acts("embed")[:]


def test_a_lost_array(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "a.zarr"
    write(path, VIT)
    shutil.rmtree(path / "vectors")
    lines = validate(path)
    assert "vectors: its zarr.json is missing" in lines
    assert sum("chunk files are missing" in line for line in lines) == 2 * VIT.n_slabs


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("array", "nan_ok"),
    [
        ("acts/blocks.0.out/grid", False),
        ("pooled/embed/cls", False),
        ("attention/entropy", False),
        ("attention/aligned", False),
        ("attention/distance_px", True),
    ],
)
def test_values_that_are_not_finite(
    tmp_path: Path, bad: float, array: str, nan_ok: bool
) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT)
    for k in range(VIT.n_slabs):
        slab = dict(slab_of(VIT, expected(VIT), k))
        if k == 1:
            slab[array] = slab[array].copy()
            slab[array][..., -1] = bad
        made.write_slab(k, slab, {})
    made.finish()
    assert validate(path) == []
    lines = validate(path, deep=True)
    if nan_ok and np.isnan(bad):
        assert lines == []
        return
    line = only(lines)
    assert line.startswith(f"{array}, slab 1: ")
    assert "its sums" in line or "4 rows of readable images, the first is row 4" in line


def test_rows_of_unreadable_images_may_be_nan(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", VIT)
    store = open_store(tmp_path / "a.zarr")
    assert not store.valid[1]
    assert np.isnan(store.acts("embed")[1]).all()
    assert validate(tmp_path / "a.zarr", deep=True) == []


def test_counts_against_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT)
    for k in range(VIT.n_slabs):
        made.write_slab(k, {**slab_of(VIT, expected(VIT), k), "n_valid": np.array(3)}, {})
    assert made.finish()
    assert validate(path) == [
        "n_valid, slab 1: is 3, but 4 rows are valid",
        "n_valid, slab 2: is 3, but 1 rows are valid",
    ]


def test_complete_without_all_commits(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, VIT)
    flip(path / "commits/c.1.0")
    assert "marked complete, but has no sound marker of slab 1" in only(validate(path))
    (path / "commits/c.1.0").unlink()
    assert "no sound marker of slab 1" in validate(path)[0]


@pytest.mark.slow
def test_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, VIT)
    write(tmp_path / "b.zarr", StorePlan(**{**vars(VIT), "n_images": 12}))
    with edited(path) as manifest:
        manifest["samples_fingerprint"] = "0" * 64
    assert "do not match the manifest's samples_fingerprint" in only(validate(path))


def test_foreign_and_changed_files(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, VIT)
    (path / "notes.txt").write_text("mine")
    (path / ".DS_Store").write_text("the desktop's")
    (path / "acts/embed/grid/c.9.0.0.0").write_bytes(b"")
    (path / "acts/embed/grid/c.1.0.0.0.00.partial").write_bytes(b"")
    (path / "acts/old").mkdir()
    (path / "acts/old/zarr.json").write_text("{}")
    meta = path / "acts/embed/grid/zarr.json"
    meta.write_text(meta.read_text().replace("float16", "int16"))
    lines = validate(path)
    assert set(lines) == {
        'acts/embed/grid: its zarr.json says data_type "int16", expected "float16"',
        "acts/embed/grid/c.1.0.0.0.00.partial: was left behind by a killed process",
        "acts/embed/grid/c.9.0.0.0: is no part of the store",
        "acts/old: is no part of the store",
        "notes.txt: is no part of the store",
    }


def test_unfinished_stores_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, VIT, slabs=[1])
    (path / "acts/embed/grid/c.0.0.0.0.00.partial").write_bytes(b"")
    (path / "acts/embed/grid/c.2.0.0.0").write_bytes(b"half")
    assert validate(path, deep=True) == []


# opening --------------------------------------------------------------------------------------


def set_manifest(path: Path, **fields: object) -> None:
    with edited(path) as manifest:
        manifest.update(fields)


def not_json(path: Path) -> None:
    (path / "zarr.json").write_text('{"zarr_format": 3, "att')


def no_plan(path: Path) -> None:
    with edited(path) as manifest:
        del manifest["plan"]["sites"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: set_manifest(p, format=None), "store format null"),
        (
            lambda p: set_manifest(p, features=["colour", "echo"]),
            "the store uses 'colour', 'echo', which this vitsee does not read; update vitsee",
        ),
        (
            lambda p: set_manifest(p, features=["box"]),
            "the manifest is damaged: features are ['box'], its plan has []",
        ),
        (not_json, "is damaged: its zarr.json is no JSON"),
        (no_plan, "the manifest is damaged: plan.sites is missing"),
    ],
)
def test_foreign_formats_and_damaged_manifests(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "a.zarr"
    write(path, PLANS["registers"])
    change(path)
    for call in (open_store, validate, describe):
        with pytest.raises(StoreError) as error:
            call(path)
        assert said in str(error.value)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [(1, "extract it anew"), (3, "update vitsee"), (10**9, "update vitsee")],
)
def test_nothing_of_another_version_is_interpreted(
    tmp_path: Path, number: int, advice: str
) -> None:
    """Whatever else it says: fields of other types, no digest, nothing."""
    rest: list[dict[str, Any]] = [
        {},
        {"features": 7, "plan": [], "digest": 0},
        {"features": ["x"]},
    ]
    for i, fields in enumerate(rest):
        path = tmp_path / f"{i}.zarr"
        path.mkdir()
        document = {"zarr_format": 3, "node_type": "group"}
        attributes = {"vitsee": {"format": number, **fields}}
        (path / "zarr.json").write_text(
            json.dumps({**document, "attributes": attributes})
        )
        before = (path / "zarr.json").read_bytes()
        for call in (open_store, validate, describe, StoreWriter.join):
            with pytest.raises(StoreError, match=f"store format {number}, .*; {advice}"):
                call(path)
        assert (path / "zarr.json").read_bytes() == before


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    write(path, PLANS["registers"])
    plain = open_store(path)
    with edited(path) as manifest:
        manifest["later"] = {"x": [1]}
        for part in ("plan", "info", "model"):
            manifest[part]["later"] = "y"
        manifest["plan"]["sites"][0]["later"] = 1
    store = open_store(path)
    assert store.manifest.plan == plain.manifest.plan
    assert validate(path, deep=True) == []
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text.replace('"later": "y"', '"later": "z"', 1))
    with pytest.raises(StoreError, match="does not match its digest"):
        open_store(path)


def test_what_is_no_store(tmp_path: Path) -> None:
    import zarr

    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "plain.zarr")
    zarr.create_array(tmp_path / "array.zarr", shape=(2,), dtype="u1")
    (tmp_path / "list.zarr").mkdir()
    (tmp_path / "list.zarr/zarr.json").write_text("[]")
    for name, said in {
        "missing": "nothing is there (run: vitsee extract",
        "file": "is no vitsee store but a file",
        "file/inner": "is no vitsee store but a file",
        "empty": "the folder has no zarr.json",
        "plain.zarr": "no 'vitsee' attribute",
        "array.zarr": "no 'vitsee' attribute",
        "list.zarr": "no 'vitsee' attribute",
    }.items():
        for call in (open_store, validate, describe):
            with pytest.raises(StoreError) as error:
                call(tmp_path / name)
            assert said in str(error.value), name
            assert name in str(error.value)
            assert "\n" not in str(error.value)


def test_incomplete_stores(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    create(path, VIT)
    with pytest.raises(IncompleteStore, match="0 of 3 slabs"):
        open_store(path, allow_partial=True)
    write(path, VIT, slabs=[2])
    with pytest.raises(IncompleteStore, match=r"1 of 3 slabs.*--allow-partial"):
        open_store(path)
    assert not open_store(path, allow_partial=True).complete
    record = describe(path)
    assert (record["complete"], record["n_committed"], record["n_valid"]) == (False, 1, 1)


# pairing --------------------------------------------------------------------------------------


def test_pairs(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", VIT)
    write(
        tmp_path / "b.zarr",
        StorePlan(**{**vars(VIT), "slab": 5, "sites": VIT.sites[:1], "erf": None}),
    )
    a, b = open_store(tmp_path / "a.zarr"), open_store(tmp_path / "b.zarr")
    both = require_paired(a, b)
    assert both.tolist() == (a.valid & b.valid).tolist()
    assert both.sum() == 8  # row 1 is unreadable in both, row 9 in one


@pytest.mark.slow
def test_stores_that_do_not_pair(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", VIT)
    write(tmp_path / "n.zarr", StorePlan(**{**vars(VIT), "n_images": 9}))
    made = create(tmp_path / "h.zarr", VIT)
    for k in range(VIT.n_slabs):
        slab = slab_of(VIT, expected(VIT), k)
        # an unreadable image's hash means nothing; the next image's does
        changed = slab["hash"] + np.array([0, 1, 1, 0], np.uint64)[: len(slab["hash"])]
        made.write_slab(k, {**slab, "hash": changed if k == 0 else slab["hash"]}, {})
    made.finish()
    a = open_store(tmp_path / "a.zarr")
    for name, said in {
        "n": "10 images against 9",
        "h": r"row 2 \(class 2/ä2.png\).*1 of 8",
    }.items():
        with pytest.raises(StoreMismatch, match=said) as error:
            require_paired(a, open_store(tmp_path / f"{name}.zarr"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [False, True])
def test_gram_matrices_may_be_nan_only_where_an_image_is_missing(
    tmp_path: Path, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 4096)
        monkeypatch.setattr(layout, "MIN_CHUNK_BYTES", 1024)
    plan = StorePlan(70, 64, "none", VIT.sites[:1], grams=True)
    path, array = tmp_path / "a.zarr", "grams/embed/all"
    made = create(path, plan)
    assert cut == (made.arrays[array].chunks[1] < plan.slab)
    whole = dict(expected(plan))
    assert np.isnan(whole[array][0, 1]).all()  # an unreadable image
    assert np.isnan(whole[array][1, 6:]).all()  # beyond the last one
    for bad in ([], [(0, 40, 3)], [(0, 40, 3), (1, 2, 5)]):
        for place in bad:
            whole[array] = whole[array].copy()
            whole[array][place] = np.nan
        remove_store(path)
        made = create(path, plan)
        for k in range(plan.n_slabs):
            made.write_slab(k, slab_of(plan, whole, k), {})
        made.finish()
        lines = validate(path, deep=True)
        assert [line.split(": ")[0] for line in lines] == [
            f"{array}, slab {k}" for k, _, _ in bad
        ]
        for line, (k, i, _) in zip(lines, bad, strict=True):
            said = f"values in 1 rows of readable images, the first is row {64 * k + i}"
            assert line.endswith(said)


def test_a_slab_without_any_readable_image(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT)
    for k in range(VIT.n_slabs):
        slab = dict(slab_of(VIT, expected(VIT), k))
        if k == 1:
            slab["valid"], slab["n_valid"] = np.zeros(4, np.uint8), np.array(0)
            slab["size"] = np.zeros((4, 2), np.int32)
            slab["acts/embed/grid"] = np.full_like(slab["acts/embed/grid"], np.nan)
            slab["grams/embed/all"] = np.full_like(slab["grams/embed/all"], np.nan)
        made.write_slab(k, slab, {})
    made.finish()
    assert validate(path, deep=True) == []
