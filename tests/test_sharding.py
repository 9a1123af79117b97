"""--shard: which slabs a process owns."""

from __future__ import annotations

import pytest

from vitsee_core.extraction.sharding import Shard, parse_shard
from vitsee_stores.errors import VitseeError


def test_shards_cover_every_slab_exactly_once() -> None:
    for n_slabs in (1, 5, 7, 12):
        for count in (1, 2, 3, 8):
            owned = [k for i in range(count) for k in Shard(i, count).slabs(n_slabs)]
            assert sorted(owned) == list(range(n_slabs))


def test_without_the_option_nothing_is_read_from_the_environment() -> None:
    assert parse_shard(None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "1"}) == Shard(
        0, 1
    )


def array(task: int, first: int, count: int, step: int = 1) -> dict[str, str]:
    """What SLURM says to a task of an array."""
    numbers = {"ID": task, "MIN": first, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


def rank(of_step: int, ranks: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(of_step), "SLURM_NTASKS": str(ranks)}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (array(7, 4, 5), Shard(3, 5)),
        (array(6, 0, 4, step=2), Shard(3, 4)),
        (rank(2, 4), Shard(2, 4)),
        (array(1, 0, 3) | rank(1, 2), Shard(3, 6)),
    ],
)
def test_slurm_arrays_and_ranks(environ: dict[str, str], expected: Shard) -> None:
    assert parse_shard("slurm", environ) == expected


@pytest.mark.parametrize(
    ("text", "environ", "phrase"),
    [
        ("8/8", {}, "count from 0"),
        ("0/0", {}, "no shards; expected i/n"),
        ("1-4", {}, "expected i/n"),
        ("slurm", {}, "neither SLURM_ARRAY_TASK_ID nor SLURM_PROCID"),
        ("slurm", {"SLURM_ARRAY_TASK_ID": "2"}, "SLURM_ARRAY_TASK_COUNT is None"),
        # --array=3,7 after two failures: not the shards of the first submission
        ("slurm", array(7, 3, 2), "give --shard i/n"),
        ("slurm", rank(4, 4), "SLURM_PROCID 4 is not below SLURM_NTASKS 4"),
    ],
)
def test_what_is_no_shard_is_refused(
    text: str, environ: dict[str, str], phrase: str
) -> None:
    with pytest.raises(VitseeError, match=phrase):
        parse_shard(text, environ)
