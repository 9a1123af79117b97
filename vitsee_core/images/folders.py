"""Image folders, with class folders or flat.

`walk` finds the files that are images by their names, and `classify` derives classes and splits
from their paths, for archives as well as for folders.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import number
from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.errors import DataError
from vitsee_core.images.formats import FORMAT_OF_ENDING
from vitsee_core.images.image_source import SPLIT_NAMES, ImageSource
from vitsee_core.images.left_out import count_ending, left_out_line
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_stores.disk import read_regular
from vitsee_stores.errors import reason
from vitsee_stores.manifest import abbreviate
from vitsee_stores.metadata import MAX_BYTES, ZARR_JSON

log = logging.getLogger(__name__)

VIDEOS = frozenset((".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_image(name: str) -> bool:
    """Return whether a file's name ends like an image's and does not start with a dot."""
    return (
        not name.startswith(".") and os.path.splitext(name)[1].lower() in FORMAT_OF_ENDING
    )


def is_video(name: str) -> bool:
    """Return whether a file's name ends like a video's and does not start with a dot."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in VIDEOS


def image_stem(name: str) -> str:
    """Return a name without the ending of an image file; other names as they are."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in FORMAT_OF_ENDING else name


# Options of our commands whose value is a picture's path.
PICTURE_OPTIONS = ("--png", "--table")
STUDY = "study.json"
SIDECARS = tuple(f"{ending}.json" for ending in TABLE_ENDINGS)


def open_folder(path: Path, name: str) -> ImageSource:
    """Return the images below a folder, in the order of their paths.

    The order is by code point, with forward slashes, so it is the same on all machines. A sample's
    id is its path below the folder; its class and split are those of `classify`.

    Raises:
        DataError: there are no images, or a folder cannot be read.
    """
    others = Counter[str]()
    paths = walk(str(path), others=others)
    line = left_out_line(path, others)
    if not paths:
        message = f"no images below {path}; expected .jpg, .png or other image files"
        raise DataError(f"{message} ({line})" if line else message)
    if line:
        log.warning("%s", line)
    labels, splits, class_names = classify(paths)
    return ImageSource(
        name=name,
        opener=FileOpener(str(path.absolute())),
        locations=paths,
        ids=paths,
        labels=labels,
        splits=splits,
        class_names=class_names,
    )


def classify(
    paths: Sequence[str],
) -> tuple[NDArray[np.int64], list[str], list[str] | None]:
    """Return labels (-1 for none), split names ("" for none) and class names of paths.

    The first folder of a path is its class. If every first folder is a split's name (train, val,
    test and their synonyms), it is the split, and the folder below it is the class. Folders below
    the class do not count, and neither does a folder that all others lie in. Classes are numbered
    in natural order (2 before 10), as timm numbers them.

    Args:
        paths: paths below the root of the data set, with forward slashes.
    """
    # Without the file's own name.
    folders = [path.split("/")[:-1] for path in paths]
    level = _first_differing_level(folders, 0)
    first_folders = {names[level] for names in folders if len(names) > level}
    splits = [""] * len(paths)
    # All of them: a class may happen to be called `test`.
    if first_folders and all(name.lower() in SPLIT_NAMES for name in first_folders):
        splits = _folders_at(folders, level)
        # A folder around all classes may lie below the splits as well.
        level = _first_differing_level(folders, level + 1)
    labels, class_names = number(_folders_at(folders, level))
    return labels, splits, class_names


def _folders_at(folders: Sequence[Sequence[str]], level: int) -> list[str]:
    """Return the folder at a level of each path, "" for a path without that level."""
    return [names[level] if len(names) > level else "" for names in folders]


def _first_differing_level(folders: Sequence[Sequence[str]], level: int) -> int:
    """Return the first level, from `level` on, whose folders are classes or splits.

    A folder that contains all others, as `zip -r` puts into its archive, is not a class and is
    skipped. A split's name is not skipped, and neither is a folder without folders in it.
    """
    while True:
        names = {path[level] for path in folders if len(path) > level}
        has_subfolders = any(len(path) > level + 1 for path in folders)
        if len(names) != 1 or not has_subfolders or min(names).lower() in SPLIT_NAMES:
            return level
        level += 1


def member_path(name: str) -> str:
    """Return the path of an archive's member, without `./` and empty folder names."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_hidden(path: str) -> bool:
    """Return whether an archive's member is in a hidden folder, or in the one that macOS adds."""
    return any(
        (name.startswith(".") and name != "..") or name == "__MACOSX"
        for name in path.split("/")
    )


def walk(
    root: str,
    is_sample: Callable[[str], bool] = is_image,
    others: Counter[str] | None = None,
) -> list[str]:
    """Return the paths of all images below a folder, sorted by code point.

    Links are followed unless they lead back to a folder that contains them; names that start with a
    dot are ignored. Left out with a warning are images whose name is not UTF-8, as ids have to be;
    folders below `root` with a store, a study or results of vitsee, whose pictures are not data;
    and in `root` itself the pictures of results.

    Args:
        root: the folder; the paths are below it and have forward slashes.
        is_sample: which files are returned, by their names.
        others: counts the endings of the other files, where it is given.

    Raises:
        DataError: a folder cannot be read.
    """
    left_out: list[str] = []
    walker = _Walker(root, is_sample, others, left_out)
    # Sorted as whole paths, not folder by folder: "a-b/1" comes before "a/1".
    paths = sorted(walker.paths("", frozenset()))
    if left_out:
        log.warning("left out of %s: %s", root, abbreviate(sorted(left_out)))
    return paths


class _Walker(NamedTuple):
    """Walks the folders below a root, see `walk`; `left_out` collects what is left out and why."""

    root: str
    is_sample: Callable[[str], bool]
    others: Counter[str] | None
    left_out: list[str]

    def paths(self, below: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[str]:
        """Yield the paths of the samples in a folder and its subfolders, in any order.

        Args:
            below: the folder's path below the root.
            ancestors: device and inode of the folders that contain it, to see circles of links.
        """
        folder = os.path.join(self.root, below)
        try:
            # Device and inode, which are the same by whatever link a folder is reached.
            status = os.stat(folder)
            identity = (status.st_dev, status.st_ino)
            if identity in ancestors:
                return
            with os.scandir(folder) as scanned:
                entries = [entry for entry in scanned if not entry.name.startswith(".")]
            pictures: set[str] = set()
            if below:
                if written := _written_by_us(entries):
                    self.left_out.append(f"{below} ({written})")
                    return
            else:
                # The root itself may have images beside results of an analysis.
                pictures = _pictures_of_results(entries)
            self.left_out.extend(
                f"{name} (a picture of results)" for name in sorted(pictures)
            )
            for entry in entries:
                if entry.name in pictures:
                    continue
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir():
                    yield from self.paths(path, ancestors | {identity})
                elif self.is_sample(entry.name):
                    try:
                        yield utf8(path)
                    except DataError as error:
                        self.left_out.append(str(error))
                elif self.others is not None:
                    count_ending(self.others, entry.name)
        except OSError as error:
            raise DataError(f"cannot read the folder {folder}: {reason(error)}") from None


def _written_by_us(entries: Sequence[os.DirEntry[str]]) -> str:
    """Return what vitsee wrote into the folder with these entries, in words; "" if nothing."""
    for entry in entries:
        if entry.name == ZARR_JSON:
            return "a store"
        if _recorded_command(entry):
            return "a study" if entry.name == STUDY else "results"
    return ""


def _recorded_command(entry: os.DirEntry[str]) -> list[str]:
    """Return the words of the vitsee command that wrote a record; [] for any other file."""
    if entry.name == STUDY or entry.name.endswith(SIDECARS):
        try:
            words = json.loads(read_regular(entry.path, MAX_BYTES))["command"]
            return [*map(str, words)] if words[0] == "vitsee" else []
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return []  # another program's
    return []


def _pictures_of_results(entries: Sequence[os.DirEntry[str]]) -> set[str]:
    """Return the names of those images that our commands drew beside their results.

    These are the pictures that a result's command names, and `r.png` beside `r.csv.json`, as
    `vitsee plot` writes it.
    """
    names: set[str] = set()
    for entry in entries:
        words = _recorded_command(entry)
        if not words or entry.name == STUDY:
            continue
        ending = next(end for end in SIDECARS if entry.name.endswith(end))
        names.add(entry.name.removesuffix(ending) + ".png")
        for option, value in itertools.pairwise(words):
            if option in PICTURE_OPTIONS:
                names.add(os.path.basename(value))
        for word in words:
            if word.startswith("--png="):
                names.add(os.path.basename(word.partition("=")[2]))
    return {
        entry.name for entry in entries if entry.name in names and is_image(entry.name)
    }


def utf8(path: str) -> str:
    """Return the path itself; raise DataError if it cannot be written as UTF-8, as ids are."""
    try:
        path.encode()
    except UnicodeEncodeError:
        escaped = path.encode("utf-8", "backslashreplace").decode()
        raise DataError(f"the name {escaped!r} is not UTF-8; rename the file") from None
    return path
