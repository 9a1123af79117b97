"""An extraction described before it runs.

`--dry-run` lists the contents and size of the store. `--plan` writes a SLURM job array that fills
it, followed by a job that validates it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vitsee_core.extraction.image_layout import ImageLayout
from vitsee_core.extraction.options import (
    DEFAULT_SLAB,
    NATIVE_OPTIONS,
    ModelOptions,
    OptionError,
    Request,
)
from vitsee_core.extraction.prepare import (
    check_output,
    chosen_images,
    cut_sides,
    plan_contents,
)
from vitsee_core.extraction.run import default_batch, erf_cost, prepare, strategy_of
from vitsee_core.extraction.slab_grams import choose_strategy
from vitsee_core.images.clips import has_clips
from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.load import check_model_options
from vitsee_core.models.same_origin import first_images
from vitsee_core.models.sources import source_of
from vitsee_core.models.weights.checkpoints import Checkpoint
from vitsee_core.models.without_weights import from_shapes, stand_in
from vitsee_core.runtime.device import resolve_device
from vitsee_stores import StoreWriter, open_store
from vitsee_stores.errors import VitseeError
from vitsee_stores.layout import StorePlan
from vitsee_stores.manifest import with_samples

UNCHECKED = (
    "from the model's shapes: no weights were read, so whether they are to be had and fit, the "
    "self-check, and values beyond float16 are left to the extraction"
)


@dataclass(frozen=True)
class DryRun:
    """The contents of a store that is not made.

    Attributes:
        plan: its contents.
        left_out: site or summary that it will not have -> reason.
        notes: remarks for the user.
        cost: the cost of receptive fields in words, "" without any.
        adds: what would be added to a complete store, in words; "" for another store.
    """

    plan: StorePlan
    left_out: dict[str, str]
    notes: tuple[str, ...]
    cost: str = ""
    adds: str = ""


def dry_run(request: Request) -> DryRun:
    """Return the arrays that an extraction would store, and their cost; nothing is written.

    Weights are loaded if shapes are not enough (order of tokens, ablated skips, interventions,
    cells on a canvas), for an existing store, which is compared with the model, and to measure the
    cost of --erf.

    Raises:
        VitseeError: anything the user can fix, in one line.
    """
    model = request.model
    assert isinstance(model, ModelOptions), "a model that is loaded has its weights"
    check_model_options(model.name, vars(model))
    if not needs_weights(model, request):
        shapes_alone = _dry_run_of_shapes(model, request)
        if shapes_alone is not None:
            return shapes_alone
    prepared = prepare(request)
    batch_size = strategy_of(prepared, request.run).batch_size
    return DryRun(
        plan=prepared.plan,
        left_out=dict(prepared.manifest.left_out),
        notes=prepared.notes,
        cost=erf_cost(prepared, batch_size, [slice(0, prepared.plan.n_images)]),
        adds=prepared.adds,
    )


def needs_weights(model: ModelOptions, request: Request) -> bool:
    """Return whether the plan depends on weights, whatever the architecture."""
    data = request.data
    run = request.run
    has_canvas = data.short_side is not None or data.tiles or data.multiple is not None
    if has_canvas or data.has_clip_options:
        return True
    if any(getattr(data, name) for name in NATIVE_OPTIONS):
        return True
    ablated = model.ablate_skip or source_of(model.name).skips_left_out
    if ablated or any(model.interventions.values()):
        return True
    if request.keep.erf or _checkpoint_changes_architecture(model):
        return True
    return not run.force and StoreWriter.join(run.output) is not None


def _checkpoint_changes_architecture(model: ModelOptions) -> bool:
    """Return whether a checkpoint's layout has arguments that differ from the architecture's."""
    if not model.checkpoint:
        return False
    try:
        file = Checkpoint.read(model.checkpoint, model.checkpoint_key)
    except ModelError:
        return False  # the extraction refuses it
    if not file.layout:
        return False
    return bool(source_of(model.name).layout_arguments(file.layout.args))


def _dry_run_of_shapes(options: ModelOptions, request: Request) -> DryRun | None:
    """Return the plan without weights, None if shapes are not enough."""
    check_output(request)
    keep = request.keep
    run = request.run
    device = resolve_device(run.device)
    selection = chosen_images(request.data, {})
    if has_clips(selection.source):
        return None
    listing = from_shapes(options.name, vars(options))
    if listing is None:
        return None
    table = listing.table
    model = stand_in(options.name, vars(options), table)
    layout = ImageLayout(model=model, table=table, storable=table)
    try:
        contents = plan_contents(layout, keep, len(selection.samples))
    except (ModelError, NotImplementedError, RuntimeError):
        return None  # the error recurs as one line once there are values
    except VitseeError:
        if keep.head_weights:  # whether there is such a classifier depends on weights
            return None
        raise
    # Both refuse what the extraction would refuse: no readable image, and no memory.
    first_images(selection, model.transform, {})
    choose_strategy(contents.plan, table, device, run.batch_size, default_batch(device))
    notes = [
        *contents.notes,
        *cut_sides(options, model),
        *table.remarks,
        *selection.notes,
        UNCHECKED,
    ]
    return DryRun(
        plan=with_samples(contents.plan, selection.samples),
        left_out={**contents.choices.left_out, **table.left_out},
        notes=tuple(notes),
    )


# ---------------- a job array

MAX_TASKS = 8
CORES_CPU = 8
CORES_VALIDATE = 2
WORKERS_GPU = 8  # loading processes: extract's own default
# A task that cannot commit one slab within its time limit would requeue forever.
MAX_RESTARTS = 50

# The signal goes to the steps of a job, not to its script, which can still requeue then. srun is
# given the cores: since SLURM 22.05 it takes none from sbatch. `scontrol requeue $SLURM_JOB_ID` can
# mean the whole array: ARRAY_TASK names one task.
_SCRIPT = """\
#!/bin/bash
# {command}
# as a job array, and behind it a job that validates the store. Submit both: bash THIS_FILE
# Options of sbatch for the array may follow, as --time=8:00:00 or --array=0-31: they hold over the
# lines below. SBATCH_PARTITION and SBATCH_ACCOUNT in the environment hold for both jobs. Submitted
# again, it continues with the slabs that are missing.
set -euo pipefail
if ! command -v vitsee > /dev/null; then
    echo "no vitsee on PATH: activate its environment" >&2
    exit 1
fi
cd {folder}

array=$(sbatch --parsable "$@" << 'ARRAY'
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cores}
#SBATCH --mem=32G
{gpus}#SBATCH --time=4:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%A_%a.log
code=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {extract} || code=$?
# 75: stopped by the signal, and resumable. This task alone goes into the queue again.
task=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}
if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$task"
fi
exit "$code"
ARRAY
)
array=${{array%%;*}}

check=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes << 'CHECK'
#!/bin/bash
#SBATCH --job-name={name}-validate
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={check_cores}
#SBATCH --mem=8G
#SBATCH --time=4:00:00
#SBATCH --output={name}-validate-%j.log
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" vitsee validate --deep {store}
CHECK
)
echo "submitted: array $array, then validation ${{check%%;*}}"
"""


def array_script(
    words: Sequence[str],
    store: str,
    folder: str,
    n_slabs: int,
    *,
    workers: int | None = None,
    gpu: bool = True,
    shard: str = "slurm",
) -> str:
    """Return the bash script that submits a job array, which fills one store, and a job behind
    it that validates the store.

    Args:
        words: the extraction's command line, without shards.
        store: its store, as the user names it.
        folder: base of relative paths.
        n_slabs: slabs of the store; more tasks are useless.
        workers: loading processes, None for the default.
        gpu: whether tasks need a GPU.
        shard: how they divide the slabs, "slurm" or "claims".

    Raises:
        OptionError: a word with a line break, tab or other unprintable character.
    """
    for text in (*words, store, folder):
        if not text.isprintable():
            raise OptionError(
                f"--plan: {text!r} cannot stand in a script; choose another name"
            )
    # Loading processes, the one that runs the model, and its writer's thread.
    cores = (WORKERS_GPU if workers is None else workers) + 2
    if not gpu:
        cores = max(cores, CORES_CPU) if workers else CORES_CPU
    store_name = re.split(r"[/\\]", store.rstrip("/"))[-1]
    name = re.sub(r"[^\w.-]+", "-", store_name)
    # Behind `--` there are no options.
    n_options = words.index("--") if "--" in words else len(words)
    extract_words = [*words[:n_options], "--shard", shard, *words[n_options:]]
    return _SCRIPT.format(
        command=shlex.join(words),
        folder=shlex.quote(folder),
        name=f"vitsee-{name.removesuffix('.zarr')}",
        last=min(MAX_TASKS, n_slabs) - 1,  # tasks count from 0
        cores=cores,
        gpus="#SBATCH --gpus=1\n" if gpu else "",
        extract=shlex.join(extract_words),
        restarts=MAX_RESTARTS,
        check_cores=CORES_VALIDATE,
        store=shlex.quote(store),
    )


def plan_array(words: Sequence[str], request: Request, shard: str = "slurm") -> str:
    """Return the script that submits the job array of an extraction, as `array_script` makes it.

    The images are counted and the model's name is looked up, so that mistakes are found before they
    wait in a queue; no model is built, and nothing is written.

    Args:
        words: the extraction's command line.
        request: its options.
        shard: how tasks divide the slabs, "slurm" or "claims".

    Raises:
        VitseeError: no such model or images; the store is complete; --force.
    """
    data = request.data
    keep = request.keep
    run = request.run
    if run.force:
        raise VitseeError(
            "--force with --plan: each task would delete the others' work; delete the store first"
        )
    source_of(request.model.name).check()
    writer = StoreWriter.join(run.output)
    identity = {} if writer is None else writer.manifest.identity
    n_images = len(chosen_images(data, identity).samples)
    if writer is None:
        n_slabs = -(-n_images // (keep.slab or DEFAULT_SLAB))
    elif not writer.complete:
        n_slabs = writer.n_slabs
    else:
        # A complete store can get sites for all images, or further images.
        plan = open_store(run.output, allow_partial=True).plan
        has_new_images = data.images is not None and n_images > plan.n_images
        if keep.sites is None and not has_new_images:
            raise VitseeError(f"{run.output} is complete: there is nothing to plan")
        n_slabs = -(-n_images // plan.slab)
        if has_new_images:
            n_slabs -= plan.n_images // plan.slab
    return array_script(
        words,
        store=str(run.output),
        folder=os.getcwd(),
        n_slabs=n_slabs,
        workers=run.workers,
        gpu=not run.device.startswith("cpu"),
        shard=shard,
    )
