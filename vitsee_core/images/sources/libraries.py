"""Data sets that timm names: `torch/...` (torchvision) and `hfds/...` (Hugging Face datasets)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.images.class_labels import class_labels, label_text
from vitsee_core.images.decoding import ArrayOpener, FileOpener, RowOpener
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import open_folder
from vitsee_core.images.image_source import (
    EVERY_SPLIT,
    SPLIT_NAMES,
    ImageSource,
    join,
    parse_split,
)

RANDOM_ACCESS = ("torch", "hfds")
ITERABLE = ("wds", "tfds", "hfids", "pipe:")
_FOLDERS = ("torch/folder", "torch/image_folder")
_LABELS = ("label", "labels", "fine_label")


def refuse_iterable(data: object) -> DataError:
    """The error for data sets that only support sequential access."""
    kinds = ", ".join(f"{kind}/" for kind in RANDOM_ACCESS)
    return DataError(
        f"{data} is read from front to back, and vitsee needs any image at any time (or there is "
        "no pairing and no resuming); unpack it to a folder, list its files in a .csv, name its "
        f".tar or .parquet files, or use {kinds}"
    )


def open_library(data: str, split: str | None) -> ImageSource:
    """`torch/NAME[:FOLDER]` (FOLDER: where torchvision keeps it; default: here) or
    `hfds/NAME[:CACHE]`, one split or several of it.

    Nothing of torchvision is downloaded; Hugging Face's library downloads and caches as it does. An
    id is the split's name, a slash, and the path or the row's number. Raises DataError: unknown or
    missing data, no split named, or the library is not installed.
    """
    name, _, root = data.partition(":")
    kind = name.partition("/")[0].lower()
    if name.lower() in _FOLDERS:
        source = open_folder(Path(root or "."), data)
        return source if split is None else source.part(split)
    if split is None:
        raise DataError(f"{data} needs a split, e.g. --split train")
    terms = parse_split(split)
    bases = list(dict.fromkeys(term.name for term in terms))
    if EVERY_SPLIT in bases:
        raise DataError(
            f"cannot read the split {split!r} of {data}; expected it named, e.g. train"
        )
    load = _load_torch if kind == "torch" else _load_hugging_face
    parts = [load(data, name, root, base) for base in bases]
    whole = join(data, parts) if len(parts) > 1 else parts[0]
    return whole.part(split)


def _load_torch(data: str, name: str, root: str, split: str) -> ImageSource:
    from timm.data.dataset_factory import create_dataset

    try:
        dataset: Any = create_dataset(name, root=root or ".", split=split, download=False)
    except (
        Exception,
        SystemExit,
    ) as error:  # each torchvision data set has errors of its own
        if "download=True" in str(error):
            raise DataError(
                f"torchvision finds no {name.partition('/')[2]} in the folder {root or '.'}, and "
                f"vitsee downloads none: name the folder that torchvision keeps it in, as "
                f"{name}:FOLDER"
            ) from None
        raise DataError(
            f"cannot open {data}, split {split}: {_first_line(error)}"
        ) from None
    pixels = getattr(dataset, "data", None)
    if pixels is None:
        return _from_files(data, dataset, split)
    if split.lower() not in SPLIT_NAMES:
        raise DataError(f"{data} has no split {split!r}; its splits: train, test")
    images = np.asarray(pixels)
    ids = [f"{split}/{row}" for row in range(len(images))]
    classes = list(getattr(dataset, "classes", None) or ()) or None
    labels = np.asarray(dataset.targets, np.int64)
    splits = [split] * len(ids)
    return ImageSource(
        data, ArrayOpener(images), range(len(ids)), ids, labels, splits, classes
    )


def _from_files(data: str, dataset: Any, split: str) -> ImageSource:
    """A torchvision data set that lists its files: ImageNet, Places365, iNaturalist."""
    if hasattr(dataset, "all_categories"):
        files = [
            (os.path.join(dataset.root, dataset.all_categories[category], file), category)
            for category, file in dataset.index
        ]
        classes = list(dataset.all_categories)
    else:
        files = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None) or []
        # ImageNet has several words a class.
        classes = [
            c if isinstance(c, str) else c[0] for c in getattr(dataset, "classes", [])
        ]
    if not files:
        raise DataError(f"{data} lists no files; give its folder or a .csv list instead")
    root = os.path.abspath(dataset.root)
    paths = [os.path.abspath(path) for path, _ in files]
    ids = [f"{split}/{Path(os.path.relpath(path, root)).as_posix()}" for path in paths]
    labels = np.array([label for _, label in files], np.int64)
    splits = [split] * len(ids)
    return ImageSource(
        data, FileOpener(root), paths, ids, labels, splits, classes or None
    )


def _load_hugging_face(data: str, name: str, root: str, split: str) -> ImageSource:
    if find_spec("datasets") is None:
        raise DataError(f"{data} needs the package datasets; run: pip install datasets")
    import datasets

    try:
        rows: Any = datasets.load_dataset(
            name.partition("/")[2], split=split, cache_dir=root or None
        )
    except (
        Exception
    ) as error:  # the library, its network layer and its file systems have many
        raise DataError(
            f"cannot open {data}, split {split}: {_first_line(error)}"
        ) from None
    columns = [
        key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)
    ]
    if len(columns) != 1:
        found = ", ".join(rows.features)
        raise DataError(
            f"{data} has {len(columns)} image columns; expected one of: {found}"
        )
    opener = RowOpener(
        rows.select_columns(columns).cast_column(
            columns[0], datasets.Image(decode=False)
        ),
        columns[0],
    )
    n = len(rows)
    key = next((key for key in _LABELS if key in rows.features), None)
    labels = np.full(n, -1, np.int64)
    names: list[str] | None = None
    if key is not None:
        try:
            labels, names = class_labels([label_text(value) for value in rows[key]])
        except DataError as error:
            raise DataError(f"the column {key!r} of {data}: {error}") from None
    named = getattr(rows.features[key], "names", None) if key else None
    classes = list(named or names or ()) or None
    ids = [f"{split}/{row}" for row in range(n)]
    return ImageSource(data, opener, range(n), ids, labels, [split] * n, classes)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
