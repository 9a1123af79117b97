"""Image folders, with class folders or flat: which files are images by their names, and how classes
and splits follow from their paths, also in tar files."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from vitsee_stores.metadata import MOST_BYTES, ZARR_JSON

log = logging.getLogger(__name__)

VIDEOS = frozenset((".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's and does not start with a dot."""
    return (
        not name.startswith(".") and os.path.splitext(name)[1].lower() in FORMAT_OF_ENDING
    )


def is_video(name: str) -> bool:
    """Whether a file's name ends like a video's and does not start with a dot."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in VIDEOS


def image_stem(name: str) -> str:
    """A name without the ending of an image file."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in FORMAT_OF_ENDING else name


PICTURES = (
    "--png",
    "--table",
)  # options of commands behind which a picture's name stands
STUDY = "study.json"
SIDECARS = tuple(f"{ending}.json" for ending in TABLE_ENDINGS)


def open_folder(path: Path, name: str) -> ImageSource:
    """The images below a folder, in the order of their paths (by code point, forward slashes).

    A sample's id is its path below the folder; `classify` determines its class and split. Raises
    DataError: no images, or a folder that cannot be read.
    """
    others = Counter[str]()
    paths = walk(str(path), others=others)
    line = left_out_line(path, others)
    if not paths:
        raise DataError(
            f"no images below {path}; expected .jpg, .png or other image files"
            f"{f' ({line})' if line else ''}"
        )
    if line:
        log.warning("%s", line)
    labels, splits, class_names = classify(paths)
    return ImageSource(
        name, FileOpener(str(path.absolute())), paths, paths, labels, splits, class_names
    )


def classify(
    paths: Sequence[str],
) -> tuple[NDArray[np.int64], list[str], list[str] | None]:
    """Labels (-1 for none), split names ("" for none) and class names from paths below the root.

    The first folder of a path is its class. If every first folder is a split's name (train, val,
    test and their synonyms), it is the split, and the folder below it the class. Folders below the
    class do not count, and neither does a folder that all others lie in. Classes are numbered in
    natural order, as timm does: 2 before 10.
    """
    folders = [path.split("/")[:-1] for path in paths]
    level = _common_folders(folders, 0)
    tops = {parts[level] for parts in folders if len(parts) > level}
    splits = [""] * len(paths)
    if tops and all(top.lower() in SPLIT_NAMES for top in tops):
        splits = [parts[level] if len(parts) > level else "" for parts in folders]
        level = _common_folders(folders, level + 1)
    names = [parts[level] if len(parts) > level else "" for parts in folders]
    labels, class_names = number(names)
    return labels, splits, class_names


def _common_folders(folders: Sequence[Sequence[str]], level: int) -> int:
    """The level of the first folders that differ, from this one on: a folder that holds all
    others, as `zip -r` puts one into its archive, is no class. A split's name is passed over
    nowhere, and neither is a folder without folders in it."""
    while True:
        names = {parts[level] for parts in folders if len(parts) > level}
        goes_on = any(len(parts) > level + 1 for parts in folders)
        if len(names) != 1 or not goes_on or min(names).lower() in SPLIT_NAMES:
            return level
        level += 1


def member_path(name: str) -> str:
    """The path of an archive's member, without `./` and empty parts."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_hidden(path: str) -> bool:
    """Whether a member of an archive lies in a hidden folder, or in the one that macOS adds."""
    return any(
        (part.startswith(".") and part != "..") or part == "__MACOSX"
        for part in path.split("/")
    )


def walk(
    root: str,
    wanted: Callable[[str], bool] = is_image,
    others: Counter[str] | None = None,
) -> list[str]:
    """Paths of all images below `root`, with forward slashes, sorted by code point; wanted: of
    files whose name it says yes to; others: counts those left out by their endings.

    Links are followed unless they lead back to a folder that contains them; names that start with a
    dot are ignored. Left out with a warning: images whose name is not UTF-8, as ids are, folders
    below `root` that hold a store, a study or results of vitsee, whose pictures are not data, and
    in `root` itself the pictures of results that lie there. Raises DataError: a folder cannot be
    read.
    """
    left_out: list[str] = []
    found = sorted(_walk(root, "", frozenset(), left_out, wanted, others))
    if left_out:
        log.warning("left out of %s: %s", root, abbreviate(sorted(left_out)))
    return found


def _walk(
    root: str,
    below: str,
    above: frozenset[tuple[int, int]],
    left_out: list[str],
    wanted: Callable[[str], bool],
    others: Counter[str] | None,
) -> Iterator[str]:
    folder = os.path.join(root, below)
    try:
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(folder) as scanned:
            entries = [entry for entry in scanned if not entry.name.startswith(".")]
        if below and (ours := _written_by_us(entries)):
            left_out.append(f"{below} ({ours})")
            return
        pictures = {*()} if below else _pictures(entries)
        left_out += [f"{name} (a picture of results)" for name in sorted(pictures)]
        for entry in entries:
            if entry.name in pictures:
                continue
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir():
                yield from _walk(root, path, above | {here}, left_out, wanted, others)
            elif wanted(entry.name):
                try:
                    yield utf8(path)
                except DataError as error:
                    left_out.append(str(error))
            elif others is not None:
                count_ending(others, entry.name)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {reason(error)}") from None


def _written_by_us(entries: Sequence[os.DirEntry[str]]) -> str:
    """The thing that vitsee wrote into the folder with these entries, in words; "" if nothing."""
    for entry in entries:
        if entry.name == ZARR_JSON:
            return "a store"
        if _command(entry):
            return "a study" if entry.name == STUDY else "results"
    return ""


def _command(entry: os.DirEntry[str]) -> list[str]:
    """The words of the vitsee command whose record a file is; none of any other file."""
    if entry.name == STUDY or entry.name.endswith(SIDECARS):
        try:
            words = json.loads(read_regular(entry.path, MOST_BYTES))["command"]
            return [*map(str, words)] if words[0] == "vitsee" else []
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return []  # another program's
    return []


def _pictures(entries: Sequence[os.DirEntry[str]]) -> set[str]:
    """The images among these that the results among them came with: where their commands put them,
    or `r.png` beside `r.csv.json`, as `vitsee plot` does."""
    named: set[str] = set()
    for entry in entries:
        words = _command(entry)
        if words and entry.name != STUDY:
            ending = next(end for end in SIDECARS if entry.name.endswith(end))
            places = [b for a, b in itertools.pairwise(words) if a in PICTURES]
            places += [
                word.partition("=")[2] for word in words if word.startswith("--png=")
            ]
            named |= {
                entry.name.removesuffix(ending) + ".png",
                *map(os.path.basename, places),
            }
    return {
        entry.name for entry in entries if entry.name in named and is_image(entry.name)
    }


def utf8(path: str) -> str:
    """The path itself. Raises DataError: it cannot be written as UTF-8, as ids are."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode("utf-8", "backslashreplace").decode()
        raise DataError(f"the name {shown!r} is not UTF-8; rename the file") from None
    return path
