"""Two processes at the same slabs: double work, the same bytes, and no error."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Ends, Whole
from tests.faults.trials import check_all_finish, check_finished, extraction, seeds
from tests.processes import Server


@pytest.mark.fault("two owners of every slab")
@seeds(1)
def test_two_extractions_of_one_store(
    run: Server, images: Path, whole: Whole, tmp_path: Path, seed: int, ended: Ends
) -> None:
    rng, path = random.Random(seed), tmp_path / "s.zarr"
    both = []
    for _ in range(2):
        both.append(run.start(*extraction(images, path)))
        time.sleep(rng.uniform(0, 0.5))
    check_all_finish(both, path, whole.bytes)
    ended("same bytes")


@pytest.mark.fault("two owners of every slab")
def test_claims_that_all_were_lost(
    run: Server, images: Path, whole: Whole, tmp_path: Path, ended: Ends
) -> None:
    """Claims only advise: whoever deletes them, or makes others', costs double work."""
    path = tmp_path / "s.zarr"
    both = [run.start(*extraction(images, path, "--shard", "claims")) for _ in range(2)]
    while both[0].running() or both[1].running():
        for claim in path.glob("commits/.claim.*.json"):
            claim.unlink(missing_ok=True)
        time.sleep(0.002)
    assert [process.end().code for process in both] == [0, 0]
    check_finished(path, whole.bytes)
    ended("same bytes")
