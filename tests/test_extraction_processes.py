"""Several processes, signals: the bytes must not depend on them (killed ones: tests/faults)."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.extractions import VIT, array_bytes, extract, extracted, plant_images
from tests.processes import Process, Server
from vitsee_stores import StoreWriter, open_store

N, SLAB = 60, 4
SHARDS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), N)


def options(folder: Path, path: Path) -> list[object]:
    return [*VIT, "--data", folder, "-o", path, "--slab", SLAB, "--batch-size", 2]


@pytest.fixture(scope="module")
def whole(run: Server, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one uninterrupted process."""
    path = tmp_path_factory.mktemp("whole") / "store.zarr"
    done = run.run("extract", *options(folder, path))
    assert done.code == 0, done.stderr
    return path


def n_committed(path: Path) -> int:
    return len(
        [f for f in (path / "commits").glob("c.*") if not f.name.endswith(".partial")]
    )


def wait_for_commits(process: Process, path: Path, n: int) -> None:
    deadline = time.monotonic() + 120
    while n_committed(path) < n and process.running() and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.slow
def test_shards_started_together_fill_one_store(
    run: Server, folder: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    words = ["extract", *options(folder, path), "--shard"]
    shards = [run.start(*words, f"{i}/{SHARDS}") for i in range(SHARDS)]
    ends = [process.end() for process in shards]
    assert [done.code for done in ends] == [0] * SHARDS, ends
    assert open_store(path).complete
    assert array_bytes(path) == array_bytes(whole)
    assert not list(tmp_path.glob("*.creating*"))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_between_batches_and_the_same_command_resumes(
    run: Server, sent: signal.Signals, folder: Path, whole: Path, tmp_path: Path
) -> None:
    for attempt in range(
        5
    ):  # on a busy machine the run may end before the signal is sent
        path = tmp_path / f"store{attempt}.zarr"
        process = run.start("extract", *options(folder, path))
        wait_for_commits(process, path, 2)
        done = process.kill(sent)
        if done.code == 75:
            break
    assert done.code == 75, done.stderr
    assert done.stdout == ""
    assert f"stopped by {sent.name}" in done.stderr
    assert "repeat the command" in done.stderr
    partial = open_store(path, allow_partial=True)
    assert 0 < partial.committed.sum() < N // SLAB
    extracted(*options(folder, path))
    assert array_bytes(path) == array_bytes(whole)


@pytest.mark.slow
def test_a_joining_process_takes_the_stores_defaults(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    first = [
        *VIT,
        "--data",
        folder,
        "-o",
        path,
        "--slab",
        16,
        "--seed",
        3,
        "--dtype",
        "float32",
    ]
    extracted(*first, "--sites", "blocks", "--shard", "0/2")
    assert not StoreWriter.join(path).complete  # type: ignore[union-attr]
    extracted(*VIT, "--data", folder, "-o", path, "--shard", "1/2")
    store = open_store(path)
    assert store.complete
    assert store.acts("blocks.0.out").dtype == np.float32
    assert store.manifest.identity["seed"] == 3


@pytest.mark.slow
def test_force_starts_anew(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.zarr"
    extracted(*options(folder, path), "--images", 8)
    first = open_store(path).manifest.store_id
    extracted(*options(folder, path), "--images", 12, "--force")
    store = open_store(path)
    assert store.n_images == 12
    assert store.manifest.store_id != first
    assert extract(*options(folder, path), "--force", "--shard", "0/2").exit_code == 1
