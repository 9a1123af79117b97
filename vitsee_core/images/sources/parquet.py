"""Images in parquet files: Hugging Face's struct of `bytes` and `path`, or a column of bytes.

A row is read with its row group, the smallest part that parquet gives out; the last few groups stay
in memory. In random order nearly every image reads a group: groups of a hundred rows, as Hugging
Face writes them, are made for that.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import NO_LABELS, label_text
from vitsee_core.images.decoding import MAX_BYTES, Opener, one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import SPLIT_NAMES, ImageSource
from vitsee_core.images.sources.base import (
    Coded,
    MatchedFiles,
    SourceRequest,
    labels_of,
    no_answer,
    strings,
)
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import counting
from vitsee_stores.errors import reason
from vitsee_stores.files import Files, NoAnswer

LABELS = ("label", "labels", "fine_label", "cls", "class")
# row groups and opened files that a process keeps
GROUPS = 2
FILES = 64
LARGE_GROUP_BYTES = 64 << 20
_TRIED = 4  # rows, of which one must be an image

log = logging.getLogger(__name__)
_reading = threading.Lock()


@dataclass(frozen=True)
class _Columns:
    """The columns that are read. nested: whether images are structs with `bytes` and `path`."""

    image: str
    nested: bool
    label: str | None

    @property
    def encoded(self) -> str:
        return f"{self.image}.bytes" if self.nested else self.image


@dataclass(frozen=True)
class _Rows:
    columns: _Columns
    paths: NDArray[Any]  # "" for none
    labels: Coded
    class_names: list[str] | None
    group_rows: NDArray[np.int64]
    group_bytes: int  # of the largest


def open_parquet(asked: SourceRequest, found: MatchedFiles) -> ImageSource:
    """The rows of parquet files, in the order of the files' names, then of their rows.

    The image column is the only one of images, or `--image-column`; labels are numbers or names in
    `label` (or the like), or in `--label-column`; names of numbers come from Hugging Face's
    metadata. A row's id is its image's path where all rows have one of their own, else the file's
    name without suffix, a slash and the row's number. Where all files are called like
    `train-00000-of-00004`, that is their split. Raises DataError: pyarrow is missing, a damaged
    file, columns that differ or hold no images.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{asked.data} needs pyarrow; run: pip install 'vitsee[parquet]'")

    def read(name: str) -> _Rows:
        try:
            rows = _read(asked, found.files, name)
        except DataError as error:
            raise DataError(f"{found.shown(name)} {error}") from None
        except NoAnswer as error:
            raise no_answer(found.shown(name), error) from None
        except Exception as error:  # pyarrow raises nearly anything on damaged files
            why = reason(error) if isinstance(error, OSError) else one_line(error)
            why = " ".join(why.split()).rstrip(".")
            raise DataError(
                f"{found.shown(name)} cannot be read as parquet: {why}"
            ) from None
        progress.advance(1)
        return rows

    names = sorted(found.names)
    with counting(asked.progress, len(names), "parquet files") as progress:
        files = found.files.each(read, names)
    columns = files[0].columns
    for name, own in zip(names, files, strict=True):
        if own.columns != columns:
            raise DataError(
                f"{found.shown(name)} has other columns than {found.shown(names[0])} "
                f"({own.columns.encoded} against {columns.encoded}, labels in "
                f"{own.columns.label} against {columns.label}); expected files that are alike"
            )
    stems = [PurePosixPath(name).stem for name in names]
    lengths = [len(own.paths) for own in files]
    opener = ParquetOpener(found.files, tuple(names), columns.encoded)
    places = _Places([own.group_rows for own in files])
    _check_images(asked, opener, places, columns.image)
    if (largest := max(own.group_bytes for own in files)) > LARGE_GROUP_BYTES:
        log.info(
            "%s has row groups of up to %s, and in random order nearly every image reads one: "
            "--order dataset reads each once, a folder or tar files need no such reads",
            *(asked.data, human_bytes(largest)),
        )
    try:
        labels, class_names = labels_of(own.labels for own in files)
    except DataError as error:
        raise DataError(
            f"the column {columns.label!r} of {asked.data}: {error}"
        ) from None
    named = files[0].class_names
    if class_names is None and named and int(labels.max(initial=-1)) < len(named):
        class_names = named
    split_names = [stem.partition("-")[0] for stem in stems]
    if not all(name.lower() in SPLIT_NAMES for name in split_names):
        split_names = [""] * len(stems)
    splits = [
        split for split, n in zip(split_names, lengths, strict=True) for _ in range(n)
    ]
    ids = _ids(np.concatenate([own.paths for own in files]), stems, lengths)
    locations = cast(Sequence[Any], places)
    rows = cast(Sequence[str], ids)
    return ImageSource(asked.data, opener, locations, rows, labels, splits, class_names)


def _ids(
    paths: NDArray[Any], stems: Sequence[str], lengths: Sequence[int]
) -> NDArray[Any]:
    """The paths, if each row has one of its own; else names of files and numbers of rows."""
    ordered = np.sort(paths)
    if (paths != "").all() and not (ordered[1:] == ordered[:-1]).any():
        return paths
    if len(set(stems)) < len(stems):
        stems = [f"{file}-{stem}" for file, stem in enumerate(stems)]
    rows = (
        f"{stem}/{k}" for stem, n in zip(stems, lengths, strict=True) for k in range(n)
    )
    return strings(rows)


def _check_images(
    asked: SourceRequest, opener: ParquetOpener, places: _Places, column: str
) -> None:
    if not len(places):
        raise DataError(f"{asked.data} has no rows; expected images")
    first = None
    for row in range(min(_TRIED, len(places))):
        try:
            opener.size(places[row])
            return
        except ImageError as error:
            first = first or error
    assert first is not None
    raise DataError(
        f"the column {column!r} of {asked.data} holds no images (row 0: {first.reason}); name "
        "another with --image-column"
    )


def _read(asked: SourceRequest, files: Files, name: str) -> _Rows:
    file = _opened(files, name)
    schema = file.schema_arrow
    columns = _columns(asked, schema)
    about = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
    rows = np.array([group.num_rows for group in about], np.int64)
    # Of all columns: what pyarrow has of a single one ends the process where it is damaged.
    largest = max((group.total_byte_size for group in about), default=0)
    n_rows = file.metadata.num_rows
    if (rows < 0).any() or int(rows.sum()) != n_rows:
        raise DataError(f"is damaged: {n_rows} rows, and {int(rows.sum())} in its groups")
    paths: NDArray[Any] = strings([""]).repeat(int(rows.sum()))
    if columns.nested and schema.field(columns.image).type.get_field_index("path") >= 0:
        found = _column(file, f"{columns.image}.path")
        paths = strings(path or "" for path in found.to_pylist())
        _check_length(len(paths), n_rows)
    labels: Coded = np.full(len(paths), -1, np.int32), []
    if columns.label is not None:
        coded = _column(file, columns.label).combine_chunks().dictionary_encode()
        codes = (
            coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        )
        texts = [label_text(value) for value in coded.dictionary.to_pylist()]
        labels = codes, texts
        _check_length(len(codes), n_rows)
    return _Rows(
        columns, paths, labels, _class_names(schema, columns.label), rows, largest
    )


def _label_kinds() -> tuple[Callable[[Any], bool], ...]:
    """pyarrow's tests of the types that hold labels; floats may be whole numbers with gaps."""
    from pyarrow import types

    return (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
        types.is_string,
        types.is_large_string,
    )


def _check_length(n_values: int, n_rows: int) -> None:
    """Raises DataError: a column has other rows than its file says."""
    if n_values != n_rows:
        raise DataError(
            f"is damaged: {n_rows} rows, and {n_values} in one of its columns"
        )


def _columns(asked: SourceRequest, schema: Any) -> _Columns:
    from pyarrow import types

    def of_bytes(kind: Any) -> bool:
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    def nested(kind: Any) -> bool:
        fields = kind if types.is_struct(kind) else ()
        return any(field.name == "bytes" and of_bytes(field.type) for field in fields)

    kinds = {field.name: field.type for field in schema}
    listed = ", ".join(f"{name} ({str(kind)[:40]})" for name, kind in kinds.items())
    label_column = asked.label_column
    without_labels = label_column == NO_LABELS and NO_LABELS not in kinds
    if without_labels:
        label_column = None
    for which, given in (("image", asked.image_column), ("label", label_column)):
        if given is not None and given not in kinds:
            raise DataError(
                f"has no column {given!r} (--{which}-column); it has: {listed}"
            )
    structs = [name for name, kind in kinds.items() if nested(kind)]
    candidates = structs or [name for name, kind in kinds.items() if of_bytes(kind)]
    if asked.image_column is None and len(candidates) != 1:
        raise DataError(
            f"has {len(candidates)} columns of images; choose one with --image-column of: {listed}"
        )
    image = asked.image_column or candidates[0]
    if not nested(kinds[image]) and not of_bytes(kinds[image]):
        raise DataError(
            f"has no images in the column {image!r}, which is {str(kinds[image])[:60]}; expected "
            "bytes, or a struct with bytes and path"
        )
    label = label_column or next((name for name in LABELS if name in kinds), None)
    if without_labels:
        label = None
    if label is not None:
        kind = kinds[label]
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not any(is_kind(kind) for is_kind in _label_kinds()):
            raise DataError(
                f"has no labels in the column {label!r}, which is {str(kind)[:60]}; expected "
                "class numbers or names (--label-column COLUMN names another, or none)"
            )
    return _Columns(image, nested(kinds[image]), label)


def _class_names(schema: Any, label: str | None) -> list[str] | None:
    """Names of the classes, from what Hugging Face's library writes beside the schema."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in about["info"]["features"][label]["names"]]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


class _Places:
    """The locations of a `ParquetOpener`: (file, row group, row in it)."""

    def __init__(self, group_rows: Sequence[NDArray[np.int64]]) -> None:
        rows = np.concatenate(group_rows)
        counts = [len(own) for own in group_rows]
        self._file = np.repeat(np.arange(len(counts)), counts)
        self._group = np.concatenate([np.arange(count) for count in counts])
        self._end = np.cumsum(rows)
        self._start = self._end - rows

    def __len__(self) -> int:
        return int(self._end[-1]) if len(self._end) else 0

    def __getitem__(self, row: int) -> tuple[int, int, int]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        at = int(np.searchsorted(self._end, row, "right"))
        return int(self._file[at]), int(self._group[at]), int(row - self._start[at])


@dataclass(frozen=True)
class ParquetOpener(Opener):
    """Rows of parquet files; a location is (file, row group, row in it). column: of the bytes."""

    files: Files
    names: tuple[str, ...]
    column: str

    def _bytes(self, location: tuple[int, int, int]) -> bytes:
        from pyarrow import ArrowException

        file, group, row = location
        name = f"row {row} of group {group} of {self.names[file]}"
        try:
            with _reading:  # a file is read in one thread, and each group once
                rows = _group(self.files, self.names[file], self.column, group)
        except (ArrowException, MemoryError) as error:
            why = f"the parquet file is damaged: {one_line(error)}"
            raise ImageError(name, why) from None
        if row >= len(rows):
            why = f"the parquet file is damaged: the group has {len(rows)} rows, fewer than it says"
            raise ImageError(name, why)
        found = rows[row]
        if not found.is_valid:
            raise ImageError(name, "the row has no image")
        encoded = found.as_buffer()
        if encoded.size > MAX_BYTES:
            raise ImageError(name, f"has {encoded.size} bytes")
        return encoded.to_pybytes()


@functools.lru_cache(FILES)
def _opened(files: Files, name: str) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(_Ranged(files, name))


@functools.lru_cache(GROUPS)
def _group(files: Files, name: str, column: str, group: int) -> Any:
    return _column(_opened(files, name), column, group)


def _column(file: Any, name: str, group: int | None = None) -> Any:
    """A column, or a field of a struct, in chunks; of all rows, or of a row group."""
    from pyarrow import chunked_array

    read = file.read if group is None else functools.partial(file.read_row_group, group)
    found = read(columns=[name], use_threads=False).column(0)
    if "." not in name:
        return found
    # A struct that is null has fields that are.
    return chunked_array(
        [chunk.flatten()[0] for chunk in found.chunks], found.type.field(0).type
    )


class _Ranged(io.RawIOBase):
    def __init__(self, files: Files, name: str) -> None:
        self._files = files
        self._name = name
        self._at = 0
        self._size, _ = files.stamp(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        data = self._files.read_range(self._name, self._at, length)
        self._at += length
        return data
