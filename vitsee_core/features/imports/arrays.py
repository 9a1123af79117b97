"""Arrays in files of other tools: what each is called, and the ids and labels beside them.

.npy               one array
.npz               one array a key
.pt, .pth          a tensor, or a dictionary of tensors; read with weights_only
.safetensors       one tensor a key
.csv, .tsv         a row an image; columns id and label, the others are the vector
.parquet           the same; a column of lists is a vector by itself (as vitsee export writes)
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import one_line
from vitsee_core.images.sources.arrays import read_npz
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.tables.formats import ending_of, read_parquet
from vitsee_stores.errors import VitseeError, reason

Array = NDArray[Any]
T = TypeVar("T")
ID, LABEL = "id", "label"
# Columns that `vitsee export` writes beside the features.
ABOUT = (ID, LABEL, "row", "index", "split")


@dataclass(frozen=True)
class Arrays:
    """values: name -> (images, ...); ids, labels: of the images, None where the file has none;
    columns: names of the entries of a vector that was made of columns."""

    values: dict[str, Array]
    ids: list[str] | None = None
    labels: list[str] | None = None
    columns: dict[str, list[str]] = field(default_factory=dict)


def read_arrays(path: Path) -> Arrays:
    """All arrays of a file.

    Raises:
        VitseeError: another ending, a file that cannot be read, or no numbers in it.
    """
    ending = ending_of(path, tuple(_READERS), "an import")
    found = _read(_READERS[ending], path, f"{ending} file of numbers")
    for name, values in found.values.items():
        if values.dtype.kind not in "fiub" or values.ndim < 2:
            raise VitseeError(
                f"{path}: {name} has {values.ndim} axes of {values.dtype}; expected numbers, "
                "(images, dim) or (images, tokens, dim)"
            )
        if 0 in values.shape[1:]:
            raise VitseeError(f"{path}: {name} is {values.shape}; expected a number an image")
    if not found.values:
        raise VitseeError(f"{path} has no array; expected one of numbers")
    return found


def read_ids(path: Path) -> tuple[list[str], list[str] | None]:
    """Ids, and labels where there are some, of a text with an id a line, or a table with a column
    id (`vitsee export --samples` writes one).

    Raises:
        VitseeError: it cannot be read, or has no ids.
    """
    if path.suffix.lower() == ".txt":
        try:
            return path.read_text("utf-8").splitlines(), None
        except (OSError, UnicodeDecodeError) as error:
            raise VitseeError(f"{path} cannot be read: {error}") from None
    ending = ending_of(path, (".txt", *_TABLES), "ids")
    columns = _read(_TABLES[ending], path, f"{ending} table")
    if ID not in columns:
        raise VitseeError(f"{path} has columns {', '.join(columns)}; expected one called {ID}")
    labels = columns.get(LABEL)
    return [*map(str, columns[ID])], None if labels is None else [*map(str, labels)]


def _read(read: Callable[[Path], T], path: Path, what: str) -> T:
    """`read(path)`; whatever a damaged file makes the libraries raise is one line, and nothing that
    they warn of is another."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(path)
    except VitseeError:
        raise
    except OSError as error:
        raise VitseeError(f"{path} cannot be read: {reason(error)}") from None
    except Exception as error:  # numpy, torch, csv and polars raise nearly anything
        raise VitseeError(f"{path} is no {what}: {one_line(error)}") from None


def _npy(path: Path) -> Arrays:
    return Arrays({path.stem: np.lib.format.open_memmap(path, mode="r")})


def _npz(path: Path) -> Arrays:
    return Arrays(read_npz(path, str(path)))


def _pt(path: Path) -> Arrays:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # the unpickler raises nearly anything on damaged files
        raise VitseeError(f"{path} is no file of tensors alone: {one_line(error)}") from None
    tensors = {path.stem: found} if isinstance(found, torch.Tensor) else found
    if not isinstance(tensors, Mapping):
        raise VitseeError(f"{path} holds a {type(found).__name__}; expected tensors by name")
    arrays = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            if value.nbytes > value.untyped_storage().nbytes():
                raise VitseeError(
                    f"{path}: {name} is {tuple(value.shape)}, of which the file has "
                    f"{human_bytes(value.untyped_storage().nbytes())}; expected all of its numbers"
                )
            arrays[str(name)] = value.float() if value.dtype is torch.bfloat16 else value
    return Arrays({name: value.numpy() for name, value in arrays.items()})


def _safetensors(path: Path) -> Arrays:
    from safetensors.numpy import load_file

    return Arrays(load_file(path))


def _csv_columns(path: Path) -> dict[str, Sequence[Any]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    if len(rows) < 2:
        raise VitseeError(f"{path} has {len(rows)} rows; expected names of columns and numbers")
    names, *body = rows
    if uneven := [at for at, row in enumerate(body, 2) if len(row) != len(names)]:
        raise VitseeError(
            f"{path}: line {uneven[0]} has {len(body[uneven[0] - 2])} cells; expected {len(names)}"
        )
    return dict(zip(names, zip(*body, strict=True), strict=True))


def _parquet_columns(path: Path) -> dict[str, Sequence[Any]]:
    frame = read_parquet(path.read_bytes())
    return {column.name: column.to_list() for column in frame.get_columns()}


def _of_columns(read: Callable[[Path], dict[str, Sequence[Any]]]) -> Callable[[Path], Arrays]:
    def arrays(path: Path) -> Arrays:
        columns = read(path)
        ids, labels = ([*map(str, columns[n])] if n in columns else None for n in (ID, LABEL))
        numbers: dict[str, Array] = {}
        for name, cells in columns.items():
            if name in ABOUT:
                continue
            try:
                numbers[name] = np.array(cells, np.float64)
            except (ValueError, TypeError):
                words = (f"{str(cell)[:40]!r}" for cell in cells if not _is_number(cell))
                found = next(words, "lists of different lengths")
                raise VitseeError(
                    f"{path}: column {name} holds {found}; expected numbers in every column "
                    f"but {', '.join(ABOUT)}"
                ) from None
        lists = {name: values for name, values in numbers.items() if values.ndim > 1}
        flat = {name: values for name, values in numbers.items() if values.ndim == 1}
        if flat:
            lists[path.stem] = np.stack([*flat.values()], 1)
        return Arrays(lists, ids, labels, {path.stem: [*flat]} if flat else {})

    return arrays


def _is_number(cell: Any) -> bool:
    try:
        np.float64(cell)
    except (ValueError, TypeError):
        return False
    return True


_TABLES = {".csv": _csv_columns, ".tsv": _csv_columns, ".parquet": _parquet_columns}
_READERS: dict[str, Callable[[Path], Arrays]] = {
    **{".npy": _npy, ".npz": _npz, ".pt": _pt, ".pth": _pt, ".safetensors": _safetensors},
    **{ending: _of_columns(read) for ending, read in _TABLES.items()},
}
