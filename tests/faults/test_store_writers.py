"""Processes that write one store together, or are killed: the writer alone, without a model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from tests.faults.trials import seeds
from tests.random_stores import PLANS, Array, expected, leftovers, write
from vitsee_stores import IncompleteStore, StoreWriter, describe, open_store, remove_store, validate

ROOT = Path(__file__).parents[2]
VIT = PLANS["vit"]


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


@pytest.mark.fault("writers of one store")
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


@pytest.mark.fault("two writers of every slab")
@seeds(2)
def test_two_owners_of_every_slab(tmp_path: Path, seed: int) -> None:
    """Neither ends with an error, and the bytes are right."""
    one, both = tmp_path / "one.zarr", tmp_path / "both.zarr"
    write(one, PLANS["many-slabs"])
    processes = [start(both, "many-slabs") for _ in range(2)]
    for process in processes:
        go(process)
        time.sleep(0.01 * (seed % 10))
    said = [end(process) for process in processes]
    assert "complete" in {state for _, state in said}
    assert validate(both, deep=True) == []
    assert leftovers(both) == []
    assert chunk_files(both) == chunk_files(one)


@pytest.mark.fault("a writer killed")
@seeds(1)
def test_a_process_killed_at_any_moment_loses_one_slab(tmp_path: Path, seed: int) -> None:
    one, killed = tmp_path / "one.zarr", tmp_path / "killed.zarr"
    plan = PLANS["many-slabs"]
    write(one, plan)
    whole = expected(plan)
    rng = random.Random(seed)
    attempts = caught_writing = 0
    while attempts < 6 or (not caught_writing and attempts < 30):
        attempts += 1
        process = start(killed, "many-slabs")
        go(process)
        if attempts % 2:
            time.sleep(rng.uniform(0.0, 0.3))
        else:  # as soon as a chunk is on its way
            while process.poll() is None and not partials(killed):
                pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        caught_writing += bool(partials(killed))
        if killed.exists():  # else killed while the empty store was built beside its place
            check_unfinished(killed, whole)
            if describe(killed)["complete"]:
                remove_store(killed)
    assert caught_writing
    process = start(killed, "many-slabs")
    go(process)
    assert end(process)[1] == "complete"
    assert validate(killed, deep=True) == []
    assert leftovers(killed) == []
    assert chunk_files(killed) == chunk_files(one)


def partials(store: Path) -> list[str]:
    folder = store / "acts/blocks.0.out/grid"
    names = os.listdir(folder) if folder.exists() else []
    return [name for name in names if name.endswith(".partial")]


def check_unfinished(path: Path, whole: dict[str, Array]) -> None:
    """What is committed is right, and nothing reads as whole that is not."""
    on_disk = StoreWriter.join(path)
    assert on_disk is not None
    if on_disk.complete:
        return
    with pytest.raises(IncompleteStore):
        open_store(path)
    assert validate(path, deep=True) == []
    if on_disk.committed().any():
        for slab in open_store(path, allow_partial=True).slabs():
            for site in slab.store.sites:
                wanted = whole[f"acts/{site}/grid"][slab.rows]
                assert_array_equal(slab.acts(site, "patches"), wanted)
