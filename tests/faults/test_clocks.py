"""Wall clocks that go backwards or jump: nothing that decides looks at one but sweeping, and that
may only sweep what is made again."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults import hooks
from tests.faults.conftest import Trial
from tests.faults.trials import check_all_finish, check_finished, ends_well, n_committed

pytestmark = pytest.mark.fault("clock going backwards or jumping")


@pytest.mark.parametrize("clock", ["clock_runs_backwards", "clock_jumps"])
def test_two_extractions_beside_each_other(trial: Trial, clock: str) -> None:
    """Neither takes the other's claims or files away; a slab's time is a note."""
    words = trial.extraction("--shard", "claims")
    both = [trial.run.start(*words, before=f"{hooks.__name__}:{clock}") for _ in range(2)]
    check_all_finish(both, trial.path, trial.whole.bytes)
    trial.ended("same bytes")


def test_a_lost_claim_is_found_without_a_clock(trial: Trial) -> None:
    """Of a process that was killed on another machine, by heartbeats that stop; of one that lives
    there, heartbeats go on whatever its clock says."""
    path, words = trial.path, trial.extraction("--shard", "claims")
    one = trial.run.start(
        *words, before=f"{hooks.__name__}:clock_runs_backwards_elsewhere"
    )
    until = time.monotonic() + 60
    while not list(path.glob("commits/.claim.*.json")) and time.monotonic() < until:
        time.sleep(0.001)
    assert one.kill().code == -signal.SIGKILL
    left = list(path.glob("commits/.claim.*.json"))
    ends_well(trial.run.run(*words, before=f"{hooks.__name__}:lose_soon"))
    assert left and n_committed(path) == 12
    check_finished(path, trial.whole.bytes)
    trial.ended("same bytes")


def test_leftovers_from_another_time_go_with_the_end(trial: Trial) -> None:
    """What a killed process of another machine left has a file server's time, not ours."""
    path = trial.path
    ends_well(trial.run.run(*trial.extraction("--shard", "0/2")))
    left = [
        path / "acts" / "blocks.0.out" / "grid" / "c.1.0.0.0.0123abcd-5.0f0f.partial",
        path / "commits" / "c.1.0.0123abcd-5.0f0f.partial",
        trial.folder / ".s.zarr.0123abcd-5.0f0f.creating",
    ]
    for place, hours in zip(left, (-48, 48, 48), strict=True):
        place.mkdir() if place.suffix == ".creating" else place.write_bytes(b"half")
        os.utime(place, (time.time() + 3600 * hours,) * 2)
    ends_well(trial.run.run(*trial.extraction()))
    check_finished(path, trial.whole.bytes)
    trial.ended("same bytes, all swept")
