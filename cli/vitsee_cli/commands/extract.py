"""`vitsee extract`: a model over images, into a store."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options, signals
from vitsee_cli.model_options import model_options
from vitsee_cli.sections import SectionedCommand, section
from vitsee_cli.values import SEED, parse_path

if TYPE_CHECKING:
    from vitsee_core.extraction import Outcome, Prepared
    from vitsee_core.extraction.options import ModelOptions, RunOptions

ATTENTION = ("none", "summary", "rows", "full")


# Which images, in which order.
DATA_OPTIONS: tuple[options.Decorator, ...] = (
    click.option(
        "--data",
        required=True,
        metavar="DATA",
        help="Folder of images, CSV/TSV list, .npz, tar, torch/NAME[:FOLDER] (torchvision's, in "
        "FOLDER), hfds/NAME[:CACHE] (Hugging Face's, cached in CACHE), demo:train or demo:test.",
    ),
    click.option(
        "--split",
        metavar="SPLIT",
        help="Part of the data: train, 'train[:45000]', 'test[10%:20%]', train+test.  "
        "[default: all]",
    ),
    click.option(
        "--images",
        metavar="N",
        type=click.IntRange(min=1),
        help="Take N images: the first of the order.  [default: all]",
    ),
    click.option(
        "--per-class",
        metavar="K",
        type=click.IntRange(min=1),
        help="Take K images of every class.  [default: all]",
    ),
    click.option(
        "--seed",
        metavar="SEED",
        type=SEED,
        help="Seed of the order.  [default: 0]",
    ),
    click.option(
        "--order",
        type=click.Choice(["shuffled", "dataset"]),
        help="Order of the images in the store.  [default: shuffled]",
    ),
)

OUTPUT_OPTION = click.option(
    "-o", "--output", metavar="STORE", type=parse_path, required=True, help="The store to fill."
)

# What the store keeps; without a value: the default of a new store, or what a joined one has.
KEEP_OPTIONS: tuple[options.Decorator, ...] = (
    click.option(
        "--sites",
        metavar="GLOB",
        multiple=True,
        help="Sites by name, glob or group (blocks, head, residual, norms, hidden, heads, "
        "modules, all), or by place (first, last, stage:I, depth:F); !NAME leaves out; see "
        "`vitsee sites MODEL`. Repeatable, or a comma list.  [default: blocks head]",
    ),
    click.option(
        "--tokens",
        metavar="[GROUP=]all|pooled",
        multiple=True,
        help="Keep every token, or only pooled vectors; norms=pooled for some sites. "
        "Repeatable.  [default: all]",
    ),
    click.option(
        "--attention",
        type=click.Choice(ATTENTION),
        help="Attention to keep: summaries a head, also CLS and received rows an image, "
        "also full maps; each level includes those before it.  [default: summary]",
    ),
    click.option(
        "--residual/--no-residual",
        default=None,
        help="Dot products of skip and branch, a token and sublayer.  [default: residual]",
    ),
    click.option(
        "--inputs/--no-inputs",
        default=None,
        help="Keep the pixels as the model sees them.  [default: no-inputs]",
    ),
    click.option(
        "--grams/--no-grams",
        default=None,
        help="Keep each site's Gram matrix (all tokens) within every slab: minibatch CKA of whole "
        "models without their activations.  [default: no-grams]",
    ),
    click.option(
        "--erf",
        metavar="N",
        type=click.IntRange(min=1),
        help="Keep effective receptive fields of the sites with a grid, over the first N images "
        "(256 gives smooth ones): a backward pass a site and batch.  [default: none]",
    ),
    click.option(
        "--head-weights/--no-head-weights",
        default=None,
        help="Keep the classifier and the norm before it, whatever their size.  [default: up to "
        "16 MB]",
    ),
    click.option(
        "--dtype",
        metavar="[SITE=]float16|float32",
        multiple=True,
        help="Type of the activations; SITE=float32 for some. Repeatable.  [default: float16]",
    ),
    click.option(
        "--codec",
        type=click.Choice(["none", "zstd", "lz4"]),
        help="Compression of the chunks.  [default: none]",
    ),
    click.option(
        "--slab",
        metavar="N",
        type=click.IntRange(min=1),
        help="Images to a slab, the unit of work and of commit.  [default: 256, halved "
        "until two fit a quarter of the memory]",
    ),
)


ABLATE_OPTION = click.option(
    "--ablate-skip",
    metavar="BLOCK[.attn|.mlp]",
    multiple=True,
    help="Run the model without this skip connection: z + f(z) becomes f(z). A block alone: all of "
    "its own. Repeatable.  [default: none]",
)

PRECISION_OPTION = click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16", "fp16"]),
    help="Arithmetic of the forward pass.  [default: fp32]",
)

# How this process works; nothing here changes a number in the store.
RUN_OPTIONS: tuple[options.Decorator, ...] = (
    click.option(
        "--dry-run",
        is_flag=True,
        help="Print what would be stored, as CSV: the sum and each folder, with -v each array. "
        "Nothing is written.",
    ),
    click.option("--force", is_flag=True, help="Start anew: delete the store at -o first."),
    click.option(
        "--batch-size",
        metavar="N",
        type=click.IntRange(min=1),
        help="Images to a forward pass.  [default: 32, on CUDA 128; with --grams a whole slab "
        "where that suits the memory]",
    ),
    options.device_option,
    click.option(
        "--workers",
        metavar="N",
        type=click.IntRange(min=0),
        help="Loading processes; 0 loads in a thread.  [default: 0 on the CPU, else up to 8]",
    ),
    click.option(
        "--shard",
        metavar="I/N|slurm",
        help="Do only every N-th slab, from the I-th (from 0) on; slurm reads the job's "
        "variables.  [default: all]",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["nan", "fail"]),
        default="nan",
        show_default=True,
        help="An unreadable image: a NaN row with valid = 0, or stop.",
    ),
)


@click.command(
    cls=SectionedCommand, short_help="Run a model over images and keep what it computes in a store."
)
@section("Model", model_options, ABLATE_OPTION, PRECISION_OPTION)
@section("Data", *DATA_OPTIONS)
@section("What to keep", OUTPUT_OPTION, *KEEP_OPTIONS)
@section("Running", *RUN_OPTIONS)
def command(model: ModelOptions, **given: Any) -> None:
    """Run MODEL (a timm name, hf-hub:..., local-dir:..., demo:vit) over images, and keep its
    activations, attention summaries and residual products in STORE.

    Repeat the same command to resume; several processes with --shard fill one store together.

    \b
      vitsee extract vit_base_patch16_224 --data imagenet/val --images 5000 -o b16.zarr
      vitsee extract resnet50 --data imagenet/val --images 5000 -o r50.zarr
      vitsee extract vit_base_patch16_224 --checkpoint dino.pth --data photos -o dino.zarr
      vitsee extract demo:vit --data demo:test -o vit.zarr --dry-run
    """
    from vitsee_core.extraction import (
        DataOptions,
        KeepOptions,
        RunOptions,
        extract,
        parse_shard,
        prepare,
    )

    def take(cls: Any) -> Any:
        names = [n for n in cls.__dataclass_fields__ if n in given]
        return cls(**{n: given[n] if given[n] != () else None for n in names})

    model = dataclasses.replace(model, ablate_skip=given.pop("ablate_skip"))
    shard = parse_shard(given.pop("shard"), os.environ)
    given["command"] = shlex.join(console.command_line())
    data, keep, run = take(DataOptions), take(KeepOptions), take(RunOptions)
    if run.dry_run:
        each = click.get_current_context().meta.get(options.VERBOSITY, 0) > 0
        show_plan(prepare(model, data, keep, run), run, each)
        return
    report(extract(model, data, keep, run, shard, SlabReporter(run.output.name)), run.output)


class SlabReporter(console.Reporter):
    """Progress of the slabs. From its start on there is something that a signal does not undo."""

    def start(self, total: int, done: int = 0) -> None:
        """As any Reporter's."""
        signals.keeps("at once: committed slabs are kept; repeat the command to resume")
        super().start(total, done)


def show_plan(prepared: Prepared, run: RunOptions, each: bool) -> None:
    """Sizes as CSV on stdout, the sum first, then folders or `each` array; remarks on stderr."""
    from vitsee_core.extraction.run import erf_cost, gram_route
    from vitsee_core.extraction.sizes import HEADER, array_sizes, folder_sizes, total_size
    from vitsee_core.machine import counted, free_disk_bytes, human_bytes
    from vitsee_stores.manifest import by_reason

    plan = prepared.plan
    total = total_size(plan)
    console.out(HEADER)
    for size in (total, *(array_sizes if each else folder_sizes)(plan)):
        console.out(size.row(plan.n_images))
    for note in prepared.notes:
        console.warn(note)
    batch_size = gram_route(prepared, run).batch_size
    if cost := erf_cost(prepared, batch_size, [slice(0, plan.n_images)]):
        console.say(cost)
    for line in by_reason(prepared.manifest.left_out):
        console.say(f"left out: {line}")
    console.say(
        f"{run.output}: {human_bytes(total.size_bytes)} in {counted(total.n_files, 'files')} for "
        f"{counted(plan.n_images, 'images')} in slabs of {plan.slab}, "
        f"{human_bytes(total.size_bytes / plan.n_images)} an image; "
        f"{human_bytes(free_disk_bytes(run.output))} free; nothing was written"
    )


def report(outcome: Outcome, output: Path) -> None:
    """The last lines: unreadable images, where the time went, what is left to do."""
    from vitsee_core.machine import counted, human_bytes

    bad = outcome.unreadable
    if bad:
        named = "; ".join(f"{name} ({reason})" for _, name, reason in bad[:10])
        more = f"; and {len(bad) - 10} more" if len(bad) > 10 else ""
        console.warn(
            f"{len(bad)} of {counted(outcome.n_images, 'images')} could not be read: "
            f"{named}{more}; their rows are NaN with valid = 0"
        )
    if outcome.n_images:
        stages = ", ".join(
            f"{stage} {seconds:.1f} s"
            for stage, seconds in sorted(outcome.clock.items(), key=lambda item: -item[1])
        )
        console.say(
            f"{counted(outcome.n_images, 'images')} in {outcome.seconds:.1f} s "
            f"({outcome.n_images / outcome.seconds:.1f} images/s), "
            f"{human_bytes(outcome.size_bytes)} written; {stages}"
        )
    if not outcome.complete:
        console.say(f"{output} is not complete yet: other shards have slabs to do")
