"""Images in parquet files: Hugging Face's struct of `bytes` and `path`, or a column of bytes.

A row is read with its row group, the smallest part of a parquet file that can be read; the last
few groups stay in memory. In random order nearly every image reads a whole group, for which groups
of a hundred rows, as Hugging Face writes them, are small enough.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import NAN
from vitsee_core.images.decoding import MAX_BYTES, Opener, one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import SPLIT_NAMES, ImageSource
from vitsee_core.images.sources.base import (
    Coded,
    MatchedFiles,
    SourceRequest,
    labels_of_files,
    no_answer,
    strings,
)
from vitsee_core.images.sources.parquet_columns import (
    NAMES,
    NUMBERS,
    PATH,
    ParquetColumns,
    choose_columns,
    coded_labels,
    declared_class_names,
    kind_of_labels,
    nulls_are_nan,
)
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.progress import counting
from vitsee_stores.errors import reason
from vitsee_stores.files import Files, NoAnswer

CACHED_GROUPS = 2  # row groups that a process keeps in memory
CACHED_FILES = 64  # opened files that a process keeps
LARGE_GROUP_BYTES = 64 << 20
_MAX_ROWS_TRIED = 4  # of which one must be an image

log = logging.getLogger(__name__)
_reading = threading.Lock()


@dataclass(frozen=True)
class _ParquetIndex:
    """The columns that are read when a data set is opened: all but the images.

    Attributes:
        columns: the columns of images and labels.
        paths: (rows,) the images' paths, "" for none.
        labels: (rows,) index into the label texts, and these.
        class_names: the names that Hugging Face's metadata declares, None without.
        label_kind: `NUMBERS` or `NAMES`; "" for no labels, or those that may be both.
        group_rows: (row groups,) the number of rows of each.
        group_bytes: the size of the largest row group.
    """

    columns: ParquetColumns
    paths: NDArray[Any]
    labels: Coded
    class_names: list[str] | None
    label_kind: str
    group_rows: NDArray[np.int64]
    group_bytes: int


def open_parquet(request: SourceRequest, matched: MatchedFiles) -> ImageSource:
    """Return the rows of parquet files, in the order of the files' names, then of their rows.

    The image column is `--image-column`, or the only column of images. Labels are numbers or names
    in `--label-column`, or in `label` or a column named alike; names of numbers come from Hugging
    Face's metadata. A row's id is its image's path if all rows have distinct paths, else the file's
    name without suffix, a slash and the row's number. If all files are called like
    `train-00000-of-00004`, the first word is their split.

    Raises:
        DataError: pyarrow is missing, a file is damaged, columns differ or hold no images.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{request.data} needs pyarrow; run: pip install 'vitsee[parquet]'"
        )

    def read(name: str) -> _ParquetIndex:
        """Return the index of a file; called in threads where a server answers."""
        try:
            index = _index_parquet(request, matched.files, name)
        except DataError as error:
            raise DataError(f"{matched.shown(name)} {error}") from None
        except NoAnswer as error:
            raise no_answer(matched.shown(name), error) from None
        except Exception as error:  # pyarrow raises nearly anything on damaged files
            why = reason(error) if isinstance(error, OSError) else one_line(error)
            why = " ".join(why.split()).rstrip(".")
            raise DataError(
                f"{matched.shown(name)} cannot be read as parquet: {why}"
            ) from None
        progress.advance(1)
        return index

    names = sorted(matched.names)
    with counting(request.progress, len(names), "parquet files") as progress:
        indexes = matched.files.each_in_threads(read, names)
    columns = indexes[0].columns
    for name, index in zip(names, indexes, strict=True):
        if index.columns != columns:
            raise DataError(
                f"{matched.shown(name)} has other columns than {matched.shown(names[0])} "
                f"({index.columns.encoded} against {columns.encoded}, labels in "
                f"{index.columns.label} against {columns.label}); expected files that are alike"
            )
    _check_label_kinds(matched, names, indexes)
    stems = [PurePosixPath(name).stem for name in names]
    lengths = [len(index.paths) for index in indexes]
    opener = ParquetOpener(
        files=matched.files,
        names=tuple(names),
        column=columns.image,
        field=columns.field,
    )
    locations = _ParquetLocations([index.group_rows for index in indexes])
    _check_images(request, opener, locations, columns.image)
    largest = max(index.group_bytes for index in indexes)
    if largest > LARGE_GROUP_BYTES:
        log.info(
            "%s has row groups of up to %s, and in random order nearly every image reads one: "
            "--order dataset reads each once, a folder or tar files need no such reads",
            request.data,
            human_bytes(largest),
        )
    try:
        labels, class_names = labels_of_files(index.labels for index in indexes)
    except DataError as error:
        raise DataError(
            f"the column {columns.label!r} of {request.data}: {error}"
        ) from None
    declared_names = indexes[0].class_names
    largest_label = int(labels.max(initial=-1))
    if class_names is None and declared_names and largest_label < len(declared_names):
        class_names = declared_names
    split_names = [stem.partition("-")[0] for stem in stems]
    if not all(name.lower() in SPLIT_NAMES for name in split_names):
        split_names = [""] * len(stems)
    splits = [
        split for split, n in zip(split_names, lengths, strict=True) for _ in range(n)
    ]
    ids = _row_ids(np.concatenate([index.paths for index in indexes]), stems, lengths)
    return ImageSource(
        name=request.data,
        opener=opener,
        locations=cast(Sequence[Any], locations),
        ids=cast(Sequence[str], ids),
        labels=labels,
        splits=splits,
        class_names=class_names,
    )


def _check_label_kinds(
    matched: MatchedFiles, names: Sequence[str], indexes: Sequence[_ParquetIndex]
) -> None:
    """Refuse labels that are numbers in one file and names in another: cat and 0 may be one class.

    Args:
        matched: the files.
        names: their names.
        indexes: their indexes, in the same order.

    Raises:
        DataError: names a file of either kind.
    """
    name_of_kind: dict[str, str] = {}
    for name, index in zip(names, indexes, strict=True):
        if index.label_kind:
            name_of_kind.setdefault(index.label_kind, name)
    if len(name_of_kind) > 1:
        raise DataError(
            f"the column {indexes[0].columns.label!r} has numbers in "
            f"{matched.shown(name_of_kind[NUMBERS])} and names in "
            f"{matched.shown(name_of_kind[NAMES])}; expected labels of one kind "
            "(--label-column COLUMN names another, or none)"
        )


def _row_ids(
    paths: NDArray[Any], stems: Sequence[str], lengths: Sequence[int]
) -> NDArray[Any]:
    """Return the (rows,) ids: the paths if all are distinct, else file name and row number.

    Args:
        paths: (rows,) the images' paths, "" for none.
        stems: the files' names without suffix.
        lengths: the files' numbers of rows.
    """
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
    request: SourceRequest,
    opener: ParquetOpener,
    locations: _ParquetLocations,
    column: str,
) -> None:
    """Raise DataError if none of the first rows has an image."""
    if not len(locations):
        raise DataError(f"{request.data} has no rows; expected images")
    first_error = None
    for row in range(min(_MAX_ROWS_TRIED, len(locations))):
        try:
            opener.size(locations[row])
            return
        except ImageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise DataError(
        f"the column {column!r} of {request.data} holds no images (row 0: "
        f"{first_error.reason}); name another with --image-column"
    )


def _index_parquet(request: SourceRequest, files: Files, name: str) -> _ParquetIndex:
    """Return the index of a parquet file, for which its paths and labels are read.

    Raises:
        DataError: the file is damaged, or has no such columns.
    """
    file = _open_parquet_file(files, name)
    schema = file.schema_arrow
    columns = choose_columns(request, schema)
    groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
    group_rows = np.array([group.num_rows for group in groups], np.int64)
    # The size of all columns, since reading a single column's size from damaged metadata makes
    # pyarrow end the process.
    largest_group = max((group.total_byte_size for group in groups), default=0)
    n_rows = file.metadata.num_rows
    n_in_groups = int(group_rows.sum())
    if (group_rows < 0).any() or n_in_groups != n_rows:
        raise DataError(f"is damaged: {n_rows} rows, and {n_in_groups} in its groups")
    paths: NDArray[Any] = strings([""]).repeat(n_rows)
    if columns.nested and schema.field(columns.image).type.get_field_index(PATH) >= 0:
        path_column = _read_column(file, columns.image, PATH)
        paths = strings(path or "" for path in path_column.to_pylist())
        _check_length(len(paths), n_rows)
    codes = np.full(len(paths), -1, np.int32)
    texts: list[str] = []
    label_kind = ""
    if columns.label is not None:
        label_column = _read_column(file, columns.label).combine_chunks()
        missing = NAN if nulls_are_nan(schema, columns.label) else ""
        codes, texts = coded_labels(label_column, missing)
        _check_length(len(codes), n_rows)
        label_kind = kind_of_labels(label_column.type, texts)
    return _ParquetIndex(
        columns=columns,
        paths=paths,
        labels=(codes, texts),
        class_names=declared_class_names(schema, columns.label),
        label_kind=label_kind,
        group_rows=group_rows,
        group_bytes=largest_group,
    )


def _check_length(n_values: int, n_rows: int) -> None:
    """Raise DataError if a column has another number of rows than its file says."""
    if n_values != n_rows:
        raise DataError(
            f"is damaged: {n_rows} rows, and {n_values} in one of its columns"
        )


class _ParquetLocations:
    """The locations of a `ParquetOpener`, each made when it is indexed.

    Args:
        group_rows: of each file, the number of rows of its row groups.
    """

    def __init__(self, group_rows: Sequence[NDArray[np.int64]]) -> None:
        rows = np.concatenate(group_rows)
        counts = [len(rows_of_file) for rows_of_file in group_rows]
        # (row groups of all files,): the file, the number in the file, and the range of rows
        self._file = np.repeat(np.arange(len(counts)), counts)
        self._group = np.concatenate([np.arange(count) for count in counts])
        self._end = np.cumsum(rows)
        self._start = self._end - rows

    def __len__(self) -> int:
        return int(self._end[-1]) if len(self._end) else 0

    def __getitem__(self, row: int) -> tuple[int, int, int]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        k = int(
            np.searchsorted(self._end, row, "right")
        )  # the row group that has the row
        return int(self._file[k]), int(self._group[k]), int(row - self._start[k])


@dataclass(frozen=True)
class ParquetOpener(Opener):
    """Opens rows of parquet files; a location is (index of the file, row group, row in it).

    Attributes:
        files: the folder or URL of the files.
        names: the files' names.
        column: the column of images.
        field: its field with the encoded images, "" for the column itself.
    """

    files: Files
    names: tuple[str, ...]
    column: str
    field: str = ""

    def _bytes(self, location: tuple[int, int, int]) -> bytes:
        """Return the bytes of a row; raise ImageError if it has none or the file is damaged."""
        from pyarrow import ArrowException

        file_index, group, row = location
        file_name = self.names[file_index]
        name = f"row {row} of group {group} of {file_name}"
        try:
            # Locked, since an opened file can be read by one thread at a time, and so that several
            # threads do not read the same group.
            with _reading:
                rows = _read_group(self.files, file_name, self.column, self.field, group)
        except (ArrowException, MemoryError) as error:
            why = f"the parquet file is damaged: {one_line(error)}"
            raise ImageError(name, why) from None
        if row >= len(rows):
            why = f"the parquet file is damaged: the group has {len(rows)} rows, fewer than it says"
            raise ImageError(name, why)
        scalar = rows[row]
        if not scalar.is_valid:
            raise ImageError(name, "the row has no image")
        encoded = scalar.as_buffer()
        if encoded.size > MAX_BYTES:
            raise ImageError(name, f"has {encoded.size} bytes")
        return encoded.to_pybytes()


@functools.lru_cache(CACHED_FILES)
def _open_parquet_file(files: Files, name: str) -> Any:
    """Return pyarrow's ParquetFile, whose metadata are read once."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(_RangedFile(files, name))


@functools.lru_cache(CACHED_GROUPS)
def _read_group(files: Files, name: str, column: str, field: str, group: int) -> Any:
    """Return a column of a row group, or a field of it, as a pyarrow ChunkedArray."""
    return _read_column(_open_parquet_file(files, name), column, field, group)


def _read_column(file: Any, name: str, field: str = "", group: int | None = None) -> Any:
    """Return a column, or a field of a column of structs, as a pyarrow ChunkedArray.

    It has the rows of a row group, or all rows without a group. The name of a column may have dots.
    """
    from pyarrow import chunked_array

    path = f"{name}.{field}" if field else name
    if group is None:
        table = file.read(columns=[path], use_threads=False)
    else:
        table = file.read_row_group(group, columns=[path], use_threads=False)
    # By name: `a.b` is also the path of the field b of a column a.
    column = table.column(name)
    if not field:
        return column
    # `flatten` makes the fields of a null struct null; `field` would give them some value.
    fields = [chunk.flatten()[0] for chunk in column.chunks]
    return chunked_array(fields, column.type.field(0).type)


class _RangedFile(io.RawIOBase):
    """A file object for pyarrow that reads ranges of a file in a folder or at a URL."""

    def __init__(self, files: Files, name: str) -> None:
        self._files = files
        self._name = name
        self._position = 0
        self._size, _ = files.stamp(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[
            whence
        ]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        data = self._files.read_range(self._name, self._position, length)
        self._position += length
        return data
