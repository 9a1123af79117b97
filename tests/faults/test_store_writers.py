"""Processes that write one store together, or are killed: the writer alone, without a model."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.extractions import array_bytes
from tests.faults.trials import check_finished, check_unfinished, seeds
from tests.random_stores import PLANS, create, expected, slab_of, write
from vitsee_stores import describe, remove_store

SPAWN = multiprocessing.get_context("spawn")


def make(store: Path, name: str, index: int, count: int, late: float, go: object) -> None:
    """What a process does once all are ready, a little late: make or join the store, resume and
    finish."""
    plan = PLANS[name]
    whole = expected(plan)
    go.wait()  # type: ignore[attr-defined]
    time.sleep(late)
    writer = create(store, plan, durable=True)
    todo = [k for k in range(index, plan.n_slabs, count) if not writer.committed()[k]]
    writer.sweep(todo)
    for k in todo:
        writer.write_slab(k, slab_of(plan, whole, k), {"shard": f"{index}/{count}"})
    writer.finish()


def start(
    store: Path, name: str, shards: list[tuple[int, int]], late: float = 0.0
) -> list[BaseProcess]:
    """Processes with the slabs of their shards; each begins `late` seconds after the one before."""
    go = SPAWN.Barrier(len(shards) + 1)
    made = [
        SPAWN.Process(target=make, args=(store, name, *shard, late * place, go))
        for place, shard in enumerate(shards)
    ]
    for process in made:
        process.start()
    go.wait()
    return [*made]


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} == {0}


@pytest.fixture(params=["vit"])
def whole(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, bytes]:
    """The bytes of a store that one process made."""
    write(tmp_path / "one.zarr", PLANS[request.param])
    return array_bytes(tmp_path / "one.zarr")


many_slabs = pytest.mark.parametrize("whole", ["many-slabs"], indirect=True)


@pytest.mark.fault("writers of one store")
def test_processes_that_start_together_make_one_store(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    end(start(tmp_path / "many.zarr", "vit", [(i, 4) for i in range(4)]))
    check_finished(tmp_path / "many.zarr", whole)


@pytest.mark.fault("two writers of every slab")
@many_slabs
@seeds(2)
def test_two_owners_of_every_slab(
    tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    """Neither ends with an error, and the bytes are right."""
    both = tmp_path / "both.zarr"
    end(start(both, "many-slabs", [(0, 1)] * 2, late=0.01 * (seed % 10)))
    check_finished(both, whole)


@pytest.mark.fault("a writer killed")
@many_slabs
@seeds(1)
def test_a_process_killed_at_any_moment_loses_one_slab(
    tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    killed, rng = tmp_path / "killed.zarr", random.Random(seed)
    attempts = caught_writing = 0
    while attempts < 6 or (not caught_writing and attempts < 30):
        attempts += 1
        (process,) = start(killed, "many-slabs", [(0, 1)])
        if attempts % 2:
            time.sleep(rng.uniform(0.0, 0.3))
        else:  # as soon as a chunk is on its way
            while process.is_alive() and not partials(killed):
                pass
        process.kill()
        process.join()
        caught_writing += bool(partials(killed))
        check_unfinished(killed, whole)
        if killed.exists() and describe(killed)["complete"]:
            remove_store(killed)
    assert caught_writing
    end(start(killed, "many-slabs", [(0, 1)]))
    check_finished(killed, whole)


def partials(store: Path) -> list[str]:
    folder = store / "acts/blocks.0.out/grid"
    names = os.listdir(folder) if folder.exists() else []
    return [name for name in names if name.endswith(".partial")]
