"""Readers of what is written on the command line: stores, sizes, devices, numbers, tokens.

Plain functions given to click as `type=`. What they refuse is a usage error (exit code 2);
whether a path exists is found out by who opens it (exit code 1).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click

TOKENS = ("all", "patches", "cls", "prefix", "mean", "mean-all", "first", "rest", "each")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SI_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class StorePath(NamedTuple):
    """A store on the command line: its label in tables and figures, and where it is."""

    label: str
    path: Path


def parse_store(text: str | StorePath) -> StorePath:
    """`NAME=path.zarr` or `path.zarr`, whose label is then the file's stem.

    A path that exists is a path, whatever signs are in it.
    """
    if isinstance(text, StorePath):
        return text
    label, sign, rest = text.partition("=")
    if sign and label and rest and "/" not in label and not Path(text).exists():
        return StorePath(label, Path(rest).expanduser())
    path = Path(text).expanduser()
    # `.` and `..` have no stem of their own.
    return StorePath(path.stem if path.stem.strip(".") else path.resolve().stem, path)


def parse_path(text: str | Path) -> Path:
    """A path, `~` expanded."""
    return Path(text).expanduser()


def parse_size(text: str | int) -> int:
    """Bytes: `4G` and `4GiB` are 4 * 1024**3, `4GB` is 4 * 1000**3, `4096` is bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no size; expected e.g. 4G, 512M or a number of bytes"
        )
    number, unit, suffix = match[1], match[2].upper(), (match[3] or "").upper()
    scale = _SI_UNITS[unit] if unit and suffix == "B" else _UNITS[unit]
    size_bytes = int(float(number) * scale)
    if size_bytes < 1:
        raise click.BadParameter(f"{text!r} is no size; expected at least one byte")
    return size_bytes


def parse_device(text: str) -> str:
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps`; whether it is there is found out later."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise click.BadParameter(
            f"{text!r} is no device; expected auto, cpu, cuda, cuda:INDEX or mps"
        )
    return text


def parse_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Comma-separated finite numbers: one for all channels, or one each of red, green, blue."""
    if isinstance(text, tuple):
        return text
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}; expected numbers, e.g. 0.5,0.5,0.5") from None
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise click.BadParameter(f"{text!r}; expected one or three finite numbers")
    return numbers


def parse_positive_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """As `parse_floats`, each above 0: what pixels are divided by."""
    numbers = parse_floats(text)
    if min(numbers) <= 0:
        raise click.BadParameter(f"{text!r}; expected numbers above 0, e.g. 0.5,0.5,0.5")
    return numbers


def parse_fraction(text: str | float) -> float:
    """A number above 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number; expected e.g. 0.9") from None
    if not 0 < number <= 1:
        percent = f" (did you mean {number / 100:.2f}?)" if 1 < number <= 100 else ""
        raise click.BadParameter(f"{text!r}; expected above 0 and at most 1{percent}")
    return number


def parse_image_size(text: str | tuple[int, int]) -> tuple[int, int]:
    """`224` or `HEIGHTxWIDTH`, as (height, width)."""
    if isinstance(text, tuple):
        return text
    match = re.fullmatch(r"([1-9]\d*)(?:[x,]([1-9]\d*))?", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no size; expected e.g. 224, or 224x320 (height x width)"
        )
    return int(match[1]), int(match[2] or match[1])


def parse_model_arg(text: str | tuple[str, Any]) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as JSON or a Python literal where it is one, else as text."""
    if isinstance(text, tuple):
        return text
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise click.BadParameter(f"{text!r}; expected KEY=VALUE, e.g. depth=6")
    for read in (json.loads, ast.literal_eval):
        try:
            return key, read(value)
        except (ValueError, SyntaxError):
            continue
    return key, value


def token_parser(choices: Iterable[str]) -> Callable[[str], str]:
    """A reader of --tokens that takes these words, and ROW,COL of the grid."""
    words = tuple(choices)

    def parse_tokens(text: str) -> str:
        if text in words or re.fullmatch(r"\d+,\d+", text):
            return text
        raise click.BadParameter(f"{text!r}; expected {', '.join(words)} or ROW,COL of the grid")

    return parse_tokens
