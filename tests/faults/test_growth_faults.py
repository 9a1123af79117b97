"""Growing a store while processes are killed, or two of them do the same: no data is lost, and
readers get either the previous generation or the next one, always complete."""

from __future__ import annotations

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from tests.extractions import array_bytes, extracted
from tests.faults.conftest import Ends
from tests.faults.trials import N, changed, extraction, moment, n_committed, seeds
from tests.processes import Server
from tests.random_stores import leftovers
from vitsee_stores import open_store, validate
from vitsee_stores.generations import SEALS

KINDS = ("sites", "images")
FIRST = 13  # the last slab of two is half empty
SITES = ["--sites", "blocks", "--sites", "head"]


def first(images: Path, path: object, *more: object) -> list[object]:
    return extraction(images, path, "--images", FIRST, *SITES, *more)


def growth(kind: str, images: Path, path: object, *more: object) -> list[object]:
    """The words of what adds twelve sites, or eleven images."""
    if kind == "images":
        return extraction(images, path, "--images", N, *more)
    return extraction(images, path, "--images", FIRST, "--sites", "norms", *more)


@pytest.fixture(scope="module")
def base(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "s.zarr"
    extracted(*first(images, path)[1:])
    return path


@pytest.fixture(scope="module")
def at_once(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind the store that was asked for at once."""
    folder = tmp_path_factory.mktemp("once")
    made = {kind: folder / f"{kind}.zarr" for kind in KINDS}
    extracted(*first(images, made["sites"], "--sites", "norms")[1:])
    extracted(*extraction(images, made["images"], *SITES)[1:])
    return made


def check(path: Path, base: Path, at_once: Path, complete: bool = False) -> None:
    """A reader has all that was there before, or all; numbers are those of an undisturbed run."""
    store, whole = open_store(path), open_store(at_once)
    left = [] if complete else ["was left behind by a killed process"]
    assert store.complete
    assert [line for line in validate(path, deep=True) if not line.endswith(tuple(left))] == []
    before = array_bytes(base)
    assert {name: data for name, data in array_bytes(path).items() if name in before} == before
    assert store.generation == 2 if complete else store.generation in (1, 2)
    expected = open_store(base) if store.generation == 1 else whole
    assert store.arrays.keys() - {*SEALS} == expected.arrays.keys() - {*SEALS}
    for name in store.arrays.keys() - {*SEALS}:
        assert_array_equal(store.array(name)[...], expected.array(name)[...], err_msg=name)
    if complete:
        assert leftovers(path) == leftovers(path / "generations/2") == []
        assert not list(path.rglob(".claim*"))


@pytest.mark.fault("a growing store killed")
@pytest.mark.parametrize("kind", KINDS)
@seeds(1)
def test_a_growing_store_killed_again_and_again(
    run: Server,
    images: Path,
    base: Path,
    at_once: dict[str, Path],
    tmp_path: Path,
    kind: str,
    seed: int,
    ended: Ends,
) -> None:
    rng, path = random.Random(seed), Path(shutil.copytree(base, tmp_path / "s.zarr"))
    words = growth(kind, images, path)
    for _ in range(3):
        begun = changed(partial(n_committed, path / "generations/2"))
        process = run.start(*words)
        moment(rng, process, 2.0, begun)
        killed = process.kill().code == -signal.SIGKILL
        ended("resumed" if killed else "ended before the signal")
        check(path, base, at_once[kind])
    done = run.run(*words)
    assert done.code == 0, done.stderr
    check(path, base, at_once[kind], complete=True)


@pytest.mark.fault("a growing store killed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_store_killed_at_each_commit(
    run: Server,
    images: Path,
    base: Path,
    at_once: dict[str, Path],
    tmp_path: Path,
    kind: str,
    ended: Ends,
) -> None:
    """Before and after each step that others can see."""
    path = Path(shutil.copytree(base, tmp_path / "s.zarr"))
    words, steps = growth(kind, images, path), 0
    while True:
        before = run.run(*words, before="tests.faults.hooks:die_before_a_commit")
        after = run.run(*words, before="tests.faults.hooks:die_after_a_commit")
        if before.code == after.code == 0:
            break
        assert before.code == after.code == 137, before.stderr + after.stderr
        steps += 1
        ended("resumed")
        check(path, base, at_once[kind])
    slabs = open_store(path).generations[1].manifest.plan.n_slabs
    assert steps == 1 + slabs + 1, "the empty generation, its slabs, and that it is complete"
    done = run.run(*words)
    assert done.code == 0, done.stderr
    assert validate(path, deep=True) == []


@pytest.mark.fault("two owners of every slab")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [(), ("--shard", "claims")], ids=["all", "claims"])
@seeds(1)
def test_two_processes_add_the_same(
    run: Server,
    images: Path,
    base: Path,
    at_once: dict[str, Path],
    tmp_path: Path,
    kind: str,
    how: tuple[str, ...],
    seed: int,
    ended: Ends,
) -> None:
    rng, path = random.Random(seed), Path(shutil.copytree(base, tmp_path / "s.zarr"))
    both = []
    for _ in range(2):
        both.append(run.start(*growth(kind, images, path, *how)))
        time.sleep(rng.uniform(0, 0.5))
    for process in both:
        done = process.end()
        assert done.code == 0, done.stderr
    check(path, base, at_once[kind], complete=True)
    ended("same bytes")
