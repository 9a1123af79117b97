"""Freed memory stays with the process inside, and goes back to the system afterwards."""

from __future__ import annotations

import platform
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extractions import VIT, extracted, plant_images
from vitsee_core.extraction import loop
from vitsee_core.runtime.malloc import OF_THE_USER, freed_memory_kept

N_BYTES = 96 << 20  # more than glibc ever keeps by itself
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt"
)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user who sets nothing; Dask's nannies leave theirs in the process that starts them."""
    for name in OF_THE_USER:
        monkeypatch.delenv(name, raising=False)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def share_given_back() -> float:
    """Of a large tensor that is freed: what the system gets at once."""
    tensor = torch.empty(N_BYTES, dtype=torch.uint8).fill_(1)
    before = resident_bytes()
    del tensor
    return (before - resident_bytes()) / N_BYTES


@needs_glibc
def test_freed_memory_stays_inside_and_goes_back_at_the_end() -> None:
    assert share_given_back() > 0.9
    with freed_memory_kept():
        assert share_given_back() < 0.1
        before = resident_bytes()
    assert before - resident_bytes() > 0.9 * N_BYTES
    assert share_given_back() > 0.9


@needs_glibc
@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"])
def test_a_user_who_has_chosen_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "65536")
    with freed_memory_kept():
        assert share_given_back() > 0.9


@pytest.mark.slow
@needs_glibc
def test_an_extraction_keeps_what_its_model_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normalise, found = vars(loop)["normalise"], list[float]()

    def before_each_batch(*args: Any) -> Any:
        found.append(share_given_back())
        return normalise(*args)

    monkeypatch.setattr(loop, "normalise", before_each_batch)
    plant_images(tmp_path / "images", 4)
    extracted(*VIT, "--data", tmp_path / "images", "-o", tmp_path / "s.zarr", "--batch-size", 2)
    assert len(found) == 2
    assert max(found) < 0.1
    assert share_given_back() > 0.9
