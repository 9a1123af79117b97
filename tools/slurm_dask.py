"""A Dask cluster of two SLURM jobs, made as docs/guide/dask.md shows it, does an extraction and a
comparison; fails unless both equal one process's. `make slurm` runs it beside a SLURM of its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dask_jobqueue.slurm import SLURMCluster

MINUTES = 10  # after which the trial has failed
EXTRACT = [
    "extract",
    "demo:vit",
    "--data",
    "demo:test",
    "--images",
    "400",
    "--slab",
    "25",
]
EXTRACT += ["--device", "cpu"]


def vitsee(*arguments: str) -> str:
    command = [sys.executable, "-m", "vitsee_cli", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def digest(store: Path) -> str:
    """Of every chunk but the commit markers, which name hosts and times."""
    found = hashlib.sha256()
    for path in sorted(store.rglob("c.*")):
        if path.is_file() and path.parent.name != "commits":
            found.update(str(path.relative_to(store)).encode() + path.read_bytes())
    return found.hexdigest()


def jobs() -> list[str]:
    listed = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%i %T %j"],
        capture_output=True,
        text=True,
    )
    return [line for line in listed.stdout.splitlines() if "RUNNING" in line]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="trial.") as name:
        folder = Path(name)
        cluster = SLURMCluster(
            cores=1,
            processes=1,
            memory="2GB",
            walltime="00:20:00",
            interface="lo",
            scheduler_options={"dashboard_address": None},
            log_directory=name,
            local_directory=name,
        )
        with cluster:
            cluster.scale(jobs=2)
            until = time.monotonic() + 60 * MINUTES
            while len(cluster.scheduler_info["workers"]) < 2:
                if time.monotonic() > until:
                    raise SystemExit(f"no two workers in {MINUTES} minutes: {jobs()}")
                time.sleep(1)
            print("workers run in jobs", *jobs(), sep="\n  ")
            address = cluster.scheduler_address
            vitsee(*EXTRACT, "-o", str(folder / "there.zarr"), "--dask", address)
            there = vitsee("cka", str(folder / "there.zarr"), "--dask", address)
        vitsee(*EXTRACT, "-o", str(folder / "here.zarr"))
        here = vitsee("cka", str(folder / "here.zarr"))
        assert digest(folder / "there.zarr") == digest(folder / "here.zarr"), (
            "other bytes"
        )
        assert there.replace("there,", "here,") == here, "another table"
        print("the same bytes, and the same table, as by one process")


if __name__ == "__main__":
    main()
