"""Half a sum on disk: a killed analysis goes on where it was.

A fold that has worked for `EVERY` seconds writes what it has merged beside the command's table,
`r.csv.partial/3.npz` for the third fold, and from then on as often as that costs at most
`COST` of its time. The same command, started again, goes on with the next slab. Slabs merge in
order, so the result is equal to the bit to that of a run that nobody stopped.

What decides a sum is its key: the command with its parameters and files, the stores with the
digests of their commits, the versions of vitsee's code and of what it computes with, the images,
which fold of the command it is, and its class. A file with another key is not read, but removed.
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
from vitsee_core.runtime.plain_state import NotPlain, is_plain, read_plain, write_plain
from vitsee_core.types import Mask
from vitsee_stores import Store
from vitsee_stores.disk import PARTIAL, partial_name, remove_files, sync
from vitsee_stores.errors import reason
from vitsee_stores.temp_files import is_left

EVERY = 30.0  # seconds of work before anything is written, and at least between two times
COST = 0.01  # of the time, at most, that writing takes
ENDING = ".npz"

log = logging.getLogger(__name__)


@dataclass
class KeptSums:
    """The sums of one command, in a folder that exists only while there is something in it.

    Attributes:
        folder: `r.csv.partial` for `-o r.csv`.
        command: makes the command's part of every key; called only where there is a file to read
            or to write, as it looks at the command's files and at vitsee's code.
        within: numbers of the outer items, where an item of `Execution.spread` folds.
        parent: the command's own, of an item's.
    """

    folder: Path
    command: Callable[[], Any]
    within: str = ""
    parent: KeptSums | None = None
    status: str = ""  # what is kept, in words; empty before anything is
    _number: int = 0
    _command: str = field(default="", repr=False)
    _fails: bool = False

    def next_sum(self, about: Sequence[Any], unit: str, total: int) -> KeptSum:
        """The next fold, or series of results, of this command.

        Args:
            about: JSON; what tells it from those with the same number.
            unit: what it counts, a plural.
            total: how many of them.
        """
        self._number += 1
        return KeptSum(self, f"{self.within}{self._number}", [*about, total], unit, total)

    def inside(self, number: str, item: int) -> KeptSums:
        """For the folds of one item of the series `number`."""
        return KeptSums(self.folder, self.command, f"{number}.{item}.", self.root)

    def remove(self) -> None:
        """Remove the folder with all sums; other files in it stay."""
        with suppress(OSError):
            remove_files(self._files())
            self.folder.rmdir()

    @property
    def root(self) -> KeptSums:
        return self.parent or self

    def _files(self) -> list[Path]:
        own = [path for path in self.folder.glob("*") if path.suffix in (ENDING, PARTIAL)]
        return [path for path in own if path.suffix == ENDING or is_left(path)]

    def key(self, number: str, about: Sequence[Any]) -> str:
        root = self.root
        root._command = root._command or json.dumps(root.command(), sort_keys=True, default=str)
        text = json.dumps([root._command, number, *about], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: str, about: Sequence[Any]) -> tuple[int, Any, int] | None:
        """How many are done, what they add up to, and the file's bytes; None without a file, or
        with that of another key."""
        path = self.folder / f"{number}{ENDING}"
        if not path.is_file():
            return None
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                key, done, state = read_plain(file)
            if key == self.key(number, about) and type(done) is int and done > 0:
                return done, state, size
            why = "it is of another command, store, setting or version"
        except (NotPlain, OSError, TypeError, ValueError) as error:
            why = f"{path.name} cannot be read ({error})"
        log.warning("%s is not used: %s; the work begins anew", self.folder, why)
        self.remove()
        return None

    def write(self, number: str, about: Sequence[Any], done: int, state: Any) -> bool:
        """Whether it was written; what prevents it is logged once."""
        root, path = self.root, self.folder / f"{number}{ENDING}"
        temporary = partial_name(path)
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                write_plain(file, [self.key(number, about), done, state])
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
    """One fold or series of a command; see `KeptSums.next_sum`."""

    sums: KeptSums
    number: str
    about: list[Any]
    unit: str
    total: int
    _next: float = 0.0
    _written: bool = False

    def resume(self) -> tuple[int, Any] | None:
        """How many are done, and their state, if a run before this one kept some; the time until
        the first writing begins."""
        self._next = time.monotonic() + EVERY
        found = self.sums.read(self.number, self.about)
        if found is None:
            return None
        done, state, size = found
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
            wanted = state()
        except NotPlain as error:
            log.debug("sum %s cannot be kept: %s", self.number, error)
            self._next = float("inf")
            return
        if self.sums.write(self.number, self.about, done, wanted):
            self._written = True
            path = self.sums.folder / f"{self.number}{ENDING}"
            self._note(done, path.stat().st_size)
        self._next = time.monotonic() + max(EVERY, (time.monotonic() - began) / COST)

    def _note(self, done: int, size: int) -> None:
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
        sums: KeptSums,
        make: Callable[[], Any],
        stores: Sequence[Store],
        mask: Mask,
        n_slabs: int,
    ) -> None:
        self._make, kind = make, type(make())
        images = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
        labels = [store.label for store in stores]
        about = [f"{kind.__module__}:{kind.__qualname__}", labels, images]
        self._kept, self._n = sums.next_sum(about, "slabs", n_slabs), n_slabs

    def resume(self) -> tuple[int, Any]:
        """How many slabs are merged already, and the accumulator; 0 and None to begin with."""
        if (found := self._kept.resume()) is None:
            return 0, None
        total = self._make()
        vars(total).update(found[1])
        return found[0], total

    def offer(self, done: int, total: Any) -> None:
        """Keep the sum of the first `done` slabs, if it is time to."""
        self._kept.offer(done, lambda: self._state(total), last=done == self._n)

    def _state(self, total: Any) -> dict[str, Any]:
        return state_of(total, self._make(), self._make())


def state_of(total: Any, fresh: Any, other: Any) -> dict[str, Any]:
    """The attributes of an accumulator that its slabs made.

    Left out is what `make` gives to every accumulator (stores, functions, settings): `fresh` and
    `other`, two empty ones, share it, and `total` has the same object, or one that travelled from
    another process and cannot be written.

    Raises:
        NotPlain: it has no attributes.
    """
    if not hasattr(total, "__dict__"):
        raise NotPlain(f"a {type(total).__name__}")
    state = {}
    for name, value in vars(total).items():
        given = vars(fresh).get(name)
        shared = name in vars(fresh) and given is vars(other)[name]
        if shared and (value is given or not is_plain(given)):
            continue
        state[name] = value
    return state
