"""Commits last, resuming, sweeping, full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.random_stores import PLANS, create, expected, leftovers, slab_of, write
from vitsee_stores import (
    IncompleteStore,
    StoreError,
    StoreWriter,
    describe,
    disk,
    folder,
    open_store,
    remove_store,
    validate,
)
from vitsee_stores import disk as owners
from vitsee_stores.disk import is_leftover, tag
from vitsee_stores.folder import Folder
from vitsee_stores.layout import arrays

VIT = PLANS["vit"]


@pytest.mark.slow
def test_every_kill_point_of_a_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each single file operation in turn: never a commit without its data."""
    whole = expected(VIT)
    one = tmp_path / "one.zarr"
    write(one, VIT)
    path = tmp_path / "a.zarr"
    made = create(path, VIT, durable=True)
    calls = 0
    stop_at = 0

    class Killed(BaseException):
        pass

    def guard(real: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= stop_at:
                raise Killed
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", guard(os.replace))
        patch.setattr(os, "fsync", guard(os.fsync))
        patch.setattr(os, "link", guard(os.link))
        committed_at = 0
        while not committed_at:
            stop_at += 7 if stop_at < 60 else 1
            calls = 0
            try:
                made.write_slab(0, slab_of(VIT, whole, 0), {})
                committed_at = stop_at
            except Killed:
                pass
            if made.committed()[0]:
                store = open_store(path, allow_partial=True)
                for name in ("embed", "blocks.0.out", "blocks.1.out"):
                    got = next(store.slabs()).acts(name, "patches")
                    assert_array_equal(got, whole[f"acts/{name}/grid"][:4])
                assert validate(path, deep=True) == []
    assert committed_at > 40, (
        "fewer operations than files: the test patches the wrong names"
    )


def test_the_marker_comes_after_everything_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path / "a.zarr", VIT, durable=True)
    events: list[tuple[str, str]] = []
    real_sync, real_replace, real_link = disk.sync, os.replace, os.link

    def sync(path: str | Path) -> None:
        events.append(("sync", os.fspath(path)))
        real_sync(path)

    def replace(source: str, target: str) -> None:
        events.append(("replace", os.fspath(target)))
        assert ("sync", os.fspath(source)) in events, "renamed before it was on the disk"
        real_replace(source, target)

    monkeypatch.setattr(disk, "sync", sync)
    monkeypatch.setattr(folder, "sync", sync)

    def link(source: str, target: str) -> None:
        events.append(("link", os.fspath(target)))
        assert ("sync", os.fspath(source)) in events, "linked before it was on the disk"
        real_link(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "link", link)
    made.write_slab(0, slab_of(VIT, expected(VIT), 0), {})
    marker = events.index(("link", str(tmp_path / "a.zarr/commits/c.0.0")))
    before = events[:marker]
    for path, spec in arrays(VIT).items():
        if spec.per in ("image", "slab"):
            within = tmp_path / "a.zarr" / path
            own = [
                what == "replace" and name.startswith(f"{within}/c.")
                for what, name in before
            ]
            renamed = np.flatnonzero(own)
            assert renamed.size, path
            assert before.index(("sync", str(within))) > max(renamed)
    assert ("sync", str(tmp_path / "a.zarr/commits")) in events[marker:]


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_on_the_disk_when_a_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)
    )
    path = tmp_path / "a.zarr"

    def everything() -> set[int]:
        return {place.stat().st_ino for place in (tmp_path, path, *path.rglob("*"))}

    made = create(path, VIT, durable=durable)
    assert synced == (everything() if durable else set()), "creation"
    whole = expected(VIT)
    for k in range(VIT.n_slabs):
        made.write_slab(k, slab_of(VIT, whole, k), {})
    assert synced >= everything() if durable else not synced, "slabs"
    assert made.finish()
    assert synced >= everything() if durable else not synced, "completion"
    joined = StoreWriter.join(path, durable=durable)
    assert joined is not None
    for one in (joined, create(path, VIT, durable=durable)):
        assert isinstance(one.files, Folder) and one.files.durable == durable


def test_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    first = write(path, VIT, slabs=[1])
    assert not first.complete
    assert not first.finish()
    again = create(path, VIT, durable=True)
    assert again.manifest.store_id == first.manifest.store_id
    assert again.committed().tolist() == [False, True, False]
    whole = expected(VIT)
    sizes = [again.write_slab(k, slab_of(VIT, whole, k), {}) for k in range(3)]
    assert sizes[1] == 0, "a committed slab is not written again"
    assert min(sizes[0], sizes[2]) > 1000
    with pytest.raises(IncompleteStore, match="3 of 3 slabs"):
        open_store(path)
    assert again.finish()
    assert again.finish(), "finishing twice is the same"
    assert open_store(path).complete


def test_a_removed_marker_makes_the_store_incomplete_and_the_slab_is_made_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.zarr"
    made = write(path, VIT)
    (path / "commits/c.1.0").unlink()
    with pytest.raises(IncompleteStore, match="2 of 3"):
        open_store(path)
    assert not made.complete
    made.write_slab(1, slab_of(VIT, expected(VIT), 1), {})
    assert made.finish()
    assert open_store(path).complete


def ended() -> str:
    """The tag of a process of this machine that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{owners.tag().split('-')[0]}-{process.pid}"


def test_sweeping_leaves_alone_what_may_still_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = write(path, VIT, slabs=[0])
    dead, other = ended(), "0123abcd-1"
    names = [
        f"acts/embed/grid/c.1.0.0.0.{dead}.00aa.partial",
        f"valid/c.1.{dead}.00cc.partial",
        f"commits/c.1.0.{dead}.00dd.partial",
        f"acts/embed/grid/c.2.0.0.0.{dead}.00bb.partial",  # from here on they stay
        f"valid/c.11.{dead}.00cc.partial",
        f"valid/c.1.{owners.tag()}.00cc.partial",
        f"valid/c.1.{other}.00cc.partial",
        f"zarr.json.{dead}.00ee.partial",
    ]
    for name in names:
        (path / name).write_bytes(b"half")
    old = path / f"valid/c.1.{other}.00dd.partial"
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    hidden = tmp_path / f".a.zarr.{other}.0011.creating"
    hidden.mkdir()
    (tmp_path / f".b.zarr.{dead}.0011.creating").mkdir()
    assert made.sweep([1]) == 4
    assert sorted(leftovers(path)) == sorted(
        [hidden.name, *(Path(n).name for n in names[3:])]
    )
    for k in (1, 2):
        made.write_slab(k, slab_of(VIT, expected(VIT), k), {})
    assert made.finish()
    assert leftovers(path) == []
    assert (tmp_path / f".b.zarr.{dead}.0011.creating").exists()


def test_creation_sweeps_what_killed_creations_left(tmp_path: Path) -> None:
    left = tmp_path / f".a.zarr.{ended()}.0011.creating"
    alive = tmp_path / f".a.zarr.{owners.tag()}.0011.creating"
    for made in (left, alive):
        made.mkdir()
    create(tmp_path / "a.zarr", VIT, durable=True)
    assert not left.exists()
    assert alive.exists()


def test_a_slab_whose_files_were_swept_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT, durable=True)
    real, calls = os.replace, 0

    def replace(source: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert made.write_slab(0, slab_of(VIT, expected(VIT), 0), {}) > 0
    assert made.committed()[0]
    assert validate(path, deep=True) == []
    assert leftovers(path) == []


@pytest.mark.parametrize("moment", ["before its marker", "after its row"])
def test_two_owners_that_make_other_bytes_commit_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The second process writes the whole slab while the first is about to put its marker, or
    between the first one's chunks and its row."""
    path = tmp_path / "a.zarr"
    first, second = create(path, VIT, durable=True), create(path, VIT, durable=True)
    one = dict(slab_of(VIT, expected(VIT), 0))
    other = {**one, "vectors/pooled": one["vectors/pooled"] + 1}
    real, began = os.link if moment == "before its marker" else os.replace, False

    def meanwhile(source: str, target: str) -> None:
        nonlocal began
        if not began and ("commits" in target or "checksums" in target):
            began = True
            second.write_slab(0, other, {"command": "second"})
        real(source, target)

    def late(source: str | Path, target: str | Path) -> None:
        meanwhile(os.fspath(source), os.fspath(target))

    name = "link" if moment == "before its marker" else "replace"
    monkeypatch.setattr(os, name, late)
    first.write_slab(0, one, {"command": "first"})
    assert began
    assert validate(path, deep=True) == []
    got = open_store(path, allow_partial=True).vectors("pooled")[:4]
    valid = one["valid"] == 1
    wanted = {"first": one, "second": other}[describe(path)["made_by"][0]["command"]]
    assert_array_equal(got[valid], wanted["vectors/pooled"][valid])
    assert leftovers(path) == []


def test_a_slab_must_be_what_the_plan_says(tmp_path: Path) -> None:
    made = create(tmp_path / "a.zarr", VIT, durable=True)
    slab = slab_of(VIT, expected(VIT), 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in slab.items() if k != "hash"}, "lacks hash"),
        ({**slab, "acts/other/grid": slab["hash"]}, "not in the plan: acts/other/grid"),
        (
            {**slab, "hash": slab["hash"][:1]},
            r"hash is uint64 \(1,\), expected uint64 \(2,\)",
        ),
        ({**slab, "valid": slab["valid"].astype(bool)}, "valid is bool"),
    ]
    for arrays_, said in wrong:
        with pytest.raises(StoreError, match=said):
            made.write_slab(2, arrays_, {})
    with pytest.raises(StoreError, match="slab 3 of a store with 3"):
        made.write_slab(3, slab, {})
    assert not made.committed().any()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "is full"),
        (errno.EIO, "cannot write slab 1"),
    ],
)
def test_a_full_disk_is_one_line_and_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    path = tmp_path / "a.zarr"
    made = write(path, VIT, slabs=[0])
    real, count = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal count
        count += 1
        if count > 9:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data)

    slab = slab_of(VIT, expected(VIT), 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=said) as error:
            made.write_slab(1, slab, {})
    assert "\n" not in str(error.value)
    assert made.committed().tolist() == [True, False, False]
    assert leftovers(path) == []
    assert made.write_slab(1, slab, {}) > 0


def test_a_full_disk_at_creation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"cannot make .*: no space left"):
            create(tmp_path / "a.zarr", VIT, durable=True)
    assert list(tmp_path.iterdir()) == []


def test_a_store_removed_while_it_is_written(tmp_path: Path) -> None:
    made = create(tmp_path / "a.zarr", VIT, durable=True)
    remove_store(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match="was removed while slab 0"):
        made.write_slab(0, slab_of(VIT, expected(VIT), 0), {})


def test_long_provenance_is_shortened_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT, durable=True)
    made.write_slab(
        0, slab_of(VIT, expected(VIT), 0), {"command": "x" * 5000, "host": "ä"}
    )
    marker = json.loads((path / "commits/c.0.0").read_bytes()[:4096])
    assert marker["host"] == "ä"
    assert marker["slab"] == 0
    assert marker["dropped"] == ["command"]
    assert made.committed()[0]


def test_what_a_living_process_makes_is_not_left_over_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    """Its age counts where its maker cannot be asked: on another machine."""
    mine, theirs = (
        tmp_path / f".s.{tag()}.0a.creating",
        tmp_path / ".s.00000000-1.0a.creating",
    )
    for made in (mine, theirs):
        made.mkdir()
        assert not is_leftover(made)
        os.utime(made, (0, 0))
    assert is_leftover(theirs) and not is_leftover(mine)
