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

# K, M, G, T alone and with iB are powers of 1024, with B of 1000.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SI_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class StorePath(NamedTuple):
    """A store of the command line."""

    label: str  # its name in tables and figures
    place: Place  # its folder or URL


class PathType(ParamType):
    """A path with `~` expanded, which the shell completes.

    Refused are an empty text, which comes from an unset variable of a script, and `-`, unless it
    stands for a stream.
    """

    name = "path"

    def __init__(self, completes: str = "file", *, stream: bool = False):
        """Make the type.

        Args:
            completes: what the shell offers: "file" (and folders) or "dir".
            stream: whether `-` stands for a standard stream, and is converted to Path("-").
        """
        self.completes = completes
        self.stream = stream

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the Path of a text; a Path, which is a default, stays."""
        # click converts defaults as well.
        if isinstance(value, Path):
            return value
        return self.parse_path(value, param, ctx)

    def parse_path(
        self, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the Path of a text, whether or not it exists.

        Raises:
            click.BadParameter: it is empty, a URL, or a stream that is not expected.
            VitseeError: it is a pipe or a device.
        """
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
        """Return the item that makes the shell complete paths itself."""
        return [CompletionItem(incomplete, type=self.completes)]


class TableType(PathType):
    """The path of a table, which may come from a pipe or from stdin (`-`)."""

    name = "table"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the Path of a text, of a stream too."""
        from vitsee_core.tables.files import is_stream

        # A pipe (/dev/fd/63) is neither a file nor a folder, which parse_path refuses.
        if isinstance(value, str) and is_stream(Path(value)):
            return Path(value)
        return super().convert(value, param, ctx)


class PlaceType(PathType):
    """A store's folder or URL."""

    name = "store"

    def __init__(self) -> None:
        """Make the type, of which the shell completes folders."""
        super().__init__("dir")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the Path or Url of a text."""
        if isinstance(value, Place):
            return value
        return self.parse_location(value, param, ctx)

    def parse_location(
        self, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Place:
        """Return the Path or Url of a text, whether or not a store is there."""
        if not is_url(text):
            return self.parse_path(text, param, ctx)
        try:
            return url.parse_place(text)
        except StoreError as error:
            self.fail(str(error), param, ctx)


class StoreType(PlaceType):
    """`NAME=path.zarr`, `GROUP/NAME=path.zarr` or `path.zarr`, converted to a StorePath.

    Without a name the label is the folder's name without its suffix. A path that exists is taken
    as a path, even with `=` in it.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the StorePath of a text."""
        if isinstance(value, StorePath):
            return value
        label, text = _split_label(value)
        location = self.parse_location(text, param, ctx)
        if label:
            return StorePath(label, location)
        named_location = location
        if isinstance(location, Path) and not location.stem.strip("."):
            named_location = location.resolve()  # `.` and `..` have no names
        return StorePath(named_location.stem, location)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return matching folders: behind `NAME=` shells do not complete paths themselves."""
        label, path = _split_label(incomplete)
        if not label:
            return super().shell_complete(ctx, param, incomplete)
        return [CompletionItem(f"{label}={folder}") for folder in _matching_folders(path)]


class NamedFile(NamedTuple):
    """A file of the command line, and the name that was typed before it."""

    label: str  # "" without a name
    path: Path


class NamedFileType(PathType):
    """`NAME=path` or `path`, converted to a NamedFile."""

    name = "file"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the NamedFile of a text."""
        if isinstance(value, NamedFile):
            return value
        label, path = _split_label(value)
        return NamedFile(label, self.parse_path(path, param, ctx))


def _split_label(text: str) -> tuple[str, str]:
    """Return label and path of `NAME=path` or `GROUP/NAME=path`, the label "" for a path alone."""
    label, sign, path = text.partition("=")
    # A path may have the sign itself: `runs/lr=0.1.zarr`.
    if not sign or not label or Path(text).exists():
        return "", text
    # A slash is a group's, or that of a path with `=` behind it.
    if "/" not in label:
        return label, path
    has_group = bool(split_label(label)[0])
    if has_group and (is_url(path) or Path(path).expanduser().exists()):
        return label, path
    return "", text


def _matching_folders(text: str) -> list[str]:
    """Return the folders whose path begins with `text`.

    If the only one is not a store, the folders in it are returned: behind a single match the shell
    adds a space, and the user could not go on.
    """
    start = text.rpartition("/")[2]
    prefix = text[: len(text) - len(start)]
    parent = Path(prefix or ".").expanduser()
    try:
        names = sorted(
            path.name
            for path in parent.iterdir()
            if path.is_dir() and path.name.startswith(start)
        )
    except OSError:
        return []
    # Hidden folders only where a dot was typed, as shells do.
    if not start.startswith("."):
        names = [name for name in names if not name.startswith(".")]
    if len(names) == 1 and not (parent / names[0] / "zarr.json").exists():
        folder = f"{prefix}{names[0]}/"
        return _matching_folders(folder) or [folder]
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
        """Return the number, checked to be finite and within the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


# The seeds that torch's and NumPy's generators both take.
SEED = WholeNumber(0, 2**63 - 1)
POSITIVE = FiniteRange(min=0, min_open=True)
SHARE = FiniteRange(0, 1, min_open=True, max_open=True)


def parse_words(text: str) -> str:
    """Return the text; an empty one, from an unset variable of a script, is refused."""
    if not text.strip():
        raise click.BadParameter("an empty text; is a variable unset?")
    return text


def parse_size(text: str | int) -> int:
    """Return bytes: `4G` and `4GiB` are 4 * 1024**3, `4GB` is 4 * 1000**3, `4096` is bytes."""
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
    # Sizes are int64 in NumPy and torch.
    if not 1 <= size < 2**63:
        raise click.BadParameter(f"{text!r} is not a size; expected one byte to 8 EiB")
    return int(size)


def parse_device(text: str) -> str:
    """Return `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; whether it exists is checked later."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise click.BadParameter(
            f"{text!r} is not a device; expected auto, cpu, cuda, cuda:INDEX or mps"
        )
    return text


def parse_dask(text: str) -> str:
    """Return `local:N`, or a scheduler's address; whether it answers is seen later."""
    from vitsee_core.runtime.dask_map import parse_address
    from vitsee_core.runtime.dask_worker import DaskError

    try:
        parse_address(text)
    except DaskError as error:
        raise click.BadParameter(str(error)) from None
    return text


def parse_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Return comma-separated finite numbers: one for all channels, or red, green and blue."""
    if isinstance(text, tuple):
        return text
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r}; expected numbers, e.g. 0.5,0.5,0.5"
        ) from None
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise click.BadParameter(f"{text!r}; expected one or three finite numbers")
    return numbers


def parse_positive_floats(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Return one or three numbers above 0, by which pixels are divided."""
    numbers = parse_floats(text)
    if min(numbers) <= 0:
        raise click.BadParameter(f"{text!r}; expected numbers above 0, e.g. 0.5,0.5,0.5")
    return numbers


def parse_fraction(text: str | float) -> float:
    """Return a number above 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number; expected e.g. 0.9") from None
    if not 0 < number <= 1:
        percent = f" (did you mean {number / 100:.2f}?)" if 1 < number <= 100 else ""
        raise click.BadParameter(f"{text!r}; expected above 0 and at most 1{percent}")
    return number


def parse_image_size(text: str | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of `224` or `HEIGHTxWIDTH`."""
    if isinstance(text, tuple):
        return text
    match = re.fullmatch(r"([1-9]\d*)(?:[x,]([1-9]\d*))?", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a size; expected e.g. 224, or 224x320 (height x width)"
        )
    return int(match[1]), int(match[2] or match[1])


def parse_model_arg(text: str | tuple[str, Any]) -> tuple[str, Any]:
    """Return (key, value) of `KEY=VALUE`.

    The value is read as JSON or as a Python literal if it is one; else it is the text.
    """
    if isinstance(text, tuple):
        return text
    key, sign, value = text.partition("=")
    if not sign or not all(name.isidentifier() for name in key.split(".")):
        raise click.BadParameter(f"{text!r}; expected KEY=VALUE, e.g. depth=6")
    # JSON first: `true` and `null` are not Python.
    for parse in (json.loads, ast.literal_eval):
        try:
            return key, parse(value)
        except (ValueError, SyntaxError):
            continue
    return key, value
