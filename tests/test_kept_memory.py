"""Freed memory stays with the process inside, and goes back to the system afterwards."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extractions import VIT, extracted, plant_images
from vitsee_core.extraction import loop
from vitsee_core.runtime.machine import MALLOC_SETTINGS, freed_memory_kept

pytestmark = pytest.mark.slow  # each in a process of its own that imports torch
N_BYTES = 96 << 20  # more than glibc ever keeps by itself
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt"
)


def in_a_fresh_process(check: Callable[..., None], *args: object, **chosen: str) -> None:
    """Call a function of this module where nothing was allocated before: after one request that
    failed, glibc serves a thread from another arena, to which what is tested here does not apply.

    chosen: variables of the environment that a user has set; Dask's nannies leave theirs behind.
    """
    call = (
        f"from {__name__} import {check.__name__} as check; check(*{[*map(str, args)]!r})"
    )
    variables = {
        name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS
    }
    subprocess.run(
        [sys.executable, "-c", call], env=variables | chosen, check=True, timeout=600
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def share_given_back() -> float:
    """Of a large tensor that is freed: what the system gets at once."""
    tensor = torch.empty(N_BYTES, dtype=torch.uint8).fill_(1)
    before = resident_bytes()
    del tensor
    return (before - resident_bytes()) / N_BYTES


def check_nothing_chosen() -> None:
    assert share_given_back() > 0.9
    with freed_memory_kept():
        assert share_given_back() < 0.1
        before = resident_bytes()
    assert before - resident_bytes() > 0.9 * N_BYTES
    assert share_given_back() > 0.9


def check_the_user_s_choice() -> None:
    with freed_memory_kept():
        assert share_given_back() > 0.9


def check_extraction(folder: str) -> None:
    normalise, found = vars(loop)["normalise"], list[float]()

    def before_each_batch(*args: Any) -> Any:
        found.append(share_given_back())
        return normalise(*args)

    vars(loop)["normalise"] = before_each_batch
    plant_images(Path(folder, "images"), 4)
    extracted(
        *VIT,
        "--data",
        Path(folder, "images"),
        "-o",
        Path(folder, "s.zarr"),
        "--batch-size",
        2,
    )
    assert len(found) == 2
    assert max(found) < 0.1
    assert share_given_back() > 0.9


@needs_glibc
def test_freed_memory_stays_inside_and_goes_back_at_the_end() -> None:
    in_a_fresh_process(check_nothing_chosen)


@needs_glibc
@pytest.mark.parametrize(
    "name", ["GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"]
)
def test_a_user_who_has_chosen_is_left_alone(name: str) -> None:
    value = "glibc.malloc.mmap_max=65536" if name == "GLIBC_TUNABLES" else "65536"
    in_a_fresh_process(check_the_user_s_choice, **{name: value})


@needs_glibc
def test_an_extraction_keeps_what_its_model_frees(tmp_path: Path) -> None:
    in_a_fresh_process(check_extraction, tmp_path)
