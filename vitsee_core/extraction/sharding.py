"""Which process makes which slab: `--shard i/n`, the numbers of a SLURM job's tasks, or claims;
locks against two processes writing one; and whether a repeated command has nothing to do, which is
seen without model, images and torch.

Without --shard, or with a requeued job beside its dying predecessor, two processes may want one
slab. Its chunks must all come from one, since another batch size or device rounds otherwise, and
the commit marker seals them together. So a slab is written under a lock that the system releases
with its process; the second process finds it committed and continues. File systems without locks,
and object stores, are used without.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitsee_core.extraction.options import OptionError
from vitsee_core.extraction.outcome import StopRequest
from vitsee_core.runtime.command_lines import without_options
from vitsee_core.runtime.machine import plural
from vitsee_stores import StorePlan, StoreWriter
from vitsee_stores.errors import VitseeError
from vitsee_stores.generations import Generation, read_generations
from vitsee_stores.leases import Claims
from vitsee_stores.metadata import ZARR_JSON
from vitsee_stores.url import Place, Url
from vitsee_stores.writer import tidy

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16
# of waiting for others: at first, and at most
FIRST_SECONDS = 0.2
POLL_SECONDS = 5.0


try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]


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
    R ranks each is shard a*R + rank of A*R. The environment is read only for 'slurm'. Raises
    OptionError: text of another form, an index out of range; VitseeError: SLURM variables are
    missing, or do not number the shards consecutively.
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
    index = int(match[1])
    count = int(match[2])
    if count == 0:
        raise OptionError(
            f"--shard {text}: no shards; expected i/n (as 0/8), slurm or claims"
        )
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
    task = 0
    tasks = 1
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
        raise VitseeError(
            f"--shard slurm: SLURM_PROCID {rank} is not below SLURM_NTASKS {ranks}"
        )
    return Shard(task * ranks + rank, tasks * ranks)


def claimed_rounds(writer: StoreWriter, stop: StopRequest) -> Generator[list[int]]:
    """Slabs to make now, round by round, until the store is complete or a signal came: slabs
    claimed by others are waited for, and taken over if their claims are lost. Close the generator
    if it is not exhausted, to release the claims. Raises StoreError: claims cannot be written to
    the store."""
    claims = Claims(writer.files, {"host": socket.gethostname(), "pid": os.getpid()})
    pause: Iterator[float] | None = None
    with claims.beating():
        while not stop and len(missing := np.flatnonzero(~writer.committed())):
            # Few, so that all processes end at about the same time; each round loads anew.
            at_once = max(1, min(MAX_AT_ONCE, len(missing) // 32))
            mine = claims.take(missing.tolist(), at_once)
            if mine:
                pause = None
                yield mine
                claims.release()
                continue
            if pause is None:
                log.info(
                    "waiting for %s that others have claimed",
                    plural(len(missing), "slabs"),
                )
                pause = pauses()
            _sleep(next(pause), stop)


def pauses() -> Iterator[float]:
    """Seconds between checks of others' work: short at first, as their slab may be nearly done."""
    seconds = FIRST_SECONDS
    while True:
        yield min(seconds, POLL_SECONDS)
        seconds = min(2 * seconds, POLL_SECONDS)


def _sleep(seconds: float, stop: StopRequest) -> None:
    until = time.monotonic() + seconds
    while not stop and time.monotonic() < until:
        time.sleep(0.1)


@contextmanager
def locked(store: Place, slabs: Sequence[int], *, wait: bool) -> Iterator[list[int]]:
    """Context with those of the slabs that no other process writes, which none begins to write
    during it: partial files of theirs are from processes that ended. wait: for those that are being
    written. The locks are on one byte per slab of an existing file; threads of one process do not
    exclude each other, and object stores have no locks."""
    if isinstance(store, Url):
        yield list(slabs)
        return
    try:
        descriptor = os.open(store / "commits" / "zarr.json", os.O_RDWR)
    except OSError:  # the writer itself reports what is wrong with the store
        yield list(slabs)
        return
    try:
        yield [slab for slab in slabs if _lock(descriptor, slab, wait)]
    finally:
        os.close(descriptor)


def _lock(descriptor: int, byte: int, wait: bool) -> bool:
    """False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except OSError as error:  # others: no locks here
        return not isinstance(error, BlockingIOError | PermissionError)
    return True


# ---------------- a repeated command with nothing to do

# Options that do not affect a store.
_HOW = ("--shard", "--dask", "--device", "--workers", "--batch-size")


def complete_plan(command: str, output: Place) -> StorePlan | None:
    """The plan of the store at `output` where this command has nothing left to do: the store is
    complete, this command in this folder made it or one of its generations, and no file that the
    command names (a list, a checkpoint) is newer. Else None. Raises StoreError: not a store, or
    damaged."""
    writer = StoreWriter.join(output)
    if writer is None or not writer.complete:
        return None
    generations = [one for one in read_generations(writer.files) if one.published]
    if not all(one.complete for one in generations):
        return None
    if not any(_was_made_by(command, one) for one in generations):
        return None
    tidy(writer.files)
    return generations[-1].combined.plan


def _was_made_by(command: str, generation: Generation) -> bool:
    info = generation.manifest.info
    place = generation.files.place
    try:
        made = shlex.split(str(info.get("command", "")))
    except ValueError:
        return False
    same = without_options(made, _HOW) == without_options(shlex.split(command), _HOW)
    if not same or info.get("data_folder") != os.getcwd():
        return False
    if not isinstance(place, Path):
        return True
    finished = (place / ZARR_JSON).stat().st_mtime
    return not any(
        os.path.isfile(word) and os.path.getmtime(word) > finished for word in made
    )
