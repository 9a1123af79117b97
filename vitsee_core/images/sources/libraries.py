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
    """Return the error for data sets that only support sequential access."""
    kinds = ", ".join(f"{kind}/" for kind in RANDOM_ACCESS)
    return DataError(
        f"{data} is read from front to back, and vitsee needs any image at any time (or there is "
        "no pairing and no resuming); unpack it to a folder, list its files in a .csv, name its "
        f".tar or .parquet files, or use {kinds}"
    )


def open_library(data: str, split: str | None) -> ImageSource:
    """Return the samples of one or several splits of a library's data set.

    Nothing is downloaded from torchvision; Hugging Face's library downloads and caches as it always
    does. An id is the split's name, a slash, and the path or the row's number.

    Args:
        data: `torch/NAME[:FOLDER]`, where FOLDER is torchvision's root (the working folder by
            default), or `hfds/NAME[:CACHE]`.
        split: a split expression.

    Raises:
        DataError: unknown or missing data, no split named, or a library that is not installed.
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
    # Whole splits are loaded, and the expression then picks from them.
    sources = [load(data, name, root, base) for base in bases]
    source = join(data, sources) if len(sources) > 1 else sources[0]
    return source.part(split)


def _load_torch(data: str, name: str, root: str, split: str) -> ImageSource:
    """Return a split of a torchvision data set; raise DataError if it cannot be opened."""
    from timm.data.dataset_factory import create_dataset

    # Each torchvision data set has errors of its own, and some end the interpreter.
    try:
        dataset: Any = create_dataset(name, root=root or ".", split=split, download=False)
    except (Exception, SystemExit) as error:
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
        return _source_of_torch_files(data, dataset, split)
    if split.lower() not in SPLIT_NAMES:
        raise DataError(f"{data} has no split {split!r}; its splits: train, test")
    images = np.asarray(pixels)
    ids = [f"{split}/{row}" for row in range(len(images))]
    classes = list(getattr(dataset, "classes", None) or ()) or None
    return ImageSource(
        name=data,
        opener=ArrayOpener(images),
        locations=range(len(ids)),
        ids=ids,
        labels=np.asarray(dataset.targets, np.int64),
        splits=[split] * len(ids),
        class_names=classes,
    )


def _source_of_torch_files(data: str, dataset: Any, split: str) -> ImageSource:
    """Return a torchvision data set that lists its files: ImageNet, Places365, iNaturalist."""
    if hasattr(dataset, "all_categories"):
        files = [
            (os.path.join(dataset.root, dataset.all_categories[category], file), category)
            for category, file in dataset.index
        ]
        classes = list(dataset.all_categories)
    else:
        files = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None) or []
        # ImageNet has a tuple of words for each class.
        classes = [
            words if isinstance(words, str) else words[0]
            for words in getattr(dataset, "classes", [])
        ]
    if not files:
        raise DataError(f"{data} lists no files; give its folder or a .csv list instead")
    root = os.path.abspath(dataset.root)
    paths = [os.path.abspath(path) for path, _ in files]
    ids = [f"{split}/{Path(os.path.relpath(path, root)).as_posix()}" for path in paths]
    return ImageSource(
        name=data,
        opener=FileOpener(root),
        locations=paths,
        ids=ids,
        labels=np.array([label for _, label in files], np.int64),
        splits=[split] * len(ids),
        class_names=classes or None,
    )


def _load_hugging_face(data: str, name: str, root: str, split: str) -> ImageSource:
    """Return a split of a Hugging Face data set; raise DataError if it cannot be opened."""
    if find_spec("datasets") is None:
        raise DataError(f"{data} needs the package datasets; run: pip install datasets")
    import datasets

    try:
        rows: Any = datasets.load_dataset(
            name.partition("/")[2], split=split, cache_dir=root or None
        )
    except (
        Exception
    ) as error:  # the library, its network and file systems have many kinds
        raise DataError(
            f"cannot open {data}, split {split}: {_first_line(error)}"
        ) from None
    columns = [
        key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)
    ]
    if len(columns) != 1:
        names = ", ".join(rows.features)
        raise DataError(
            f"{data} has {len(columns)} image columns; expected one of: {names}"
        )
    # Left encoded: the hash is that of the encoded bytes, and decoding is ours.
    images = rows.select_columns(columns)
    images = images.cast_column(columns[0], datasets.Image(decode=False))
    n = len(rows)
    key = next((key for key in _LABELS if key in rows.features), None)
    labels = np.full(n, -1, np.int64)
    class_names: list[str] | None = None
    if key is not None:
        try:
            labels, class_names = class_labels([label_text(value) for value in rows[key]])
        except DataError as error:
            raise DataError(f"the column {key!r} of {data}: {error}") from None
        # The names that the data set declares are preferred to those in the rows.
        declared_names = getattr(rows.features[key], "names", None)
        class_names = list(declared_names or class_names or ()) or None
    return ImageSource(
        name=data,
        opener=RowOpener(images, columns[0]),
        locations=range(n),
        ids=[f"{split}/{row}" for row in range(n)],
        labels=labels,
        splits=[split] * n,
        class_names=class_names,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
