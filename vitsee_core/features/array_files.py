"""Arrays, image ids and labels from files of other tools, as `vitsee import` reads them.

What each kind of file holds:

.npy               one array
.npz               one array per key
.pt, .pth          a tensor, or a dictionary of tensors; read with weights_only
.safetensors       one tensor per key
.csv, .tsv         a row per image; columns id and label, the others are the vector
.parquet           the same; a column of lists is a vector by itself (as vitsee export writes)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import label_text
from vitsee_core.images.decoding import one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.sources.arrays import read_npz
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.tables.delimited import as_numbers, read_cells
from vitsee_core.tables.formats import ending_of, read_parquet
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError, reason

Array = NDArray[Any]
Columns = Mapping[str, Sequence[Any]]
T = TypeVar("T")
ID = "id"
LABEL = "label"
# Columns that `vitsee export` writes beside the features: they are not numbers of the vector.
SAMPLE_COLUMNS = (ID, LABEL, "row", "index", "split")
EXPECTED = "expected names of columns and numbers"
NUMBERS = f"expected numbers in every column but {', '.join(SAMPLE_COLUMNS)}"


@dataclass(frozen=True)
class Arrays:
    """The arrays of one file, and what it says about their images.

    Attributes:
        values: name -> (images, ...) array.
        ids: id of each image; None if the file has none.
        labels: label of each image, "" for none; None if the file has none.
        columns: name of a vector that was made of table columns -> names of its entries.
    """

    values: dict[str, Array]
    ids: list[str] | None = None
    labels: list[str] | None = None
    columns: dict[str, list[str]] = field(default_factory=dict)


def read_arrays(path: Path) -> Arrays:
    """Return all arrays of a file, whose ending says how it is read.

    Raises:
        VitseeError: another ending, a file that cannot be read, or an array that is not numbers
            in (images, dim) or (images, tokens, dim).
    """
    ending = ending_of(path, (*_ARRAY_READERS, *_TABLE_READERS), "an import")
    read = _ARRAY_READERS.get(ending, _read_table_arrays)
    arrays = _read_or_refuse(read, path, f"{ending} file of numbers")
    for name, values in arrays.values.items():
        if values.dtype.kind not in "fiub" or values.ndim < 2:
            raise VitseeError(
                f"{path}: {name} has {values.ndim} axes of {values.dtype}; expected "
                "numbers, (images, dim) or (images, tokens, dim)"
            )
        if 0 in values.shape[1:]:
            raise VitseeError(
                f"{path}: {name} is {values.shape}; expected a number an image"
            )
    if not arrays.values:
        raise VitseeError(f"{path} has no array; expected one of numbers")
    return arrays


def read_ids(path: Path) -> tuple[list[str], list[str] | None]:
    """Return the image ids of a file, and the labels if it has them.

    The file is a text with an id per line, which has no labels, or a table with a column id
    (`vitsee export --samples` writes one).

    Raises:
        VitseeError: the file cannot be read, or has no ids.
    """
    if path.suffix.lower() == ".txt":
        try:
            return path.read_text("utf-8-sig").splitlines(), None
        except (OSError, UnicodeDecodeError) as error:
            raise VitseeError(f"{path} cannot be read: {error}") from None
    ending = ending_of(path, (".txt", *_TABLE_READERS), "ids")
    columns = _read_or_refuse(_TABLE_READERS[ending], path, f"{ending} table")
    if ID not in columns:
        raise VitseeError(
            f"{path} has columns {', '.join(columns)}; expected one called {ID}"
        )
    return _ids_in_columns(columns, path), _labels_in_columns(columns, path)


def _ids_in_columns(columns: Columns, path: Path) -> list[str]:
    """Return the ids of a table as text, numbers as they were read.

    Raises:
        VitseeError: a row has no id.
    """
    ids = columns[ID]
    if None in ids:
        raise VitseeError(
            f"{path}: row {list(ids).index(None)} has no {ID}; expected one a row"
        )
    return [str(value) for value in ids]


def _labels_in_columns(columns: Columns, path: Path) -> list[str] | None:
    """Return the labels of a table as text, "" for none; None without a column of labels.

    Raises:
        VitseeError: a label that is neither a text nor a number.
    """
    if LABEL not in columns:
        return None
    try:
        return [label_text(value) for value in columns[LABEL]]
    except DataError as error:
        raise VitseeError(f"{path}: {error}") from None


def _read_or_refuse(read: Callable[[Path], T], path: Path, kind: str) -> T:
    """Return `read(path)`; turn every error of a damaged file into one line.

    Warnings of the libraries are dropped: the error line, if any, says what is wrong.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(path)
    except VitseeError:
        raise
    except OSError as error:
        raise VitseeError(f"{path} cannot be read: {reason(error)}") from None
    except Exception as error:  # numpy, torch, csv and polars raise nearly anything
        raise VitseeError(f"{path} is no {kind}: {one_line(error)}") from None


def _read_npy(path: Path) -> Arrays:
    """Return the array of a .npy file, named like the file."""
    # A memory map: rows are read slab by slab, so that arrays beyond the memory can be imported.
    return Arrays({path.stem: np.lib.format.open_memmap(path, mode="r")})


def _read_npz(path: Path) -> Arrays:
    """Return the arrays of a .npz file by their keys."""
    return Arrays(read_npz(path, str(path)))


def _read_torch_file(path: Path) -> Arrays:
    """Return the tensors of a file of `torch.save`; other values in its dictionary are skipped.

    No code of the file is run.

    Raises:
        VitseeError: another content, or a tensor of more numbers than the file has.
    """
    # Imported here, as torch takes seconds to load and other files do not need it.
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # the unpickler raises nearly anything on damaged files
        raise VitseeError(
            f"{path} is no file of tensors alone: {one_line(error)}"
        ) from None
    tensors = {path.stem: content} if isinstance(content, torch.Tensor) else content
    if not isinstance(tensors, Mapping):
        raise VitseeError(
            f"{path} holds a {type(content).__name__}; expected tensors by name"
        )
    arrays = {}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            continue
        # An expanded view: a few bytes in the file could ask for any amount of memory.
        if value.nbytes > value.untyped_storage().nbytes():
            raise VitseeError(
                f"{path}: {name} is {tuple(value.shape)}, of which the file has "
                f"{human_bytes(value.untyped_storage().nbytes())}; expected all of its "
                "numbers"
            )
        # NumPy does not have bfloat16; float32 holds all of its values.
        if value.dtype is torch.bfloat16:
            value = value.float()
        arrays[str(name)] = value
    return Arrays({name: value.numpy() for name, value in arrays.items()})


def _read_safetensors(path: Path) -> Arrays:
    """Return the tensors of a .safetensors file by their keys."""
    from safetensors.numpy import load_file

    return Arrays(load_file(path))


def _read_delimited_columns(path: Path) -> Columns:
    """Return the columns of a .csv or .tsv: numbers where all cells are numbers, else text.

    Columns about the images, as `vitsee export` names them, are text in any case.

    Raises:
        VitseeError: no rows, a column without a name, or a column of numbers with an empty cell.
    """
    # Cells are read as text, because ids such as 007 must keep their zeros.
    frame, decimal_comma = read_cells(
        path,
        path.read_bytes(),
        path.suffix.lower(),
        number_type=lambda name: None,
        expected=EXPECTED,
    )
    if not len(frame):
        # A frame without columns has not even a header.
        raise VitseeError(f"{path} has {frame.width and 1} rows; {EXPECTED}")
    columns = dict[str, Sequence[Any]]()
    for column in frame.get_columns():
        if not column.name:
            raise VitseeError(
                f"{path}: a column has no name, as that of row numbers which pandas "
                "writes (to_csv(index=False) leaves it out); expected a name for each "
                "column"
            )
        numbers = None
        if column.name not in SAMPLE_COLUMNS:
            numbers = as_numbers(column, decimal_comma=decimal_comma)
        if numbers is None:
            columns[column.name] = column.fill_null("").to_list()
            continue
        if numbers.null_count():
            raise VitseeError(f"{path}: column {column.name} holds ''; {NUMBERS}")
        columns[column.name] = numbers.cast(pl.Float64).to_list()
    return columns


def _read_parquet_columns(path: Path) -> Columns:
    """Return the columns of a .parquet file; cells may be lists."""
    frame = read_parquet(path.read_bytes())
    return {column.name: column.to_list() for column in frame.get_columns()}


def _read_table_arrays(path: Path) -> Arrays:
    """Return the arrays of a table: one per column of lists, and one of all columns of numbers.

    The latter is named like the file, and its entries are in the order of the columns.

    Raises:
        VitseeError: a cell that is not a number, or lists of different lengths.
    """
    columns = _TABLE_READERS[path.suffix.lower()](path)
    ids = _ids_in_columns(columns, path) if ID in columns else None
    labels = _labels_in_columns(columns, path)
    vectors: dict[str, Array] = {}
    scalars: dict[str, Array] = {}
    for name, cells in columns.items():
        if name in SAMPLE_COLUMNS:
            continue
        try:
            numbers = np.array(cells, np.float64)
        except (ValueError, TypeError):
            raise VitseeError(
                f"{path}: column {name} holds {_describe_bad_cell(cells)}; {NUMBERS}"
            ) from None
        if numbers.ndim > 1:
            vectors[name] = numbers
        else:
            scalars[name] = numbers
    entry_names = {}
    if scalars:
        vectors[path.stem] = np.stack(list(scalars.values()), axis=1)
        entry_names[path.stem] = list(scalars)
    return Arrays(vectors, ids, labels, entry_names)


def _describe_bad_cell(cells: Sequence[Any]) -> str:
    """Return the first cell that is not a number, cut to 40 characters.

    If each cell by itself can be converted, they are lists of different lengths.
    """
    for cell in cells:
        try:
            np.float64(cell)
        except (ValueError, TypeError):
            return f"{str(cell)[:40]!r}"
    return "lists of different lengths"


_TABLE_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _read_delimited_columns,
    ".tsv": _read_delimited_columns,
    ".parquet": _read_parquet_columns,
}
# The order of both is that of the endings in messages.
_ARRAY_READERS: dict[str, Callable[[Path], Arrays]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_torch_file,
    ".pth": _read_torch_file,
    ".safetensors": _read_safetensors,
}
