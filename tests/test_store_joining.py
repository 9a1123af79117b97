"""What may be joined, what is refused untouched, and removing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.random_stores import PLANS, create, make_manifest, make_samples, write
from vitsee_stores import IdentityMismatch, StoreError, StoreWriter, remove_store
from vitsee_stores.manifest import check_identity

VIT = PLANS["vit"]


def test_other_choices_are_refused_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    create(path, VIT, precision="fp32", sites=["embed"])
    with pytest.raises(IdentityMismatch) as error:
        create(
            path,
            VIT,
            precision="bf16",
            sites=["embed"],
            model={"name": "other", "args": {}},
        )
    said = str(error.value)
    assert "precision is fp32, given bf16" in said
    assert "model.name is random, given other" in said
    assert "sites" not in said
    assert "\n" not in said


def test_identity_is_compared_as_json_and_only_where_given() -> None:
    stored = {
        "size": [3, 8, 8],
        "seed": 0,
        "tokens": {"default": "all", "head": "pooled"},
    }
    check_identity(stored, {"size": (3, 8, 8)})
    check_identity(stored, {"seed": np.int64(0)})
    with pytest.raises(IdentityMismatch, match=r"tokens\.head is pooled, given nothing"):
        check_identity(stored, {"tokens": {"default": "all"}})
    with pytest.raises(IdentityMismatch, match="order is nothing, given shuffled"):
        check_identity(stored, {"order": "shuffled"})
    with pytest.raises(IdentityMismatch) as error:
        check_identity({"ids": "a" * 500}, {"ids": "b" * 500})
    assert len(str(error.value)) < 400


def test_other_images_are_refused(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", VIT)
    manifest = make_manifest(VIT)
    other = make_samples(10, start=5)
    manifest = dataclasses.replace(manifest, samples_fingerprint=other.fingerprint())
    with pytest.raises(IdentityMismatch, match="samples_fingerprint"):
        StoreWriter.create_or_join(tmp_path / "a.zarr", manifest, other)


@pytest.mark.parametrize("kind", ["file", "folder", "empty", "dangling", "zarr"])
def test_what_is_no_store_is_refused_untouched(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.zarr"
    if kind == "file":
        path.write_text("precious")
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
    if kind == "folder":
        (path / "thesis.tex").write_text("precious")
    if kind == "zarr":
        (path / "zarr.json").write_text(
            '{"zarr_format": 3, "node_type": "group", "attributes": {}}'
        )
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for call in (lambda: create(path, VIT), lambda: remove_store(path)):
        with pytest.raises(StoreError) as error:
            call()
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)
        assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_missing_or_unwritable_parent(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot make .*no such file"):
        create(tmp_path / "missing" / "a.zarr", VIT)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        create(tmp_path / "file" / "a.zarr", VIT)


@pytest.mark.slow
def test_removing(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    remove_store(path)
    write(path, VIT)
    (tmp_path / ".a.zarr.00.removing").mkdir()
    (tmp_path / "other").mkdir()
    remove_store(path)
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    write(tmp_path / "real.zarr", PLANS["registers"])
    path.symlink_to(tmp_path / "real.zarr")
    remove_store(path)
    assert not (tmp_path / "real.zarr").exists()
