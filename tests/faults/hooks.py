"""What a started process does before its command (`Server.start(before=...)`)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from vitsee_core.extraction import sharding
from vitsee_core.runtime import kept_sums
from vitsee_stores import disk as owners
from vitsee_stores import leases as claims
from vitsee_stores import objects


def look_often() -> None:
    """Ask for slabs that others have claimed several times a second."""
    sharding.POLL_SECONDS = 0.2


def retry_soon() -> None:
    """Do not wait long before an object store is asked again."""
    objects.WAIT_SECONDS = 0.01


def keep_often() -> None:
    """Half of a sum is kept after every slab, and slabs take a moment."""
    kept_sums.EVERY, kept_sums.COST = 0.0, float("inf")
    offer = kept_sums.KeptSum.offer

    def slowly(kept: kept_sums.KeptSum, *args: Any, **more: Any) -> None:
        offer(kept, *args, **more)
        time.sleep(0.1)

    kept_sums.KeptSum.offer = slowly  # type: ignore[assignment, method-assign]


def lose_soon() -> None:
    """Take a claim for lost that two seconds did not change; heartbeats are as much faster."""
    look_often()
    claims.LOST_SECONDS = 2.0
    beating = claims.Claims.beating
    claims.Claims.beating = lambda self, seconds=0.2: beating(self, seconds)  # type: ignore[method-assign]


def another_machine() -> None:
    """Nobody here can ask whether this process lives."""
    owners._machine = lambda: "0123abcd"  # type: ignore[assignment]


def clock_runs_backwards() -> None:
    """The wall clock goes back by up to two hours whenever it is asked. What measures durations
    (time.monotonic) never does: the system promises that."""
    now, steps, gmtime = time.time, random.Random(0), time.gmtime
    back = itertools.accumulate(steps.uniform(0, 7200) for _ in itertools.count())

    def earlier() -> float:
        return now() - next(back)

    time.time, time.gmtime = earlier, lambda seconds=None: gmtime(seconds or earlier())


def clock_jumps() -> None:
    """The wall clock is a day ahead, or behind, each time it is asked."""
    now, steps, gmtime = time.time, random.Random(0), time.gmtime

    def another() -> float:
        return now() + steps.choice((-86400, 86400))

    time.time, time.gmtime = another, lambda seconds=None: gmtime(seconds or another())


def clock_runs_backwards_elsewhere() -> None:
    """Claims alone can tell whether this process lives."""
    lose_soon()
    another_machine()
    clock_runs_backwards()


def _die(after: bool) -> None:
    """End like a killed process at the first step that others can see: a store is put in its place,
    a slab is committed, a store is said to be complete."""

    def dying(
        step: Callable[..., None], is_one: Callable[[str], bool] = lambda place: True
    ) -> Callable[..., None]:
        def done(source: str, place: str, **more: object) -> None:
            if not is_one(str(place)):
                return step(source, place, **more)
            if after:
                step(source, place, **more)
            os._exit(137)

        return done

    os.rename, os.link = dying(os.rename), dying(os.link)
    os.replace = dying(os.replace, lambda place: place.endswith("zarr.json"))


def die_before_a_commit() -> None:
    """Before that step."""
    _die(after=False)


def die_after_a_commit() -> None:
    """Right after it."""
    _die(after=True)


def die_at_a_step() -> None:
    """End by SIGKILL before the step VITSEE_DIE_AT (from 1; 0: never) of those that change files
    below VITSEE_DIE_BELOW: a file begun, renamed, linked or removed, a folder made. How many there
    were is appended to VITSEE_STEPS, a byte each, where that names a file."""
    below, at = os.environ["VITSEE_DIE_BELOW"] + os.sep, int(os.environ["VITSEE_DIE_AT"])
    log = os.environ["VITSEE_STEPS"]
    counted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log else None
    steps = itertools.count(1)  # of every thread

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changes = event in (
                "os.rename",
                "os.link",
                "os.remove",
                "os.mkdir",
                "os.rmdir",
            )
        if not changes or isinstance(args[0], int):
            return
        if not os.path.abspath(os.fsdecode(args[0])).startswith(below):
            return
        if counted is not None:
            os.write(counted, b".")
        if next(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
