"""Batches of pixels in a fixed order, loaded ahead of their consumer."""

from __future__ import annotations

import logging
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images.clips import clip_recipe
from vitsee_core.images.decoding import Facts, Opener, load_into
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.pool import Loaded, load_with_workers
from vitsee_core.images.selection import Selection
from vitsee_core.images.transform import AnyRecipe, make_recipe

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
        size: (images, 2) height and width as decoded, EXIF orientation not applied.
        seconds: (images,) between neighbouring sampled frames of clips, else NaN.
    """

    rows: slice
    pixels: torch.Tensor
    valid: NDArray[np.bool_]
    hash: NDArray[np.uint64]
    size: NDArray[np.int32]
    errors: list[tuple[int, str, str]]
    seconds: NDArray[np.float32]


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
    or dropping the iterator stops the workers.

    Raises:
        ImageError: an image cannot be read and `on_error` is "fail".
        DataError: a range outside the selection, an unknown `on_error`, a transform that timm
            cannot build, or a worker that was killed.
    """
    if on_error not in ON_ERROR:
        raise DataError(f"unknown on_error {on_error!r}; expected one of: {', '.join(ON_ERROR)}")
    if workers < 0:
        raise DataError(f"{workers} workers; expected 0 or more")
    ranges = [_range(part, len(selection)) for part in rows]
    recipe = clip_recipe(transform) if "clip" in transform else make_recipe(transform)
    n_images = sum(part.stop - part.start for part in ranges)
    return _batches(selection, recipe, ranges, min(workers, n_images), on_error)


def _batches(
    selection: Selection, recipe: AnyRecipe, ranges: list[slice], workers: int, on_error: str
) -> Generator[Batch]:
    import torch

    source, ids = selection.source, selection.samples.ids
    index = selection.samples.index
    places = [[source.locations[i] for i in index[part]] for part in ranges]

    def produce(stopped: threading.Event) -> Generator[Loaded]:
        if workers:
            return load_with_workers(source.opener, places, recipe, workers, stopped)
        return _load_here(source.opener, places, recipe, stopped)

    with closing(_ahead(produce)) as loaded:
        for part, (pixels, of) in zip(ranges, loaded, strict=True):
            named = [(part.start + k, ids[part.start + k], reason) for k, reason in of.errors]
            if named and on_error == "fail":
                raise ImageError(*named[0][1:])
            batch = torch.from_numpy(pixels)
            yield Batch(part, batch, of.valid, of.hash, of.size, named, of.seconds)


def _load_here(
    opener: Opener, places: Sequence[Sequence[Any]], recipe: AnyRecipe, stopped: threading.Event
) -> Generator[Loaded]:
    """The batches one after another, in this thread; ends early when `stopped`."""
    # An ImageError that names the image comes instead.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
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
        raise DataError(f"rows {start}:{stop} are outside the {n} samples of the selection")
    return slice(int(start), int(stop))
