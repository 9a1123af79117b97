"""Wall clocks that go backwards or jump: nothing that decides looks at one but sweeping, and that
may only sweep what is made again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults import hooks
from tests.faults.conftest import Ends, Whole
from tests.faults.trials import check_all_finish, check_finished, extraction, n_committed
from tests.processes import Server


@pytest.mark.fault("clock going backwards or jumping")
@pytest.mark.parametrize("clock", ["clock_runs_backwards", "clock_jumps"])
def test_two_extractions_beside_each_other(
    run: Server, images: Path, whole: Whole, tmp_path: Path, clock: str, ended: Ends
) -> None:
    """Neither takes the other's claims or files away; a slab's time is a note."""
    path, before = tmp_path / "s.zarr", f"{hooks.__name__}:{clock}"
    words = extraction(images, path, "--shard", "claims")
    both = [run.start(*words, before=before) for _ in range(2)]
    check_all_finish(both, path, whole.bytes)
    ended("same bytes")


@pytest.mark.fault("clock going backwards or jumping")
def test_a_lost_claim_is_found_without_a_clock(
    run: Server, images: Path, whole: Whole, tmp_path: Path, ended: Ends
) -> None:
    """Of a process that was killed on another machine, by heartbeats that stop; of one that lives
    there, heartbeats go on whatever its clock says."""
    path, before = tmp_path / "s.zarr", f"{hooks.__name__}:clock_runs_backwards_elsewhere"
    words = extraction(images, path, "--shard", "claims")
    one = run.start(*words, before=before)
    until = time.monotonic() + 60
    while not list(path.glob("commits/.claim.*.json")) and time.monotonic() < until:
        time.sleep(0.001)
    assert one.kill().code == -signal.SIGKILL
    left = list(path.glob("commits/.claim.*.json"))
    done = run.run(*words, before=f"{hooks.__name__}:lose_soon")
    assert done.code == 0, done.stderr
    assert left and n_committed(path) == 12
    check_finished(path, whole.bytes)
    ended("same bytes")


@pytest.mark.fault("clock going backwards or jumping")
def test_leftovers_from_another_time_go_with_the_end(
    run: Server, images: Path, whole: Whole, tmp_path: Path, ended: Ends
) -> None:
    """What a killed process of another machine left has a file server's time, not ours."""
    path = tmp_path / "s.zarr"
    assert run.run(*extraction(images, path, "--shard", "0/2")).code == 0
    left = [
        path / "acts" / "blocks.0.out" / "grid" / "c.1.0.0.0.0123abcd-5.0f0f.partial",
        path / "commits" / "c.1.0.0123abcd-5.0f0f.partial",
        tmp_path / ".s.zarr.0123abcd-5.0f0f.creating",
    ]
    for place, hours in zip(left, (-48, 48, 48), strict=True):
        place.mkdir() if place.suffix == ".creating" else place.write_bytes(b"half")
        os.utime(place, (time.time() + 3600 * hours,) * 2)
    done = run.run(*extraction(images, path))
    assert done.code == 0, done.stderr
    check_finished(path, whole.bytes)
    ended("same bytes, all swept")
