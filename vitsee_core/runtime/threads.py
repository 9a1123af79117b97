"""Splits work over single-core threads, instead of parallelising every pass.

A pass over a few images takes some ten microseconds. Shared by several threads it ends with the
slowest of them, and where other work competes for the cores (loading images, writing) that wait is
far longer than the pass. Threads with images of their own synchronise once per call.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

CHUNK_BYTES = 1 << 20


def run_split(
    function: Callable[[int, range], None],
    n_items: int,
    n_pieces: int,
    *,
    plain: bool = False,
) -> None:
    """Call `function(piece, items)` for every piece of the items 0 to n_items - 1.

    Pieces are runs of about equal length. Each runs in a thread in which torch uses one core, in
    the caller's inference mode and without gradients; a single piece runs in the caller's thread on
    all its cores. Returns when all have ended; an error in a piece is then raised.

    plain: the function does not use torch, so the caller's thread takes the last piece: one thread
    less to wake, which can take longer than a small piece.
    """
    bounds = [n_items * i // n_pieces for i in range(n_pieces + 1)]
    if n_pieces == 1:
        function(0, range(n_items))
        return
    inference = torch.is_inference_mode_enabled()

    def run(piece: int) -> None:
        """Call the function for a piece; torch's modes are each thread's own."""
        with torch.inference_mode(inference), torch.no_grad():
            function(piece, range(bounds[piece], bounds[piece + 1]))

    # Keyed by process: threads do not survive a fork.
    pool = _pool(torch.get_num_threads(), os.getpid())
    n_beside = n_pieces - 1 if plain else n_pieces
    futures = [pool.submit(run, piece) for piece in range(n_beside)]
    try:
        for piece in range(n_beside, n_pieces):
            run(piece)
    finally:
        wait(futures)
    for future in futures:
        future.result()


def by_chunks(
    function: Callable[[slice], None],
    n_images: int,
    image_bytes: int,
    device: torch.device,
    *,
    at_once: bool = False,
) -> None:
    """Call `function(images)` for chunks of a batch, each thread with its own images.

    A chunk stays in a core's cache over several passes. On a GPU the function is called once, for
    all images.

    Args:
        function: gets the images as a slice.
        n_images: size of the batch.
        image_bytes: memory of one image.
        device: where the images are.
        at_once: each thread's images are one chunk, and the function does not use torch: for a
            single compiled pass, which gains nothing from chunks.
    """
    if device.type != "cpu":
        function(slice(0, n_images))
        return
    n_chunks = max(1, n_images * image_bytes // CHUNK_BYTES)
    step = n_images if at_once else max(1, CHUNK_BYTES // max(1, image_bytes))

    def run(_: int, images: range) -> None:
        """Call the function for chunks of a thread's images."""
        for first in range(images.start, images.stop, max(1, step)):
            function(slice(first, min(first + step, images.stop)))

    n_pieces = min(torch.get_num_threads(), n_chunks, max(1, n_images))
    run_split(run, n_images, n_pieces, plain=at_once)


@functools.lru_cache(maxsize=1)
def _pool(n_threads: int, process: int) -> ThreadPoolExecutor:
    """Return threads in each of which torch uses one core; process: the id of this process."""
    n_threads_before = torch.get_num_threads()
    pool = ThreadPoolExecutor(n_threads, "one core", _use_one_core)
    started = threading.Barrier(n_threads + 1)
    for _ in range(n_threads):
        pool.submit(started.wait)
    started.wait()
    # The setting holds for the thread that makes it and for threads that start later: for those
    # it is taken back once all of the pool have started.
    torch.set_num_threads(n_threads_before)
    return pool


def _use_one_core() -> None:
    """Let torch use one core in this thread."""
    # A thread's first use of torch copies the process-wide setting, so it comes first.
    torch.get_num_threads()
    torch.set_num_threads(1)
