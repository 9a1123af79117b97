"""Half a sum on disk: a killed analysis goes on where it was.

A fold that has worked for `EVERY` seconds writes what it has merged beside the command's table,
`r.csv.partial/3.sum` for the third fold, and from then on as often as that costs at most
`COST` of its time. The same command, started again, goes on with the next slab. Slabs merge in
order, so the result is equal to the bit to that of a run that nobody stopped.

What decides a sum is its key: the command with its parameters and files, the stores with the
digests of their commits, the versions of vitsee's code and of what it computes with, the images,
which fold of the command it is, and its class. A file with another key is not read, but removed.

Reading a file runs no code (`plain_values`), as a pickle could that a stranger put into a folder of
results.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.plain_values import NotPlain, is_plain, read_plain, write_plain
from vitsee_core.types import Mask
from vitsee_stores import Store
from vitsee_stores.disk import PARTIAL, is_leftover, partial_name, remove_files, sync
from vitsee_stores.errors import reason

EVERY = 30.0  # seconds of work before anything is written, and at least between two times
COST = 0.01  # of the time, at most, that writing takes
ENDING = ".sum"
OLD_ENDING = ".npz"  # of sums that earlier versions kept, which are not read

log = logging.getLogger(__name__)


@dataclass
class FoldCheckpoints:
    """The sums of one command, in a folder that exists only while there is something in it.

    Attributes:
        folder: `r.csv.partial` for `-o r.csv`.
        command: makes the command's part of every key; called only where there is a file to read
            or to write, as it looks at the command's files and at vitsee's code.
        within: prefix of the numbers of sums: the numbers of the outer items, where an item of
            `Execution.spread` folds itself.
        parent: the checkpoints of the whole command; None if these are.
    """

    folder: Path
    command: Callable[[], Any]
    within: str = ""
    parent: FoldCheckpoints | None = None
    status: str = ""  # what is kept, in words; empty before anything is
    _number: int = 0
    _command: str = field(default="", repr=False)
    _fails: bool = False

    def next_sum(self, about: Sequence[Any], unit: str, total: int) -> KeptSum:
        """Return the next fold, or series of results, of this command.

        Args:
            about: JSON values of its key, which tell it from one with the same number.
            unit: what it counts, a plural.
            total: how many of them.
        """
        self._number += 1
        return KeptSum(self, f"{self.within}{self._number}", [*about, total], unit, total)

    def inside(self, number: str, item: int) -> FoldCheckpoints:
        """Return the checkpoints for the folds of one item of the series `number`."""
        return FoldCheckpoints(self.folder, self.command, f"{number}.{item}.", self.root)

    def remove(self) -> None:
        """Remove the folder with all sums; other files in it stay."""
        with suppress(OSError):
            remove_files(self._files())
            self.folder.rmdir()

    @property
    def root(self) -> FoldCheckpoints:
        """The checkpoints of the whole command."""
        return self.parent or self

    def _files(self) -> list[Path]:
        """Return the files of sums in the folder, and those that a killed run was writing."""
        return [
            path
            for path in self.folder.glob("*")
            if path.suffix in (ENDING, OLD_ENDING)
            or (path.suffix == PARTIAL and is_leftover(path))
        ]

    def key(self, number: str, about: Sequence[Any]) -> str:
        """Return the SHA-256 of everything that decides a sum."""
        root = self.root
        root._command = root._command or json.dumps(
            root.command(), sort_keys=True, default=str
        )
        text = json.dumps([root._command, number, *about], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: str, about: Sequence[Any]) -> tuple[int, Any, int] | None:
        """Return how many are done, what they add up to, and the size of the file in bytes.

        None without a file, or with a file of another key or a damaged one, which is removed with
        all others of the folder.
        """
        path = self.folder / f"{number}{ENDING}"
        reason_to_refuse = "it is of another command, store, setting or version"
        if path.is_file():
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    key, done, state = read_plain(file)
                if key == self.key(number, about) and type(done) is int and done > 0:
                    return done, state, size
            except (NotPlain, OSError, TypeError, ValueError) as error:
                reason_to_refuse = f"{path.name} cannot be read ({error})"
        elif not (self.folder / f"{number}{OLD_ENDING}").is_file():
            return None
        log.warning(
            "%s is not used: %s; the work begins anew", self.folder, reason_to_refuse
        )
        self.remove()
        return None

    def write(self, number: str, about: Sequence[Any], done: int, state: Any) -> bool:
        """Write a sum, and return whether that worked; what prevents it is logged once.

        Args:
            number: of the sum.
            about: JSON values of its key.
            done: how many are in it.
            state: what `write_plain` takes.
        """
        root = self.root
        path = self.folder / f"{number}{ENDING}"
        temporary = partial_name(path)
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                write_plain(file, [self.key(number, about), done, state])
            # On disk before it gets its name: after a crash a file of that name is whole.
            sync(temporary)
            os.replace(temporary, path)
            sync(self.folder)
        except (OSError, NotPlain) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            if not root._fails:
                log.warning("%s: half of the work is not kept (%s)", self.folder, why)
            root._fails = True
            return False
        finally:
            with suppress(OSError):
                remove_files([temporary])
        return True


@dataclass
class KeptSum:
    """One fold or series of results of a command, which `FoldCheckpoints.next_sum` makes."""

    sums: FoldCheckpoints
    number: str
    about: list[Any]
    unit: str
    total: int
    _next: float = 0.0
    _written: bool = False

    def resume(self) -> tuple[int, Any] | None:
        """Return how many are done, and their state; None if no earlier run kept any.

        From now on the seconds until the first writing count.
        """
        self._next = time.monotonic() + EVERY
        checkpoint = self.sums.read(self.number, self.about)
        if checkpoint is None:
            return None
        done, state, size = checkpoint
        self._note(done, size)
        log.info("goes on after %s", self.sums.root.status)
        return done, state

    def offer(self, done: int, state: Callable[[], Any], *, last: bool = False) -> None:
        """Write the state of the first `done` if it is time to.

        Args:
            done: how many are in it.
            state: makes it; raises NotPlain where that is impossible.
            last: nothing follows, so that a sum that took long is written, however recent its last
                writing is.
        """
        began = time.monotonic()
        if began < self._next and not (last and self._written):
            return
        try:
            state_to_write = state()
        except NotPlain as error:
            log.debug("sum %s cannot be kept: %s", self.number, error)
            self._next = float("inf")
            return
        if self.sums.write(self.number, self.about, done, state_to_write):
            self._written = True
            path = self.sums.folder / f"{self.number}{ENDING}"
            self._note(done, path.stat().st_size)
        seconds_of_writing = time.monotonic() - began
        self._next = time.monotonic() + max(EVERY, seconds_of_writing / COST)

    def _note(self, done: int, size: int) -> None:
        """Set the status of the command: `slab 12 of 40 (r.csv.partial, 3.1 MB)`."""
        self.sums.root.status = (
            f"{self.unit.removesuffix('s')} {done} of {self.total} "
            f"({self.sums.folder}, {human_bytes(size)})"
        )


class KeptFold:
    """A fold whose merged accumulator is kept.

    Args:
        sums: of the command.
        make: creates an empty accumulator.
        stores: one, or a pair.
        mask: (images,) which count.
        n_slabs: how many are folded.
    """

    def __init__(
        self,
        sums: FoldCheckpoints,
        make: Callable[[], Any],
        stores: Sequence[Store],
        mask: Mask,
        n_slabs: int,
    ) -> None:
        self._make = make
        kind = type(make())
        images_digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
        labels = [store.label for store in stores]
        about = [f"{kind.__module__}:{kind.__qualname__}", labels, images_digest]
        self._kept_sum = sums.next_sum(about, "slabs", n_slabs)
        self._n_slabs = n_slabs

    def resume(self) -> tuple[int, Any]:
        """Return how many slabs are merged already, and the accumulator.

        0 and None if no earlier run kept any.
        """
        resumed = self._kept_sum.resume()
        if resumed is None:
            return 0, None
        n_done, state = resumed
        # Stores, functions and settings are not in the state: a new accumulator has them.
        total = self._make()
        vars(total).update(state)
        return n_done, total

    def offer(self, done: int, total: Any) -> None:
        """Keep the sum of the first `done` slabs, if it is time to."""
        self._kept_sum.offer(
            done,
            lambda: state_of(total, self._make(), self._make()),
            last=done == self._n_slabs,
        )


def state_of(total: Any, fresh: Any, other: Any) -> dict[str, Any]:
    """Return the attributes of an accumulator that its slabs made.

    Left out is what `make` gives to every accumulator (stores, functions, settings): two empty
    accumulators share it, and `total` has the same object, or one that travelled from another
    process and cannot be written.

    Args:
        total: the accumulator.
        fresh: an empty one from `make`.
        other: another empty one.

    Raises:
        NotPlain: it has no attributes.
    """
    if not hasattr(total, "__dict__"):
        raise NotPlain(f"a {type(total).__name__}")
    state = {}
    for name, value in vars(total).items():
        initial = vars(fresh).get(name)
        is_shared = name in vars(fresh) and initial is vars(other)[name]
        if is_shared and (value is initial or not is_plain(initial)):
            continue
        state[name] = value
    return state
