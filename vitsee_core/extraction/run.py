"""One call of `vitsee extract`: prepare, create or join the store, fill what this process owns.

Batches never cross a slab, so a slab does not depend on which process makes it: bitwise on a CPU,
up to last digits on a GPU, whose libraries may select other kernels."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import torch

from vitsee_core.extraction.erf import ErfSums
from vitsee_core.extraction.growth import grow_store
from vitsee_core.extraction.image_layout import describe
from vitsee_core.extraction.loop import SlabLoop
from vitsee_core.extraction.options import Request, RunOptions
from vitsee_core.extraction.outcome import REST, Interrupted, Outcome, StopRequest
from vitsee_core.extraction.plan import folder_sizes, slab_bytes, times_of
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
from vitsee_stores.layout import n_bytes
from vitsee_stores.manifest import by_reason
from vitsee_stores.writer import tidy

log = logging.getLogger(__name__)

MOST_WORKERS = 32


def extract(asked: Request, shard: Shard, progress: Progress = SILENT) -> Outcome:
    """Fill (this shard's part of) a store; repeat the call to resume it.

    Raises:
        VitseeError: one line for the user; the store keeps every slab committed so far.
        Interrupted: a signal; exit code 75.
    """
    if asked.run.force and (shard.claims or shard.count > 1):
        raise VitseeError(
            "--force with --shard would delete other shards' work: delete it first"
        )
    prepared = prepare(asked, progress)
    run = asked.run
    with StopRequest() as stop:
        prepared, writer = made_or_joined(prepared, asked)
        if announce(prepared, writer, run):
            return Outcome(complete=True)
        if shard.claims:
            outcome = fill_claimed(prepared, writer, run, shard, progress, stop)
        else:
            mine = shard.slabs(writer.n_slabs)
            outcome = fill(prepared, writer, run, shard, mine, progress, stop)
        outcome.complete = writer.finish()
        if shard.claims and stop and not outcome.complete:
            raise stopped(stop, writer, shard.others)
        return outcome


def prepare(asked: Request, progress: Progress = SILENT) -> Prepared:
    """Load the model (if needed), choose the images, run the self-check, and decide the contents of
    the store.

    Nothing is written. An existing store is joined: it supplies every choice that was not given,
    and is compared with those that were. To a complete one is added what it lacks. Raises
    VitseeError: anything the user can fix, in one line; IdentityMismatch: the existing store was
    made from something else.
    """
    writer = None if asked.run.force else StoreWriter.join(asked.run.output)
    if writer is None:
        check_output(asked)
        return plan_store(asked, progress)
    if writer.manifest.growth is not None:
        raise StoreError(
            f"{writer.place} is a generation of the store above it: give that one"
        )
    if writer.complete and not _changed(writer, asked):
        return grow_store(writer, asked, progress)
    return join_store(writer, asked, progress)


def _changed(writer: StoreWriter, asked: Request) -> bool:
    """Whether the model runs with interventions, or ran with some: such stores do not grow, as what
    replaces a value may depend on the rows."""
    interventions = asked.model.interventions
    given = interventions.values() if isinstance(interventions, dict) else interventions
    return any(given) or bool(writer.manifest.identity.get("interventions"))


def made_or_joined(prepared: Prepared, asked: Request) -> tuple[Prepared, StoreWriter]:
    """The store's writer, with the preparation that belongs to it. Raises VitseeError: as
    `open_writer`."""
    try:
        return prepared, open_writer(prepared, asked.run)
    except IdentityMismatch:
        # Another process made the store meanwhile: take its defaults, compare explicit choices.
        run = dataclasses.replace(asked.run, force=False)
        prepared = prepare(dataclasses.replace(asked, run=run))
        return prepared, open_writer(prepared, asked.run)


def announce(prepared: Prepared, writer: StoreWriter, run: RunOptions) -> bool:
    """Log what is known before any work; returns whether the store is already complete."""
    for note in prepared.notes:
        log.warning("%s", note)
    for line in by_reason(prepared.manifest.left_out):
        log.info("left out: %s", line)
    if canvas := describe(prepared.plan.canvas):
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
    """Make missing slabs as they can be claimed, until none is missing or a signal came. Raises
    Interrupted: a signal within a slab."""
    plan = prepared.plan
    outcome = Outcome(False, examples=prepared.plan.examples)
    rows = [plan.rows(int(k)) for k in np.flatnonzero(writer.committed())]
    done = sum(part.stop - part.start for part in rows)
    with (
        counting(progress, plan.n_images, plan.examples, done=done),
        closing(claimed_rounds(writer, stop)) as rounds,
    ):
        for number, mine in enumerate(rounds):
            outcome.add(
                fill(prepared, writer, run, shard, mine, progress, stop, number == 0)
            )
    return outcome


def open_writer(prepared: Prepared, run: RunOptions) -> StoreWriter:
    """The existing store's writer, or that of a store created now. Raises VitseeError: the store
    would not fit the free disk (nothing is made then); IdentityMismatch: another process made a
    store there with other choices or images."""
    weights = {} if prepared.weights is None else prepared.weights.arrays
    once = {f"weights/{name}": values for name, values in weights.items()}
    if prepared.writer is not None:
        prepared.writer.finish_creation(prepared.selection.samples, once)
        return prepared.writer
    if run.force:
        remove_store(run.output)
    sizes = n_bytes(prepared.plan)
    need = sum(sizes.values())
    free = free_disk_bytes(scratch_folder(run.output))
    taken = 0
    if isinstance(run.output, Path):  # of this machine's disk
        taken = max_disk_bytes(prepared.manifest, disk_block_bytes(run.output))
    strategy = strategy_of(prepared, run)
    place = run.output if prepared.files is None else prepared.files
    folders = folder_sizes(prepared.plan)
    by_folder = (
        f"{one.name.rstrip('/')} {human_bytes(one.size_bytes)}" for one in folders
    )
    log.info("%s takes %s: %s", place, human_bytes(need), ", ".join(by_folder))
    for path, size in sizes.items():
        log.debug("%s: %s", path, human_bytes(size))
    if taken > free:
        raise VitseeError(
            f"{place} would take up to {human_bytes(taken)}, the disk has {human_bytes(free)} "
            "free; choose fewer --sites, --tokens pooled or fewer --images (see --dry-run)"
        )
    strategy.check_room(free - taken, prepared.plan.slab)
    samples = prepared.selection.samples
    writer = StoreWriter.create_or_join(place, prepared.manifest, samples, once)
    is_theirs = writer.manifest.store_id != prepared.manifest.store_id  # they were first
    if is_theirs and prepared.files is None:
        check_same_images(writer, prepared.selection, prepared.first)
    return writer


def fill(
    prepared: Prepared,
    writer: StoreWriter,
    run: RunOptions,
    shard: Shard,
    mine: Sequence[int],
    progress: Progress,
    stop: StopRequest,
    remarks: bool = True,
) -> Outcome:
    """Make and commit every missing slab of `mine`, which the shard owns or has claimed. Without
    `remarks`, what earlier rounds logged is logged at debug level. Raises Interrupted: a signal
    came before they were all made."""
    plan = prepared.plan
    device = prepared.device
    level = logging.INFO if remarks else logging.DEBUG
    committed = writer.committed()
    todo = [k for k in mine if not committed[k]]
    with locked(writer.place, todo, wait=False) as free:
        writer.sweep(free)
    spans = [plan.rows(k) for k in todo]
    total = sum(span.stop - span.start for span in spans)
    if not todo:
        return Outcome(complete=False)
    if len(todo) < len(mine):
        there = len(mine) - len(todo)
        log.log(level, "resuming: %d of %s are there", there, plural(len(mine), "slabs"))
    strategy = strategy_of(prepared, run)
    batch_size = strategy.batch_size
    workers = run.workers if run.workers is not None else default_workers(device)
    log.log(
        level,
        "%s in %s of %d on %s, batches of %d; slab buffers: %s of host memory",
        *(plural(total, plan.examples), plural(len(todo), "slabs")),
        *(plan.slab, device_name(device), batch_size),
        human_bytes(2 * slab_bytes(plan)),
    )
    if grams := strategy.describe(plan):
        log.log(level, "%s", grams)
    erf = None
    if prepared.erf is not None and plan.erf is not None:
        passes, cost = prepared.erf
        erf = ErfSums(passes, plan.erf.size, cost.batch_size(device, batch_size))
        if line := erf_cost(prepared, batch_size, spans):
            log.log(level, "%s", line)
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
    at_once = batch_size  # with tiles, about as many images as give a batch of tiles
    if plan.canvas is not None and plan.canvas.tiles is not None:
        at_once = max(1, batch_size // n_tiles(plan.canvas.size, plan.canvas.tiles))

    def load(slabs: Sequence[slice]) -> Generator[Batch]:
        ranges = [
            slice(first, min(first + at_once, span.stop))
            for span in slabs
            for first in range(span.start, span.stop, at_once)
        ]
        transform = prepared.model.transform
        return batches(
            prepared.selection, transform, ranges, workers=workers, on_error=run.on_error
        )

    def reload(k: int) -> Generator[Batch]:
        return load([plan.rows(k)])

    job = SlabLoop(
        prepared,
        writer,
        provenance,
        strategy,
        erf=erf,
        reload=reload,
        on_error=run.on_error,
    )
    loading = load(spans)
    started = time.perf_counter()
    # Claims and workers make several rounds of one phase, which their caller counts.
    phase = (
        nullcontext()
        if shard.claims or shard.dask
        else counting(progress, total, plan.examples)
    )
    with phase, job.clock(REST), closing(loading):
        job.run(todo, loading, stop, progress)
    seconds = time.perf_counter() - started
    log.log(level, "the run was limited by %s", job.clock.limit())
    committed = writer.committed()
    if stop and not committed[todo].all():
        raise stopped(stop, writer, shard.others)
    if job.overtaken:
        log.info(
            "%s of %d had been committed by another process meanwhile (give each its own --shard)",
            *(plural(len(job.overtaken), "slabs"), len(todo)),
        )
    return Outcome(
        complete=False,
        n_images=total,
        size_bytes=job.written,
        seconds=seconds,
        clock=job.clock.seconds,
        beside=job.clock.beside,
        unreadable=job.unreadable,
        examples=plan.examples,
        remarks=job.remarks,
        not_finite=job.not_finite,
    )


def stopped(stop: StopRequest, writer: StoreWriter, others: str = "") -> Interrupted:
    """The message after a signal. others: who may commit more, "" for nobody."""
    until_now = f" until now ({others})" if others else ""
    return Interrupted(
        f"stopped by {stop.signal_name} with {int(writer.committed().sum())} of "
        f"{plural(writer.n_slabs, 'slabs')} committed{until_now}; repeat the command to resume",
        stop.signal_name or "",
    )


def erf_cost(prepared: Prepared, batch_size: int, spans: Sequence[slice]) -> str:
    """The cost of the receptive fields of these rows, in words; "" without any."""
    plan = prepared.plan
    if prepared.erf is None or plan.erf is None:
        return ""
    passes, cost = prepared.erf
    size = cost.batch_size(prepared.device, batch_size)
    loaded = [
        min(batch_size, stop - first)
        for start, stop in (
            (span.start, min(span.stop, plan.erf.n_images)) for span in spans
        )
        for first in range(start, stop, batch_size)
    ]
    pieces = [min(size, n - first) for n in loaded for first in range(0, n, size)]
    return cost.describe(pieces, len(passes.names)) if pieces else ""


def strategy_of(prepared: Prepared, run: RunOptions) -> GramStrategy:
    """How this process computes Gram matrices, and its batch size."""
    device = prepared.device
    default = max(1, default_batch(device) // times_of(prepared.plan))
    return choose_strategy(prepared.plan, prepared.table, device, run.batch_size, default)


def default_batch(device: torch.device) -> int:
    return 128 if device.type == "cuda" else 32


def default_workers(device: torch.device) -> int:
    """0 (one loading thread) beside a CPU model, which needs the cores; else one process per core
    except two, which feed the device and write."""
    if device.type == "cpu":
        return 0
    return min(MOST_WORKERS, max(1, n_cores() - 2))
