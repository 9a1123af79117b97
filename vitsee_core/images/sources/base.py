"""The query that every source of images answers, and the files that a name stands for, or a pattern
with braces as a shell expands them (`in1k-{0000..0063}.tar`, `{train,val}.tar`)."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import class_labels
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import is_hidden, is_image, is_video
from vitsee_core.images.left_out import count_ending, left_out_line
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_stores.files import Files, NoAnswer
from vitsee_stores.folder import Folder

log = logging.getLogger(__name__)

Coded = tuple[NDArray[np.int32], list[str]]  # (images,) index into the texts, -1 for none


@dataclass(frozen=True)
class SourceRequest:
    """`--data` and the options that say how it is read.

    Attributes:
        data: as the user wrote it.
        label_key: of tars: the member (`cls`, `txt`), or the field of the `.json`, with the label;
            `none` for no labels.
        image_column, label_column: of parquet files; `none` for no labels.
        exif: whether images are turned upright by their EXIF orientation.
        clips: whether videos and folders of frames are asked for, not images.
        progress: shown while many files are read for the first time.
    """

    data: str
    split: str | None = None
    label_key: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    progress: Progress = SILENT
    clips: bool = False
    exif: bool = False

    def wants(self, path: str) -> bool:
        """Whether a file is one of the asked kind by its name."""
        base = path.rpartition("/")[2]
        return is_video(base) if self.clips else is_image(base)

    def count_other(self, others: Counter[str], path: str) -> None:
        """Count a file that is not wanted because of its ending; images beside videos, which may
        be previews of them, are not counted."""
        if not is_hidden(path) and not (self.clips and is_image(path.rpartition("/")[2])):
            count_ending(others, path)

    def say_left_out(self, others: Mapping[str, int]) -> None:
        """Log the files that `count_other` counted, in one line."""
        if line := left_out_line(self.data, others):
            log.warning("%s", line)

    @property
    def nothing(self) -> str:
        """The message for a place without samples: `no images in %s; expected ...`."""
        if self.clips:
            return "no videos in %s; expected .mp4, .webm, .mov, .avi, .mkv or .gif files"
        return "no images in %s; expected .jpg, .png or other image files"

    def check(self, kind: str) -> None:
        """Raises DataError: an option that data of this kind (an ending) does not have."""
        for of, option, value in (
            (".tar", "--label-key", self.label_key),
            (".parquet", "--image-column", self.image_column),
            (".parquet", "--label-column", self.label_column),
        ):
            if value is not None and kind != of:
                raise DataError(
                    f"{option} is of {of} files; {self.data} has none: leave it out"
                )


@dataclass(frozen=True)
class MatchedFiles:
    """Files that a name stands for.

    Attributes:
        files: those of the folder or URL that they have in common.
        names: below it.
        root: that folder, as it is shown.
        given: whether they were named one by one or by a pattern, not as all of a folder.
    """

    files: Files
    names: Sequence[str]
    root: str
    given: bool = True

    def shown(self, name: str) -> str:
        return f"{self.root}/{name}" if self.root else name

    @property
    def paths(self) -> list[Path]:
        """The files on this machine. Raises DataError: they are at a URL."""
        shown = [self.shown(name) for name in self.names]
        if not isinstance(self.files, Folder):
            raise DataError(
                f"{shown[0]}: only images, .tar and .parquet files are read at URLs"
            )
        return [Path(path) for path in shown]

    @property
    def path(self) -> Path:
        """The one file. Raises DataError: several, or at a URL."""
        first, *others = self.paths
        if others:
            raise DataError(f"{first} and {others[0]}: expected one file of this kind")
        return first


def found_paths(paths: Sequence[str]) -> MatchedFiles:
    """Files on this machine, in this order."""
    if len({os.path.isabs(path) for path in paths}) > 1:
        paths = [os.path.abspath(path) for path in paths]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, root or None).replace(os.sep, "/") for path in paths]
    return MatchedFiles(
        Folder(Path(root).absolute()), names, "" if root == "" else root.rstrip("/")
    )


def strings(values: Iterable[str]) -> NDArray[Any]:
    """Packed text: an item is a str again, a million take a fifth of a list's memory."""
    return np.array(list(values), np.dtypes.StringDType())


def labels_of(files: Iterable[Coded]) -> tuple[NDArray[np.int64], list[str] | None]:
    """(images,) labels of all files, and class names, as `class_labels` has them. files: of each
    (images,) codes, and the texts that they count."""
    coded = list(files)
    known = list(dict.fromkeys(text for _, texts in coded for text in texts))
    numbers, class_names = class_labels(known)
    number = dict(zip(known, numbers.tolist(), strict=True))
    # A code of -1 is the last.
    parts = [
        np.array([*(number[text] for text in texts), -1], np.int64)[codes]
        for codes, texts in coded
    ]
    return np.concatenate(parts), class_names


def no_answer(place: object, error: NoAnswer) -> DataError:
    """The error for a server that gave none: the data may be fine."""
    return DataError(
        f"{place} cannot be read: {error.strerror}; repeat the command to go on"
    )


# ---------------- patterns with braces

MOST = 100_000
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(text: str) -> list[str]:
    """The names that `text` stands for, in its order; itself if it has no braces. Numbers keep the
    zeros that the first or the last one begins with. Raises DataError: a brace without its other
    half, one that holds neither a range of numbers nor several names, or more than a hundred
    thousand names."""
    match = _INNERMOST.search(text)
    if match is None:
        if "{" in text or "}" in text:
            raise DataError(
                f"{text} has a brace without its other half; expected {{0000..0063}}"
            )
        return [text]
    start, stop = match.span()
    made: dict[str, None] = {}
    for choice in _choices(match[1], text):
        made.update(dict.fromkeys(expand_braces(text[:start] + choice + text[stop:])))
        if len(made) > MOST:
            raise DataError(f"{text} stands for more than {MOST} names")
    return list(made)


def _choices(inner: str, text: str) -> list[str]:
    if match := _RANGE.fullmatch(inner):
        first = int(match[1])
        last = int(match[2])
        padded = any(len(end) > 1 and end.startswith("0") for end in match.groups())
        width = max(map(len, match.groups())) if padded else 0
        step = 1 if last >= first else -1
        if abs(last - first) >= MOST:
            raise DataError(f"{text} stands for more than {MOST} names")
        return [f"{number:0{width}}" for number in range(first, last + step, step)]
    if "," in inner:
        return inner.split(",")
    raise DataError(
        f"{text}: cannot read {{{inner}}}; expected a range of numbers, {{0000..0063}}, or names, "
        "{train,val}"
    )
