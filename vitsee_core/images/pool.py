"""Loading by worker processes.

A worker is a fresh interpreter that imports Pillow and NumPy only (0.2 s): forking is not safe
once torch or zarr have started threads, and importing torch in every worker costs seconds, which
only recipes that resize by torchvision pay. Pixels
come back through one block of shared memory, everything else through a socket per worker. A worker
ends when its socket is closed, however the parent ends, and does not see SIGINT or
SIGTERM, which reach a whole process group or job: its parent decides when it stops.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import Facts, Opener, load_into
from vitsee_core.images.errors import DataError
from vitsee_core.images.shared import SharedBlock
from vitsee_core.images.transform import AnyRecipe

Loaded = tuple[NDArray[np.uint8], Facts]

_TASKS_AHEAD = 2  # a worker finds its next task waiting
_LARGEST_TASK = 16  # images; small enough that large batches spread evenly
_SECONDS_TO_END = 2.0
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from vitsee_core.images.pool import serve; serve(int(sys.argv[2]))"
)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    socket: Connection
    n_tasks: int = 0


@dataclass
class _Open:
    slot: int
    pixels: NDArray[np.uint8]
    facts: Facts
    missing: int

    def copy(self) -> Loaded:
        return self.pixels.copy(), self.facts


def load_with_workers(
    opener: Opener,
    places: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    n_workers: int,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """The batches in order; each is cut into tasks for the workers as they have room.

    Ends early when `stopped`. The shared memory has room for two batches, or as many as give every
    worker two tasks.

    Raises:
        DataError: a worker was killed, or this system cannot start one; or a server gave no answer.
    """
    largest = max(map(len, places), default=0)
    if not largest:
        return
    task = max(1, min(_LARGEST_TASK, -(-largest // n_workers)))
    n_slots = max(2, -(-_TASKS_AHEAD * n_workers * task // largest))
    image_bytes = int(np.prod(recipe.shape))
    ring = SharedBlock(n_slots * largest * image_bytes)
    heir, fds = opener.inherit()
    workers: list[_Worker] = []
    try:
        for _ in range(n_workers):
            workers.append(_start((ring.fd, *fds)))
        for worker in workers:
            worker.socket.send_bytes(pickle.dumps((heir, recipe, ring)))
        yield from _dispatch(workers, places, recipe, ring, n_slots, task, stopped)
    finally:
        _end(workers)
        for fd in (ring.fd, *fds):
            os.close(fd)


def _dispatch(
    workers: list[_Worker],
    places: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    ring: SharedBlock,
    n_slots: int,
    task: int,
    stopped: threading.Event,
) -> Generator[Loaded]:
    image_bytes = int(np.prod(recipe.shape))
    slot_bytes = ring.size // n_slots
    tasks = (
        (number, start, min(start + task, len(locations)))
        for number, locations in enumerate(places)
        for start in range(0, len(locations), task)
    )
    free = deque(range(n_slots))
    running: dict[int, _Open] = {}
    next_task = next(tasks, None)
    next_out = 0
    while next_out < len(places):
        while next_task is not None:
            number, start, stop = next_task
            worker = min(workers, key=lambda w: w.n_tasks)
            if worker.n_tasks >= _TASKS_AHEAD or (number not in running and not free):
                break
            if number not in running:
                slot, n = free.popleft(), len(places[number])
                view = ring.array((n, *recipe.shape), slot * slot_bytes)
                running[number] = _Open(slot, view, Facts.none(n), n)
            offset = running[number].slot * slot_bytes + start * image_bytes
            _send(worker, (number, start, offset, places[number][start:stop]))
            next_task = next(tasks, None)
        if next_out in running and not running[next_out].missing:
            batch = running.pop(next_out)
            free.append(batch.slot)
            next_out += 1
            yield batch.copy()
            continue
        _receive(workers, running)
        if stopped.is_set():
            return


def _send(worker: _Worker, message: Any) -> None:
    try:
        worker.socket.send(message)
    except OSError:
        raise _lost(worker) from None
    worker.n_tasks += 1


def _receive(workers: list[_Worker], running: dict[int, _Open]) -> None:
    by_socket = {worker.socket: worker for worker in workers}
    for ready in wait(list(by_socket), timeout=0.1):
        worker = by_socket[ready]  # type: ignore[index]
        try:
            answer = worker.socket.recv()
        except (EOFError, OSError):
            raise _lost(worker) from None
        if isinstance(answer, DataError):
            raise answer
        number, start, facts = answer
        worker.n_tasks -= 1
        batch = running[number]
        batch.facts.put(start, facts)
        batch.missing -= len(facts.valid)


def _start(fds: tuple[int, ...]) -> _Worker:
    if os.name != "posix":
        raise DataError("loading processes need a POSIX system; run with --workers 0")
    ours, theirs = socket.socketpair()
    paths = [path or os.getcwd() for path in sys.path]
    command = [sys.executable, "-I", "-c", _START, json.dumps(paths), str(theirs.fileno())]
    # The mask is inherited, so that no signal arrives before the worker could ignore it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # of torch, which some recipes import
        )
    except OSError as error:
        ours.close()
        raise DataError(f"cannot start a loading process: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return _Worker(process, Connection(ours.detach()))


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.socket.close()
    for worker in workers:
        try:
            worker.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # a read that hangs, on a file server perhaps
            worker.process.kill()
            worker.process.wait()


def _lost(worker: _Worker) -> DataError:
    try:
        code: int | None = worker.process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        code = None
    how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
    return DataError(
        f"a loading process ended early ({how}); if memory ran out, run with fewer --workers"
    )


def serve(fd: int) -> None:
    """Load for the parent at the other end of the socket `fd`; returns when that is closed."""
    # Pillow warns about odd metadata of single files; with several workers that is noise.
    warnings.simplefilter("ignore")
    socket = Connection(fd)
    try:
        opener, recipe, ring = pickle.loads(socket.recv_bytes())
        while True:
            _load_task(socket, opener, recipe, ring)
    except (EOFError, ConnectionError):
        return


def _load_task(socket: Connection, opener: Opener, recipe: AnyRecipe, ring: SharedBlock) -> None:
    number, start, offset, locations = socket.recv()
    out = ring.array((len(locations), *recipe.shape), offset)
    try:
        answer: Any = (number, start, load_into(out, opener, locations, recipe))
    except DataError as error:  # of what the images are read from, not of one of them
        answer = error
    socket.send(answer)
