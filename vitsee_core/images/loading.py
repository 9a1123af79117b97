"""Batches of pixels in a fixed order, loaded ahead of their consumer by a thread or by processes.

`torch.utils.data.DataLoader` is not used: its workers import torch (seconds for each), and forked
ones are not safe once torch or zarr have started threads. A worker here is a fresh interpreter
that imports Pillow and NumPy only (0.2 s); torch is imported only for recipes that resize by
torchvision. Pixels come back through one block of shared memory, everything else through a socket
for each worker. A worker ends when its socket is closed, however the parent ends. It does not see
SIGINT or SIGTERM, which reach a whole process group or job: its parent decides when it stops.
"""

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

_BATCHES_AHEAD = 2
ON_ERROR = ("nan", "fail")


@dataclass
class Batch:
    """The pixels of consecutive rows of a selection, and what is known of the images.

    Attributes:
        rows: the rows of the selection.
        pixels: uint8 (images, channels, height, width) after resize and crop; (clips, frames,
            channels, height, width) for clips.
        valid: (images,) False for an unreadable image, which has zeros, hash 0, size 0 and an
            entry in `errors`.
        hash: (images,) hash of the encoded bytes.
        size: (images, 2) height and width as decoded.
        errors: (row of the selection, id, reason) of each unreadable image.
        seconds: (images,) seconds between sampled frames of a clip, NaN for an image.
        pixel_hash: (images,) hash of the pixels, 0 for an unreadable image.
        remarks: remark (see `picture_remarks`) -> number of images it applies to.
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
    """Yield one batch for each range of rows, in their order, whatever the number of workers.

    Loading runs ahead of the consumer. At most six batches are in memory, more only if a batch has
    fewer images than there are workers. Closing or dropping the iterator stops the workers.

    Args:
        selection: the chosen samples of a data set.
        transform: the model's input transform, as the store's metadata has it.
        rows: ranges of the selection, as slices or (start, stop).
        workers: the number of loading processes; 0 loads in a thread of this process.
        on_error: "nan" goes on after an unreadable image, "fail" raises its error.

    Raises:
        ImageError: an image cannot be read and `on_error` is "fail".
        DataError: a range outside the selection, an unknown `on_error`, a transform that timm
            cannot build, or a worker that was killed.
    """
    if on_error not in ON_ERROR:
        raise DataError(
            f"unknown on_error {on_error!r}; expected one of: {', '.join(ON_ERROR)}"
        )
    if workers < 0:
        raise DataError(f"{workers} workers; expected 0 or more")
    # The arguments are checked here and not in the generator, which runs only when it is iterated.
    ranges = [_slice_within(row_range, len(selection)) for row_range in rows]
    image_recipe = make_recipe(transform)
    recipe: AnyRecipe = image_recipe
    clip = transform.get("clip")
    if clip is not None:
        recipe = ClipRecipe(image_recipe, Sampling(**clip))
    n_images = sum(row_range.stop - row_range.start for row_range in ranges)
    n_workers = min(workers, n_images)
    return _generate_batches(selection, recipe, ranges, n_workers, on_error)


def _generate_batches(
    selection: Selection,
    recipe: AnyRecipe,
    ranges: list[slice],
    n_workers: int,
    on_error: str,
) -> Generator[Batch]:
    """Yield the batches of `batches`, whose arguments were checked."""
    import torch

    source = selection.source
    ids = selection.samples.ids
    index = selection.samples.index
    batch_locations = [
        [source.locations[i] for i in index[row_range]] for row_range in ranges
    ]

    def produce(stopped: threading.Event) -> Generator[Loaded]:
        """Yield pixels and facts of each batch, until `stopped` is set."""
        if n_workers:
            return load_with_workers(
                source.opener, batch_locations, recipe, n_workers, stopped
            )
        return _load_in_this_thread(source.opener, batch_locations, recipe, stopped)

    with closing(_produced_ahead(produce)) as loaded:
        for row_range, (pixels, facts) in zip(ranges, loaded, strict=True):
            errors = []
            for k, reason in facts.errors:
                row = row_range.start + k
                errors.append((row, ids[row], reason))
            if errors and on_error == "fail":
                _, image_id, reason = errors[0]
                raise ImageError(image_id, reason)
            yield Batch(
                rows=row_range,
                pixels=torch.from_numpy(pixels),
                valid=facts.valid,
                hash=facts.hash,
                size=facts.size,
                errors=errors,
                seconds=facts.seconds,
                pixel_hash=facts.pixel_hash,
                remarks=facts.remarks,
            )


def _load_in_this_thread(
    opener: Opener,
    batch_locations: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """Yield the batches one after another, loaded in this thread; end early when `stopped`."""
    for locations in batch_locations:
        pixels = np.empty((len(locations), *recipe.shape), np.uint8)
        facts = Facts.none(len(locations))
        # A few images at a time, so that a stop is seen within a batch of hundreds.
        for start in range(0, len(locations), opener.at_once):
            if stopped.is_set():
                return
            chunk = slice(start, start + opener.at_once)
            chunk_facts = load_into(pixels[chunk], opener, locations[chunk], recipe)
            facts.put(start, chunk_facts)
        yield pixels, facts


def _produced_ahead(
    produce: Callable[[threading.Event], Generator[Loaded]],
) -> Generator[Loaded]:
    """Yield the items of `produce`, which a thread makes up to two ahead.

    The thread ends with this generator. An exception of the thread is raised here.
    """
    # Simple queues, which a KeyboardInterrupt in the middle of `get` leaves usable: it can leave a
    # Queue's lock taken, and the thread would wait for it for ever. `room` has a token for each
    # item that the thread may put.
    ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(_BATCHES_AHEAD):
        room.put(None)
    stopped = threading.Event()

    def put(item: tuple[bool, Any]) -> None:
        """Wait for room and put (True, item), or (False, exception or None) at the end."""
        while not stopped.is_set():
            try:
                room.get(timeout=0.1)
            except queue.Empty:
                continue
            return ready.put(item)

    def run() -> None:
        """Put all items and then the end or the exception; the thread's function."""
        try:
            with closing(produce(stopped)) as items:
                for item in items:
                    put((True, item))
                    if stopped.is_set():
                        return
            put((False, None))
        except (
            BaseException
        ) as error:  # even SystemExit: the consumer would wait for ever
            put((False, error))

    thread = threading.Thread(target=run, name="vitsee-loading", daemon=True)
    thread.start()
    try:
        while True:
            is_item, item = ready.get()
            room.put(None)
            if not is_item:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        stopped.set()
        thread.join()


def _slice_within(row_range: slice | tuple[int, int], n: int) -> slice:
    """Return the slice of a range of n rows; raise DataError if it is empty or not within them."""
    if isinstance(row_range, slice):
        start = row_range.start or 0
        stop = n if row_range.stop is None else row_range.stop
    else:
        start, stop = row_range
    if not 0 <= start < stop <= n:
        raise DataError(
            f"rows {start}:{stop} are outside the {n} samples of the selection"
        )
    return slice(int(start), int(stop))


Loaded = tuple[NDArray[np.uint8], Facts]  # the pixels of a batch, and the facts about it

# ---------------- by worker processes

_TASKS_AHEAD = 2  # so that a worker finds its next task waiting
_MAX_TASK_IMAGES = 16  # small enough that large batches spread evenly
_SECONDS_TO_END = 2.0
_WORKER_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from vitsee_core.images.loading import serve; serve(int(sys.argv[2]))"
)


@dataclass
class _Worker:
    """A loading process, our end of its socket, and the number of tasks it has not answered."""

    process: subprocess.Popen[bytes]
    socket: Connection
    n_tasks: int = 0


@dataclass
class _BatchInProgress:
    """A batch whose images are being loaded.

    Attributes:
        slot: the part of the shared memory that has its pixels.
        pixels: the pixels there, which workers fill.
        facts: the facts that have arrived.
        n_missing: images that have not been loaded yet.
    """

    slot: int
    pixels: NDArray[np.uint8]
    facts: Facts
    n_missing: int


def load_with_workers(
    opener: Opener,
    batch_locations: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    n_workers: int,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """Yield the batches in order; each is cut into tasks for the workers as they have room.

    It ends early when `stopped` is set. The shared memory has room for two batches, or for as many
    as give every worker two tasks.

    Args:
        opener: reads the images.
        batch_locations: the locations of each batch's images.
        recipe: resizes and crops a decoded image.
        n_workers: the number of processes.
        stopped: set by the consumer's thread.

    Raises:
        DataError: a worker was killed, this system cannot start one, or a server gave no answer.
    """
    largest_batch = max(map(len, batch_locations), default=0)
    if not largest_batch:
        return
    # -(-a // b) is a / b rounded up.
    task_images = max(1, min(_MAX_TASK_IMAGES, -(-largest_batch // n_workers)))
    n_slots = max(2, -(-_TASKS_AHEAD * n_workers * task_images // largest_batch))
    image_bytes = int(np.prod(recipe.shape))
    shared = SharedBlock(n_slots * largest_batch * image_bytes)
    worker_opener, fds = opener.inherit()
    workers: list[_Worker] = []
    try:
        # All are started before the first is written to: interpreters start at the same time.
        for _ in range(n_workers):
            workers.append(_start_worker((shared.fd, *fds)))
        for worker in workers:
            worker.socket.send_bytes(pickle.dumps((worker_opener, recipe, shared)))
        yield from _dispatch(
            workers,
            batch_locations,
            recipe,
            shared,
            n_slots=n_slots,
            task_images=task_images,
            stopped=stopped,
        )
    finally:
        _end_workers(workers)
        for fd in (shared.fd, *fds):
            os.close(fd)


def _dispatch(
    workers: list[_Worker],
    batch_locations: Sequence[Sequence[Any]],
    recipe: AnyRecipe,
    shared: SharedBlock,
    *,
    n_slots: int,
    task_images: int,
    stopped: threading.Event,
) -> Generator[Loaded]:
    """Hand tasks to the workers and yield each batch when all of its images have arrived.

    Args:
        workers: the started processes.
        batch_locations: the locations of each batch's images.
        recipe: gives the shape of an image's pixels.
        shared: the memory that workers write pixels to.
        n_slots: the number of batches that `shared` has room for.
        task_images: the largest number of images in a task.
        stopped: ends the generator when it is set.
    """
    image_bytes = int(np.prod(recipe.shape))
    slot_bytes = shared.size // n_slots
    # (batch number, first image, image behind the last) of each task
    tasks = (
        (number, start, min(start + task_images, len(locations)))
        for number, locations in enumerate(batch_locations)
        for start in range(0, len(locations), task_images)
    )
    free_slots = deque(range(n_slots))
    running: dict[int, _BatchInProgress] = {}  # batch number -> batch
    next_task = next(tasks, None)
    next_to_yield = 0
    while next_to_yield < len(batch_locations):
        # Hand out tasks, in order, until every worker has its share or all slots are taken.
        while next_task is not None:
            number, start, stop = next_task
            worker = min(workers, key=lambda w: w.n_tasks)
            if worker.n_tasks >= _TASKS_AHEAD:
                break
            if number not in running and not free_slots:
                break
            if number not in running:
                slot = free_slots.popleft()
                n = len(batch_locations[number])
                pixels = shared.array((n, *recipe.shape), slot * slot_bytes)
                running[number] = _BatchInProgress(slot, pixels, Facts.none(n), n)
            offset = running[number].slot * slot_bytes + start * image_bytes
            locations = batch_locations[number][start:stop]
            try:
                worker.socket.send((number, start, offset, locations))
            except OSError:
                raise _worker_lost(worker) from None
            worker.n_tasks += 1
            next_task = next(tasks, None)
        if next_to_yield in running and not running[next_to_yield].n_missing:
            batch = running.pop(next_to_yield)
            free_slots.append(batch.slot)
            next_to_yield += 1
            # A copy, since the slot is given to another batch while the consumer has this one.
            yield batch.pixels.copy(), batch.facts
            continue
        _receive_answers(workers, running)
        if stopped.is_set():
            return


def _receive_answers(
    workers: list[_Worker], running: dict[int, _BatchInProgress]
) -> None:
    """Wait up to 0.1 s for answers of workers and add them to their batches."""
    by_socket = {worker.socket: worker for worker in workers}
    for ready in wait(list(by_socket), timeout=0.1):
        worker = by_socket[ready]  # type: ignore[index]
        try:
            answer = worker.socket.recv()
        except (EOFError, OSError):
            raise _worker_lost(worker) from None
        if isinstance(answer, DataError):
            raise answer
        number, start, facts = answer
        worker.n_tasks -= 1
        batch = running[number]
        batch.facts.put(start, facts)
        batch.n_missing -= len(facts.valid)


def _start_worker(fds: tuple[int, ...]) -> _Worker:
    """Start a process that runs `serve` and inherits the file descriptors `fds`.

    Raises:
        DataError: this system cannot start one.
    """
    if os.name != "posix":
        raise DataError("loading processes need a POSIX system; run with --workers 0")
    our_end, worker_end = socket.socketpair()
    # -I keeps the user's PYTHON* variables and site packages out; the worker takes this process's
    # module paths instead, in which "" stands for the working folder.
    module_paths = json.dumps([path or os.getcwd() for path in sys.path])
    socket_fd = worker_end.fileno()
    command = [sys.executable, "-I", "-c", _WORKER_PROGRAM, module_paths, str(socket_fd)]
    # One thread for torch, which some recipes import: the workers are the parallelism.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The mask is inherited, so that no signal arrives before the worker could ignore it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(socket_fd, *fds),
            env=environment,
        )
    except OSError as error:
        our_end.close()
        raise DataError(f"cannot start a loading process: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        worker_end.close()
    return _Worker(process, Connection(our_end.detach()))


def _end_workers(workers: list[_Worker]) -> None:
    """Close the sockets, which ends the workers, and kill those that do not end in time."""
    # All sockets first, so that the workers end at the same time.
    for worker in workers:
        worker.socket.close()
    for worker in workers:
        try:
            worker.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # a read that hangs, on a file server perhaps
            worker.process.kill()
            worker.process.wait()


def _worker_lost(worker: _Worker) -> DataError:
    """Return the error that says how a worker ended before its time."""
    try:
        code: int | None = worker.process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        code = None
    how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
    return DataError(
        f"a loading process ended early ({how}); if memory ran out, run with fewer --workers"
    )


def serve(fd: int) -> None:
    """Load for the parent at the other end of the socket `fd`; return when that is closed.

    The main function of a worker. The first message has the opener, the recipe and the shared
    memory; each further message is a task, answered by (batch number, first image, facts).
    """
    # With several workers the warnings of libraries are noise; Pillow's are heard by image.
    warnings.simplefilter("ignore")
    socket = Connection(fd)
    try:
        opener, recipe, shared = pickle.loads(socket.recv_bytes())
        while True:
            number, start, offset, locations = socket.recv()
            out = shared.array((len(locations), *recipe.shape), offset)
            try:
                facts = load_into(out, opener, locations, recipe)
                answer: Any = (number, start, facts)
            except DataError as error:  # about the server or archive, not about an image
                answer = error
            socket.send(answer)
    except (EOFError, ConnectionError):
        return
