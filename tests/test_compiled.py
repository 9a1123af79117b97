"""Loops that are compiled when they are first called."""

from __future__ import annotations

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from tests.extractions import VIT, array_bytes, plant_images
from vitsee_core.kernels.compiled import EXACT, compiled


def add_up(x: Any) -> float:
    total = 0.0
    for value in x:
        total += value
    return total


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, asked = numba.njit, list[bool]()

    def without_cache(function: Any, **options: Any) -> Any:
        if function is not add_up:  # numba's own
            return plain(function, **options)
        asked.append(bool(options.get("cache")))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return plain(function, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    found = compiled(add_up)
    assert asked == []  # nothing is compiled before the first call
    assert found(np.arange(5.0)) == 10.0
    assert found(np.array([1.0, np.nan])) != found(np.array([1.0, 2.0]))
    assert asked == [True, False]


@compiled
def square(x: float) -> float:
    return x * x


@compiled
def sum_of_squares(x: Any) -> float:
    total = 0.0
    for value in x:
        total += square(value)
    return total


@pytest.mark.slow
def test_a_compiled_function_calls_others_of_its_module() -> None:
    assert sum_of_squares(np.array([1.0, 2.0, 3.0])) == 14.0
    assert square(3.0) == 9.0


@compiled
def add_in_lanes(x: Any, y: Any, z: Any) -> float:
    """Too long for a compiler to inline it of its own accord."""
    total = 0.0
    for first in (x, y, z):
        for second in (x, y, z):
            for i in range(first.shape[0]):
                total += first[i] * second[i] - math.exp(first[i] - second[i])
                total += first[i] / (1.0 + second[i] * second[i])
    return total


@compiled
def add_twice(x: Any) -> float:
    return add_in_lanes(x, x, x) + add_in_lanes(x, x, x)


@pytest.mark.slow
def test_a_compiled_function_runs_no_code_of_another() -> None:
    """Of a callee in a cache of its own it would depend on what was loaded first whether that or
    the caller's copy runs, and they round differently."""
    x = np.arange(5.0)
    assert add_twice(x) == pytest.approx(2 * add_in_lanes(x, x, x))
    caller: Any = vars(add_twice)["dispatcher"](
        True
    )  # not from the cache, whose code cannot be read
    caller(x)
    text = next(iter(caller.inspect_llvm().values()))
    defined = re.findall(r"^define\b[^@]*@(\S+?)\(", text, re.MULTILINE)
    assert any("add_twice" in name for name in defined)
    assert not any("add_in_lanes" in name for name in defined)


@pytest.mark.slow
def test_stores_are_equal_to_the_bit_from_the_first_run_on(tmp_path: Path) -> None:
    """A first run compiles its loops, a second one reads them from the cache; threads differ."""
    data, stores = plant_images(tmp_path / "data", 24), list[dict[str, bytes]]()
    model = [*VIT[:3], "--img-size", "112", *VIT[5:]]
    for n_threads in (1, 2):
        store = tmp_path / f"{n_threads}.zarr"
        words = [
            *model,
            "--data",
            data,
            "--attention",
            "rows",
            "--slab",
            "12",
            "-o",
            store,
        ]
        subprocess.run(
            [sys.executable, "-m", "vitsee_cli", "extract", *map(str, words)],
            env=os.environ
            | {
                "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
                "OMP_NUM_THREADS": str(n_threads),
            },
            check=True,
        )
        stores.append(array_bytes(store))
    assert any((tmp_path / "cache").rglob("*.nbi"))
    assert stores[0].keys() == stores[1].keys()
    assert [name for name, found in stores[0].items() if found != stores[1][name]] == []


def test_the_cache_notices_changes_of_the_files_of_callees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules as they are in processes one after another: numba keeps what it loaded."""
    caller = (
        "from callee import more\nfrom vitsee_core.kernels.compiled import compiled\n\n\n"
    )
    caller += "@compiled\ndef twice_more(x):\n    return more(more(x))\n"
    (tmp_path / "caller.py").write_text(caller)
    monkeypatch.syspath_prepend(str(tmp_path))
    for addend in (1, 20):
        written = "from vitsee_core.kernels.compiled import compiled\n\n\n"
        written += f"@compiled\ndef more(x):\n    return x + {addend}\n"
        (tmp_path / "callee.py").write_text(written)
        for name in ("caller", "callee"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        assert importlib.import_module("caller").twice_more(1) == 1 + 2 * addend


def test_sums_keep_their_order_where_roundings_count() -> None:
    def add_three(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        return np.float32(a + b - c)

    exact = compiled(add_three, flags=EXACT)
    tiny, large = np.float32(1e-3), np.float32(1e8)
    assert exact(tiny, large, large) == 0.0
