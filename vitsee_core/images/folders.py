"""Image folders: class folders or flat."""

from __future__ import annotations

from pathlib import Path

from vitsee_core.images.catalogue import classify, walk
from vitsee_core.images.errors import DataError
from vitsee_core.images.openers import FileOpener
from vitsee_core.images.source import Source


def open_folder(path: Path, name: str) -> Source:
    """The images below a folder, in the order of their paths (by code point, forward slashes).

    A sample's id is its path below the folder; `classify` says what its class and split are.

    Raises:
        DataError: no images, a folder that cannot be read, or a name that is not UTF-8.
    """
    paths = walk(str(path))
    if not paths:
        raise DataError(f"no images below {path}; expected .jpg, .png or other image files")
    labels, splits, class_names = classify(paths)
    return Source(name, FileOpener(str(path.absolute())), paths, paths, labels, splits, class_names)
