"""Division of a store's slabs among processes, and locks against two that write one slab.

The slabs of a process follow from `--shard i/n`, from the numbers of a SLURM job's tasks, or
from claims. The last part finds out whether a repeated command has nothing to do, without the
model, the images and torch.

Without --shard, or with a requeued job beside its dying predecessor, two processes may want
one slab. Its chunks must all come from one of them: another batch size or device rounds
otherwise, and the commit marker seals the chunks together. So a slab is written under a lock
that the system releases when its process ends; the second process then sees that the slab is
committed, and continues. File systems without locks, and object stores, are used without.
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
# Pauses while other processes work: the first one, and the longest.
FIRST_SECONDS = 0.2
POLL_SECONDS = 5.0


try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Shard:
    """One of several processes that fill a store together.

    Attributes:
        index: number of this process among `count`, from 0.
        count: number of processes.
        claims: whether it is one of any number of processes, which claim missing slabs.
        dask: whether it is a worker, which is given its slabs.
    """

    index: int = 0
    count: int = 1
    claims: bool = False
    dask: bool = False

    def slabs(self, n_slabs: int) -> range:
        """Return every count-th slab from `index` on: shards end at about the same time."""
        return range(self.index, n_slabs, self.count)

    @property
    def others(self) -> str:
        """The words for the processes that go on when this one is stopped; "" if it is alone."""
        if self.count == 1 and not self.claims:
            return ""
        return "other processes with --shard go on"

    def __str__(self) -> str:
        if self.claims:
            return "claims"
        if self.dask:
            return "dask"
        return f"{self.index}/{self.count}"


def parse_shard(text: str | None, environ: Mapping[str, str]) -> Shard:
    """Return the shard that a value of --shard names.

    Args:
        text: None for all slabs, "i/n", "slurm" or "claims".
        environ: environment variables, which are read only for "slurm".

    Raises:
        OptionError: text of another form, or an index out of range.
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
    """Return the shard of a SLURM task.

    Element a of an array of A tasks with R ranks each is shard a R + rank of A R.
    """

    def number(name: str, default: int | None = None) -> int:
        """Read a variable. Raises VitseeError: it is missing without default, or no number."""
        value = environ.get(name)
        if value is None and default is not None:
            return default
        if value is None or not value.isdigit():
            raise VitseeError(
                f"--shard slurm: {name} is {value!r}; expected a number "
                "(run under sbatch --array or srun, or give --shard i/n)"
            )
        return int(value)

    n_ranks = 1
    if "SLURM_PROCID" in environ:
        n_ranks = number("SLURM_NTASKS", 1)
    rank = number("SLURM_PROCID", 0)
    if "SLURM_ARRAY_TASK_ID" not in environ and "SLURM_PROCID" not in environ:
        raise VitseeError(
            "--shard slurm: neither SLURM_ARRAY_TASK_ID nor SLURM_PROCID is set "
            "(run under sbatch --array or srun, or give --shard i/n)"
        )
    task = 0
    n_tasks = 1
    if "SLURM_ARRAY_TASK_ID" in environ:
        n_tasks = number("SLURM_ARRAY_TASK_COUNT")
        # Array elements may be numbered from another start, in steps: --array=10-30:10.
        offset = number("SLURM_ARRAY_TASK_ID") - number("SLURM_ARRAY_TASK_MIN", 0)
        task, remainder = divmod(offset, number("SLURM_ARRAY_TASK_STEP", 1))
        if remainder or not 0 <= task < n_tasks:
            raise VitseeError(
                f"--shard slurm: task {environ['SLURM_ARRAY_TASK_ID']} is none of {n_tasks} "
                "evenly numbered array tasks (a resubmitted part of an array: give --shard i/n)"
            )
    if rank >= n_ranks:
        raise VitseeError(
            f"--shard slurm: SLURM_PROCID {rank} is not below SLURM_NTASKS {n_ranks}"
        )
    return Shard(task * n_ranks + rank, n_tasks * n_ranks)


def claimed_rounds(writer: StoreWriter, stop: StopRequest) -> Generator[list[int]]:
    """Yield claimed slabs to make, round by round, until the store is complete.

    A round without free slabs waits for the slabs that others have claimed, and takes them
    over once their claims are lost. A signal ends the rounds. Close the generator if it is
    not exhausted, to release the claims.

    Raises:
        StoreError: claims cannot be written to the store.
    """
    claims = Claims(writer.files, {"host": socket.gethostname(), "pid": os.getpid()})
    waits: Iterator[float] | None = None
    with claims.beating():
        while not stop and len(missing := np.flatnonzero(~writer.committed())):
            # Few slabs at once, so that all processes end at about the same time; not one, as
            # each round starts the loading of images anew.
            n_at_once = max(1, min(MAX_AT_ONCE, len(missing) // 32))
            claimed = claims.take(missing.tolist(), n_at_once)
            if claimed:
                waits = None
                yield claimed
                claims.release()
                continue
            if waits is None:
                log.info(
                    "waiting for %s that others have claimed",
                    plural(len(missing), "slabs"),
                )
                waits = pauses()
            # In short steps, so that a signal is answered at once.
            until = time.monotonic() + next(waits)
            while not stop and time.monotonic() < until:
                time.sleep(0.1)


def pauses() -> Iterator[float]:
    """Yield the seconds between checks of others' work.

    They are short at first, as the slab of another process may be nearly done, then double.
    """
    seconds = FIRST_SECONDS
    while True:
        yield min(seconds, POLL_SECONDS)
        seconds = min(2 * seconds, POLL_SECONDS)


@contextmanager
def locked(store: Place, slabs: Sequence[int], *, wait: bool) -> Iterator[list[int]]:
    """Lock slabs against other processes, and yield those that were free.

    No other process begins to write a yielded slab within the context, so its partial files
    are those of processes that ended. Threads of one process do not exclude each other, and
    object stores have no locks.

    Args:
        store: folder or URL of the store.
        slabs: indices of the slabs.
        wait: whether to wait for slabs that are being written, and not leave them out.
    """
    if isinstance(store, Url):
        yield list(slabs)
        return
    try:
        descriptor = os.open(store / "commits" / "zarr.json", os.O_RDWR)
    except OSError:  # the writer itself reports what is wrong with the store
        yield list(slabs)
        return
    try:
        # One byte of an existing file stands for each slab, whatever the file's length.
        yield [slab for slab in slabs if _lock_byte(descriptor, slab, wait)]
    finally:
        os.close(descriptor)


def _lock_byte(descriptor: int, byte: int, wait: bool) -> bool:
    """Lock a byte of a file; return False if another process has locked it."""
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
    """Return the plan of the store at `output` if a command has nothing left to do, else None.

    That is so if the store is complete, this command in this folder made it or one of its
    generations, and no file that the command names (a list, a checkpoint) is newer.

    Raises:
        StoreError: `output` is not a store, or a damaged one.
    """
    writer = StoreWriter.join(output)
    if writer is None or not writer.complete:
        return None
    generations = [
        generation
        for generation in read_generations(writer.files)
        if generation.published
    ]
    if not all(generation.complete for generation in generations):
        return None
    if not any(_was_made_by(command, generation) for generation in generations):
        return None
    tidy(writer.files)
    return generations[-1].combined.plan


def _was_made_by(command: str, generation: Generation) -> bool:
    """Return whether this command in this folder made a generation, from the same files."""
    info = generation.manifest.info
    folder = generation.files.place
    try:
        recorded_words = shlex.split(str(info.get("command", "")))
    except ValueError:  # a foreign record: not a command line
        return False
    words = shlex.split(command)
    if without_options(recorded_words, _HOW) != without_options(words, _HOW):
        return False
    if info.get("data_folder") != os.getcwd():
        return False
    if not isinstance(folder, Path):
        return True
    # The root's zarr.json is written last.
    finished = (folder / ZARR_JSON).stat().st_mtime
    return not any(
        os.path.isfile(word) and os.path.getmtime(word) > finished
        for word in recorded_words
    )
