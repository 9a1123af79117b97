"""Creation at once, commits last, resuming, sweeping: with real processes, killed at random."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.random_stores import (
    PLANS,
    create,
    expected,
    make_manifest,
    make_samples,
    slab_of,
    write,
)
from vitsee_stores import (
    IdentityMismatch,
    IncompleteStore,
    StoreError,
    StoreWriter,
    disk,
    open_store,
    remove_store,
    validate,
    writer,
)
from vitsee_stores.layout import arrays
from vitsee_stores.manifest import check_identity

ROOT = Path(__file__).parents[1]
VIT, CHUNKED = PLANS["vit"], PLANS["chunked"]


def start(store: Path, plan: str, shard: tuple[int, int] = (0, 1)) -> subprocess.Popen[str]:
    """A process that has imported everything and waits for a line."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "stores")])
    options = ["--plan", plan, "--shard", *map(str, shard)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.random_stores", str(store), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.split()


def chunk_files(store: Path) -> dict[str, bytes]:
    """Every file of the arrays, but the markers, whose provenance differs by design."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and path.parent not in (store, store / "commits")
    }


def leftovers(store: Path) -> list[str]:
    hidden = [p.name for p in store.parent.iterdir() if p.name.startswith(f".{store.name}.")]
    return hidden + [p.name for p in store.rglob("*.partial")]


def test_processes_that_start_together_make_one_store(tmp_path: Path) -> None:
    one, many = tmp_path / "one.zarr", tmp_path / "many.zarr"
    write(one, VIT)
    processes = [start(many, "vit", (i, 4)) for i in range(4)]
    for process in processes:
        go(process)
    said = [end(process) for process in processes]
    assert len({store_id for store_id, _ in said}) == 1
    assert "complete" in {state for _, state in said}
    assert open_store(many).complete
    assert validate(many, deep=True) == []
    assert leftovers(many) == []
    assert chunk_files(many) == chunk_files(one)


def test_a_process_killed_at_any_moment_loses_one_slab(tmp_path: Path) -> None:
    one, killed = tmp_path / "one.zarr", tmp_path / "killed.zarr"
    write(one, CHUNKED)
    whole = expected(CHUNKED)
    rng, interrupted = random.Random(0), 0
    for _ in range(6):
        process = start(killed, "chunked")
        go(process)
        time.sleep(rng.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        interrupted += bool(list(killed.rglob("c.*.partial")))
        if not killed.exists():
            continue  # killed while the empty store was built beside its place
        on_disk = StoreWriter.join(killed)
        assert on_disk is not None
        if not on_disk.complete:
            with pytest.raises(IncompleteStore):
                open_store(killed)
        if on_disk.committed().any():
            store = open_store(killed, allow_partial=True)
            for slab in store.slabs():
                wanted = whole["acts/blocks.0.out/grid"][slab.rows]
                assert_array_equal(slab.acts("blocks.0.out", "patches"), wanted)
            assert validate(killed, deep=True) == []
    process = start(killed, "chunked")
    go(process)
    assert end(process)[1] == "complete"
    assert validate(killed, deep=True) == []
    assert leftovers(killed) == []
    assert chunk_files(killed) == chunk_files(one)


def test_every_kill_point_of_a_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before each single file operation in turn: never a commit without its data."""
    whole = expected(VIT)
    one = tmp_path / "one.zarr"
    write(one, VIT)
    path = tmp_path / "a.zarr"
    made = create(path, VIT)
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
    assert committed_at > 40, "fewer operations than files: the test patches the wrong names"


def test_the_marker_comes_after_everything_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path / "a.zarr", VIT)
    events: list[tuple[str, str]] = []
    real_sync, real_replace = disk.sync, os.replace

    def sync(path: str | Path) -> None:
        events.append(("sync", os.fspath(path)))
        real_sync(path)

    def replace(source: str, target: str) -> None:
        events.append(("replace", os.fspath(target)))
        assert ("sync", os.fspath(source)) in events, "renamed before it was on the disk"
        real_replace(source, target)

    monkeypatch.setattr(disk, "sync", sync)
    monkeypatch.setattr(writer, "sync", sync)
    monkeypatch.setattr(os, "replace", replace)
    made.write_slab(0, slab_of(VIT, expected(VIT), 0), {})
    marker = events.index(("replace", str(tmp_path / "a.zarr/commits/c.0.0")))
    before = events[:marker]
    for path, spec in arrays(VIT).items():
        if spec.per != "once" and path != "commits":
            folder = tmp_path / "a.zarr" / path
            renamed = [
                i
                for i, e in enumerate(before)
                if e[0] == "replace" and e[1].startswith(f"{folder}/c.")
            ]
            assert renamed, path
            assert before.index(("sync", str(folder))) > max(renamed)
    assert ("sync", str(tmp_path / "a.zarr/commits")) in events[marker:]


def test_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    first = write(path, VIT, slabs=[1])
    assert not first.complete
    assert not first.finish()
    again = create(path, VIT)
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


def test_a_torn_marker_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = write(path, VIT)
    marker = path / "commits/c.2.0"
    marker.write_bytes(marker.read_bytes()[:100])
    assert made.committed().tolist() == [True, True, False]
    assert not made.complete


def test_sweeping_leaves_other_slabs_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = write(path, VIT, slabs=[0])
    names = [
        "acts/embed/grid/c.1.0.0.0.00aa.partial",
        "acts/embed/grid/c.2.0.0.0.00bb.partial",
        "valid/c.1.00cc.partial",
        "valid/c.11.00cc.partial",
        "commits/c.1.0.00dd.partial",
        "zarr.json.00ee.partial",
    ]
    for name in names:
        (path / name).write_bytes(b"half")
    hidden = tmp_path / ".a.zarr.0011.creating"
    hidden.mkdir()
    (tmp_path / ".b.zarr.0011.creating").mkdir()
    assert made.sweep([1]) == 3
    assert sorted(leftovers(path)) == sorted(
        [hidden.name, *(Path(names[i]).name for i in (1, 3, 5))]
    )
    for k in (1, 2):
        made.write_slab(k, slab_of(VIT, expected(VIT), k), {})
    assert made.finish()
    assert leftovers(path) == []
    assert (tmp_path / ".b.zarr.0011.creating").exists()


def test_a_slab_must_be_what_the_plan_says(tmp_path: Path) -> None:
    made = create(tmp_path / "a.zarr", VIT)
    slab = slab_of(VIT, expected(VIT), 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in slab.items() if k != "hash"}, "lacks hash"),
        ({**slab, "acts/other/grid": slab["hash"]}, "not in the plan: acts/other/grid"),
        ({**slab, "hash": slab["hash"][:1]}, r"hash is uint64 \(1,\), expected uint64 \(2,\)"),
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
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EIO, "cannot write slab 1")],
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
            create(tmp_path / "a.zarr", VIT)
    assert list(tmp_path.iterdir()) == []


def test_a_store_removed_while_it_is_written(tmp_path: Path) -> None:
    made = create(tmp_path / "a.zarr", VIT)
    remove_store(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match="was removed while slab 0"):
        made.write_slab(0, slab_of(VIT, expected(VIT), 0), {})


def test_long_provenance_is_shortened_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = create(path, VIT)
    made.write_slab(0, slab_of(VIT, expected(VIT), 0), {"command": "x" * 5000, "host": "ä"})
    marker = json.loads((path / "commits/c.0.0").read_bytes()[:4096])
    assert marker["host"] == "ä"
    assert marker["slab"] == 0
    assert marker["dropped"] == ["command"]
    assert made.committed()[0]


# what may not be joined -----------------------------------------------------------------------


def test_other_choices_are_refused_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    create(path, VIT, precision="fp32", sites=["embed"])
    with pytest.raises(IdentityMismatch) as error:
        create(path, VIT, precision="bf16", sites=["embed"], model={"name": "other", "args": {}})
    said = str(error.value)
    assert "precision is fp32, given bf16" in said
    assert "model.name is random, given other" in said
    assert "sites" not in said
    assert "\n" not in said


def test_identity_is_compared_as_json_and_only_where_given() -> None:
    stored = {"size": [3, 8, 8], "seed": 0, "tokens": {"default": "all", "head": "pooled"}}
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
