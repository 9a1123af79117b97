"""Loops that are compiled when they are first called."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from vitsee_core.compiled import EXACT, compiled


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


def test_sums_keep_their_order_where_roundings_count() -> None:
    def add_three(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        return np.float32(a + b - c)

    exact = compiled(add_three, flags=EXACT)
    tiny, large = np.float32(1e-3), np.float32(1e8)
    assert exact(tiny, large, large) == 0.0
