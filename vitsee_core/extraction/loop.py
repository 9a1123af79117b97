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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitsee_core.extraction.buffers import SlabBuffers, to_store
from vitsee_core.extraction.by_frame import FrameObserver
from vitsee_core.extraction.erf import ErfSums
from vitsee_core.extraction.native import NativeCapture, NativeObserver
from vitsee_core.extraction.not_finite import FiniteWatch, pixels_of_sound, without_broken
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


class _SlabTools(NamedTuple):
    """The model, images and buffers that all slabs of a run share."""

    observer: SlabObserver
    capture: Capture | NativeCapture
    grams: SlabGrams
    stop: StopRequest
    pool: ThreadPoolExecutor  # the writer's thread


class SlabLoop:
    """Makes and commits slabs.

    Attributes:
        clock: time by stage.
        written: number of bytes written.
        overtaken: slabs that another process committed while this one made them.
        unreadable: (row, id, reason) of images that could not be read.
        not_finite: (row, id, reason) of images that break the model.
        remarks: remark about an image -> number of such images.
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
        """Prepare a loop.

        Args:
            prepared: the checked extraction.
            writer: writer of its store.
            provenance: record of this process for the commit markers.
            strategy: how Gram matrices are computed.
            erf: sums of receptive fields, if the store has any.
            reload: function that loads the batches of slab k anew, to find the images that
                made it NaN.
            on_error: "fail" to stop at such an image, "nan" to leave it out.
        """
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
        self._broken: dict[int, NotFinite] = {}  # slab -> why it is not finite
        self._free: queue.SimpleQueue[SlabBuffers] = queue.SimpleQueue()
        self._pending: list[Future[None]] = []

    def run(
        self,
        todo: list[int],
        loading: Iterator[Batch],
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Make slabs from their batches, in order, until all are made or a signal came.

        Args:
            todo: indices of the slabs.
            loading: their batches.
            stop: whether a signal came.
            progress: advanced by images and bytes.
        """
        self.progress = progress
        prepared = self.prepared
        plan = prepared.plan
        device = prepared.device
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
            tools = _SlabTools(observer, capture, grams, stop, pool)
            for k in todo:
                if not self._make(k, feed, tools):
                    break
            # Whether slabs are broken is known once the writer has looked at their peaks.
            self._wait()
            if self._broken:
                self._make_again(tools)
        # An error of the writer that no later slab has met is raised here.
        for future in self._pending:
            future.result()

    def _wait(self) -> None:
        """Wait until the writer has nothing to do."""
        with self.clock("waiting for the writer"):
            wait(self._pending)

    def _make(
        self,
        k: int,
        feed: PixelFeed,
        tools: _SlabTools,
    ) -> bool:
        """Pass slab `k` through the model and hand it to the writer.

        Returns:
            False if a signal came before the slab was complete.
        """
        plan = self.prepared.plan
        with self.clock("waiting for the writer"):
            buffers = self._take(self._free)
            # Memory for waiting activations is taken before the pass, not in the midst of
            # it.
            tools.grams.reserve_memory(buffers, self._take)
        if not self._forward(k, buffers, feed, tools):
            return False
        with self.clock("reductions"):
            tools.observer.finish()
        erf_arrays: dict[str, NDArray[Any]] = {}
        if self.erf is not None and k < plan.n_erf_slabs:
            with self.clock("erf"):
                erf_arrays = self.erf.finish(f"slab {k}")
        writing = tools.pool.submit(self._write, k, buffers, tools.grams, erf_arrays)
        self._pending.append(writing)
        return True

    def _make_again(self, tools: _SlabTools) -> None:
        """Make the slabs that came out NaN once more, without the images that did it.

        Raises:
            NotFinite: no image breaks the model by itself, or all do; or one does, and images
                that break the model are to end the run.
        """
        prepared = self.prepared
        self.progress = SILENT
        failures = self._broken
        self._broken = {}
        for k, failure in sorted(failures.items()):
            if self._reload is None:
                raise failure
            with closing(self._reload(k)) as loading, self.clock("model"):
                batches, left_out = without_broken(
                    loading,
                    look=partial(self._look, k, tools.observer, tools.capture),
                    ids=prepared.selection.samples.ids,
                    failure=failure,
                    fail=self._fails,
                    elsewhere=partial(self._sound_pixels, tools.observer, tools.capture),
                )
            n_unreadable = len(self.unreadable)
            remarks = self.remarks.copy()
            feed = PixelFeed(iter(batches), prepared.device)
            if not self._make(k, feed, tools):
                return
            # Both were counted when the slab was made first.
            del self.unreadable[n_unreadable:]
            self.remarks = remarks
            self.not_finite += [
                (image.row, image.name, image.reason) for image in left_out
            ]
            self._wait()
            if k in self._broken:
                raise self._broken[k]

    def _sound_pixels(
        self, observer: SlabObserver, capture: Capture | NativeCapture
    ) -> torch.Tensor | None:
        """Return the pixels of the store's first image that does not break the model, None if all
        do. The images before it are loaded and run."""
        if self._reload is None:
            return None
        for k in range(self.prepared.plan.n_slabs):
            with closing(self._reload(k)) as loading:
                for batch in loading:
                    watch = self._look(k, observer, capture, batch)
                    pixels = pixels_of_sound(batch, watch)
                    if pixels is not None:
                        return pixels
        return None

    def _look(
        self,
        k: int,
        observer: SlabObserver,
        capture: Capture | NativeCapture,
        batch: Batch,
    ) -> FiniteWatch:
        """Find the images of a batch of slab `k` whose activations are not finite."""
        prepared = self.prepared
        if prepared.changes is not None:
            prepared.changes.begin(prepared.plan.rows(k))
            prepared.changes.at(batch.rows)
        on_device = batch.pixels.to(prepared.device)
        pixels = normalise(on_device, prepared.model.transform, prepared.device)
        of_batch = FiniteWatch()
        for pass_pixels in self._passes(pixels, batch, observer):
            watch = FiniteWatch()
            capture.run(pass_pixels, watch)
            # An image has several rows where the model sees its tiles or frames. It gets the
            # first site that any of them breaks in the pass.
            images = observer.images_of_pass(len(pass_pixels))
            rows_of_image: dict[int, list[int]] = {}
            for row in watch.first_sites:
                rows_of_image.setdefault(images[row], []).append(row)
            for image, rows in rows_of_image.items():
                broken_at: str | None = watch.first_sites[rows[0]]
                if len(rows_of_image) > 1:
                    # Images in one sequence, apart by a mask, break one another: 0 x NaN.
                    if prepared.changes is not None:
                        start = batch.rows.start + image
                        prepared.changes.at(slice(start, start + 1))
                    alone = FiniteWatch()
                    capture.run(pass_pixels[rows], alone)
                    broken_at = alone.first_site()
                if broken_at is not None:
                    of_batch.first_sites.setdefault(image, broken_at)
        return of_batch

    @contextmanager
    def _memory(
        self, plan: StorePlan, sets: int
    ) -> Iterator[tuple[SlabGrams, SlabObserver]]:
        """Context with host memory for `sets` slabs, and the observer that fills it.

        The memory is freed once no copy is pending.
        """
        device = self.prepared.device
        with ExitStack() as stack:
            # Made once for all slabs, as pinning memory takes time.
            for _ in range(sets):
                buffers = SlabBuffers(plan, pinned=device.type == "cuda")
                stack.callback(buffers.release)
                self._free.put(buffers)
            grams = stack.enter_context(
                self.strategy.open(plan, device, self.clock, self.writer.place)
            )
            observer_type = SlabObserver
            if plan.canvas is not None and plan.canvas.tiles is not None:
                observer_type = TiledObserver
            elif plan.canvas is not None and plan.canvas.own_grids:
                observer_type = NativeObserver
            elif plan.clip is not None and plan.clip.by_frame:
                observer_type = FrameObserver
            clock = self.clock if device.type == "cpu" else None
            observer = observer_type(plan, device, grams, self.prepared.precision, clock)
            stack.callback(observer.close)
            yield grams, observer

    def _take(self, free: queue.SimpleQueue[T]) -> T:
        """Wait for a free set of memory and return it; raise an error of the writer."""
        while True:
            for future in self._pending:
                if future.done():
                    future.result()
            try:
                # In short waits, so that an error of the writer ends the run although no
                # buffers come.
                return free.get(timeout=0.2)
            except queue.Empty:
                continue

    def _forward(
        self,
        k: int,
        buffers: SlabBuffers,
        feed: PixelFeed,
        tools: _SlabTools,
    ) -> bool:
        """Pass slab `k` through the model; return False if a signal came before its end."""
        prepared = self.prepared
        clock = self.clock
        observer = tools.observer
        capture = tools.capture
        rows = prepared.plan.rows(k)
        observer.start(buffers)
        changes = prepared.changes
        if changes is not None:
            changes.begin(rows)
        if self.erf is not None:
            self.erf.start()
        row = rows.start
        while row < rows.stop:
            if tools.stop:
                return False
            with clock("loading"):
                batch, on_device = feed.take()
            self.unreadable += batch.errors
            self.remarks.update(batch.remarks)
            with _batch_fits(len(batch.valid), prepared.device):
                with clock("model"):
                    pixels = normalise(
                        on_device, prepared.model.transform, prepared.device
                    )
                    observer.begin_batch(row - rows.start, batch)
                    if changes is not None:
                        changes.at(slice(row, row + len(batch.valid)))
                    for pass_pixels in self._passes(pixels, batch, observer):
                        capture.run(pass_pixels, observer)
                    if changes is not None:
                        changes.check()
                # The next pixels are copied while the device still works on these.
                with clock("loading"):
                    feed.ahead()
                with clock("reductions"):
                    observer.end_batch()
                if not self._add_erf(row, pixels, batch, tools):
                    return False
            row += len(batch.valid)
            self.progress.advance(len(batch.valid), 0)
        return True

    def _passes(
        self, pixels: torch.Tensor, batch: Batch, observer: SlabObserver
    ) -> Iterable[torch.Tensor]:
        """Cut a batch into the inputs of single forward passes.

        An input is the batch, its frames, its images of one size, or some of its tiles.
        """
        if isinstance(observer, FrameObserver):
            # (clips, frames, 3, H, W) -> (clips x frames, 3, H, W)
            return (pixels.flatten(0, 1),)
        # An image that does not count is not run: alone at its size, or tile by tile, it can
        # break the model.
        sizes = np.where(batch.valid[:, None], batch.size, 0).tolist()
        if isinstance(observer, NativeObserver):
            return observer.passes(pixels, sizes)
        if isinstance(observer, TiledObserver):
            return observer.passes(pixels, sizes, self.strategy.batch_size)
        return (pixels,)

    def _add_erf(
        self,
        row: int,
        pixels: torch.Tensor,
        batch: Batch,
        tools: _SlabTools,
    ) -> bool:
        """Add the receptive fields of a batch that begins at this row of the store.

        Returns:
            False if a signal came before all were added.
        """
        plan = self.prepared.plan
        if self.erf is None or plan.erf is None or row >= plan.erf.n_images:
            return True
        # NativeCapture has no receptive fields: own grids exclude --erf.
        assert isinstance(tools.capture, Capture)
        # Only the first n_images rows of the store have receptive fields.
        valid = torch.from_numpy(batch.valid[: plan.erf.n_images - row])
        valid_pixels = pixels[: len(valid)][valid.to(pixels.device)]
        # Receptive fields have forward passes of their own, which must not fill the slab.
        with self.clock("erf"), tools.capture.paused():
            return self.erf.add(valid_pixels, lambda: bool(tools.stop))

    def _write(
        self,
        k: int,
        buffers: SlabBuffers,
        grams: SlabGrams,
        erf_arrays: dict[str, NDArray[Any]],
    ) -> None:
        """Write and commit slab `k`, in the writer's thread; its buffers are free then."""
        plan = self.prepared.plan
        rows = plan.rows(k)
        n_images = rows.stop - rows.start
        where = f"{plan.examples} {rows.start} to {rows.stop - 1}"
        # Copies from the device may still be under way.
        buffers.wait()
        precision = self.prepared.precision
        with self.clock("writing"):
            try:
                check_peaks(
                    buffers.peaks, plan.stored, where, grams.host_sites, precision
                )
            except NotFinite as error:
                # Made again at the end, without the images that did it.
                self._broken[k] = error
                self._free.put(buffers)
                return
            sums = {**buffers.sums, **grams.host_matrices(buffers, n_images)}
            slab = {**to_store(buffers, sums, n_images, plan), **erf_arrays}
            if self.prepared.recorded is not None:
                ids = self.prepared.selection.samples.ids
                self.prepared.recorded.check(rows.start, slab["hash"], ids)
            # Processes on one store may make the same slab; the one that comes second
            # writes nothing.
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
