"""Several processes at the same slabs, by mistake or beside a dying one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extractions import VIT, array_bytes, extracted, plant_images
from tests.processes import Server
from vitsee_core.extraction.sharding import locked
from vitsee_stores import StoreWriter, open_store

N, SLAB = 16, 2


def options(data: Path, path: Path, batch_size: int = 2) -> list[object]:
    return [*VIT, "--data", data, "-o", path, "--slab", SLAB, "--batch-size", batch_size]


@pytest.mark.slow
def test_two_processes_without_shards_end_well(run: Server, tmp_path: Path) -> None:
    """Their batch sizes differ, and so would their numbers' last bits: every slab is of one."""
    data = plant_images(tmp_path / "data", N)
    wholes = [tmp_path / f"whole{size}.zarr" for size in (1, 2)]
    for size, whole in enumerate(wholes, 1):
        extracted(*options(data, whole, size))
    path = tmp_path / "store.zarr"
    both = [run.start("extract", *options(data, path, size)) for size in (1, 2)]
    ends = [process.end() for process in both]
    assert [done.code for done in ends] == [0, 0], ends
    assert open_store(path).complete
    found = array_bytes(path)
    expected = [array_bytes(whole) for whole in wholes]
    for k in range(N // SLAB):
        chunks = {name for name in found if name.split("/c.")[1].split(".")[0] == str(k)}
        assert any(all(found[c] == one[c] for c in chunks) for one in expected), k
    assert not list(path.rglob("*.partial"))
    assert not list(tmp_path.glob(".store*"))


def test_a_slab_that_another_committed_meanwhile_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = plant_images(tmp_path / "data", 8), tmp_path / "store.zarr"
    write = StoreWriter.write_slab

    def overtaken(writer: StoreWriter, k: int, *args: Any) -> int:
        if k == 1:
            monkeypatch.setattr(StoreWriter, "write_slab", write)
            write(writer, k, *args)
        return write(writer, k, *args)

    monkeypatch.setattr(StoreWriter, "write_slab", overtaken)
    said = extracted(*options(data, path)).stderr
    assert "1 slab of 4 had been committed by another process meanwhile" in said
    assert open_store(path).complete


HOLD = """
import pathlib, sys, time
from vitsee_core.extraction.sharding import locked
store = pathlib.Path(sys.argv[1])
with locked(store, [int(sys.argv[2])], wait=True):
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(0.2)
    (store / "done").write_text("")
"""


def hold(store: Path, slab: int) -> subprocess.Popen[str]:
    """A process that writes this slab until it is written to."""
    (store / "commits").mkdir()
    (store / "commits" / "zarr.json").write_text("{}")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store), str(slab)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    return other


def test_a_slab_has_one_writer_at_a_time(tmp_path: Path) -> None:
    other = hold(tmp_path, 3)
    with locked(tmp_path, [2, 3, 4], wait=False) as free:
        assert free == [2, 4]
    assert other.stdin is not None
    with locked(tmp_path, [2], wait=True):  # another slab: no waiting
        other.stdin.write("go on\n")
        other.stdin.flush()
    with locked(tmp_path, [3], wait=True):
        assert (tmp_path / "done").exists()
    other.communicate()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    other = hold(tmp_path, 0)
    other.kill()
    other.communicate()
    with locked(tmp_path, [0], wait=False) as free:
        assert free == [0]


def test_a_store_that_cannot_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "none", [0, 1], wait=False) as free,
        locked(tmp_path / "none", [0], wait=True),
    ):
        assert free == [0, 1]
