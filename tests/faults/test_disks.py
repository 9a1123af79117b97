"""Disks that get full, or are turned read-only, in the middle of the work."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Ends, Trial
from tests.faults.trials import (
    check_finished,
    check_unfinished,
    ends_well,
    extraction,
    moment,
    n_committed,
    says_one_line,
    seeds,
)
from tests.processes import Process, Server

Disk = tuple[Path, Path]
Disks = Callable[[float], Disk]


@pytest.fixture
def disk(run: Server, tmp_path: Path) -> Iterator[Disks]:
    """Makes a disk of so many MiB: its place for commands, and where this process sees it."""
    place = tmp_path / "disk"

    def make(megabytes: float) -> Disk:
        if not run.mounts:
            pytest.skip("this machine grants no mount namespace (unshare --mount)")
        place.mkdir()
        return place, run.mount(place, megabytes)

    yield make
    if place.exists():
        run.unmount(place)


def fill(folder: Path) -> Path:
    """Take what is left of the disk."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


@pytest.mark.fault("disk full while extracting")
@seeds(1)
def test_an_extraction_on_a_disk_that_gets_full(
    trial: Trial, disk: Disks, seed: int
) -> None:
    """One line, committed slabs kept; with room again the same command makes the rest."""
    run, whole, (place, seen) = trial.run, trial.whole, disk(16)
    path, view = place / "s.zarr", seen / "s.zarr"
    words = extraction(trial.images, path)
    process = run.start(*words)
    moment(trial.rng, process, whole.seconds, lambda: n_committed(view) > 0)
    filler = fill(seen)
    done = process.end()
    if done.code == 0:
        trial.ended("ended before the disk was full")
    else:
        line, told = says_one_line(done), ("is full", "no space left", "the disk has")
        assert str(path) in line and any(how in line for how in told), line
        trial.ended("one line, resumed")
    check_unfinished(view, whole.bytes)
    assert not list(seen.rglob("*.partial")) and not list(seen.glob(".*"))
    filler.unlink()
    ends_well(run.run(*words))
    check_finished(view, whole.bytes)


@pytest.mark.fault("disk read-only while extracting")
@seeds(1)
def test_an_extraction_on_a_disk_that_turns_read_only(
    trial: Trial, disk: Disks, seed: int
) -> None:
    run, whole, (place, seen) = trial.run, trial.whole, disk(16)
    path, view = place / "s.zarr", seen / "s.zarr"
    words = extraction(trial.images, path, *trial.rng.choice(([], ["--shard", "claims"])))
    process = run.start(*words)
    moment(trial.rng, process, whole.seconds, lambda: n_committed(view) > 0)
    turn(run, place, "ro", process.running)
    done = process.end()
    if done.code == 0:
        trial.ended("ended before")
    else:
        line = says_one_line(done)
        assert str(path) in line and "read-only file system" in line, line
        trial.ended("one line, resumed")
    check_unfinished(view, whole.bytes)
    turn(run, place, "rw", lambda: True)
    ends_well(run.run(*words))
    check_finished(view, whole.bytes)


def turn(run: Server, place: Path, option: str, going_on: Callable[[], bool]) -> None:
    """Remount, between two files that a process writes."""
    while not run.remount(place, option) and going_on():
        time.sleep(0.005)
    run.remount(place, option)


def caching(
    run: Server, store: Path, place: Path, seen: Path, seconds: float, seed: int
) -> tuple[list[object], Process]:
    """`cka` with its cache on that disk, and its process, somewhere in the middle of it."""
    words: list[object] = [
        "cka",
        store,
        "--estimator",
        "exact",
        "--cache",
        place / "cache",
    ]
    process = run.start(*words)
    moment(random.Random(seed), process, seconds, lambda: any((seen / "cache").glob("*")))
    return words, process


@pytest.mark.fault("disk of the Gram cache full")
@seeds(1)
def test_a_gram_cache_on_a_disk_that_gets_full(
    run: Server, many: Path, clean: tuple[str, float], disk: Disks, seed: int, ended: Ends
) -> None:
    """One line that names the cache; what it holds is whole, and used by the next."""
    place, seen = disk(100)
    words, process = caching(run, many, place, seen, clean[1], seed)
    filler = fill(seen)
    done = process.end()
    if done.code == 0:
        assert done.stdout == clean[0]
        ended("ended before the disk was full")
    else:
        line = says_one_line(done)
        assert str(place) in line and "--cache" in line, line
        ended("one line")
    assert {path.suffix for path in (seen / "cache").glob("*")} <= {".tiles", ".json"}
    filler.unlink()
    again = run.run(*words)
    assert (again.code, again.stdout) == (0, clean[0]), again.stderr


@pytest.mark.fault("disk of the Gram cache read-only")
@seeds(1)
def test_a_gram_cache_on_a_disk_that_turns_read_only(
    run: Server, many: Path, clean: tuple[str, float], disk: Disks, seed: int, ended: Ends
) -> None:
    """The right numbers, from scratch files, or one line that names the cache."""
    place, seen = disk(200)
    words, process = caching(run, many, place, seen, clean[1], seed)
    turn(run, place, "ro", process.running)
    done = process.end()
    if done.code:
        line = says_one_line(done)
        assert str(place) in line and "read-only file system" in line, line
        ended("one line")
    else:
        assert done.stdout == clean[0]
        ended("same numbers")
    again = run.run(*words)
    assert (again.code, again.stdout) == (0, clean[0]), again.stderr
    if "are not kept" in again.stderr:
        assert str(place) in again.stderr


@pytest.mark.fault("disk of the table full")
def test_a_table_on_a_full_disk(trial: Trial, disk: Disks) -> None:
    """Neither the table nor half of it, nor a sidecar or a picture alone."""
    place, seen = disk(0.05)
    filler = fill(seen)
    words = [
        "attn-dist",
        trial.whole.path,
        "-o",
        place / "r.csv",
        "--png",
        place / "r.png",
    ]
    line = says_one_line(trial.run.run(*words))
    assert "cannot write" in line and str(place) in line and "no space left" in line
    assert list(seen.iterdir()) == [filler]
    trial.ended("one line, no file")


@pytest.mark.fault("disk of a study's results full")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_study_on_a_disk_that_is_full(
    run: Server, disk: Disks, jobs: int, ended: Ends
) -> None:
    """The steps that failed are named in a line, results of before are whole; with room again the
    same command makes the rest."""
    place, seen = disk(60)
    words = ["study", "v=demo:vit", "--data", "demo", "--images", 20, "-o", place / "out",
             "--jobs", jobs, "--analyses", "cka,spectrum"]  # fmt: skip
    ends_well(run.run(*words))

    def results() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (seen / "out/results").iterdir()}

    before = results()
    room = seen / "room"
    room.write_bytes(b"\0" * (24 << 10))  # for study.json, but for no picture
    filler = fill(seen)
    room.unlink()
    changed = [*words, "--set", "cka.estimator=biased", "--set", "spectrum.tokens=cls"]
    done = run.run(*changed)
    assert done.code == 1 and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("vitsee study: 3 of 4 steps failed: "), line
    for step in ("cka-v", "spectrum", "report"):
        assert (
            f"{step} (cannot write {place / 'out'}" in line and "no space left" in line
        ), line
    assert results() == before
    filler.unlink()
    ends_well(run.run(*changed))
    assert {*results()} == {*before} and results()["cka-v.csv"] != before["cka-v.csv"]
    ended("one line, resumed")
