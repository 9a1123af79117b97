#!/bin/bash
# What `vitsee extract --plan slurm` prints, run on the SLURM at hand to the validated store: two
# array tasks of one core, whose time limit is too short, so that they are stopped and requeued.
# Fails unless that happened and the store is whole. `make slurm` runs it beside a SLURM of its own.
set -euo pipefail
images=${IMAGES:-1200} # more where the machine is too fast to be stopped
minutes=${MINUTES:-20} # after which the trial has failed

folder=$(mktemp -d "${TMPDIR:-/tmp}/trial.XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1

vitsee extract vit_small_patch16_224 --random-init 0 --data demo:test --images "$images" --slab 8 \
    --batch-size 8 --tokens pooled --attention none --no-residual --device cpu -o s.zarr \
    --plan slurm > s.sh
[ ! -e s.zarr ] || { echo "--plan made a store" >&2; exit 1; }
submitted=$(SBATCH_MEM_PER_NODE=1G bash s.sh --array=0-1 --cpus-per-task=1 --time=2 --signal=TERM@30)
echo "$submitted"
read -r array check < <(sed 's/.*array \([0-9]*\), then validation \([0-9]*\)/\1 \2/' <<< "$submitted")

field() { # of a job as scontrol knows it
    scontrol --oneliner show job "$1" | grep -o "\b$2=[^ ]*" | cut -d= -f2 | sort -u | tr '\n' ' '
}
fail() {
    echo "the trial failed: $1" >&2
    tail -n 20 ./*.log >&2
    scontrol --oneliner show job >&2
    exit 1
}

before=
for _ in $(seq $((minutes * 12))); do
    state="$(field "$array" JobState)/ validation $(field "$check" JobState)"
    slabs=$(vitsee -q info s.zarr -f n_committed 2> /dev/null || echo 0)
    [ "$state" = "$before" ] || echo "$(date +%T) array ${state}, $slabs slabs committed"
    before=$state
    case $(field "$check" JobState) in
        "PENDING " | "RUNNING " | "COMPLETING ") sleep 5 ;;
        *) break ;;
    esac
done
restarts=$(for task in 0 1; do field "${array}_$task" Restarts; done | tr -d '\n')
echo "restarts of the tasks: $restarts"
[ "$(field "$check" JobState)" = "COMPLETED " ] || fail "the validation did not complete"
[ "$(field "$array" JobState)" = "COMPLETED " ] || fail "the array did not complete"
[ "$(vitsee info s.zarr -f complete)" = true ] || fail "the store is not complete"
grep -q "stopped by SIGTERM" vitsee-s-"$array"_*.log || fail "no task was stopped: give more IMAGES"
[ "${restarts// /}" != 00 ] || fail "no task was requeued"
grep -h "stopped by SIGTERM\|is complete\|images/s" vitsee-s-"$array"_*.log
cat "vitsee-s-validate-$check.log"
