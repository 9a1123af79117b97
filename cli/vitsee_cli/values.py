"""Parsers of values on the command line: stores, paths, sizes, devices, numbers, tokens.

Functions and click types given as `type=`. A value that they refuse is a usage error (exit code 2);
whether a path exists is checked where it is opened (exit code 1).
"""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from vitsee_core.tables.groups import split_label
from vitsee_stores import url
from vitsee_stores.errors import StoreError, VitseeError
from vitsee_stores.url import Place, is_url

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # generic only in newer releases of click
else:
    ParamType = click.ParamType

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SI_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class StorePath(NamedTuple):
    """A store on the command line: its label in tables and figures, and where it is."""

    label: str
    place: Place


class PathType(ParamType):
    """A path, `~` expanded; the shell completes it. Neither empty (an unset variable of a script)
    nor, where no stream is meant, `-`."""

    name = "path"

    def __init__(self, completes: str = "file", *, stream: bool = False):
        """`completes`: what the shell offers, `file` (and folders) or `dir`. `stream`: `-` stands
        for a standard stream and comes back as Path("-")."""
        self.completes = completes
        self.stream = stream

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, Path):
            return value
        return self.path(value, param, ctx)

    def path(
        self, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        if not text.strip():
            self.fail("an empty text is not a path; is a variable unset?", param, ctx)
        if text == "-" and not self.stream:
            self.fail(
                "- is not a path here; write ./- for a file of that name", param, ctx
            )
        if is_url(text):
            self.fail(
                f"{text} is a URL, which only stores have; expected a path", param, ctx
            )
        path = Path(text).expanduser()
        if path.exists() and not path.is_file() and not path.is_dir():
            raise VitseeError(
                f"{text} is a pipe or a device; expected a file or a folder"
            )
        return path

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.completes)]


class TableType(PathType):
    """The path of a table, which may come from a pipe, see `is_stream`."""

    name = "table"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        from vitsee_core.tables.files import is_stream

        if isinstance(value, str) and is_stream(Path(value)):
            return Path(value)
        return super().convert(value, param, ctx)


class PlaceType(PathType):
    """A store's folder or URL."""

    name = "store"

    def __init__(self) -> None:
        super().__init__("dir")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, Place):
            return value
        return self.place(value, param, ctx)

    def place(
        self, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Place:
        if not is_url(text):
            return self.path(text, param, ctx)
        try:
            return url.parse_place(text)
        except StoreError as error:
            self.fail(str(error), param, ctx)


class StoreType(PlaceType):
    """`NAME=path.zarr`, `GROUP/NAME=path.zarr` or `path.zarr`, whose label is then the file's stem,
    as a StorePath.

    A path that exists is taken as a path, even with `=` in it.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, StorePath):
            return value
        label, rest = _named(value)
        place = self.place(rest, param, ctx)
        # `.` and `..` have no stem of their own.
        own = (
            place.resolve()
            if isinstance(place, Path) and not place.stem.strip(".")
            else place
        )
        return StorePath(label or own.stem, place)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Folders; behind `NAME=`, where shells complete no paths themselves, by name."""
        label, rest = _named(incomplete)
        if not label:
            return super().shell_complete(ctx, param, incomplete)
        return [CompletionItem(f"{label}={path}") for path in _folders(rest)]


class NamedFile(NamedTuple):
    """A file on the command line: what it is called, "" where that is not said, and where it is."""

    label: str
    path: Path


class NamedFileType(PathType):
    """`NAME=path` or `path`, as a NamedFile."""

    name = "file"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        if isinstance(value, NamedFile):
            return value
        label, rest = _named(value)
        return NamedFile(label, self.path(rest, param, ctx))


def _named(text: str) -> tuple[str, str]:
    """The label ("" without one) and the path of `NAME=path` or `GROUP/NAME=path`, which is a path
    as a whole unless there is something behind the sign."""
    label, sign, rest = text.partition("=")
    if not sign or not label or Path(text).exists():
        return "", text
    grouped = bool(split_label(label)[0]) and (
        is_url(rest) or Path(rest).expanduser().exists()
    )
    if "/" not in label or grouped:
        return (label, rest)
    return ("", text)


def _folders(text: str) -> list[str]:
    """The folders whose path begins with `text`; if the only one is not a store, the folders in it,
    as the shell would add a space behind it."""
    start = text.rpartition("/")[2]
    prefix = text[: len(text) - len(start)]
    place = Path(prefix or ".").expanduser()
    try:
        names = sorted(
            p.name for p in place.iterdir() if p.is_dir() and p.name.startswith(start)
        )
    except OSError:
        return []
    names = [name for name in names if start.startswith(".") or not name.startswith(".")]
    if len(names) == 1 and not (place / names[0] / "zarr.json").exists():
        return _folders(f"{prefix}{names[0]}/") or [f"{prefix}{names[0]}/"]
    return [prefix + name for name in names]


# Called as functions too.
parse_path = PathType()
parse_folder = PathType("dir")
parse_output = PathType(stream=True)
parse_table = TableType()
parse_place = PlaceType()
parse_named_file = NamedFileType()
parse_store = StoreType()


class WholeNumber(click.IntRange):
    """A whole number within a range, called so in messages."""

    name = "whole number"


class FiniteRange(click.FloatRange):
    """A number within a range; `inf` and `nan` are refused."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


SEED = WholeNumber(0, 2**63 - 1)  # what every generator takes
POSITIVE = FiniteRange(min=0, min_open=True)
SHARE = FiniteRange(0, 1, min_open=True, max_open=True)


def parse_words(text: str) -> str:
    """Any text but an empty one (an unset variable of a script)."""
    if not text.strip():
        raise click.BadParameter("an empty text; is a variable unset?")
    return text


def parse_size(text: str | int) -> int:
    """Bytes: `4G` and `4GiB` are 4 * 1024**3, `4GB` is 4 * 1000**3, `4096` is bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a size; expected e.g. 4G, 512M or a number of bytes"
        )
    number = match[1]
    unit = match[2].upper()
    suffix = (match[3] or "").upper()
    scale = _SI_UNITS[unit] if unit and suffix == "B" else _UNITS[unit]
    size = float(number) * scale
    if not 1 <= size < 2**63:
        raise click.BadParameter(f"{text!r} is not a size; expected one byte to 8 EiB")
    size_bytes = int(size)
    return size_bytes


def parse_device(text: str) -> str:
    """`auto`, `cpu`, `cuda`, `cuda:1` or `mps`; whether it exists is checked later."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise click.BadParameter(
            f"{text!r} is not a device; expected auto, cpu, cuda, cuda:INDEX or mps"
        )
    return text


def parse_dask(text: str) -> str:
    """`local:N`, or a scheduler's address; whether anyone answers there is seen later."""
    from vitsee_core.runtime.dask_map import parse_address
    from vitsee_core.runtime.dask_worker import DaskError

    try:
        parse_address(text)
    except DaskError as error:
        raise click.BadParameter(str(error)) from None
    return text


def parse_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Comma-separated finite numbers: one for all channels, or one each of red, green, blue."""
    if isinstance(text, tuple):
        return text
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r}; expected numbers, e.g. 0.5,0.5,0.5"
        ) from None
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise click.BadParameter(f"{text!r}; expected one or three finite numbers")
    return numbers


def parse_positive_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Numbers as `parse_floats` reads them, each above 0: pixels are divided by them."""
    numbers = parse_floats(text)
    if min(numbers) <= 0:
        raise click.BadParameter(f"{text!r}; expected numbers above 0, e.g. 0.5,0.5,0.5")
    return numbers


def parse_fraction(text: str | float) -> float:
    """A number above 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number; expected e.g. 0.9") from None
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
            f"{text!r} is not a size; expected e.g. 224, or 224x320 (height x width)"
        )
    return int(match[1]), int(match[2] or match[1])


def parse_model_arg(text: str | tuple[str, Any]) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as JSON or a Python literal where it is one, else as text."""
    if isinstance(text, tuple):
        return text
    key, sign, value = text.partition("=")
    if not sign or not all(part.isidentifier() for part in key.split(".")):
        raise click.BadParameter(f"{text!r}; expected KEY=VALUE, e.g. depth=6")
    for read in (json.loads, ast.literal_eval):
        try:
            return key, read(value)
        except (ValueError, SyntaxError):
            continue
    return key, value
