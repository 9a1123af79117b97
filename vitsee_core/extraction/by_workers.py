"""`extract --dask`: the missing slabs of one store, made and committed by the workers of a cluster.

A worker loads the model with its first slabs and keeps it. Results are only counts of images.
Claims mark the slabs in progress, as with `--shard claims`; those of a lost worker are taken over
by the worker that is given its slabs.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from vitsee_core.extraction import sharding
from vitsee_core.extraction.options import ModelOptions, Request
from vitsee_core.extraction.outcome import Outcome, StopRequest
from vitsee_core.extraction.prepare import Prepared
from vitsee_core.extraction.run import announce, fill, made_or_joined, prepare, stopped
from vitsee_core.extraction.sharding import Shard
from vitsee_core.images.sources import placed
from vitsee_core.models.intervention_spec import placed as placed_stores
from vitsee_core.models.sources import source_of
from vitsee_core.runtime.dask_worker import on_this_worker
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.runtime.streaming import Map
from vitsee_stores import StoreWriter
from vitsee_stores.errors import NoStore, VitseeError
from vitsee_stores.leases import Claims

log = logging.getLogger(__name__)

PIECES = 4  # per worker thread, so that all end at about the same time
BY_DASK = Shard(dask=True)


@dataclasses.dataclass
class SlabsByWorker:
    """Makes slabs of an existing store, and keeps the model and images for the next ones. about: of
    this run's claims. Pickles as the options alone; paths are absolute, as a worker has its own
    working directory."""

    asked: Request
    about: dict[str, Any]
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        self._one = threading.Lock()  # one model per process; it has the device to itself

    def __getstate__(self) -> dict[str, Any]:
        own = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        return {**own, "prepared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __call__(self, execution: Execution, slabs: list[int]) -> Outcome:
        """Make and commit those of the slabs that are missing and unclaimed. Raises DaskError: the
        worker does not see the store, the images or the model."""
        with self._one:
            if self.prepared is None:  # what succeeded in the command's own process
                try:
                    output = self.asked.run.output
                    if StoreWriter.join(output) is None:
                        raise NoStore(f"no store at {output}: nothing is there")
                    self.prepared = prepare(self.asked)
                except VitseeError as error:
                    raise on_this_worker(error) from None
            writer = self.prepared.writer
            assert writer is not None, "joined"
            own = {"host": socket.gethostname(), "pid": os.getpid()}
            claims = Claims(writer.files, {**own, **self.about})
            committed = writer.committed()
            with claims.beating():
                # What was added when this worker began may be whole: it then has the first store.
                missing = [k for k in slabs if k < len(committed) and not committed[k]]
                mine = claims.take(missing, len(slabs))
                how = self.asked.run, BY_DASK, mine, execution.progress, StopRequest()
                return fill(self.prepared, writer, *how, remarks=False)


def extract_by_workers(asked: Request, map: Map, progress: Progress = SILENT) -> Outcome:
    """`extract` with the slabs distributed over the workers of `map`; this process creates the
    store, and makes none of its slabs.

    Raises:
        VitseeError: as `extract`.
        Interrupted: a signal; exit code 75.
    """
    work = by_absolute_paths(asked)
    prepared, writer = made_or_joined(prepare(work.asked), work.asked)
    if announce(prepared, writer, asked.run):
        return Outcome(complete=True)
    plan = prepared.plan
    run = dataclasses.replace(work.asked.run, force=False)  # already deleted
    work.asked = dataclasses.replace(work.asked, run=run)
    del prepared  # frees this process' model
    execution = Execution(map=map, progress=progress)
    started = time.perf_counter()
    outcome = Outcome(False, examples=plan.examples)
    rows = [plan.rows(int(k)) for k in np.flatnonzero(writer.committed())]
    done = sum(part.stop - part.start for part in rows)
    try:
        with raised(), counting(progress, plan.n_images, plan.examples, done=done):
            for of_slabs in _until_done(writer, execution, work):
                outcome.add(of_slabs)
    except KeyboardInterrupt as signal_raised:
        stop = StopRequest()
        stop.signal_name = str(signal_raised)
        own = getattr(map, "local", 0)  # processes that end with this one
        raise stopped(
            stop, writer, "" if own else "workers finish what they have begun"
        ) from None
    outcome.seconds = time.perf_counter() - started
    outcome.complete = writer.finish()
    return outcome


def _until_done(
    writer: StoreWriter, execution: Execution, work: SlabsByWorker
) -> Iterator[Outcome]:
    """Results of each piece; slabs claimed by others are requested again."""
    before = -1
    pause = None
    while len(missing := np.flatnonzero(~writer.committed()).tolist()):
        if len(missing) == before:
            if pause is None:
                log.info(
                    "waiting for %s that others have claimed", plural(before, "slabs")
                )
                pause = sharding.pauses()
            time.sleep(next(pause))
        before = len(missing)
        size = len(missing) // (PIECES * max(1, execution.width))
        size = max(1, min(sharding.MOST_AT_ONCE, size))
        pieces = [missing[at : at + size] for at in range(0, len(missing), size)]
        yield from execution.spread(work, pieces)


def by_absolute_paths(asked: Request) -> SlabsByWorker:
    """The options with paths that are valid in any working directory."""
    model = asked.model
    data = asked.data
    run = asked.run
    assert isinstance(model, ModelOptions), "workers load the model by its name"
    model = dataclasses.replace(
        model,
        name=source_of(model.name).placed(Path.cwd()),
        checkpoint=model.checkpoint and model.checkpoint.absolute(),
        replace=placed_stores(model.replace),
        ablate_heads=placed_stores(model.ablate_heads),
        registers=placed_stores(model.registers),
    )
    only = data.only and data.only.absolute()
    data = dataclasses.replace(data, data=placed(data.data, Path.cwd()), only=only)
    run = dataclasses.replace(run, output=run.output.absolute())
    return SlabsByWorker(
        Request(model, data, asked.keep, run), {"run": secrets.token_hex(8)}
    )


@contextmanager
def raised() -> Iterator[None]:
    """Context in which signals raise KeyboardInterrupt with their name: there is no work to finish
    first."""

    def note(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {caught: signal.signal(caught, note) for caught in StopRequest.CAUGHT}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
