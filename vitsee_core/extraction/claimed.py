"""`--shard claims`: processes that come and go make the missing slabs, a few at a time."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Generator, Iterator

import numpy as np

from vitsee_core.extraction.signals import StopRequest
from vitsee_core.runtime.machine import counted
from vitsee_stores import StoreWriter
from vitsee_stores.leases import Claims

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16
FIRST_SECONDS, POLL_SECONDS = 0.2, 5.0  # of waiting for others: at first, and at most


def claimed_rounds(writer: StoreWriter, stop: StopRequest) -> Generator[list[int]]:
    """Slabs to make now, round by round, until the store is complete or a signal came: slabs
    claimed by others are waited for, and taken over if their claims are lost. Close the generator
    if it is not exhausted, to release the claims. Raises StoreError: claims cannot be written to
    the store."""
    claims = Claims(writer.files, {"host": socket.gethostname(), "pid": os.getpid()})
    pause: Iterator[float] | None = None
    with claims.beating():
        while not stop and len(missing := np.flatnonzero(~writer.committed())):
            mine = claims.take(missing.tolist(), _at_once(len(missing)))
            if mine:
                pause = None
                yield mine
                claims.release()
                continue
            if pause is None:
                log.info("waiting for %s that others have claimed", counted(len(missing), "slabs"))
                pause = pauses()
            _sleep(next(pause), stop)


def _at_once(n_missing: int) -> int:
    """Few enough that all processes end at about the same time; each round restarts the loading."""
    return max(1, min(MOST_AT_ONCE, n_missing // 32))


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
