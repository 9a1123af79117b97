"""Stores at s3:// URLs, on a server of the S3 protocol: the same bytes and numbers as in folders,
commits by conditional requests, and nothing half written that reads as whole."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from numpy.testing import assert_array_equal
from obstore.store import from_url

from tests.conftest import SLAB, slab_arrays, tiny_plan
from tests.s3 import download, environment, make_bucket, objects, server, upload
from vitsee_stores import (
    IdentityMismatch,
    IncompleteStore,
    Samples,
    StoreError,
    StoreWriter,
    describe,
    new_manifest,
    open_store,
    remove_store,
    validate,
)
from vitsee_stores import objects as remote
from vitsee_stores.leases import Claims, read_claims
from vitsee_stores.manifest import Manifest
from vitsee_stores.url import Url, parse_place

# One site with tokens and a vector: a tenth of the requests of the tiny plan.
PLAN = replace(
    tiny_plan(), sites=(tiny_plan().sites[0], tiny_plan().sites[4]), attention=(), sublayers=(),
    attention_level="none", rollout=False,
)  # fmt: skip
MakeStore = Callable[..., Path]


def folder_name(request: pytest.FixtureRequest) -> str:
    """The test's own, without what URLs and patterns have no place for."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as number:
        yield number


@pytest.fixture
def bucket(
    port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """The URL of an empty folder."""
    for name, value in environment(port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.01)
    make_bucket(port, "tests")
    return f"s3://tests/{folder_name(request)}"


def samples() -> Samples:
    n = PLAN.n_images
    index = np.arange(n, dtype=np.int64)
    return Samples(index, [f"{i}.png" for i in index], index % 2, ["test"] * n)


def manifest(**identity: Any) -> Manifest:
    return new_manifest({"seed": 0, **identity}, PLAN, samples())


def write(
    place: str | Path, made: Manifest, slabs: range = range(PLAN.n_slabs)
) -> StoreWriter:
    writer = StoreWriter.create_or_join(place, made, samples(), durable=False)
    for k in slabs:
        writer.write_slab(k, slab_arrays(PLAN, k), {"command": "test"})
    writer.finish()
    return writer


def test_urls_and_paths_are_told_apart() -> None:
    assert parse_place("s3://b/runs/a.zarr") == Url("s3", "b", "runs/a.zarr")
    assert parse_place(Path("s3://b/a.zarr")) == Url("s3", "b", "a.zarr")
    assert str(parse_place("gs://b//x/a.zarr/")) == "gs://b/x/a.zarr"
    assert parse_place("az://box/runs/a.zarr") == Url("az", "box", "runs/a.zarr")
    url = Url("s3", "b", "runs/v.1.zarr")
    assert (url.name, url.stem, url.absolute()) == ("v.1.zarr", "v.1", url)
    for text in ("a.zarr", "./s3:/a.zarr", "C:/a", "x=1.zarr"):
        assert parse_place(text) == Path(text)
    for text in (
        "http://host/a.zarr",
        "s3://",
        "s3://b",
        "s3://b/",
        "s3://b/../a",
        "s3://b/a?x",
    ):
        with pytest.raises(StoreError, match=r"at URLs with s3://|names no store"):
            parse_place(text)


@pytest.mark.slow
def test_the_bytes_are_those_of_a_folder(bucket: str, tmp_path: Path) -> None:
    made = manifest()
    write(f"{bucket}/a.zarr", made)
    write(tmp_path / "a.zarr", made)
    there = objects(f"{bucket}/a.zarr")
    here = {
        path.relative_to(tmp_path / "a.zarr").as_posix(): path.read_bytes()
        for path in (tmp_path / "a.zarr").rglob("*")
        if path.is_file()
    }
    assert there.keys() == here.keys()
    differing = [name for name in here if here[name] != there[name]]
    assert all(
        name.startswith("commits/c.") for name in differing
    )  # the time in the markers


@pytest.mark.slow
def test_reading_gives_the_numbers_of_a_folder(
    bucket: str, make_store: MakeStore
) -> None:
    folder = make_store("a.zarr")
    upload(folder, f"{bucket}/a.zarr")
    here, there = open_store(folder), open_store(f"{bucket}/a.zarr")
    assert there.label == "a" and str(there.place) == f"{bucket}/a.zarr"
    assert f"({bucket}/a.zarr)" in there._repr_html_()
    for name in here.arrays:
        assert_array_equal(here.array(name)[...], there.array(name)[...])
    tokens = there.acts("blocks.0.out")
    assert_array_equal(tokens[[7, 0, 9]], here.acts("blocks.0.out")[[7, 0, 9]])
    assert there.samples.id.tolist() == here.samples.id.tolist()
    assert there.revision == here.revision == here.revision_of("embed")
    again = pickle.loads(pickle.dumps(there))
    assert_array_equal(
        again.acts("blocks.0.out", (1, 2))[:], here.acts("blocks.0.out", (1, 2))[:]
    )
    with pytest.raises(StoreError, match="is in no folder of this machine"):
        _ = there.path
    facts, ours = describe(f"{bucket}/a.zarr"), describe(folder)
    assert facts.pop("path") == f"{bucket}/a.zarr" and ours.pop("path")
    assert facts == ours


@pytest.mark.slow
def test_a_store_copied_with_any_tool_is_valid(
    bucket: str, make_store: MakeStore, tmp_path: Path
) -> None:
    upload(make_store("a.zarr"), f"{bucket}/a.zarr")
    assert validate(f"{bucket}/a.zarr", deep=True) == []
    write(f"{bucket}/b.zarr", manifest())
    download(f"{bucket}/b.zarr", tmp_path / "b.zarr")
    assert validate(tmp_path / "b.zarr", deep=True) == []
    shutil.copytree(tmp_path / "b.zarr", tmp_path / "c.zarr")
    assert open_store(tmp_path / "c.zarr").complete


@pytest.mark.slow
def test_a_store_is_written_by_several_and_resumed(bucket: str) -> None:
    url, made = f"{bucket}/a.zarr", manifest()
    first = write(url, made, range(1))
    with pytest.raises(IncompleteStore, match=rf"{url} is incomplete: 1 of 3 slabs"):
        open_store(url)
    partial = open_store(url, allow_partial=True)
    assert partial.valid.tolist() == [True] * SLAB + [False] * (PLAN.n_images - SLAB)
    second = write(url, manifest())  # the same choices, a store_id of its own
    assert second.manifest.store_id == first.manifest.store_id
    assert first.complete
    assert first.write_slab(1, slab_arrays(PLAN, 1), {}) == 0  # committed by the second
    assert validate(url, deep=True) == []
    with pytest.raises(IdentityMismatch, match="seed is 0, given 1"):
        write(url, manifest(seed=1))


@pytest.mark.slow
def test_claims_in_a_bucket(bucket: str) -> None:
    writer = write(bucket, manifest(), range(1))
    a, b = Claims(writer.files, {"host": "here"}), Claims(writer.files, {})
    taken = a.take(range(PLAN.n_slabs), 1)
    others = b.take(range(PLAN.n_slabs), 9)
    assert sorted(taken + others) == list(range(PLAN.n_slabs))
    assert a.take(taken, 1) == []
    a.renew()
    assert read_claims(writer.files)[taken[0]]["beat"] == 1
    a.release()
    assert sorted(read_claims(writer.files)) == others
    write(bucket, manifest())
    assert writer.finish() and read_claims(writer.files) == {}
    assert not any(".claim" in name for name in objects(bucket))


def test_what_is_there_and_no_store_is_left_alone(bucket: str, tmp_path: Path) -> None:
    obstore.put(from_url(bucket), "notes/readme.txt", b"mine")
    for call in (open_store, remove_store, lambda url: write(url, manifest())):
        with pytest.raises(
            StoreError, match=r"is no vitsee store: the folder has no zarr.json"
        ):
            call(f"{bucket}/notes")
    assert objects(bucket) == {"notes/readme.txt": b"mine"}
    with pytest.raises(
        StoreError, match=rf"^no store at {bucket}/a.zarr: nothing is there"
    ):
        open_store(f"{bucket}/a.zarr")
    with pytest.raises(StoreError, match="there is no such bucket"):
        open_store("s3://elsewhere/a.zarr")
    with pytest.raises(StoreError, match="there is no such bucket"):
        write("s3://elsewhere/a.zarr", manifest())


@pytest.mark.slow
def test_removal(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.zarr", "a.zarr.grams"):
        write(f"{bucket}/{name}", manifest())
    kept = objects(f"{bucket}/a.zarr.grams")
    real, calls = remote.Objects.remove, []

    def stops(self: remote.Objects, names: Any) -> None:
        calls.append(names := list(names))
        if len(calls) == 2:
            real(self, names[::2])
            raise OSError(5, "gone")
        real(self, names)

    monkeypatch.setattr(remote.Objects, "remove", stops)
    with pytest.raises(StoreError, match=rf"cannot remove {bucket}/a.zarr: gone"):
        remove_store(f"{bucket}/a.zarr")
    assert describe(f"{bucket}/a.zarr")["n_committed"] == 0
    with pytest.raises(IncompleteStore):
        open_store(f"{bucket}/a.zarr", allow_partial=True)
    # The same choices fill it again, others need it removed.
    write(f"{bucket}/a.zarr", manifest())
    assert validate(f"{bucket}/a.zarr", deep=True) == []
    remove_store(f"{bucket}/a.zarr")
    assert objects(f"{bucket}/a.zarr") == {}
    assert objects(f"{bucket}/a.zarr.grams") == kept
    remove_store(f"{bucket}/a.zarr")  # nothing is there


@pytest.mark.slow
def test_damage_is_found(bucket: str) -> None:
    url = f"{bucket}/a.zarr"
    write(url, manifest())
    client, chunk = from_url(url), "acts/embed/grid/c.1.0.0.0"
    whole = bytes(obstore.get(client, chunk).bytes())
    other = bytes(obstore.get(client, chunk.replace("c.1", "c.0")).bytes())
    acts = open_store(url).acts("embed", "patches")
    line = rf"{url} is damaged: acts/embed/grid, slab 1: c.1.0.0.0 {{}} \(run: vitsee validate"
    for data, said in (
        (bytes([whole[0] ^ 1]) + whole[1:], "does not match its checksum"),
        (whole[:-1], "has 195 bytes, expected 196"),
        (b"", "is cut short: it has 0 bytes"),
        (other, "is not the chunk that was committed here"),
    ):
        obstore.put(client, chunk, data)
        with pytest.raises(StoreError, match=line.format(said)):
            acts[4:8]
        assert len(validate(url, deep=True)) == 1
    obstore.delete(client, chunk)
    with pytest.raises(StoreError, match=line.format("is missing")):
        acts[4:8]
    obstore.put(client, "acts/more/x", b"1")
    obstore.put(client, "note.txt", b"1")
    assert validate(url) == [
        "note.txt: is no part of the store",
        "acts/more: is no part of the store",
        "acts/embed/grid, slab 1: 1 of 1 chunk files are missing: c.1.0.0.0",
    ]


@pytest.mark.slow
def test_two_owners_that_make_other_bytes_commit_one_of_them(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = f"{bucket}/a.zarr", manifest()
    one = slab_arrays(PLAN, 0)
    other = {**one, "vectors/pooled": one["vectors/pooled"] + 1}
    first, second = write(url, made, range(0)), write(url, made, range(0))
    real = remote.Objects.put_if_absent
    began: list[str] = []

    def late(self: remote.Objects, name: str, data: bytes) -> bool:
        if not began:
            began.append(name)
            second.write_slab(0, other, {"command": "second"})
        return real(self, name, data)

    monkeypatch.setattr(remote.Objects, "put_if_absent", late)
    first.write_slab(0, one, {"command": "first"})
    assert began == ["commits/c.0.0"]
    assert validate(url, deep=True) == []
    got = open_store(url, allow_partial=True).vectors("pooled")[:SLAB]
    wanted = {"first": one, "second": other}[describe(url)["made_by"][0]["command"]]
    assert_array_equal(got, wanted["vectors/pooled"])


@pytest.mark.slow
def test_zarr_python_opens_the_same_url(bucket: str) -> None:
    import zarr

    url = f"{bucket}/a.zarr"
    write(url, manifest())
    store = open_store(url)
    opened = zarr.open_group(zarr.storage.ObjectStore(from_url(url)), mode="r")
    assert opened.attrs["vitsee"] == store.zarr.attrs["vitsee"] and store.zarr.read_only
    for group in (opened, store.zarr):
        for name in ("acts/embed/grid", "vectors/pooled", "samples/label"):
            array = group[name]
            assert isinstance(array, zarr.Array)
            assert_array_equal(array[...], store.array(name)[...])


@pytest.mark.slow
def test_a_forked_process_is_told(
    bucket: str, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(make_store("a.zarr"), f"{bucket}/a.zarr")
    open_store(f"{bucket}/a.zarr")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(StoreError, match=r"this process was forked .* 'spawn'"):
        open_store(f"{bucket}/a.zarr")


def test_without_obstore_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "obstore" else real(name),
    )
    with pytest.raises(
        StoreError, match=r"s3://b/a.zarr needs obstore; run: pip install 'vitsee"
    ):
        open_store("s3://b/a.zarr")
