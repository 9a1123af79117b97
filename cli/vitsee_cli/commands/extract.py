"""`vitsee extract`: a model over images, into a store."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options, signals
from vitsee_cli.analysis import spread_over
from vitsee_cli.extraction_options import (
    ablate_skip_option,
    intervention_options,
    keep_options,
    precision_option,
    run_options,
    store_output_option,
)
from vitsee_cli.model_options import data_options, model_options
from vitsee_cli.sections import STORES, SectionedCommand, section
from vitsee_core.extraction.options import (
    INTERVENTIONS,
    DataOptions,
    KeepOptions,
    ModelOptions,
    Request,
    RunOptions,
)
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import soon_said

if TYPE_CHECKING:
    from vitsee_core.extraction.ahead import DryRun
    from vitsee_core.extraction.outcome import Outcome
    from vitsee_stores.url import Place

QUESTION = STORES


@click.command(cls=SectionedCommand)
@section(
    "Model", model_options, ablate_skip_option, intervention_options, precision_option
)
@section("Data", data_options)
@section("What to keep", store_output_option, keep_options)
@section("Running", run_options)
def command(model: ModelOptions, **given: Any) -> None:
    """Run a model over images and store what it computes.

    MODEL is a timm name, hf-hub:..., local-dir:..., demo:vit, transformers:OWNER/NAME,
    open_clip:NAME/TAG, torchvision:vit_b_16, torchhub:OWNER/REPO:ENTRY, or a function of your own
    file that gives a torch module, model.py:build. Its activations, attention summaries and
    residual products go into STORE. Repeat the same command to resume; several processes with
    --shard fill one store together. To a complete store more --sites or more --images are added.

    \b
      vitsee extract vit_base_patch16_224 --data imagenet/val --images 5000 -o b16.zarr
      vitsee extract resnet50 --data imagenet/val --images 5000 -o r50.zarr
      vitsee extract vit_base_patch16_224 --checkpoint dino.pth --data photos -o dino.zarr
      vitsee extract transformers:facebook/dinov2-small --data photos -o dinov2.zarr
      vitsee extract 'model.py:build?depth=12' --data photos -o mine.zarr
      vitsee extract demo:vit --data demo:test -o vit.zarr --dry-run
      vitsee extract resnet50 --data imagenet/val -o r50.zarr --plan slurm > r50.sh; bash r50.sh
    """
    from vitsee_core.extraction.sharding import complete_plan, parse_shard

    def take(cls: Any) -> Any:
        names = [n for n in cls.__dataclass_fields__ if n in given]
        return cls(**{n: given[n] if given[n] != () else None for n in names})

    model = dataclasses.replace(
        model, **{name: given.pop(name) for name in ("ablate_skip", *INTERVENTIONS)}
    )

    def asked() -> Request:
        return Request(model, take(DataOptions), take(KeepOptions), take(RunOptions))

    dask = given.pop("dask")
    if given.pop("plan"):
        if dask is not None:
            raise click.UsageError(
                "--plan is of jobs that need no cluster: leave out --dask"
            )
        show_script(asked(), given["shard"])
        return
    if dask is not None and (given["shard"] is not None or given["dry_run"]):
        raise click.UsageError(
            "--dask gives the slabs out itself: leave out --shard and --dry-run"
        )
    shard = parse_shard(given.pop("shard"), os.environ)
    given["command"] = shlex.join(console.command_line())
    request = asked()
    run = request.run
    again = not (run.dry_run or run.force)
    if again and (plan := complete_plan(run.command, run.output)) is not None:
        examples = plural(plan.n_images, plan.examples)
        console.say(
            f"{run.output} is complete ({examples}): nothing to do (this "
            f"command made it; its model and {plan.examples} were not read again)"
        )
        return
    with soon_said("loading torch and timm"):
        from vitsee_core.extraction.ahead import dry_run
        from vitsee_core.extraction.by_workers import extract_by_workers
        from vitsee_core.extraction.run import extract
    if run.dry_run:
        each = click.get_current_context().meta.get(options.VERBOSITY, 0) > 0
        show_plan(dry_run(request), run, each)
        return
    progress = SlabReporter(run.output.name)
    if dask is not None:
        with spread_over(dask, progress) as own:
            outcome = extract_by_workers(request, **own, progress=progress)
    else:
        outcome = extract(request, shard, progress)
    report(outcome, run.output)


def show_script(asked: Request, shard: str | None) -> None:
    """The script of an array job on stdout."""
    from vitsee_core.extraction.ahead import plan_array
    from vitsee_core.runtime.command_lines import without_options

    if shard not in (None, "slurm", "claims") or asked.run.dry_run:
        raise click.UsageError(
            "--plan numbers the shards itself: leave out --shard and --dry-run"
        )
    words = without_options(console.command_line(), ["--plan", "--shard"])
    console.out(plan_array(words, asked, shard or "slurm").rstrip())


class SlabReporter(console.Reporter):
    """Progress of the slabs. From its start on, committed slabs survive a signal."""

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        if unit in ("images", "clips"):
            signals.keeps(
                "at once: committed slabs are kept; repeat the command to resume"
            )
        super().start(total, done, unit)


def show_plan(planned: DryRun, run: RunOptions, each: bool) -> None:
    """Sizes as CSV on stdout, the sum first, then folders or `each` array; remarks on stderr."""
    from vitsee_core.extraction.image_layout import describe
    from vitsee_core.extraction.plan import HEADER, array_sizes, folder_sizes, total_size
    from vitsee_core.runtime.machine import free_disk_bytes, human_bytes, scratch_folder
    from vitsee_stores.manifest import by_reason

    plan = planned.plan
    total = total_size(plan)
    console.out(HEADER)
    for size in (total, *(array_sizes if each else folder_sizes)(plan)):
        console.out(size.row(plan.n_images))
    if planned.adds:
        console.say(planned.adds)
    for note in planned.notes:
        console.warn(note)
    if planned.cost:
        console.say(planned.cost)
    for line in by_reason(planned.left_out):
        console.say(f"left out: {line}")
    if canvas := describe(plan.canvas):
        console.say(canvas)
    free = free_disk_bytes(scratch_folder(run.output))
    left = f"; {human_bytes(free)} free" if isinstance(run.output, Path) else ""
    console.say(
        f"{run.output}: {human_bytes(total.size_bytes)} in {plural(total.n_files, 'files')} for "
        f"{plural(plan.n_images, plan.examples)} in slabs of {plan.slab}, "
        f"{human_bytes(total.size_bytes / plan.n_images)} per {plan.examples[:-1]}"
        f"{left}; nothing was written"
    )


def report(outcome: Outcome, output: Place) -> None:
    """The last lines: unreadable images, where the time went, what is left to do."""
    from vitsee_core.runtime.machine import human_bytes

    for line in outcome.remark_lines():
        console.warn(line)
    if line := outcome.unreadable_line():
        console.warn(line)
    if outcome.n_images:
        console.say(
            f"{plural(outcome.n_images, outcome.examples)} in {outcome.seconds:.1f} s "
            f"({outcome.n_images / outcome.seconds:.1f} {outcome.examples}/s), "
            f"{human_bytes(outcome.size_bytes)} written; {outcome.stages()}"
        )
    if not outcome.complete:
        console.say(f"{output} is not complete yet: other shards have slabs to do")
