"""Options that would have no effect are refused in one line, before any work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.command_line import invoke, one_line
from tests.stores import write_labelled
from vitsee_core.runtime.machine import human_bytes

CASES = {
    "coverage": (
        ("attn-map", "--kind", "mean-cls", "--no-coverage"),
        "--coverage/--no-coverage has no effect without --kind aligned",
    ),
    "scale": (
        ("attn-map", "--kind", "entropy", "--scale", "head"),
        "--scale has no effect without a --kind that is drawn as maps",
    ),
    "temperature": (
        ("knn", "b.zarr", "--vote", "majority", "--temperature", "0.1"),
        "--temperature has no effect without --vote softmax",
    ),
    "background": (
        ("spatial", "--background", "3"),
        "--background has no effect without --masks",
    ),
    "ridge": (
        ("similarity", "--measure", "rsa", "--ridge", "0.1"),
        "--ridge has no effect without --metric gulp",
    ),
    "k": (
        ("similarity", "--measure", "gulp", "--k", "3"),
        "--k has no effect without --metric mutual_knn or cknna",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, tmp_path: Path) -> None:
    (command, *args), line = CASES[name]
    out = tmp_path / "r.csv"
    assert one_line(command, "a.zarr", *args, "-o", out, code=2) == f"Error: {line}"
    assert not out.exists()


def test_memory_below_a_chunk(tmp_path: Path) -> None:
    """knn streams: below one chunk of a store nothing can be kept to."""
    rng = np.random.default_rng(0)
    stores = [
        write_labelled(
            tmp_path / f"{name}.zarr", {"embed": rng.normal(size=(8, 3, 500))}, [0, 1] * 4,
            hash_offset=100 * i,
        )
        for i, name in enumerate("ab")
    ]  # fmt: skip
    largest = max(spec.chunk_bytes for spec in stores[0].arrays.values())
    args = ["knn", *(store.path for store in stores), "--k", "3", "--memory"]
    need = f"--memory is 1.0 kB, but reading a chunk of a takes {human_bytes(3 * largest)}; give"
    assert need in one_line(*args, "1K")
    assert invoke(*args, 3 * largest).exit_code == 0
