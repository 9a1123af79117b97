"""Growing a store while processes are killed, or two of them do the same: no data is lost, and
readers get either the previous generation or the next one, always complete."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from tests.extractions import array_bytes, extracted
from tests.faults.commands import Command, undisturbed
from tests.faults.conftest import Trial
from tests.faults.trials import (
    N,
    changed,
    ends_well,
    extraction,
    n_committed,
    seeds,
)
from tests.processes import Server
from tests.random_stores import leftovers
from vitsee_stores import open_store, validate
from vitsee_stores.generations import SEALS

FIRST = 13  # the last slab of two is half empty
SITES = ["--sites", "blocks", "--sites", "head"]


# The words of what adds twelve sites, or eleven images.
GROWTH = {
    "sites": ["--images", FIRST, "--sites", "norms"],
    "images": ["--images", N],
}


@dataclass
class Growing:
    """The store before, and the one that was asked for at once; `words` make the first the second.
    path: a copy of the first, for one trial; command: how it grew undisturbed."""

    base: Path
    at_once: Path
    path: Path
    words: list[object]
    command: Command

    def check(self, complete: bool = False) -> None:
        check(self.path, self.base, self.at_once, complete)


@pytest.fixture(scope="module")
def stores(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("once")
    made = {name: folder / f"{name}.zarr" for name in ("base", *GROWTH)}
    first = ["--images", FIRST, *SITES]
    extracted(*extraction(images, made["base"], *first)[1:])
    extracted(*extraction(images, made["sites"], *first, "--sites", "norms")[1:])
    extracted(*extraction(images, made["images"], *SITES)[1:])
    return made


@pytest.fixture(scope="module")
def commands(
    run: Server,
    images: Path,
    stores: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Command]:
    """Each growth, as it is when nothing disturbs it."""
    made = {}
    for name, more in GROWTH.items():
        path = tmp_path_factory.mktemp(name) / "whole" / "s.zarr"
        shutil.copytree(stores["base"], path)
        made[name] = undisturbed(run, partial(growth, images, more), path)
    return made


def growth(images: Path, more: list[object], path: Path) -> list[object]:
    """The words of what adds to the store at a path."""
    return extraction(images, path, *more)


@pytest.fixture(params=GROWTH)
def growing(
    stores: dict[str, Path],
    commands: dict[str, Command],
    trial: Trial,
    request: pytest.FixtureRequest,
) -> Growing:
    name = request.param
    shutil.copytree(stores["base"], trial.path)
    words = commands[name].words(trial.path)
    return Growing(stores["base"], stores[name], trial.path, words, commands[name])


def check(path: Path, base: Path, at_once: Path, complete: bool) -> None:
    """A reader has all that was there before, or all; numbers are those of an undisturbed run."""
    store, whole = open_store(path), open_store(at_once)
    left = [] if complete else ["was left behind by a killed process"]
    assert store.complete
    assert [
        line for line in validate(path, deep=True) if not line.endswith(tuple(left))
    ] == []
    before = array_bytes(base)
    assert {
        name: data for name, data in array_bytes(path).items() if name in before
    } == before
    assert store.generation == 2 if complete else store.generation in (1, 2)
    expected = open_store(base) if store.generation == 1 else whole
    assert store.arrays.keys() - {*SEALS} == expected.arrays.keys() - {*SEALS}
    for name in store.arrays.keys() - {*SEALS}:
        assert_array_equal(
            store.array(name)[...], expected.array(name)[...], err_msg=name
        )
    if complete:
        assert leftovers(path) == leftovers(path / "generations/2") == []
        assert not list(path.rglob(".claim*"))


@pytest.mark.fault("a growing store killed")
@seeds(1)
def test_a_growing_store_killed_again_and_again(
    trial: Trial, growing: Growing, seed: int
) -> None:
    for _ in range(3):
        begun = changed(partial(n_committed, growing.path / "generations/2"))
        growing.command.kill(trial, growing.path, begun)
        growing.check()
    ends_well(trial.run.run(*growing.words))
    growing.check(complete=True)


@pytest.mark.fault("a growing store killed")
def test_a_growing_store_killed_at_each_commit(trial: Trial, growing: Growing) -> None:
    """Before and after each step that others can see."""
    hooks, steps = "tests.faults.hooks:die", 0
    while True:
        before = trial.run.run(*growing.words, before=f"{hooks}_before_a_commit")
        after = trial.run.run(*growing.words, before=f"{hooks}_after_a_commit")
        if before.code == after.code == 0:
            break
        assert before.code == after.code == 137, before.stderr + after.stderr
        steps += 1
        trial.ended("resumed")
        growing.check()
    slabs = open_store(growing.path).generations[1].manifest.plan.n_slabs
    assert steps == 1 + slabs + 1, (
        "the empty generation, its slabs, and that it is complete"
    )
    ends_well(trial.run.run(*growing.words))
    assert validate(growing.path, deep=True) == []


@pytest.mark.fault("two owners of every slab")
@pytest.mark.parametrize("how", [(), ("--shard", "claims")], ids=["all", "claims"])
@seeds(1)
def test_two_processes_add_the_same(
    trial: Trial, growing: Growing, how: tuple[str, ...], seed: int
) -> None:
    both = []
    for _ in range(2):
        both.append(trial.run.start(*growing.words, *how))
        time.sleep(trial.rng.uniform(0, 0.5))
    for process in both:
        ends_well(process.end())
    growing.check(complete=True)
    trial.ended("same bytes")
