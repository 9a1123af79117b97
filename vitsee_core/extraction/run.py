"""One call of `vitsee extract`: prepare, create or join the store, fill what this process owns.

Batches never cross a slab, so that a slab does not depend on the process that makes it: its
bytes are equal on a CPU, and its values up to the last digits on a GPU, whose libraries may
select other kernels.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import numpy as np
import torch

from vitsee_core.extraction.erf import ErfSums
from vitsee_core.extraction.growth import grow_store
from vitsee_core.extraction.image_layout import describe_canvas
from vitsee_core.extraction.loop import SlabLoop
from vitsee_core.extraction.options import Request, RunOptions
from vitsee_core.extraction.outcome import REST, Interrupted, Outcome, StopRequest
from vitsee_core.extraction.plan import folder_sizes, images_per_example, slab_bytes
from vitsee_core.extraction.prepare import Prepared, check_output, join_store, plan_store
from vitsee_core.extraction.sharding import Shard, claimed_rounds, locked
from vitsee_core.extraction.slab_grams import GramStrategy, choose_strategy
from vitsee_core.extraction.tiles import n_tiles
from vitsee_core.images import Batch, batches
from vitsee_core.models.same_origin import check_same_images
from vitsee_core.runtime.device import device_name
from vitsee_core.runtime.machine import (
    disk_block_bytes,
    free_disk_bytes,
    human_bytes,
    n_cores,
    plural,
    scratch_folder,
)
from vitsee_core.runtime.progress import SILENT, Progress, counting
from vitsee_core.runtime.versions import store_versions
from vitsee_stores import StoreWriter, remove_store
from vitsee_stores.creation import max_disk_bytes
from vitsee_stores.errors import IdentityMismatch, StoreError, VitseeError
from vitsee_stores.layout import StorePlan, n_bytes
from vitsee_stores.manifest import by_reason
from vitsee_stores.writer import tidy

log = logging.getLogger(__name__)

MAX_WORKERS = 32


def extract(request: Request, shard: Shard, progress: Progress = SILENT) -> Outcome:
    """Fill a store, or this shard's slabs of it. A repeated call resumes it.

    Args:
        request: all options.
        shard: which slabs this process makes.
        progress: advanced by images and bytes.

    Raises:
        VitseeError: one line for the user; the store keeps every slab committed so far.
        Interrupted: a signal; exit code 75.
    """
    if request.run.force and (shard.claims or shard.count > 1):
        raise VitseeError(
            "--force with --shard would delete other shards' work: delete it first"
        )
    prepared = prepare(request, progress)
    run = request.run
    with StopRequest() as stop:
        prepared, writer = made_or_joined(prepared, request)
        if announce(prepared, writer, run):
            return Outcome(complete=True)
        if shard.claims:
            outcome = fill_claimed(prepared, writer, run, shard, progress, stop)
        else:
            outcome = fill(
                prepared=prepared,
                writer=writer,
                run=run,
                shard=shard,
                slabs=shard.slabs(writer.n_slabs),
                progress=progress,
                stop=stop,
            )
        outcome.complete = writer.finish()
        if shard.claims and stop and not outcome.complete:
            raise stopped(stop, writer, shard.others)
        return outcome


def prepare(request: Request, progress: Progress = SILENT) -> Prepared:
    """Load the model, choose the images, run the self-check, and plan the store's contents.

    Nothing is written. An existing store is joined: it supplies every choice that was not
    given, and is compared with those that were. A complete store grows by the sites or images
    that it lacks.

    Raises:
        VitseeError: anything the user can fix, in one line.
        IdentityMismatch: the existing store was made from something else.
    """
    # --force starts anew, and reads nothing of the store that it will replace.
    writer = None if request.run.force else StoreWriter.join(request.run.output)
    if writer is None:
        check_output(request)
        return plan_store(request, progress)
    if writer.manifest.growth is not None:
        raise StoreError(
            f"{writer.place} is a generation of the store above it: give that one"
        )
    if writer.complete and not _has_interventions(writer, request):
        return grow_store(writer, request, progress)
    return join_store(writer, request, progress)


def _has_interventions(writer: StoreWriter, request: Request) -> bool:
    """Return whether the model runs with interventions, or ran with some for the store.

    Such stores do not grow: the value that replaces another may depend on the rows.
    """
    interventions = request.model.interventions
    if isinstance(interventions, dict):  # texts by option, of a model that is not loaded
        is_changed = any(interventions.values())
    else:
        is_changed = any(interventions)
    return is_changed or bool(writer.manifest.identity.get("interventions"))


def made_or_joined(prepared: Prepared, request: Request) -> tuple[Prepared, StoreWriter]:
    """Return the preparation of a store and its writer; the store is created if necessary.

    Raises:
        VitseeError: as `open_writer`.
    """
    try:
        return prepared, open_writer(prepared, request.run)
    except IdentityMismatch:
        # Another process made the store since `prepare`: that store supplies the defaults
        # now, and explicit choices are compared with it.
        # Without --force, which would delete what the other process is filling.
        run = dataclasses.replace(request.run, force=False)
        prepared = prepare(dataclasses.replace(request, run=run))
        return prepared, open_writer(prepared, request.run)


def announce(prepared: Prepared, writer: StoreWriter, run: RunOptions) -> bool:
    """Log remarks and what is left out; return whether the store is already complete."""
    for note in prepared.notes:
        log.warning("%s", note)
    for line in by_reason(prepared.manifest.left_out):
        log.info("left out: %s", line)
    if canvas := describe_canvas(prepared.plan.canvas):
        log.info("%s", canvas)
    if prepared.adds:
        log.info("%s", prepared.adds)
    if writer.complete:
        tidy(writer.files)
        examples = plural(prepared.plan.n_images, prepared.plan.examples)
        log.info("%s is complete (%s): nothing to do", run.output, examples)
        return True
    return False


def fill_claimed(
    prepared: Prepared,
    writer: StoreWriter,
    run: RunOptions,
    shard: Shard,
    progress: Progress,
    stop: StopRequest,
) -> Outcome:
    """Make missing slabs as they can be claimed, until none is missing or a signal came.

    Raises:
        Interrupted: a signal came within a slab.
    """
    plan = prepared.plan
    outcome = Outcome(False, examples=plan.examples)
    n_done = committed_images(writer)
    with (
        counting(progress, plan.n_images, plan.examples, done=n_done),
        closing(claimed_rounds(writer, stop)) as rounds,
    ):
        for number, slabs in enumerate(rounds):
            outcome_of_round = fill(
                prepared=prepared,
                writer=writer,
                run=run,
                shard=shard,
                slabs=slabs,
                progress=progress,
                stop=stop,
                remarks=number == 0,
            )
            outcome.add(outcome_of_round)
    return outcome


def committed_images(writer: StoreWriter) -> int:
    """Return the number of images in committed slabs."""
    spans = [writer.plan.rows(int(k)) for k in np.flatnonzero(writer.committed())]
    return sum(span.stop - span.start for span in spans)


def open_writer(prepared: Prepared, run: RunOptions) -> StoreWriter:
    """Return the writer of the existing store, or of a store that is created now.

    Raises:
        VitseeError: the store would not fit the free disk; nothing is made then.
        IdentityMismatch: another process made a store there with other choices or images.
    """
    # Arrays that are written with the store, not with a slab.
    once = {}
    if prepared.weights is not None:
        for name, values in prepared.weights.arrays.items():
            once[f"weights/{name}"] = values
    if prepared.writer is not None:
        prepared.writer.finish_creation(prepared.selection.samples, once)
        return prepared.writer
    # Only after the preparation, which may still have refused the request.
    if run.force:
        remove_store(run.output)
    target = run.output if prepared.files is None else prepared.files
    _log_sizes(prepared.plan, target)
    free = free_disk_bytes(scratch_folder(run.output))
    needed = 0
    if isinstance(run.output, Path):  # a URL takes nothing of this machine's disk
        needed = max_disk_bytes(prepared.manifest, disk_block_bytes(run.output))
    if needed > free:
        raise VitseeError(
            f"{target} would take up to {human_bytes(needed)}, the disk has {human_bytes(free)} "
            "free; choose fewer --sites, --tokens pooled or fewer --images (see --dry-run)"
        )
    strategy_of(prepared, run).check_room(free - needed, prepared.plan.slab)
    samples = prepared.selection.samples
    writer = StoreWriter.create_or_join(target, prepared.manifest, samples, once)
    # Two processes may create a store at once; the first one's is taken.
    another_was_first = writer.manifest.store_id != prepared.manifest.store_id
    if another_was_first and prepared.files is None:
        check_same_images(writer, prepared.selection, prepared.first)
    return writer


def _log_sizes(plan: StorePlan, target: object) -> None:
    """Log the size of a new store, by folder, and of its arrays at debug level."""
    sizes = n_bytes(plan)
    by_folder = ", ".join(
        f"{folder.name.rstrip('/')} {human_bytes(folder.size_bytes)}"
        for folder in folder_sizes(plan)
    )
    log.info("%s takes %s: %s", target, human_bytes(sum(sizes.values())), by_folder)
    for path, size in sizes.items():
        log.debug("%s: %s", path, human_bytes(size))


def fill(
    prepared: Prepared,
    writer: StoreWriter,
    run: RunOptions,
    shard: Shard,
    slabs: Sequence[int],
    progress: Progress,
    stop: StopRequest,
    remarks: bool = True,
) -> Outcome:
    """Make and commit every missing one of these slabs.

    Args:
        prepared: the checked extraction.
        writer: writer of its store.
        run: how this process works.
        shard: this process among others.
        slabs: indices of slabs that the shard owns or has claimed.
        progress: advanced by images and bytes.
        stop: ends the work between two batches once a signal came.
        remarks: whether to log at info level; False in further rounds, which would log the
            same lines again.

    Raises:
        Interrupted: a signal came before all slabs were made.
    """
    plan = prepared.plan
    device = prepared.device
    log_level = logging.INFO if remarks else logging.DEBUG
    committed = writer.committed()
    missing = [k for k in slabs if not committed[k]]
    # Remains of killed processes in slabs that nobody holds.
    with locked(writer.place, missing, wait=False) as free:
        writer.sweep(free)
    if not missing:
        return Outcome(complete=False)
    spans = [plan.rows(k) for k in missing]
    n_images = sum(span.stop - span.start for span in spans)
    if len(missing) < len(slabs):
        n_done = len(slabs) - len(missing)
        log.log(
            log_level,
            "resuming: %d of %s are there",
            n_done,
            plural(len(slabs), "slabs"),
        )
    strategy = strategy_of(prepared, run)
    batch_size = strategy.batch_size
    workers = default_workers(device) if run.workers is None else run.workers
    log.log(
        log_level,
        "%s in %s of %d on %s, batches of %d; slab buffers: %s of host memory",
        plural(n_images, plan.examples),
        plural(len(missing), "slabs"),
        plan.slab,
        device_name(device),
        batch_size,
        human_bytes(2 * slab_bytes(plan)),  # one is written while the other is filled
    )
    if grams_line := strategy.describe(plan):
        log.log(log_level, "%s", grams_line)
    erf = None
    if prepared.erf is not None and plan.erf is not None:
        passes, cost = prepared.erf
        erf = ErfSums(passes, plan.erf.size, cost.batch_size(device, batch_size))
        if erf_line := erf_cost(prepared, batch_size, spans):
            log.log(log_level, "%s", erf_line)
    provenance = {
        "command": run.command,
        "shard": str(shard),
        "host": socket.gethostname(),
        "device": device_name(device),
        "batch_size": batch_size,
        **strategy.record(),
        "workers": workers,
        "versions": store_versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }

    def load(slab_spans: Sequence[slice]) -> Generator[Batch]:
        """Load the images of these rows, in batches that do not cross a slab."""
        return batches(
            prepared.selection,
            prepared.model.transform,
            batch_ranges(plan, slab_spans, batch_size),
            workers=workers,
            on_error=run.on_error,
        )

    loop = SlabLoop(
        prepared,
        writer,
        provenance,
        strategy,
        erf=erf,
        reload=lambda k: load([plan.rows(k)]),
        on_error=run.on_error,
    )
    loading = load(spans)
    started = time.perf_counter()
    phase: AbstractContextManager[object] = nullcontext()
    # Claims and workers make several rounds of one phase, which their caller counts.
    if not shard.claims and not shard.dask:
        phase = counting(progress, n_images, plan.examples)
    with phase, loop.clock(REST), closing(loading):
        loop.run(missing, loading, stop, progress)
    seconds = time.perf_counter() - started
    log.log(log_level, "the run was limited by %s", loop.clock.limit())
    # A signal may come when nothing is left to stop.
    if stop and not writer.committed()[missing].all():
        raise stopped(stop, writer, shard.others)
    if loop.overtaken:
        log.info(
            "%s of %d had been committed by another process meanwhile (give each its own --shard)",
            plural(len(loop.overtaken), "slabs"),
            len(missing),
        )
    return Outcome(
        complete=False,
        n_images=n_images,
        size_bytes=loop.written,
        seconds=seconds,
        clock=loop.clock.seconds,
        beside=loop.clock.beside,
        unreadable=loop.unreadable,
        examples=plan.examples,
        remarks=loop.remarks,
        not_finite=loop.not_finite,
    )


def batch_ranges(
    plan: StorePlan, slab_spans: Sequence[slice], batch_size: int
) -> list[slice]:
    """Return the rows of each batch, none of which crosses a slab.

    On a tiled canvas a batch has about as many images as give `batch_size` tiles.
    """
    n_at_once = batch_size
    if plan.canvas is not None and plan.canvas.tiles is not None:
        n_at_once = max(1, batch_size // n_tiles(plan.canvas.size, plan.canvas.tiles))
    return [
        slice(first, min(first + n_at_once, span.stop))
        for span in slab_spans
        for first in range(span.start, span.stop, n_at_once)
    ]


def stopped(stop: StopRequest, writer: StoreWriter, others: str = "") -> Interrupted:
    """Return the error after a signal.

    Args:
        others: processes that may commit more slabs, in words; "" if there are none.
    """
    until_now = f" until now ({others})" if others else ""
    return Interrupted(
        f"stopped by {stop.signal_name} with {int(writer.committed().sum())} of "
        f"{plural(writer.n_slabs, 'slabs')} committed{until_now}; repeat the command to resume",
        stop.signal_name or "",
    )


def erf_cost(prepared: Prepared, batch_size: int, spans: Sequence[slice]) -> str:
    """Describe the cost of the receptive fields of these rows; "" if there are none."""
    plan = prepared.plan
    if prepared.erf is None or plan.erf is None:
        return ""
    passes, cost = prepared.erf
    max_backward = cost.batch_size(prepared.device, batch_size)
    backward_sizes: list[int] = []
    for span in spans:
        stop = min(span.stop, plan.erf.n_images)
        for first in range(span.start, stop, batch_size):
            n_loaded = min(batch_size, stop - first)
            # A loaded batch is split if its backward pass would not fit the memory.
            for begin in range(0, n_loaded, max_backward):
                backward_sizes.append(min(max_backward, n_loaded - begin))
    if not backward_sizes:
        return ""
    return cost.describe(backward_sizes, len(passes.names))


def strategy_of(prepared: Prepared, run: RunOptions) -> GramStrategy:
    """Choose how this process computes Gram matrices, and its batch size."""
    device = prepared.device
    default = max(1, default_batch(device) // images_per_example(prepared.plan))
    return choose_strategy(prepared.plan, prepared.table, device, run.batch_size, default)


def default_batch(device: torch.device) -> int:
    """Return the default number of images in a forward pass."""
    if device.type == "cuda":
        return 128
    return 32


def default_workers(device: torch.device) -> int:
    """Return the default number of processes that load images.

    It is 0, one loading thread, beside a model on the CPU, which needs the cores. Else all
    cores load but two, which feed the device and write.
    """
    if device.type == "cpu":
        return 0
    return min(MAX_WORKERS, max(1, n_cores() - 2))
