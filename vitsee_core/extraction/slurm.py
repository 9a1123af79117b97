"""An extraction as a SLURM job array: a script that submits it, followed by a validating job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from vitsee_core.extraction.options import DEFAULT_SLAB, OptionError, Request
from vitsee_core.extraction.prepare import chosen_images
from vitsee_core.models.sources import source_of
from vitsee_stores import StoreWriter, open_store
from vitsee_stores.errors import VitseeError

MOST_TASKS = 8
CORES_CPU, CORES_VALIDATE = 8, 2
WORKERS_GPU = 8  # loading processes: extract's own default
# A task that cannot commit one slab within its time limit would requeue forever.
MOST_RESTARTS = 50

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
    """The text for bash of a job array that fills one store.

    Args:
        words: the extraction's command line, without shards.
        store: its store, as the user names it.
        folder: base of relative paths.
        n_slabs: of the store; more tasks are useless.
        workers: loading processes, None for the default.
        gpu: whether tasks need one.
        shard: how they divide the slabs, "slurm" or "claims".

    Raises:
        OptionError: a word with a line break.
    """
    for text in (*words, store, folder):
        if not text.isprintable():
            raise OptionError(f"--plan: {text!r} cannot stand in a script; choose another name")
    end = words.index("--") if "--" in words else len(words)
    cores = (WORKERS_GPU if workers is None else workers) + 2
    if not gpu:
        cores = max(cores, CORES_CPU) if workers else CORES_CPU
    name = re.sub(r"[^\w.-]+", "-", re.split(r"[/\\]", store.rstrip("/"))[-1])
    return _SCRIPT.format(
        command=shlex.join(words),
        folder=shlex.quote(folder),
        name=f"vitsee-{name.removesuffix('.zarr')}",
        last=min(MOST_TASKS, n_slabs) - 1,
        cores=cores,
        gpus="#SBATCH --gpus=1\n" if gpu else "",
        extract=shlex.join((*words[:end], "--shard", shard, *words[end:])),
        restarts=MOST_RESTARTS,
        check_cores=CORES_VALIDATE,
        store=shlex.quote(store),
    )


def plan_array(words: Sequence[str], asked: Request, shard: str = "slurm") -> str:
    """The script of the array for an extraction with the command line `words`. The images are
    counted and the model's name is looked up, so that mistakes are found before they wait in a
    queue; no model is built, and nothing is written. Raises VitseeError: no such model or images;
    the store is complete; --force."""
    data, keep, run = asked.data, asked.keep, asked.run
    if run.force:
        raise VitseeError(
            "--force with --plan: each task would delete the others' work; delete the store first"
        )
    source_of(asked.model.name).check()
    writer = StoreWriter.join(run.output)
    stored = {} if writer is None else writer.manifest.identity
    n_images = len(chosen_images(data, stored).samples)
    slab = keep.slab or DEFAULT_SLAB
    n_slabs = -(-n_images // slab) if writer is None else writer.n_slabs
    if writer is not None and writer.complete:
        plan = open_store(run.output, allow_partial=True).plan
        grows = data.images is not None and n_images > plan.n_images
        if keep.sites is None and not grows:
            raise VitseeError(f"{run.output} is complete: there is nothing to plan")
        n_slabs = -(-n_images // plan.slab)
        if grows:
            n_slabs -= plan.n_images // plan.slab
    place, gpu = (str(run.output), os.getcwd()), not run.device.startswith("cpu")
    return array_script(words, *place, n_slabs, workers=run.workers, gpu=gpu, shard=shard)
