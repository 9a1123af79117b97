"""`extract --dask`: the workers of a cluster make and commit the missing slabs of one store.

A worker loads the model with its first slabs and keeps it. It returns counts of images only.
Claims mark the slabs in progress, as with `--shard claims`; the claims of a lost worker are
taken over by the worker that is given its slabs.
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
from vitsee_core.extraction.run import (
    announce,
    committed_images,
    fill,
    made_or_joined,
    prepare,
    stopped,
)
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
    """Makes slabs of an existing store, and keeps the model and images for the next ones.

    It pickles as the options alone.

    Attributes:
        request: all options; paths are absolute, as a worker has its own working directory.
        run_fields: fields of this run's claims, by which its workers know each other.
        prepared: the checked extraction, once this process has made slabs.
    """

    request: Request
    run_fields: dict[str, Any]
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        # A worker may have several threads, but one model, which has the device to itself.
        self._model_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "run_fields": self.run_fields,
            "prepared": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __call__(self, execution: Execution, slabs: list[int]) -> Outcome:
        """Make and commit those of the slabs that are missing and unclaimed.

        Raises:
            DaskError: the worker does not see the store, the images or the model.
        """
        with self._model_lock:
            if self.prepared is None:
                # The same preparation succeeded in the command's process, so an error here is
                # about this worker.
                try:
                    output = self.request.run.output
                    if StoreWriter.join(output) is None:
                        raise NoStore(f"no store at {output}: nothing is there")
                    self.prepared = prepare(self.request)
                except VitseeError as error:
                    raise on_this_worker(error) from None
            writer = self.prepared.writer
            assert writer is not None, "joined"
            process_fields = {"host": socket.gethostname(), "pid": os.getpid()}
            claims = Claims(writer.files, {**process_fields, **self.run_fields})
            committed = writer.committed()
            with claims.beating():
                # If the generation was complete when this worker began, the writer is that of
                # the first one, which may have fewer slabs.
                missing = [k for k in slabs if k < len(committed) and not committed[k]]
                return fill(
                    prepared=self.prepared,
                    writer=writer,
                    run=self.request.run,
                    shard=BY_DASK,
                    slabs=claims.take(missing, len(slabs)),
                    progress=execution.progress,
                    stop=StopRequest(),
                    remarks=False,
                )


def extract_by_workers(
    request: Request, map: Map, progress: Progress = SILENT
) -> Outcome:
    """Extract with the slabs distributed over the workers of `map`.

    This process creates the store and makes none of its slabs.

    Raises:
        VitseeError: as `extract`.
        Interrupted: a signal; exit code 75.
    """
    work = by_absolute_paths(request)
    prepared, writer = made_or_joined(prepare(work.request), work.request)
    if announce(prepared, writer, request.run):
        return Outcome(complete=True)
    plan = prepared.plan
    # The old store was deleted here: a worker must not delete the new one.
    run = dataclasses.replace(work.request.run, force=False)
    work.request = dataclasses.replace(work.request, run=run)
    del prepared  # frees this process' model
    execution = Execution(map=map, progress=progress)
    started = time.perf_counter()
    outcome = Outcome(False, examples=plan.examples)
    n_done = committed_images(writer)
    try:
        with (
            signals_as_keyboard_interrupt(),
            counting(progress, plan.n_images, plan.examples, done=n_done),
        ):
            for outcome_of_piece in _until_done(writer, execution, work):
                outcome.add(outcome_of_piece)
    except KeyboardInterrupt as interrupt:
        stop = StopRequest()
        stop.signal_name = str(interrupt)
        others = "workers finish what they have begun"
        if getattr(map, "local", 0):  # its processes end with this one
            others = ""
        raise stopped(stop, writer, others) from None
    outcome.seconds = time.perf_counter() - started
    outcome.complete = writer.finish()
    return outcome


def _until_done(
    writer: StoreWriter, execution: Execution, work: SlabsByWorker
) -> Iterator[Outcome]:
    """Yield the outcome of each piece of work, until every slab is committed.

    Slabs that others have claimed are requested again, after a pause.
    """
    n_before = -1
    pauses = None
    while missing := np.flatnonzero(~writer.committed()).tolist():
        if len(missing) == n_before:
            if pauses is None:
                log.info(
                    "waiting for %s that others have claimed", plural(n_before, "slabs")
                )
                pauses = sharding.pauses()
            time.sleep(next(pauses))
        n_before = len(missing)
        size = len(missing) // (PIECES * max(1, execution.width))
        size = max(1, min(sharding.MAX_AT_ONCE, size))
        pieces = [missing[first : first + size] for first in range(0, len(missing), size)]
        yield from execution.spread(work, pieces)


def by_absolute_paths(request: Request) -> SlabsByWorker:
    """Return the work of a request, with paths that are valid in any working directory."""
    model = request.model
    data = request.data
    run = request.run
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
    absolute = Request(model, data, request.keep, run)
    return SlabsByWorker(absolute, run_fields={"run": secrets.token_hex(8)})


@contextmanager
def signals_as_keyboard_interrupt() -> Iterator[None]:
    """Context in which signals raise KeyboardInterrupt with their name.

    This process has no slab to finish first, unlike one that runs the model.
    """

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {
        caught: signal.signal(caught, raise_interrupt) for caught in StopRequest.CAUGHT
    }
    try:
        yield
    finally:
        for caught, handler in old_handlers.items():
            signal.signal(caught, handler)
