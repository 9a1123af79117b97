"""Cached Gram matrices, claims and markers, damaged: made again, or of no account."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.extractions import extracted
from tests.faults.conftest import Ends, Trial, Whole
from tests.faults.test_damaged_files import DAMAGES, damaged, invoke
from tests.faults.trials import check_finished, seeds
from vitsee_core.extraction import sharding
from vitsee_stores import StoreWriter, open_store
from vitsee_stores import leases as claims
from vitsee_stores.leases import Claims

TRIALS_AT_ONCE = 8


@pytest.fixture(scope="module")
def cache(
    whole: Whole, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A folder of Gram matrices, and what commands print that use it."""
    folder = tmp_path_factory.mktemp("cache")
    printed = {}
    for words in (
        "cka S --cache C",
        "cka S --cache C --estimator minibatch",
        "similarity S --cache C",
    ):
        done = invoke(words, {"S": whole.path, "C": folder})
        assert done.exit_code == 0, done.stderr
        printed[words] = done.stdout
    return folder, printed


@pytest.mark.fault("a file of the Gram cache flipped, cut or emptied")
@seeds(1)
def test_damaged_matrices_are_made_again(
    cache: tuple[Path, dict[str, str]], whole: Whole, seed: int, ended: Ends
) -> None:
    """Never read: tiles have checksums, and headers a digest."""
    rng, (folder, printed) = random.Random(seed), cache
    for _ in range(TRIALS_AT_ONCE):
        path = rng.choice(sorted(folder.iterdir()))
        path.write_bytes(damaged(path.read_bytes(), rng.choice(DAMAGES), rng))
        for words, before in printed.items():
            done = invoke(words, {"S": whole.path, "C": folder})
            assert (done.exit_code, done.stdout) == (0, before), (
                path.name,
                words,
                done.stderr,
            )
            ended("same numbers")


@pytest.mark.fault("a claim flipped, cut or emptied")
@seeds(1)
def test_damaged_claims_cost_time_alone(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By design nothing rests on them: the slab waits its time, and is made."""
    rng, path = trial.rng, trial.path
    extracted(*trial.extraction("--shard", "0/2")[1:])
    writer = StoreWriter.join(path)
    assert writer is not None
    Claims(writer.files, {"host": "here", "pid": 1}).take(
        np.flatnonzero(~writer.committed()).tolist(), 99
    )
    for claim in sorted(path.glob("commits/.claim.*.json")):
        claim.write_bytes(damaged(claim.read_bytes(), rng.choice(DAMAGES), rng))
    monkeypatch.setattr(claims, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(sharding, "POLL_SECONDS", 0.1)
    extracted(*trial.extraction("--shard", "claims")[1:])
    check_finished(path, trial.whole.bytes)
    trial.ended("same bytes")


@pytest.mark.fault("a marker or chunk flipped, cut or emptied, extracted again")
@seeds(2)
def test_damaged_slabs_are_made_again(trial: Trial, seed: int) -> None:
    """A marker that is damaged is none; of other damage `validate` says what to do."""
    rng, path = trial.rng, trial.path
    shutil.copytree(trial.whole.path, path)
    slab = rng.randrange(open_store(path).n_slabs)
    marker = path / "commits" / f"c.{slab}.0"
    if seed % 2:
        chunks = [
            p for p in path.rglob(f"c.{slab}*") if p.name.split(".")[1] == str(slab)
        ]
        chunk = rng.choice(
            [p for p in sorted(chunks) if not {"samples", "weights"} & {*p.parts}]
        )
        chunk.write_bytes(damaged(chunk.read_bytes(), rng.choice(DAMAGES), rng))
        said = invoke(f"validate --deep {path}", {}).stderr
        assert (
            f"(delete commits/c.{slab}.0, then repeat the vitsee extract command" in said
        )
        marker.unlink()
    else:
        marker.write_bytes(damaged(marker.read_bytes(), rng.choice(DAMAGES), rng))
    extracted(*trial.extraction()[1:])
    check_finished(path, trial.whole.bytes)
    trial.ended("same bytes")
