"""What this process may use of the machine it shares with others of its job."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitsee_core.extraction.run import default_workers
from vitsee_core.runtime import machine
from vitsee_core.runtime.machine import local_processes, memory_bytes, plural

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("environ", "n"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "0"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "-1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, 1),
        (
            {"SLURM_TASKS_PER_NODE": "8"},
            1,
        ),  # of the job: its script itself is one process
        ({"LOCAL_WORLD_SIZE": "all"}, 1),
    ],
)
def test_processes_of_a_job_on_this_machine(environ: dict[str, str], n: int) -> None:
    assert local_processes(environ) == n


def test_one_of_a_kind_and_several() -> None:
    one = {"images": "image", "Gram matrices": "Gram matrix", "queries": "query"}
    one |= {"classes": "class", "analyses": "analysis"}
    for nouns, noun in one.items():
        assert (plural(1, nouns), plural(2, nouns)) == (f"1 {noun}", f"2 {nouns}")


def test_they_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_processes", lambda _environ: 1)
    whole = memory_bytes()
    monkeypatch.setattr(machine, "local_processes", lambda _environ: 8)
    assert memory_bytes() == whole // 8


@pytest.mark.parametrize(
    ("cores", "all_cores", "processes", "workers"),
    [(16, 16, 1, 14), (64, 64, 8, 6), (8, 64, 8, 6), (2, 2, 1, 1), (192, 192, 1, 32)],
)
def test_workers_by_cores(
    cores: int,
    all_cores: int,
    processes: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: all_cores)
    monkeypatch.setattr(machine, "local_processes", lambda _environ: processes)
    assert default_workers(CUDA) == workers
    assert default_workers(CPU) == 0


@pytest.mark.parametrize(
    ("error", "limited"),
    [
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (ImportError("libmkl.so: Cannot allocate memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("No module named 'torch'"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_the_loader_s_words_for_too_little_memory(
    error: Exception, limited: bool
) -> None:
    assert machine.is_limited_memory(error) == limited


@pytest.mark.slow
def test_too_little_memory_for_a_library_is_a_line(tmp_path: Path) -> None:
    """torch does not fit into 1.5 GB of addresses."""
    code = "from vitsee_cli.main import main; main()"
    command = f"{sys.executable} -c '{code}' extract demo:vit --data demo:test -o {tmp_path}/x.zarr"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 1500000; exec {command}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(
        "vitsee extract: out of memory, as this process may take only so"
    )
    assert done.stderr.count("\n") == 1 and not (tmp_path / "x.zarr").exists()
