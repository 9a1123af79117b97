"""Assignment of slabs to processes: `--shard i/n`, the numbers of a SLURM job's tasks, or
claims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vitsee_core.extraction.options import OptionError
from vitsee_stores.errors import VitseeError


@dataclass(frozen=True)
class Shard:
    """One of `count` processes that fill a store together; `index` counts from 0. With `claims` it
    is one of any number, which claim missing slabs; with `dask` a worker, which is given its
    slabs."""

    index: int = 0
    count: int = 1
    claims: bool = False
    dask: bool = False

    def slabs(self, n_slabs: int) -> range:
        """Every count-th slab from `index` on, so that shards end at about the same time."""
        return range(self.index, n_slabs, self.count)

    @property
    def others(self) -> str:
        """The words for the processes that go on when this one is stopped; "" if it is alone."""
        alone = self.count == 1 and not self.claims
        return "" if alone else "other processes with --shard go on"

    def __str__(self) -> str:
        if self.claims or self.dask:
            return "claims" if self.claims else "dask"
        return f"{self.index}/{self.count}"


def parse_shard(text: str | None, environ: Mapping[str, str]) -> Shard:
    """The shard named by `text`: None (all slabs), 'i/n', 'slurm' or 'claims'.

    'slurm' multiplies the array task by the rank in its step: element a of an array of A tasks with
    R ranks each is shard a*R + rank of A*R. The environment is read only for 'slurm'.

    Raises:
        OptionError: text of another form, an index out of range.
        VitseeError: SLURM variables are missing, or do not number the shards consecutively.
    """
    if text is None:
        return Shard()
    if text == "slurm":
        return _from_slurm(environ)
    if text == "claims":
        return Shard(claims=True)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise OptionError(f"--shard is {text!r}; expected i/n (as 0/8), slurm or claims")
    index, count = int(match[1]), int(match[2])
    if count == 0:
        raise OptionError(f"--shard {text}: no shards; expected i/n (as 0/8), slurm or claims")
    if index >= count:
        raise OptionError(
            f"--shard {text}: shards count from 0, so the last is {count - 1}/{count}"
        )
    return Shard(index, count)


def _from_slurm(environ: Mapping[str, str]) -> Shard:
    def number(name: str, default: int | None = None) -> int:
        value = environ.get(name)
        if value is None and default is not None:
            return default
        if value is None or not value.isdigit():
            raise VitseeError(
                f"--shard slurm: {name} is {value!r}; expected a number "
                "(run under sbatch --array or srun, or give --shard i/n)"
            )
        return int(value)

    ranks = number("SLURM_NTASKS", 1) if "SLURM_PROCID" in environ else 1
    rank = number("SLURM_PROCID", 0)
    if "SLURM_ARRAY_TASK_ID" not in environ and "SLURM_PROCID" not in environ:
        raise VitseeError(
            "--shard slurm: neither SLURM_ARRAY_TASK_ID nor SLURM_PROCID is set "
            "(run under sbatch --array or srun, or give --shard i/n)"
        )
    task, tasks = 0, 1
    if "SLURM_ARRAY_TASK_ID" in environ:
        tasks = number("SLURM_ARRAY_TASK_COUNT")
        offset = number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN", 0)
        task, rest = divmod(offset, number("SLURM_ARRAY_TASK_STEP", 1))
        if rest or not 0 <= task < tasks:
            raise VitseeError(
                f"--shard slurm: task {environ['SLURM_ARRAY_TASK_ID']} is none of {tasks} evenly "
                "numbered array tasks (a resubmitted part of an array: give --shard i/n)"
            )
    if rank >= ranks:
        raise VitseeError(f"--shard slurm: SLURM_PROCID {rank} is not below SLURM_NTASKS {ranks}")
    return Shard(task * ranks + rank, tasks * ranks)
