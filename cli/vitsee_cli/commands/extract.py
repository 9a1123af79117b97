"""`vitsee extract`: a model over images, into a store."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
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
    "Model", [model_options, ablate_skip_option, intervention_options, precision_option]
)
@section("Data", [data_options])
@section("What to keep", [store_output_option, keep_options])
@section("Running", [run_options])
def command(model: ModelOptions, **values: Any) -> None:
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

    # They are fields of the model's options: a changed model is another model.
    intervention_names = ("ablate_skip", *INTERVENTIONS)
    interventions = {name: values.pop(name) for name in intervention_names}
    model = dataclasses.replace(model, **interventions)
    dask = values.pop("dask")
    if values.pop("plan"):
        if dask is not None:
            raise click.UsageError(
                "--plan is of jobs that need no cluster: leave out --dask"
            )
        show_script(_request_of(model, values), values["shard"])
        return
    if dask is not None and (values["shard"] is not None or values["dry_run"]):
        raise click.UsageError(
            "--dask gives the slabs out itself: leave out --shard and --dry-run"
        )
    # "slurm" takes the number from the environment of the job.
    shard = parse_shard(values.pop("shard"), os.environ)
    values["command"] = shlex.join(console.command_line())
    request = _request_of(model, values)
    run = request.run
    # The same command again is answered before torch, the model and the images are loaded.
    plan = None
    if not run.dry_run and not run.force:
        plan = complete_plan(run.command, run.output)
    if plan is not None:
        examples = plural(plan.n_images, plan.examples)
        console.say(
            f"{run.output} is complete ({examples}): nothing to do (this "
            f"command made it; its model and {plan.examples} were not read again)"
        )
        return
    # Seconds, in which nothing would be on the screen.
    with soon_said("loading torch and timm"):
        from vitsee_core.extraction.ahead import dry_run
        from vitsee_core.extraction.by_workers import extract_by_workers
        from vitsee_core.extraction.run import extract
    if run.dry_run:
        is_verbose = click.get_current_context().meta.get(options.VERBOSITY, 0) > 0
        show_plan(dry_run(request), run, each_array=is_verbose)
        return
    progress = SlabReporter(run.output.name)
    if dask is not None:
        with spread_over(dask, progress) as map_keyword:
            outcome = extract_by_workers(request, **map_keyword, progress=progress)
    else:
        outcome = extract(request, shard, progress)
    report(outcome, run.output)


def _request_of(model: ModelOptions, values: Mapping[str, Any]) -> Request:
    """Return the request: the model, and the values of the options in three groups."""

    def options_from(kind: Any) -> Any:
        """Return an instance of the dataclass; () is what click has for an option left out."""
        fields = {}
        for name in kind.__dataclass_fields__:
            if name in values:
                fields[name] = None if values[name] == () else values[name]
        return kind(**fields)

    return Request(
        model,
        options_from(DataOptions),
        options_from(KeepOptions),
        options_from(RunOptions),
    )


def show_script(request: Request, shard: str | None) -> None:
    """Print the script of an array job on stdout."""
    from vitsee_core.extraction.ahead import plan_array
    from vitsee_core.runtime.command_lines import without_options

    if shard not in (None, "slurm", "claims") or request.run.dry_run:
        raise click.UsageError(
            "--plan numbers the shards itself: leave out --shard and --dry-run"
        )
    # The same command in each job, with the job's own shard.
    words = without_options(console.command_line(), ["--plan", "--shard"])
    console.out(plan_array(words, request, shard or "slurm").rstrip())


class SlabReporter(console.Reporter):
    """Shows the progress of an extraction; once it starts, committed slabs survive a signal."""

    def start(self, total: int, done: int = 0, unit: str = "images") -> None:
        """Begin a phase; with the images begin the slabs that a stopped command keeps."""
        # Other phases (listing, hashing) have made nothing that could be kept.
        if unit in ("images", "clips"):
            signals.set_resume_line(
                "at once: committed slabs are kept; repeat the command to resume"
            )
        super().start(total, done, unit)


def show_plan(planned: DryRun, run: RunOptions, *, each_array: bool) -> None:
    """Print the sizes of a planned store as CSV on stdout, and remarks on stderr.

    The sum stands first, then each folder, or each array.
    """
    from vitsee_core.extraction.image_layout import describe_canvas
    from vitsee_core.extraction.plan import HEADER, array_sizes, folder_sizes, total_size
    from vitsee_core.runtime.machine import free_disk_bytes, human_bytes, scratch_folder
    from vitsee_stores.manifest import by_reason

    plan = planned.plan
    total = total_size(plan)
    # With -v every array.
    sizes = array_sizes(plan) if each_array else folder_sizes(plan)
    console.out(HEADER)
    for size in (total, *sizes):
        console.out(size.row(plan.n_images))
    if planned.adds:
        console.say(planned.adds)
    for note in planned.notes:
        console.warn(note)
    if planned.cost:
        console.say(planned.cost)
    for line in by_reason(planned.left_out):
        console.say(f"left out: {line}")
    canvas_line = describe_canvas(plan.canvas)
    if canvas_line:
        console.say(canvas_line)
    size_line = (
        f"{run.output}: {human_bytes(total.size_bytes)} in "
        f"{plural(total.n_files, 'files')} for {plural(plan.n_images, plan.examples)} in "
        f"slabs of {plan.slab}, {human_bytes(total.size_bytes / plan.n_images)} per "
        f"{plan.examples[:-1]}"
    )
    if isinstance(run.output, Path):  # nobody knows how much an object store still takes
        # The store is not there yet: the folder that it will be in tells the disk.
        free = free_disk_bytes(scratch_folder(run.output))
        size_line += f"; {human_bytes(free)} free"
    console.say(f"{size_line}; nothing was written")


def report(outcome: Outcome, output: Place) -> None:
    """Print the last lines: unreadable images, where the time went, what is left to do."""
    from vitsee_core.runtime.machine import human_bytes

    for line in outcome.remark_lines():
        console.warn(line)
    unreadable_line = outcome.unreadable_line()
    if unreadable_line:
        console.warn(unreadable_line)
    if outcome.n_images:
        console.say(
            f"{plural(outcome.n_images, outcome.examples)} in {outcome.seconds:.1f} s "
            f"({outcome.n_images / outcome.seconds:.1f} {outcome.examples}/s), "
            f"{human_bytes(outcome.size_bytes)} written; {outcome.stages()}"
        )
    if not outcome.complete:
        console.say(f"{output} is not complete yet: other shards have slabs to do")
