"""`--only FILE`: the images that the lines of a file name, as data sets publish their lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_core.images.file_names import image_stem
from vitsee_stores.errors import reason

MOST_BYTES = 1 << 28
_SHOWN = 60
Places = dict[str, list[int]]


def read_only(path: Path, option: str = "--only") -> list[tuple[int, str]]:
    """Number and text of the lines that are not blank. option: what the file was given to.

    Raises:
        DataError: the file is missing, too large, not UTF-8, or has no line.
    """
    try:
        if not path.is_file():
            raise DataError(f"no file {path}; {option} expects a list of images, one a line")
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES} bytes; expected a list of images")
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; {option} expects a list of images") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from None
    lines = [(k, line.strip()) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty; {option} expects a list of images, one a line")
    return lines


def named_only(path: Path, ids: Sequence[str], name: str) -> NDArray[np.bool_]:
    """(images,) which of `ids` the lines of a file name.

    A line is an id; an id without its ending; a folder of ids, also by the last parts of its path;
    or a file's name without folders and ending, where one image has it. Of a line that is none of
    these, the first word counts: lists of classes have its name in words behind it.

    Args:
        path: the file.
        ids: of the data set, unique.
        name: of the data set, for the message.

    Raises:
        DataError: a line that names no image, or several by a bare name; see `read_only`.
    """
    lines = read_only(path)
    by_file = _by(map(_file, ids))
    finders = (_by(ids), _by(map(image_stem, ids)), _by_folder(ids), by_file)
    chosen = np.zeros(len(ids), bool)
    unmatched = []
    for number, line in lines:
        keys = [line, line.removeprefix("./").strip("/")]  # `bear/` is the folder bear
        keys.append(line.split()[0])  # `n01440764 tench, Tinca tinca`
        found = next((f[key] for f in finders for key in keys if key in f), None)
        if found is None:
            unmatched.append((number, line))
        elif len(found) > 1 and any(found is by_file.get(key) for key in keys):
            raise DataError(
                f"line {number} of {path}, {line[:_SHOWN]!r}, names {len(found)} images of {name}: "
                f"{ids[found[0]]} and {ids[found[1]]}; expected their folders too"
            )
        else:
            chosen[found] = True
    if unmatched:
        number, line = unmatched[0]
        more = f", and {len(unmatched) - 1} more lines" if len(unmatched) > 1 else ""
        raise DataError(
            f"line {number} of {path}, {line[:_SHOWN]!r}, names no image of {name}{more}; expected "
            f"ids as {ids[0]!r}, with or without ending, folders of them, or names of files"
        )
    return chosen


def _by(keys: Iterable[str]) -> Places:
    found: Places = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _by_folder(ids: Sequence[str]) -> Places:
    """The images below each folder, by its whole path and by the last parts of it."""
    found: Places = {}
    for place, key in enumerate(ids):
        parts = key.split("/")[:-1]
        for stop in range(1, len(parts) + 1):
            for start in range(stop):
                found.setdefault("/".join(parts[start:stop]), []).append(place)
    return found


def shorter_ids(own: str) -> set[str]:
    """An image's id without its ending, without its folders, without both."""
    return {image_stem(own), own.rpartition("/")[2], _file(own)}


def _file(name: str) -> str:
    return image_stem(name.rpartition("/")[2])
