"""Loops that are compiled when they are first called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from vitsee_core.compiled import EXACT, compiled, emitted


def add_up(x: Any) -> float:
    total = 0.0
    for value in x:
        total += value
    return total


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_compiled_function_calls_others_of_its_module() -> None:
    assert sum_of_squares(np.array([1.0, 2.0, 3.0])) == 14.0
    assert square(3.0) == 9.0


@emitted
def add_one(builder: Any, numbers: Any, place: Any) -> None:
    where = builder.gep(numbers, [place])
    found = builder.load(where)
    builder.store(builder.fadd(found, found.type(1.0)), where)


@compiled
def add_one_to_each(numbers: Any) -> None:
    for place in range(numbers.shape[0]):
        add_one(numbers, place)


def test_a_compiled_function_calls_one_of_chosen_instructions() -> None:
    numbers = np.array([1.0, 2.5])
    add_one_to_each(numbers)
    assert numbers.tolist() == [2.0, 3.5]
    with pytest.raises(TypeError, match="add_one is called by compiled functions alone"):
        add_one(numbers, 0)


def test_the_cache_notices_changes_of_the_files_of_callees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules as they are in processes one after another: numba keeps what it loaded."""
    caller = "from callee import more\nfrom vitsee_core.compiled import compiled\n\n\n"
    caller += "@compiled\ndef twice_more(x):\n    return more(more(x))\n"
    (tmp_path / "caller.py").write_text(caller)
    monkeypatch.syspath_prepend(str(tmp_path))
    for addend in (1, 20):
        written = "from vitsee_core.compiled import compiled\n\n\n"
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
