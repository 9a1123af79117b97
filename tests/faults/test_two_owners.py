"""Two processes at the same slabs: double work, the same bytes, and no error."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import Trial
from tests.faults.trials import check_all_finish, seeds

pytestmark = pytest.mark.fault("two owners of every slab")


@seeds(1)
def test_two_extractions_of_one_store(trial: Trial, seed: int) -> None:
    both = []
    for _ in range(2):
        both.append(trial.run.start(*trial.extraction()))
        time.sleep(trial.rng.uniform(0, 0.5))
    check_all_finish(both, trial.path, trial.whole.bytes)
    trial.ended("same bytes")


def test_claims_that_all_were_lost(trial: Trial) -> None:
    """Claims only advise: whoever deletes them, or makes others', costs double work."""
    both = [trial.run.start(*trial.extraction("--shard", "claims")) for _ in range(2)]
    while both[0].running() or both[1].running():
        for claim in trial.path.glob("commits/.claim.*.json"):
            claim.unlink(missing_ok=True)
        time.sleep(0.002)
    check_all_finish(both, trial.path, trial.whole.bytes)
    trial.ended("same bytes")
