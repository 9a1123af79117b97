"""Requests, files and records that all sources of images share.

`SourceRequest` is `--data` with its options, `MatchedFiles` the files that it stands for, and
`expand_braces` expands patterns with braces as a shell does (`in1k-{0000..0063}.tar`,
`{train,val}.tar`).
"""

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

# (images,) index into the label texts, -1 for none; and the label texts
Coded = tuple[NDArray[np.int32], list[str]]


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
        """Return whether a file's name says that it is of the requested kind."""
        base = path.rpartition("/")[2]
        return is_video(base) if self.clips else is_image(base)

    def count_other(self, others: Counter[str], path: str) -> None:
        """Count the ending of a file that is left out because of it.

        Hidden files are not counted, nor images beside videos, which may be previews of them.
        """
        is_preview = self.clips and is_image(path.rpartition("/")[2])
        if not is_hidden(path) and not is_preview:
            count_ending(others, path)

    def say_left_out(self, others: Mapping[str, int]) -> None:
        """Log the files that `count_other` counted, in one line."""
        if line := left_out_line(self.data, others):
            log.warning("%s", line)

    @property
    def nothing(self) -> str:
        """The message for data without samples, `no images in %s; expected ...`."""
        if self.clips:
            return "no videos in %s; expected .mp4, .webm, .mov, .avi, .mkv or .gif files"
        return "no images in %s; expected .jpg, .png or other image files"

    def check(self, kind: str) -> None:
        """Raise DataError if an option is set that data of this kind (an ending) does not have."""
        self._check_option("--label-key", self.label_key, ".tar", kind)
        self._check_option("--image-column", self.image_column, ".parquet", kind)
        self._check_option("--label-column", self.label_column, ".parquet", kind)

    def _check_option(
        self, option: str, value: str | None, option_kind: str, kind: str
    ) -> None:
        """Raise DataError if an option for `option_kind` is set for data of another kind."""
        if value is not None and kind != option_kind:
            raise DataError(
                f"{option} is of {option_kind} files; {self.data} has none: leave it out"
            )


@dataclass(frozen=True)
class MatchedFiles:
    """The files that `--data` stands for.

    Attributes:
        files: the folder or URL that they have in common.
        names: their names below it.
        root: that folder or URL, as messages show it; "" for the working folder.
        explicit: whether they were named one by one or by a pattern, not as all files of a folder.
    """

    files: Files
    names: Sequence[str]
    root: str
    explicit: bool = True

    def shown(self, name: str) -> str:
        """Return the path or URL of a file, as messages show it."""
        return f"{self.root}/{name}" if self.root else name

    @property
    def paths(self) -> list[Path]:
        """The files' paths on this machine. Raises DataError: they are at a URL."""
        shown = [self.shown(name) for name in self.names]
        if not isinstance(self.files, Folder):
            raise DataError(
                f"{shown[0]}: only images, .tar and .parquet files are read at URLs"
            )
        return [Path(path) for path in shown]

    @property
    def path(self) -> Path:
        """The path of the only file. Raises DataError: there are several, or it is at a URL."""
        first, *others = self.paths
        if others:
            raise DataError(f"{first} and {others[0]}: expected one file of this kind")
        return first


def matched_paths(paths: Sequence[str]) -> MatchedFiles:
    """Return the files at these paths of this machine, in this order."""
    if len({os.path.isabs(path) for path in paths}) > 1:  # commonpath refuses a mixture
        paths = [os.path.abspath(path) for path in paths]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, root or None).replace(os.sep, "/") for path in paths]
    return MatchedFiles(Folder(Path(root).absolute()), names, root.rstrip("/"))


def strings(values: Iterable[str]) -> NDArray[Any]:
    """Return packed text, whose items are str again.

    A million names take a fifth of a list's memory.
    """
    return np.array(list(values), np.dtypes.StringDType())


def labels_of_files(
    files: Iterable[Coded],
) -> tuple[NDArray[np.int64], list[str] | None]:
    """Return the (images,) labels of all files and the class names, as `class_labels` has them.

    Args:
        files: of each file (images,) indices into its label texts, and these texts.
    """
    coded = list(files)
    all_texts = list(dict.fromkeys(text for _, texts in coded for text in texts))
    labels, class_names = class_labels(all_texts, _images_of_texts(coded, all_texts))
    label_of_text = dict(zip(all_texts, labels.tolist(), strict=True))
    labels_by_file = []
    for codes, texts in coded:
        # The last entry is what a code of -1, no label, picks.
        label_of_code = np.array([*(label_of_text[text] for text in texts), -1], np.int64)
        labels_by_file.append(label_of_code[codes])
    return np.concatenate(labels_by_file), class_names


def _images_of_texts(coded: Sequence[Coded], all_texts: Sequence[str]) -> list[int]:
    """Return the number of images of each label text, over all files."""
    n_images = Counter[str]()
    for codes, texts in coded:
        counts = np.bincount(codes[codes >= 0], minlength=len(texts))
        for text, count in zip(texts, counts.tolist(), strict=True):
            n_images[text] += count
    return [n_images[text] for text in all_texts]


def no_answer(location: object, error: NoAnswer) -> DataError:
    """Return the error for a server that did not answer, though the data may be fine."""
    return DataError(
        f"{location} cannot be read: {error.strerror}; repeat the command to go on"
    )


# ---------------- patterns with braces

MAX_NAMES = 100_000
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(text: str) -> list[str]:
    """Return the names that `text` stands for, in its order; `text` itself if it has no braces.

    Numbers keep the leading zeros of the first or the last one, as in a shell.

    Raises:
        DataError: a brace without its other half, braces around neither a range of numbers nor
            several names, or more than a hundred thousand names.
    """
    # The innermost braces are replaced by each of their choices, and the rest expanded again.
    match = _INNERMOST.search(text)
    if match is None:
        if "{" in text or "}" in text:
            raise DataError(
                f"{text} has a brace without its other half; expected {{0000..0063}}"
            )
        return [text]
    start, stop = match.span()
    names: dict[str, None] = {}  # a dict as an ordered set
    for choice in _brace_choices(match[1], text):
        names.update(dict.fromkeys(expand_braces(text[:start] + choice + text[stop:])))
        if len(names) > MAX_NAMES:
            raise DataError(f"{text} stands for more than {MAX_NAMES} names")
    return list(names)


def _brace_choices(inner: str, text: str) -> list[str]:
    """Return what the text within braces stands for; `text` is the whole, for messages."""
    if match := _RANGE.fullmatch(inner):
        first = int(match[1])
        last = int(match[2])
        width = 0
        if any(len(end) > 1 and end.startswith("0") for end in match.groups()):
            width = max(map(len, match.groups()))
        step = 1 if last >= first else -1
        if abs(last - first) >= MAX_NAMES:
            raise DataError(f"{text} stands for more than {MAX_NAMES} names")
        return [f"{number:0{width}}" for number in range(first, last + step, step)]
    if "," in inner:
        return inner.split(",")
    raise DataError(
        f"{text}: cannot read {{{inner}}}; expected a range of numbers, {{0000..0063}}, or names, "
        "{train,val}"
    )
