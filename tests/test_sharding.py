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
    assert parse_shard(None, {"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "1"}) == Shard(0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "4",
                "SLURM_ARRAY_TASK_COUNT": "5",
                "SLURM_ARRAY_TASK_STEP": "1",
            },
            Shard(3, 5),
        ),
        (
            {
                "SLURM_ARRAY_TASK_ID": "6",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            Shard(3, 4),
        ),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, Shard(2, 4)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "1",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
            },
            Shard(3, 6),
        ),
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
        (
            "slurm",  # --array=3,7 after two failures: not the shards of the first submission
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "3",
                "SLURM_ARRAY_TASK_COUNT": "2",
                "SLURM_ARRAY_TASK_STEP": "1",
            },
            "give --shard i/n",
        ),
    ],
)
def test_what_is_no_shard_is_refused(text: str, environ: dict[str, str], phrase: str) -> None:
    with pytest.raises(VitseeError, match=phrase):
        parse_shard(text, environ)
