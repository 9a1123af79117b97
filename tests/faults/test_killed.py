"""Processes killed at random moments: what they leave is right, and the next one makes the rest."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import Ends, Trial
from tests.faults.trials import (
    changed,
    check_all_finish,
    check_finished,
    check_unfinished,
    ends_well,
    extraction,
    killed,
    moment,
    n_committed,
    seeds,
)
from tests.processes import Server
from tests.random_stores import tokens_site, write
from vitsee_stores.layout import StorePlan, TokenLayout

QUICKLY = "tests.faults.hooks:look_often"


@pytest.mark.fault("extraction killed")
@seeds(1)
def test_an_extraction_killed_again_and_again(trial: Trial, seed: int) -> None:
    for _ in range(3):
        begun = changed(partial(n_committed, trial.path))
        process = trial.run.start(*trial.extraction())
        moment(trial.rng, process, trial.whole.seconds, begun)
        killed(process, trial.ended)
        check_unfinished(trial.path, trial.whole.bytes)
    ends_well(trial.run.run(*trial.extraction()))
    check_finished(trial.path, trial.whole.bytes)


@pytest.mark.fault("one of two claiming processes killed")
@seeds(1)
def test_claiming_processes_are_killed_and_replaced(trial: Trial, seed: int) -> None:
    run, whole, words = trial.run, trial.whole, trial.extraction("--shard", "claims")
    both = [run.start(*words, before=QUICKLY) for _ in range(2)]
    for _ in range(2):
        one = both[trial.rng.randrange(2)]
        moment(trial.rng, one, whole.seconds, changed(partial(n_committed, trial.path)))
        killed(one, trial.ended, "made by the others")
        both[both.index(one)] = run.start(*words, before=QUICKLY)
    check_all_finish(both, trial.path, whole.bytes)


@pytest.mark.fault("cka killed while it caches")
@seeds(1)
def test_a_gram_pass_killed_again_and_again(
    run: Server,
    many: Path,
    clean: tuple[str, float],
    tmp_path: Path,
    seed: int,
    ended: Ends,
) -> None:
    """The numbers of one that kept nothing, and no half file beside the whole ones."""
    rng, cache, table = random.Random(seed), tmp_path / "cache", tmp_path / "r.csv"
    words = ["cka", many, "--cache", cache]
    for _ in range(3):
        begun = changed(lambda: set(cache.glob("*")))
        process = run.start(*words, "-o", table, "--force")
        moment(rng, process, clean[1], begun)
        was_killed = process.kill().code == -signal.SIGKILL
        half = "swept half a matrix" if list(cache.glob("*.partial")) else "same numbers"
        ended(half if was_killed else "ended before the signal")
        assert was_killed or table.read_text() == clean[0]
        assert not table.exists() or table.read_text() == clean[0]
    done = run.run(*words)
    assert (done.code, done.stdout) == (0, clean[0]), done.stderr
    assert {path.suffix for path in cache.iterdir()} == {".tiles", ".json"}


@pytest.mark.fault("a sum over slabs killed")
@pytest.mark.parametrize("spread", [(), ("--jobs", "2")], ids=str)
@seeds(1)
def test_a_sum_killed_again_and_again(
    run: Server, tmp_path: Path, seed: int, spread: tuple[str, ...], ended: Ends
) -> None:
    """It goes on where it was, and gives the bytes of one that nobody killed."""
    rng, path = random.Random(seed), tmp_path / "s.zarr"
    site = tokens_site(
        "blocks.0.out", TokenLayout((), (2, 2), stride_px=(16.0, 16.0)), dim=8
    )
    write(path, StorePlan(240, 8, "none", (site,)))
    words = ["spectrum", path, "--tokens", "all", *spread]
    whole, table = tmp_path / "whole.csv", tmp_path / "r.csv"
    ends_well(run.run(*words, "-o", whole))
    kept = table.with_name("r.csv.partial")
    how = []
    for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        begun = changed(lambda: sorted(p.stat().st_mtime_ns for p in kept.glob("*.sum")))
        process = run.start(*words, "-o", table, before="tests.faults.hooks:keep_often")
        until = time.monotonic() + 60
        while not begun() and process.running() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        stopped = process.kill(sent)
        how.append(stopped.code)
        ended("ended before the signal" if stopped.code == 0 else "went on")
        assert stopped.code in (0, -signal.SIGKILL, 75), stopped.stderr
        if stopped.code == 0:
            break
        assert not table.exists()
    if how[-1] != 0:
        assert "goes on after slab" in ends_well(run.run(*words, "-o", table)).stderr
    assert table.read_bytes() == whole.read_bytes()
    assert not kept.exists()


@pytest.mark.fault("one of two cka on one cache killed")
@seeds(1)
def test_two_gram_passes_on_one_cache(
    run: Server,
    many: Path,
    clean: tuple[str, float],
    tmp_path: Path,
    seed: int,
    ended: Ends,
) -> None:
    rng, cache = random.Random(seed), tmp_path / "cache"
    both = [run.start("cka", many, "--cache", cache) for _ in range(2)]
    moment(rng, both[0], clean[1], lambda: bool(list(cache.glob("*"))))
    both[0].kill()
    done = both[1].end()
    assert (done.code, done.stdout) == (0, clean[0]), done.stderr
    ended("same numbers")


@pytest.mark.fault("extraction killed")
def test_what_a_killed_extraction_started_ends(
    run: Server, images: Path, tmp_path: Path, ended: Ends
) -> None:
    """Loading processes, and the memory that they share."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("this system does not list a process' children")
    before = set(Path("/dev/shm").glob("*"))
    process = run.start(*extraction(images, tmp_path / "s.zarr", "--workers", 2))
    until = time.monotonic() + 60
    while not (started := children(process.pid)) and process.running():
        assert time.monotonic() < until
        time.sleep(0.002)
    assert process.kill().code == -signal.SIGKILL
    while any(map(runs, started)):
        assert time.monotonic() < until
        time.sleep(0.01)
    left = set(Path("/dev/shm").glob("*")) - before
    # joblib's are of tests that run beside this one: extract has none of these.
    assert {
        place.name for place in left if not place.name.startswith("sem.loky-")
    } == set()
    ended("left nothing running")


def runs(pid: int) -> bool:
    """Whether a process has not ended, if perhaps nobody asked yet how."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += list(map(int, listed.read_text().split()))
    return found
