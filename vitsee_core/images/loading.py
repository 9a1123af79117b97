"""Batches of pixels in a fixed order, loaded ahead of their consumer by a thread or by processes.

A worker is a fresh interpreter that imports Pillow and NumPy only (0.2 s): forking is not safe
once torch or zarr have started threads, and importing torch in every worker costs seconds, which
only recipes that resize by torchvision pay. Pixels come back through one block of shared memory,
everything else through a socket per worker. A worker ends when its socket is closed, however the
parent ends, and does not see SIGINT or SIGTERM, which reach a whole process group or job: its
parent decides when it stops."""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.clips import ClipRecipe
from vitsee_core.images.decoding import Facts, Opener, load_into
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.selection import Selection
from vitsee_core.images.shared_memory import SharedBlock
from vitsee_core.images.transform import AnyRecipe, make_recipe
from vitsee_core.images.videos import Sampling

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_AHEAD = 2
ON_ERROR = ("nan", "fail")


@dataclass
class Batch:
    """Consecutive rows of a selection.

    Attributes:
        pixels: uint8 (images, channels, height, width) after resize and crop, of clips (clips,
            frames, channels, height, width).
        valid: False for an unreadable image, which has zeros, hash 0, size 0 and an entry in
            `errors`.
        errors: row number in the selection, id, reason.
        size: (images, 2) height and width as decoded.
        seconds: (images,) between neighbouring sampled frames of clips, else NaN.
        pixel_hash: (images,) hash of the pixels, 0 of an unreadable image.
        remarks: what was done to images -> of how many of them, see `picture_remarks`.
    """

    rows: slice
    pixels: torch.Tensor
    valid: NDArray[np.bool_]
    hash: NDArray[np.uint64]
    size: NDArray[np.int32]
    errors: list[tuple[int, str, str]]
    seconds: NDArray[np.float32]
    pixel_hash: NDArray[np.uint64]
    remarks: Counter[str] = field(default_factory=Counter)


def batches(
    selection: Selection,
    transform: Mapping[str, Any],
    rows: Iterable[slice | tuple[int, int]],
    *,
    workers: int = 0,
    on_error: str = "nan",
) -> Generator[Batch]:
    """One batch for each range of `rows`, in their order, whatever the number of workers.

    Loading runs ahead of the consumer: in a thread (`workers=0`) or in that many processes. At most
    six batches are in memory, more only if a batch has fewer images than there are workers. Closing
    or dropping the iterator stops the workers. Raises ImageError: an image cannot be read and
    `on_error` is "fail"; DataError: a range outside the selection, an unknown `on_error`, a
    transform that timm cannot build, or a worker that was killed.
    """
    if on_error not in ON_ERROR:
        raise DataError(
            f"unknown on_error {on_error!r}; expected one of: {', '.join(ON_ERROR)}"
        )
    if workers < 0:
        raise DataError(f"{workers} workers; expected 0 or more")
    ranges = [_range(part, len(selection)) for part in rows]
    still = make_recipe(transform)
    clip = transform.get("clip")
    recipe: AnyRecipe = still if clip is None else ClipRecipe(still, Sampling(**clip))
    n_images = sum(part.stop - part.start for part in ranges)
    return _batches(selection, recipe, ranges, min(workers, n_images), on_error)


def _batches(
    selection: Selection,
    recipe: AnyRecipe,
    ranges: list[slice],
    workers: int,
    on_error: str,
) -> Generator[Batch]:
    import torch

    source = selection.source
    ids = selection.samples.ids
    index = selection.samples.index
    places = [[source.locations[i] for i in index[part]] for part in ranges]

    def produce(stopped: threading.Event) -> Generator[Loaded]:
        if workers:
            return load_with_workers(source.opener, places, recipe, workers, stopped)
        return _load_here(source.opener, places, recipe, stopped)

    with closing(_ahead(produce)) as loaded:
        for part, (pixels, of) in zip(ranges, loaded, strict=True):
            named = [
                (part.start + k, ids[part.start + k], reason) for k, reason in of.errors
            ]
            if named and on_error == "fail":
                raise ImageError(*named[0][1:])
            batch = torch.from_numpy(pixels)
            yield Batch(
                rows=part,
                pixels=batch,
                valid=of.valid,
                hash=of.hash,
                size=of.size,
                errors=named,
                seconds=of.seconds,
                pixel_hash=of.pixel_hash,
                remarks=of.remarks,
            )


def _load_here(
    opener: Opener,
    places: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """The batches one after another, in this thread; ends early when `stopped`."""
    for locations in places:
        pixels = np.empty((len(locations), *recipe.shape), np.uint8)
        facts = Facts.none(len(locations))
        for start in range(0, len(locations), opener.at_once):
            if stopped.is_set():
                return
            some = slice(start, start + opener.at_once)
            facts.put(start, load_into(pixels[some], opener, locations[some], recipe))
        yield pixels, facts


def _ahead(produce: Callable[[threading.Event], Generator[Loaded]]) -> Generator[Loaded]:
    """Items of `produce`, made up to two ahead in a thread that ends with this generator. An
    exception of the thread is raised here."""
    # Simple queues, which a KeyboardInterrupt in the middle of `get` leaves usable: it can leave a
    # Queue's lock taken, and the thread would wait for it for ever. `room` has a token for each
    # item that the thread may put.
    ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(_AHEAD):
        room.put(None)
    stopped = threading.Event()

    def put(item: tuple[bool, Any]) -> None:
        while not stopped.is_set():
            try:
                room.get(timeout=0.1)
            except queue.Empty:
                continue
            return ready.put(item)

    def run() -> None:
        try:
            with closing(produce(stopped)) as items:
                for item in items:
                    put((True, item))
                    if stopped.is_set():
                        return
            put((False, None))
        except BaseException as error:  # handed over, whatever it is
            put((False, error))

    thread = threading.Thread(target=run, name="vitsee-loading", daemon=True)
    thread.start()
    try:
        while True:
            more, item = ready.get()
            room.put(None)
            if not more:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        stopped.set()
        thread.join()


def _range(part: slice | tuple[int, int], n: int) -> slice:
    start, stop = (part.start or 0, part.stop) if isinstance(part, slice) else part
    stop = n if stop is None else stop
    if not 0 <= start < stop <= n:
        raise DataError(
            f"rows {start}:{stop} are outside the {n} samples of the selection"
        )
    return slice(int(start), int(stop))


Loaded = tuple[NDArray[np.uint8], Facts]

# ---------------- by worker processes

_TASKS_AHEAD = 2  # a worker finds its next task waiting
_LARGEST_TASK = 16  # images; small enough that large batches spread evenly
_SECONDS_TO_END = 2.0
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from vitsee_core.images.loading import serve; serve(int(sys.argv[2]))"
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


def load_with_workers(
    opener: Opener,
    places: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    n_workers: int,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """The batches in order; each is cut into tasks for the workers as they have room.

    Ends early when `stopped`. The shared memory has room for two batches, or as many as give every
    worker two tasks. Raises DataError: a worker was killed, or this system cannot start one; or a
    server gave no answer.
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
                slot = free.popleft()
                n = len(places[number])
                view = ring.array((n, *recipe.shape), slot * slot_bytes)
                running[number] = _Open(slot, view, Facts.none(n), n)
            offset = running[number].slot * slot_bytes + start * image_bytes
            try:
                worker.socket.send((number, start, offset, places[number][start:stop]))
            except OSError:
                raise _lost(worker) from None
            worker.n_tasks += 1
            next_task = next(tasks, None)
        if next_out in running and not running[next_out].missing:
            batch = running.pop(next_out)
            free.append(batch.slot)
            next_out += 1
            yield batch.pixels.copy(), batch.facts
            continue
        _receive(workers, running)
        if stopped.is_set():
            return


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
    command = [
        sys.executable,
        "-I",
        "-c",
        _START,
        json.dumps(paths),
        str(theirs.fileno()),
    ]
    # The mask is inherited, so that no signal arrives before the worker could ignore it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
            },  # of torch, which some recipes import
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
    # With several workers the warnings of libraries are noise; Pillow's are heard by image.
    warnings.simplefilter("ignore")
    socket = Connection(fd)
    try:
        opener, recipe, ring = pickle.loads(socket.recv_bytes())
        while True:
            number, start, offset, locations = socket.recv()
            out = ring.array((len(locations), *recipe.shape), offset)
            try:
                answer: Any = (number, start, load_into(out, opener, locations, recipe))
            except (
                DataError
            ) as error:  # of what the images are read from, not of one of them
                answer = error
            socket.send(answer)
    except (EOFError, ConnectionError):
        return
