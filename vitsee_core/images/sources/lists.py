"""Lists of images.

These are CSV and TSV files with path, label, split, id and box, text files with a path on each
line, and the labels of ImageNet's validation images in the forms in which ImageNet has them.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.images.class_labels import class_labels
from vitsee_core.images.decoding import FileOpener, one_line
from vitsee_core.images.errors import DataError, ImageError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.placement import Box, BoxOpener, box_pixels, box_text, parse_box
from vitsee_core.images.sources.base import expand_braces
from vitsee_core.tables.delimited import (
    as_utf_8,
    declared_separator,
    rows_of,
    separator_of,
)
from vitsee_stores.errors import reason
from vitsee_stores.url import is_url

_PATH_NAMES = (
    "path",
    "image_path",
    "file_path",
    "filepath",
    "file_name",
    "filename",
    "file",
)
_COLUMNS = {
    "path": (*_PATH_NAMES, "image"),
    "label": ("label", "class", "target", "category"),
    "split": ("split", "subset", "partition"),
    "id": ("id", "image_id", "key"),
    "box": ("box",),
}
# ImageNet's LOC_val_solution.csv: its header, and folders where its images may be, from its own.
_SOLUTION_HEADER = ("imageid", "predictionstring")
_SOLUTION_FOLDERS = ("", "val", "ILSVRC/Data/CLS-LOC/val")
_WITHOUT_HEADER = ("path", "label", "split")  # the columns of a list without a header
_MAX_PATHS_TRIED = 16

Row = tuple[int, list[str]]  # line number from 1, fields

META = "meta.mat"
MAX_BYTES = 1 << 24  # of ImageNet's file of class numbers and of its meta.mat
# Folders where the images may be, from that of the labels (ILSVRC2012_devkit_t12/data).
DEVKIT_FOLDERS = (
    "",
    "val",
    "../../val",
    "../../ILSVRC2012_img_val",
    "../..",
    "../../ILSVRC/Data/CLS-LOC/val",
)


def open_list(path: Path, name: str, exif: bool = False) -> ImageSource:
    """Return the images of a list, in the order of its lines.

    A .csv or .tsv list has cells between commas or tabs, or, as tables have them, between others
    that its first line shows. With a header it has its columns by name: path, and optionally label,
    split, id and box; further columns are ignored. Without a header the columns are path, label,
    split.

    - Relative paths start at the list's folder.
    - Labels are class numbers, or names if any of them is not a number; an empty one is no label.
    - A box, `x0 y0 x1 y1` in pixels of the file, is the part of the file that is the image. It is
      cut out before everything else. An empty box is the whole file.
    - A sample's id is its `id` column, or else the path as it is written, followed by
      `#x0,y0,x1,y1` if it has a box.

    A text list (.txt) has a path on each line, or, if all lines end in one, a path and a class
    number or a WordNet id (n01440764). The images of ImageNet's LOC_val_solution.csv are found
    beside it, in its folder val, or where the archive has them, and the first WordNet id is the
    label. The development kit's file of labels is read by `ground_truth`.

    Args:
        path: the list.
        name: the list's name, for messages.
        exif: whether images are turned upright by their EXIF orientation before boxes are cut.

    Raises:
        DataError: an unreadable or uneven list, an id that occurs twice, a missing file, or a box
            that is empty or reaches out of its image.
    """
    fields = ground_truth(path)
    if fields is not None:
        lines = [*range(1, len(fields["path"]) + 1)]
        return _source_of_fields(path, name, fields, lines, exif)
    rows = _read_rows(path, name)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{name} is empty; expected one image path a line")
    header = _columns_of_header(first[1])
    width = len(first[1])
    columns = header or {key: k for k, key in enumerate(_WITHOUT_HEADER) if k < width}
    if header is None and width > len(_WITHOUT_HEADER):
        expected = ", ".join(_WITHOUT_HEADER)
        raise DataError(f"{name} has {width} columns and no header; expected {expected}")
    fields = {key: [] for key in columns}
    lines = []
    if header is None:
        rows = chain([first], rows)
    for line, row in rows:
        if len(row) != width:
            raise DataError(
                f"line {line} of {name} has {len(row)} fields; expected {width}"
            )
        lines.append(line)
        for key, column in columns.items():
            fields[key].append(row[column].strip())
    if _cell_names(first[1]) == _SOLUTION_HEADER:
        fields = _fields_of_solution(path.absolute().parent, fields)
    return _source_of_fields(path, name, fields, lines, exif)


def shards_listed(path: Path) -> list[str] | None:
    """Return the .tar or .parquet files that a text file lists, one a line, as paths or URLs.

    Relative paths start at the text file's folder. None is returned if it is not such a list.

    Raises:
        DataError: a line with a wrong brace.
    """
    if path.suffix.lower() != ".txt":
        return None
    try:
        lines = [
            line.strip()
            for line in path.read_text("utf-8-sig").splitlines()
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError):
        return None  # it may be a list of images, whose reader then says why it cannot be read
    if not lines or not lines[0].lower().endswith((".tar", ".parquet")):
        return None
    names = [name for line in lines for name in expand_braces(line)]
    return [name if is_url(name) else str(path.parent / name) for name in names]


def _fields_of_solution(
    folder: Path, fields: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Return paths, ids and labels of ImageNet's LOC_val_solution.csv in a folder.

    Its labels are a WordNet id and a box, `n01978287 85 1 272 425`, for each object in the image.
    """
    ids = [f"{name}.JPEG" for name in fields["path"]]
    image_folder = ""
    if ids:
        image_folder = _first_folder_with(folder, _SOLUTION_FOLDERS, ids[0])
    paths = [f"{image_folder}/{image_id}".lstrip("/") for image_id in ids]
    labels = [text.partition(" ")[0] for text in fields["label"]]
    return {"path": paths, "id": ids, "label": labels}


def _first_folder_with(folder: Path, candidates: Sequence[str], name: str) -> str:
    """Return the first of the candidates below a folder that has a file of this name, or ""."""
    existing = (inner for inner in candidates if (folder / inner / name).exists())
    return next(existing, "")


def _source_of_fields(
    path: Path, name: str, fields: dict[str, list[str]], lines: list[int], exif: bool
) -> ImageSource:
    """Return the images of a list that was read.

    Args:
        path: the list.
        name: the list's name, for messages.
        fields: column -> the text of each row; "path" is there, the other columns may be.
        lines: the line number of each row.
        exif: whether images are turned upright before boxes are cut.

    Raises:
        DataError: the fields do not make sense, or the first files are all missing.
    """
    paths = fields["path"]
    n = len(paths)
    if not n:
        raise DataError(f"{name} has a header and no images below it")
    ids = fields.get("id", paths)
    for key, values in (("path", paths), ("id", ids)):
        if "" in values:
            raise DataError(
                f"line {lines[values.index('')]} of {name} has an empty {key}"
            )
    boxes: list[Box | None] = []
    for line, text in zip(lines, fields.get("box", [""] * n), strict=True):
        try:
            boxes.append(parse_box(text) if text else None)
        except DataError as error:
            raise DataError(f"line {line} of {name}: {error}") from None
    # Boxes of the same file are different samples.
    ids = [
        image_id if box is None else f"{image_id}#{box_text(box, ',')}"
        for image_id, box in zip(ids, boxes, strict=True)
    ]
    line_of_id: dict[str, int] = {}
    for line, image_id in zip(lines, ids, strict=True):
        if image_id in line_of_id:
            raise DataError(
                f"line {line} of {name} repeats the id {image_id!r} of line "
                f"{line_of_id[image_id]}; expected unique ids: give repeated images different "
                "ones in a column 'id'"
            )
        line_of_id[image_id] = line
    # Only the first files are looked for: on a file server, a million look-ups take minutes.
    folder = str(path.absolute().parent)
    exist = [os.path.exists(os.path.join(folder, p)) for p in paths[:_MAX_PATHS_TRIED]]
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
    try:
        labels, class_names = class_labels(fields.get("label", [""] * n))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    source = ImageSource(
        name=name,
        # With `exif` already here, since the boxes are compared with sizes of upright images.
        opener=FileOpener(folder, exif=exif),
        locations=paths,
        ids=ids,
        labels=labels,
        splits=fields.get("split", [""] * n),
        class_names=class_names,
    )
    if any(box is not None for box in boxes):
        return _cut_boxes(source, boxes, lines)
    return source


def _cut_boxes(
    files: ImageSource, boxes: Sequence[Box | None], lines: Sequence[int]
) -> ImageSource:
    """Return the source whose images are the boxes' parts of files.

    The headers of files with a box are read.

    Args:
        files: the source of whole files.
        boxes: a box for each file, None for the whole file.
        lines: each file's line number in the list, for messages.

    Raises:
        DataError: a box exceeds its image.
    """
    for k, box in enumerate(boxes):
        if box is None:
            continue
        try:
            box_pixels(box, files.size(k))
        except ImageError:
            continue  # loading deals with images that cannot be read
        except DataError as error:
            raise DataError(f"line {lines[k]} of {files.name}: {error}") from None
    edges = np.array(
        [(math.nan,) * 4 if box is None else box for box in boxes], np.float32
    )
    locations = list(zip(files.locations, boxes, strict=True))
    opener = BoxOpener(files.opener)
    return replace(files, opener=opener, locations=locations, boxes=edges)


def _cell_names(row: list[str]) -> tuple[str, ...]:
    """Return the cells of a row as names of columns."""
    return tuple(cell.strip().lower() for cell in row)


def _columns_of_header(row: list[str]) -> dict[str, int] | None:
    """Return column -> its position in a header, or None if a row is not a header."""
    names = _cell_names(row)
    if names == _SOLUTION_HEADER:
        return {"path": 0, "label": 1}
    columns = {}
    for key, synonyms in _COLUMNS.items():
        present = [synonym for synonym in synonyms if synonym in names]
        if present:
            columns[key] = names.index(present[0])
    if "path" not in columns:
        return None
    return columns


def _read_rows(path: Path, name: str) -> Iterator[Row]:
    """Yield line number and fields of each line that is not blank.

    Raises:
        DataError: the file cannot be read as a list.
    """
    try:
        data = as_utf_8(path.read_bytes())
        if path.suffix.lower() == ".txt":
            yield from _text_rows(data.decode())
            return
        separator, data = declared_separator(data)
        separator = separator or _separator_of_list(path, data)
        reader = rows_of(data, separator, strict=True)
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except (csv.Error, ValueError) as error:
        raise DataError(f"{name} cannot be read as a list: {one_line(error)}") from None
    except OSError as error:
        raise DataError(f"cannot read {name}: {reason(error)}") from None


def _separator_of_list(path: Path, data: bytes) -> str:
    """Return the separator of a list's cells: its ending's, unless only another one fits.

    Names of files may have semicolons and bars, so that another separator has to lead to a header
    with a column of paths, or to a first path that exists.
    """
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    other = separator_of(data, usual)
    if other == usual:
        return usual
    first_row = next(rows_of(data, other), [""])
    if _columns_of_header(first_row) or (path.parent / first_row[0].strip()).is_file():
        return other
    return usual


def _text_rows(text: str) -> Iterator[Row]:
    """Yield a path for each line, and its label if every line ends in one, as ImageNet's lists do.

    If a single line has no label, all of them are paths: these may have blanks.
    """
    lines = [
        (k, line.strip()) for k, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    rows = [(k, line.rsplit(maxsplit=1)) for k, line in lines]
    is_label = re.compile("-?[0-9]+|n[0-9]{8}").fullmatch
    if all(len(fields) == 2 and is_label(fields[1]) for _, fields in rows):
        yield from rows
    else:
        yield from ((k, [line]) for k, line in lines)


def ground_truth(path: Path) -> dict[str, list[str]] | None:
    """Return paths, ids and labels of ImageNet's ILSVRC2012_validation_ground_truth.txt.

    That file has a class number on each line, in the order of the images' names; meta.mat beside it
    says which WordNet id, the label, each number stands for. None is returned for any other file.

    Raises:
        DataError: meta.mat cannot be read, or lacks a number.
    """
    meta = path.with_name(META)
    if path.suffix.lower() != ".txt" or not meta.is_file():
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        lines = path.read_text("utf-8-sig").split()
    except (OSError, UnicodeDecodeError):
        return None  # reading it as a list says why
    if not lines or not all(re.fullmatch(r"\d+", line) for line in lines):
        return None
    names = _wordnet_ids(meta)
    unknown = next((line for line in lines if int(line) not in names), None)
    if unknown is not None:
        raise DataError(f"{path} has the class {unknown}, which {meta} does not name")
    ids = [f"ILSVRC2012_val_{k:08d}.JPEG" for k in range(1, len(lines) + 1)]
    folder = path.absolute().parent
    image_folder = _first_folder_with(folder, DEVKIT_FOLDERS, ids[0])
    paths = [os.path.join(image_folder, name) for name in ids]
    return {"path": paths, "id": ids, "label": [names[int(line)] for line in lines]}


def _wordnet_ids(meta: Path) -> dict[int, str]:
    """Return ILSVRC2012_ID -> WNID (WordNet id) from the array `synsets` of meta.mat."""
    from scipy.io import loadmat

    try:
        if meta.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{meta} has more than {MAX_BYTES} bytes; expected ImageNet's meta.mat"
            )
        synsets: Any = loadmat(meta, squeeze_me=True, struct_as_record=False)["synsets"]
        return {int(synset.ILSVRC2012_ID): str(synset.WNID) for synset in synsets.ravel()}
    except OSError as error:
        raise DataError(f"cannot read {meta}: {reason(error)}") from None
    except DataError:
        raise
    except Exception as error:  # whatever scipy meets in a file of another kind
        raise DataError(
            f"{meta} is not ImageNet's meta.mat ({type(error).__name__}: {error}); expected "
            "synsets with ILSVRC2012_ID and WNID"
        ) from None
