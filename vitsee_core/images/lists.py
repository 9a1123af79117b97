"""CSV and TSV lists of images: path, label, split, id."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import number
from vitsee_core.images.image_source import ImageSource
from vitsee_stores.errors import reason

_PATH_NAMES = ("path", "image_path", "file_path", "filepath", "file_name", "filename", "file")
_COLUMNS = {
    "path": (*_PATH_NAMES, "image"),
    "label": ("label", "class", "target", "category"),
    "split": ("split", "subset", "partition"),
    "id": ("id", "image_id", "key"),
}
_WITHOUT_HEADER = ("path", "label", "split")
_PATHS_TRIED = 16
_LARGEST_LABEL = 2**62

Row = tuple[int, list[str]]


def open_list(path: Path, name: str) -> ImageSource:
    """The images of a comma- or tab-separated list (by its suffix), in the order of its lines.

    With a header, columns are found by name (path; optional label, split, id; others are passed
    over); without one they are path, label, split. Relative paths start at the list's folder.
    Labels are class numbers, or names where any is not a number; an empty one is none. A sample's
    id is its `id` column, or else the path as it is written.

    Raises:
        DataError: an unreadable or uneven list, an id that occurs twice, or a missing file.
    """
    rows = _rows(path, name)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{name} is empty; expected one image path a line")
    header = _header(first[1])
    width = len(first[1])
    columns = header or {key: k for k, key in enumerate(_WITHOUT_HEADER) if k < width}
    if header is None and width > len(_WITHOUT_HEADER):
        expected = ", ".join(_WITHOUT_HEADER)
        raise DataError(f"{name} has {width} columns and no header; expected {expected}")
    fields: dict[str, list[str]] = {key: [] for key in columns}
    lines: list[int] = []
    for line, row in rows if header else _chain(first, rows):
        if len(row) != width:
            raise DataError(f"line {line} of {name} has {len(row)} fields; expected {width}")
        lines.append(line)
        for key, column in columns.items():
            fields[key].append(row[column].strip())
    return _source(path, name, fields, lines)


def _source(path: Path, name: str, fields: dict[str, list[str]], lines: list[int]) -> ImageSource:
    paths = fields["path"]
    n = len(paths)
    if not n:
        raise DataError(f"{name} has a header and no images below it")
    ids = fields.get("id", paths)
    for key, values in (("path", paths), ("id", ids)):
        if "" in values:
            raise DataError(f"line {lines[values.index('')]} of {name} has an empty {key}")
    seen: dict[str, int] = {}
    for line, sample in zip(lines, ids, strict=True):
        if sample in seen:
            raise DataError(
                f"line {line} of {name} repeats the id {sample!r} of line {seen[sample]}; "
                "expected unique ids: give repeated images different ones in a column 'id'"
            )
        seen[sample] = line
    folder = str(path.absolute().parent)
    exist = [os.path.exists(os.path.join(folder, p)) for p in paths[:_PATHS_TRIED]]
    if not any(exist):
        raise DataError(
            f"none of the first paths of {name} exists (line {lines[0]}: {paths[0]}); "
            f"expected a column 'path' with paths relative to {folder}"
        )
    if not exist[0] and not os.path.splitext(paths[0])[1]:
        raise DataError(
            f"line {lines[0]} of {name} looks like a header without a path column; "
            f"expected one of: {', '.join(_COLUMNS['path'])}"
        )
    labels, class_names = _labels(fields.get("label"), n)
    splits = fields.get("split", [""] * n)
    return ImageSource(name, FileOpener(folder), paths, ids, labels, splits, class_names)


def _labels(values: list[str] | None, n: int) -> tuple[NDArray[np.int64], list[str] | None]:
    """Labels and class names; names are None where every label is a number or empty."""
    if values is None:
        return np.full(n, -1, np.int64), None
    try:
        numbers = [int(value) if value else -1 for value in values]
    except ValueError:
        return number(values)
    if min(numbers) < -1 or max(numbers) > _LARGEST_LABEL:
        return number(values)
    return np.array(numbers, np.int64), None


def _header(row: list[str]) -> dict[str, int] | None:
    """Column numbers by meaning, if the row names a path column."""
    names = [cell.strip().lower() for cell in row]
    columns = {}
    for key, known in _COLUMNS.items():
        found = next((names.index(name) for name in known if name in names), None)
        if found is not None:
            columns[key] = found
    return columns if "path" in columns else None


def _rows(path: Path, name: str) -> Iterator[Row]:
    """Line number and fields of every line that is not blank.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or has broken quotes.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{name} cannot be read as a list: {one_line(error)}") from None
    except OSError as error:
        raise DataError(f"cannot read {name}: {reason(error)}") from None


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest
