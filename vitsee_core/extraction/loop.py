"""The loop over slabs: forward passes in this thread, writing in another.

    images -> batches -> Capture -> SlabObserver -> slab buffers -> writer thread -> store

Two sets of slab buffers alternate: while one is written, the forward pass fills the other.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from vitsee_core.extraction.buffers import SlabBuffers, to_store
from vitsee_core.extraction.by_frame import FrameObserver
from vitsee_core.extraction.erf import ErfSums
from vitsee_core.extraction.native import NativeCapture, NativeObserver
from vitsee_core.extraction.not_finite import FiniteWatch, without_broken
from vitsee_core.extraction.outcome import Clock, StopRequest
from vitsee_core.extraction.plan import hook_points
from vitsee_core.extraction.prepare import Prepared
from vitsee_core.extraction.sharding import locked
from vitsee_core.extraction.slab import SlabObserver, check_peaks
from vitsee_core.extraction.slab_grams import GramStrategy, SlabGrams
from vitsee_core.extraction.tiles import TiledObserver
from vitsee_core.extraction.transfer import PixelFeed
from vitsee_core.images import Batch, normalise
from vitsee_core.models.capture import Capture
from vitsee_core.models.selfcheck import NotFinite
from vitsee_core.runtime.device import precision_context
from vitsee_core.runtime.machine import freed_memory_kept, is_out_of_memory, plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_stores import StoreWriter
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import StorePlan

T = TypeVar("T")


class SlabLoop:
    """Makes and commits slabs. Results: `written`, `clock`, `unreadable`, `not_finite` (images that
    break the model), `remarks` and `overtaken` (slabs that another process committed meanwhile).

    reload: loads the batches of a slab anew, for those that one image has made NaN.
    """

    def __init__(
        self,
        prepared: Prepared,
        writer: StoreWriter,
        provenance: dict[str, Any],
        strategy: GramStrategy,
        erf: ErfSums | None = None,
        reload: Callable[[int], Generator[Batch]] | None = None,
        on_error: str = "nan",
    ):
        self.prepared = prepared
        self.writer = writer
        self.strategy = strategy
        self.erf = erf
        self.provenance = provenance
        self.clock = Clock()
        self.written = 0
        self.overtaken: list[int] = []
        self.unreadable: list[tuple[int, str, str]] = []
        self.remarks = Counter[str]()
        self.not_finite: list[tuple[int, str, str]] = []
        self._reload = reload
        self._fails = on_error == "fail"
        self._broken: dict[int, NotFinite] = {}
        self._free: queue.SimpleQueue[SlabBuffers] = queue.SimpleQueue()
        self._pending: list[Future[None]] = []

    def run(
        self,
        todo: list[int],
        loading: Iterator[Batch],
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Make the slabs `todo` from their batches, in order, until done or asked to stop."""
        self.progress = progress
        prepared = self.prepared
        plan = self.prepared.plan
        device = self.prepared.device
        table = prepared.table
        capture: Capture | NativeCapture
        if plan.canvas is not None and plan.canvas.own_grids:
            capture = NativeCapture(prepared.model, table, plan)
        else:
            capture = Capture(prepared.model, table, **hook_points(table, plan))
        feed = PixelFeed(loading, device)
        with (
            freed_memory_kept() if device.type == "cpu" else nullcontext(),
            self._memory(plan, sets=min(2, len(todo))) as (grams, observer),
            # The writer's products enter the same context inside this one.
            precision_context(device, prepared.precision),
            ThreadPoolExecutor(1, "writer") as pool,
            torch.inference_mode(),
            # Before the capture's own hooks, which see what the changes leave.
            nullcontext() if prepared.changes is None else prepared.changes.applied(),
            capture,
        ):
            for k in todo:
                if not self._make(k, observer, capture, grams, feed, stop, pool):
                    break
            self._wait()
            if self._broken:
                self._make_again(observer, capture, grams, stop, pool)
        for future in self._pending:
            future.result()

    def _wait(self) -> None:
        with self.clock("waiting for the writer"):
            wait(self._pending)

    def _make(
        self,
        k: int,
        observer: SlabObserver,
        capture: Capture | NativeCapture,
        grams: SlabGrams,
        feed: PixelFeed,
        stop: StopRequest,
        pool: ThreadPoolExecutor,
    ) -> bool:
        """One slab through the model, handed to the writer; False if a signal came before."""
        plan = self.prepared.plan
        with self.clock("waiting for the writer"):
            buffers = self._take(self._free)
            grams.reserve(buffers, self._take)
        if not self._forward(k, buffers, observer, capture, feed, stop):
            return False
        with self.clock("reductions"):
            observer.finish()
        fields: dict[str, NDArray[Any]] = {}
        if self.erf is not None and k < plan.n_erf_slabs:
            with self.clock("erf"):
                fields = self.erf.finish(f"slab {k}")
        self._pending.append(pool.submit(self._write, k, buffers, grams, fields))
        return True

    def _make_again(
        self,
        observer: SlabObserver,
        capture: Capture | NativeCapture,
        grams: SlabGrams,
        stop: StopRequest,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Make the slabs that came out NaN once more, without the images that did it. Raises
        NotFinite: as `without_broken`."""
        prepared = self.prepared
        self.progress = SILENT
        failures = self._broken
        self._broken = {}
        for k, failure in sorted(failures.items()):
            if self._reload is None or not isinstance(capture, Capture):
                raise failure
            if isinstance(observer, TiledObserver):
                raise failure
            ids = prepared.selection.samples.ids
            with closing(self._reload(k)) as loading, self.clock("model"):
                look = partial(self._look, k, observer, capture)
                batches, left_out = without_broken(
                    loading, look, ids, failure, self._fails
                )
            n_unreadable = len(self.unreadable)
            remarks = self.remarks.copy()
            feed = PixelFeed(iter(batches), prepared.device)
            if not self._make(k, observer, capture, grams, feed, stop, pool):
                return
            # Both have been counted the first time.
            del self.unreadable[n_unreadable:]
            self.remarks = remarks
            self.not_finite += [
                (image.row, image.name, image.reason) for image in left_out
            ]
            self._wait()
            if k in self._broken:
                raise self._broken[k]

    def _look(
        self, k: int, observer: SlabObserver, capture: Capture, batch: Batch
    ) -> FiniteWatch:
        """The images of a batch of slab `k` whose activations are not finite."""
        prepared = self.prepared
        watch = FiniteWatch()
        if prepared.changes is not None:
            prepared.changes.begin(prepared.plan.rows(k))
            prepared.changes.at(batch.rows)
        given = batch.pixels.to(prepared.device)
        pixels = normalise(given, prepared.model.transform, prepared.device)
        for part in self._parts(pixels, batch, observer):
            capture.run(part, watch)
        if isinstance(observer, FrameObserver):
            frames = len(pixels[0])
            sites = dict(reversed(watch.first_sites.items()))
            watch.first_sites = {row // frames: site for row, site in sites.items()}
        return watch

    @contextmanager
    def _memory(
        self, plan: StorePlan, sets: int
    ) -> Iterator[tuple[SlabGrams, SlabObserver]]:
        """Context with host memory for `sets` slabs and the observer that fills it; freed once no
        copy is pending."""
        device = self.prepared.device
        with ExitStack() as stack:
            for _ in range(sets):
                buffers = SlabBuffers(plan, pinned=device.type == "cuda")
                stack.callback(buffers.release)
                self._free.put(buffers)
            grams = stack.enter_context(
                self.strategy.open(plan, device, self.clock, self.writer.place)
            )
            kind = SlabObserver
            if plan.canvas is not None and plan.canvas.tiles is not None:
                kind = TiledObserver
            elif plan.canvas is not None and plan.canvas.own_grids:
                kind = NativeObserver
            elif plan.clip is not None and plan.clip.by_frame:
                kind = FrameObserver
            clock = self.clock if device.type == "cpu" else None
            observer = kind(plan, device, grams, self.prepared.precision, clock)
            stack.callback(observer.close)
            yield grams, observer

    def _take(self, free: queue.SimpleQueue[T]) -> T:
        """Wait for a free set; an error of the writer is raised here."""
        while True:
            for future in self._pending:
                if future.done():
                    future.result()
            try:
                return free.get(timeout=0.2)
            except queue.Empty:
                continue

    def _forward(
        self,
        k: int,
        buffers: SlabBuffers,
        observer: SlabObserver,
        capture: Capture | NativeCapture,
        feed: PixelFeed,
        stop: StopRequest,
    ) -> bool:
        """One slab through the model; False if a signal came before it was complete."""
        prepared = self.prepared
        clock = self.clock
        rows = prepared.plan.rows(k)
        observer.start(buffers)
        changes = prepared.changes
        if changes is not None:
            changes.begin(rows)
        if self.erf is not None:
            self.erf.start()
        row = rows.start
        while row < rows.stop:
            if stop:
                return False
            with clock("loading"):
                batch, given = feed.take()
            self.unreadable += batch.errors
            self.remarks.update(batch.remarks)
            with _batch_fits(len(batch.valid), prepared.device):
                with clock("model"):
                    pixels = normalise(given, prepared.model.transform, prepared.device)
                    observer.begin_batch(row - rows.start, batch)
                    if changes is not None:
                        changes.at(slice(row, row + len(batch.valid)))
                    for part in self._parts(pixels, batch, observer):
                        capture.run(part, observer)
                    if changes is not None:
                        changes.check()
                with clock("loading"):
                    feed.ahead()
                with clock("reductions"):
                    observer.end_batch()
                if not self._add_erf(row, pixels, batch, capture, stop):
                    return False
            row += len(batch.valid)
            self.progress.advance(len(batch.valid), 0)
        return True

    def _parts(
        self, pixels: torch.Tensor, batch: Batch, observer: SlabObserver
    ) -> Iterable[torch.Tensor]:
        """Inputs of single forward passes: a batch, its frames, its images of one size, or some of
        its tiles."""
        if isinstance(observer, FrameObserver):
            return (pixels.flatten(0, 1),)
        if isinstance(observer, NativeObserver):
            return observer.parts(pixels, batch.size.tolist())
        if not isinstance(observer, TiledObserver):
            return (pixels,)
        return observer.parts(pixels, batch.size.tolist(), self.strategy.batch_size)

    def _add_erf(
        self,
        row: int,
        pixels: torch.Tensor,
        batch: Batch,
        capture: Capture | NativeCapture,
        stop: StopRequest,
    ) -> bool:
        """Receptive fields of a batch that begins at this row of the store; False if a signal came
        before they were complete."""
        plan = self.prepared.plan
        if self.erf is None or plan.erf is None or row >= plan.erf.n_images:
            return True
        assert isinstance(capture, Capture)
        valid = torch.from_numpy(batch.valid[: plan.erf.n_images - row])
        with self.clock("erf"), capture.paused():
            return self.erf.add(
                pixels[: len(valid)][valid.to(pixels.device)], lambda: bool(stop)
            )

    def _write(
        self,
        k: int,
        buffers: SlabBuffers,
        grams: SlabGrams,
        fields: dict[str, NDArray[Any]],
    ) -> None:
        plan = self.prepared.plan
        rows = plan.rows(k)
        n = rows.stop - rows.start
        where = f"{plan.examples} {rows.start} to {rows.stop - 1}"
        buffers.wait()
        precision = self.prepared.precision
        with self.clock("writing"):
            try:
                check_peaks(buffers.peaks, plan.stored, where, grams.kept, precision)
            except NotFinite as error:
                self._broken[k] = error
                self._free.put(buffers)
                return
            sums = {**buffers.sums, **grams.on_host(buffers, n)}
            slab = to_store(buffers, sums, n, plan) | fields
            if (known := self.prepared.recorded) is not None:
                known.check(rows.start, slab["hash"], self.prepared.selection.samples.ids)
            with locked(self.writer.place, [k], wait=True):
                size = self.writer.write_slab(k, slab, self.provenance)
        if not size:
            self.overtaken.append(k)
        self.written += size
        self.progress.advance(0, size)
        self._free.put(buffers)


@contextmanager
def _batch_fits(n_images: int, device: torch.device) -> Iterator[None]:
    """Context that turns out-of-memory errors into VitseeError with the batch size to try."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = f"; try --batch-size {n_images // 2}" if n_images > 1 else ""
        message = f"out of memory on {device} with {plural(n_images, 'images')} at once{smaller}"
        raise VitseeError(message) from None
