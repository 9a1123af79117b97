"""Checked access to a JSON document: an untrusted file can hold anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_NAME_BYTES = 200
SHOWN = 60


class Fields:
    """One object of the document. Every method returns one checked field, or raises ValueError with
    the field's place, its value and what was expected."""

    def __init__(self, value: Any, where: str = ""):
        self.where = where
        if not isinstance(value, dict):
            raise unexpected(where or "it", value, "an object")
        self.value: dict[str, Any] = value

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def place(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise ValueError(f"{self.place(key)} is missing")
        return self.value[key]

    def object(self, key: str) -> Fields:
        return Fields(self.get(key), self.place(key))

    def integer(self, key: str, low: int, high: int) -> int:
        return integer(self.get(key), self.place(key), low, high)

    def number(self, key: str, low: float, high: float) -> float:
        return number(self.get(key), self.place(key), low, high)

    def flag(self, key: str) -> bool:
        return flag(self.get(key), self.place(key))

    def text(self, key: str) -> str:
        return text(self.get(key), self.place(key))

    def name(self, key: str) -> str:
        return name(self.get(key), self.place(key))

    def one_of(self, key: str, words: Iterable[str]) -> str:
        value, known = self.get(key), list(words)
        if value not in known:
            raise unexpected(self.place(key), value, f"one of {', '.join(known)}")
        return str(value)

    def list(self, key: str, item: Callable[[Any, str], T]) -> tuple[T, ...]:
        """A list of the results of `item`, which is called with each entry and its place."""
        return items(self.get(key), self.place(key), item)

    def pair(self, key: str, item: Callable[[Any, str], T]) -> tuple[T, T]:
        values = self.list(key, item)
        if len(values) != 2:
            raise unexpected(self.place(key), self.value[key], "a list of two")
        return values[0], values[1]


def items(value: Any, where: str, item: Callable[[Any, str], T]) -> tuple[T, ...]:
    """A list whose entries are converted by `item`."""
    if not isinstance(value, list):
        raise unexpected(where, value, "a list")
    return tuple(item(one, f"{where}[{i}]") for i, one in enumerate(value))


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise unexpected(where, value, "true or false")
    return value


def integer(value: Any, where: str, low: int, high: int) -> int:
    """An integer from `low` to `high`; booleans are refused."""
    if type(value) is not int or not low <= value <= high:
        raise unexpected(where, value, f"a whole number from {low} to {high}")
    return value


def number(value: Any, where: str, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
    if not good:
        raise unexpected(where, value, f"a number from {low:g} to {high:g}")
    return float(value)


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise unexpected(where, value, "text")
    return value


def name(value: Any, where: str) -> str:
    """A name that can be part of a path: no slash, no `..`, no control characters, not hidden."""
    good = (
        isinstance(value, str)
        and value.isprintable()
        and 0 < len(value.encode()) <= MOST_NAME_BYTES
        and not value.startswith(".")
        and ".." not in value
        and not {"/", "\\"} & set(value)
    )
    if not good:
        raise unexpected(where, value, "a name without slashes, '..' and control characters")
    return str(value)


def unexpected(where: str, value: Any, expected: str) -> ValueError:
    """The error for a field with an unexpected value."""
    shown = json.dumps(value) if not isinstance(value, (dict, list)) or not value else "..."
    kind = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else ""
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
    return ValueError(f"{where} is {kind or shown}, expected {expected}")
