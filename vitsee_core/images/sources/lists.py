"""Lists of images: path, label, split, id and box in CSV and TSV files, paths in text files, and
the labels of ImageNet's validation images as its development kit has them."""

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
# ImageNet's file of labels: its header, and where the images are, from its folder.
_SOLUTION = ("imageid", "predictionstring")
_SOLUTION_FOLDERS = ("", "val", "ILSVRC/Data/CLS-LOC/val")
_WITHOUT_HEADER = ("path", "label", "split")
_PATHS_TRIED = 16

Row = tuple[int, list[str]]

META = "meta.mat"
MAX_BYTES = 1 << 24
# Where the images are, from the folder of the labels (ILSVRC2012_devkit_t12/data).
FOLDERS = (
    "",
    "val",
    "../../val",
    "../../ILSVRC2012_img_val",
    "../..",
    "../../ILSVRC/Data/CLS-LOC/val",
)


def open_list(path: Path, name: str, exif: bool = False) -> ImageSource:
    """The images of a comma- or tab-separated list (by its suffix), in the order of its lines.

    With a header, columns are found by name (path; optional label, split, id, box; others are
    passed over); without one they are path, label, split. Relative paths start at the list's
    folder. Labels are class numbers, or names where any is not a number; an empty one is none. A
    box is `x0 y0 x1 y1` in pixels of the file, with `exif` of the file turned upright: the image is
    this part of it, cut out before everything else; an empty one is the whole. A sample's id is its
    `id` column, or else the path as it is written; with a box `#x0,y0,x1,y1` follows.

    A text list (.txt) has a path a line, or, where all lines end in one, a path and a class number
    or a WordNet id (n01440764). Of ImageNet's LOC_val_solution.csv the images are found beside it,
    in its folder val, or where the archive has them, and the first WordNet id is the label; for the
    development kit's file of labels see `ground_truth`. Raises DataError: an unreadable or uneven
    list, an id that occurs twice, a missing file, a box that is empty or reaches out of its image.
    """
    if (known := ground_truth(path)) is not None:
        return _source(path, name, known, [*range(1, len(known["path"]) + 1)], exif)
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
    for line, row in rows if header else chain([first], rows):
        if len(row) != width:
            raise DataError(
                f"line {line} of {name} has {len(row)} fields; expected {width}"
            )
        lines.append(line)
        for key, column in columns.items():
            fields[key].append(row[column].strip())
    if _names(first[1]) == _SOLUTION:
        fields = _solution(path.absolute().parent, fields)
    return _source(path, name, fields, lines, exif)


def shards_listed(path: Path) -> list[str] | None:
    """The .tar or .parquet files that a text file lists, one a line, as paths or URLs; relative
    paths start at its folder. None if it is no such list. Raises DataError: a line with a wrong
    brace."""
    if path.suffix.lower() != ".txt":
        return None
    try:
        lines = [
            line.strip()
            for line in path.read_text("utf-8-sig").splitlines()
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError):
        return None  # the list of images that it may be says why
    if not lines or not lines[0].lower().endswith((".tar", ".parquet")):
        return None
    names = [name for line in lines for name in expand_braces(line)]
    return [name if is_url(name) else str(path.parent / name) for name in names]


def _solution(folder: Path, fields: dict[str, list[str]]) -> dict[str, list[str]]:
    """Paths, ids and labels of a file whose labels are `n01978287 85 1 272 425`, with boxes."""
    ids = [f"{name}.JPEG" for name in fields["path"]]
    inner = next(
        (f for f in _SOLUTION_FOLDERS for i in ids[:1] if (folder / f / i).exists()), ""
    )
    labels = [text.partition(" ")[0] for text in fields["label"]]
    return {"path": [f"{inner}/{i}".lstrip("/") for i in ids], "id": ids, "label": labels}


def _source(
    path: Path, name: str, fields: dict[str, list[str]], lines: list[int], exif: bool
) -> ImageSource:
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
    ids = [
        i if box is None else f"{i}#{box_text(box, ',')}"
        for i, box in zip(ids, boxes, strict=True)
    ]
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
    try:
        labels, class_names = class_labels(fields.get("label", [""] * n))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    splits = fields.get("split", [""] * n)
    opener = FileOpener(folder, exif=exif)  # before boxes are held against sizes
    whole = ImageSource(name, opener, paths, ids, labels, splits, class_names)
    if any(box is not None for box in boxes):
        return _cut(whole, boxes, lines)
    return whole


def _cut(
    whole: ImageSource, boxes: Sequence[Box | None], lines: Sequence[int]
) -> ImageSource:
    """The boxes' parts of images; reads the headers of files with a box. Raises DataError: a box
    exceeds its image."""
    for k, box in enumerate(boxes):
        if box is None:
            continue
        try:
            box_pixels(box, whole.size(k))
        except ImageError:
            continue  # an image that cannot be read, as others
        except DataError as error:
            raise DataError(f"line {lines[k]} of {whole.name}: {error}") from None
    edges = np.array(
        [(math.nan,) * 4 if box is None else box for box in boxes], np.float32
    )
    places = list(zip(whole.locations, boxes, strict=True))
    return replace(whole, opener=BoxOpener(whole.opener), locations=places, boxes=edges)


def _names(row: list[str]) -> tuple[str, ...]:
    return tuple(cell.strip().lower() for cell in row)


def _header(row: list[str]) -> dict[str, int] | None:
    names = _names(row)
    if names == _SOLUTION:
        return {"path": 0, "label": 1}
    found = {key: [n for n in known if n in names] for key, known in _COLUMNS.items()}
    columns = {key: names.index(own[0]) for key, own in found.items() if own}
    return columns if "path" in columns else None


def _rows(path: Path, name: str) -> Iterator[Row]:
    """Line number and fields of every line that is not blank."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        if path.suffix.lower() == ".txt":
            yield from _text_rows(path.read_text("utf-8-sig"))
            return
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{name} cannot be read as a list: {one_line(error)}") from None
    except OSError as error:
        raise DataError(f"cannot read {name}: {reason(error)}") from None


def _text_rows(text: str) -> Iterator[Row]:
    """A path per line, and its label if every line ends in a number, as in ImageNet's lists."""
    lines = [
        (k, line.strip()) for k, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    parts = [(k, line.rsplit(maxsplit=1)) for k, line in lines]
    if all(
        len(part) == 2 and re.fullmatch("-?[0-9]+|n[0-9]{8}", part[1])
        for _, part in parts
    ):
        yield from parts
    else:
        yield from ((k, [line]) for k, line in lines)


def ground_truth(path: Path) -> dict[str, list[str]] | None:
    """Paths, ids and labels (WordNet ids) of ILSVRC2012_validation_ground_truth.txt, which has the
    number of a class per line, in the order of the images' names, and meta.mat beside it, which
    says what the numbers mean; None for any other file. Raises DataError: meta.mat cannot be read,
    or lacks a number."""
    meta = path.with_name(META)
    if path.suffix.lower() != ".txt" or not meta.is_file():
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        lines = path.read_text("utf-8-sig").split()
    except (OSError, UnicodeDecodeError):
        return None  # said by whoever reads it as a list
    if not lines or not all(re.fullmatch(r"\d+", line) for line in lines):
        return None
    names = _wordnet_ids(meta)
    unknown = next((line for line in lines if int(line) not in names), None)
    if unknown is not None:
        raise DataError(f"{path} has the class {unknown}, which {meta} does not name")
    ids = [f"ILSVRC2012_val_{k:08d}.JPEG" for k in range(1, len(lines) + 1)]
    folder = path.absolute().parent
    inner = next((f for f in FOLDERS if (folder / f / ids[0]).exists()), "")
    paths = [os.path.join(inner, name) for name in ids]
    return {"path": paths, "id": ids, "label": [names[int(line)] for line in lines]}


def _wordnet_ids(meta: Path) -> dict[int, str]:
    """ILSVRC2012_ID -> WNID, of the array `synsets`."""
    from scipy.io import loadmat

    try:
        if meta.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{meta} has more than {MAX_BYTES} bytes; expected ImageNet's meta.mat"
            )
        synsets: Any = loadmat(meta, squeeze_me=True, struct_as_record=False)["synsets"]
        return {int(one.ILSVRC2012_ID): str(one.WNID) for one in synsets.ravel()}
    except OSError as error:
        raise DataError(f"cannot read {meta}: {reason(error)}") from None
    except DataError:
        raise
    except Exception as error:  # whatever scipy meets in a file of another kind
        raise DataError(
            f"{meta} is not ImageNet's meta.mat ({type(error).__name__}: {error}); expected "
            "synsets with ILSVRC2012_ID and WNID"
        ) from None
