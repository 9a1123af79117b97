"""The index of one tar file: where its images lie and which labels stand beside them.

Headers are read here and not by tarfile, which takes twice as long, keeps an object for every
member, and asks a server for each header: an index of a million members is a few arrays.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import NO_LABELS, label_text
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import (
    VIDEOS,
    is_hidden,
    is_image,
    is_video,
    member_path,
    utf8,
)
from vitsee_core.images.left_out import count_ending
from vitsee_core.images.sources.base import strings
from vitsee_stores.files import Files
from vitsee_stores.folder import Folder

BLOCK = 512
# bytes of a long name, and of a member with a label
PATH_MOST = 1 << 16
LABEL_MOST = 1 << 20
# Read at once: on a disk less than most images, so that these are passed over; of a server, whose
# answers take longer to come than to be sent, several images.
WINDOW = 1 << 14
WINDOW_FAR = 1 << 20
MAX_REPLACED_SHOWN = 1000
FLUSH = 1 << 15  # Python objects that become arrays at once
PACKED = {
    b"\x1f\x8b": "gunzip",
    b"(\xb5/\xfd": "zstd -d",
    b"BZh": "bunzip2",
    b"\xfd7zX": "unxz",
}
IMAGES = frozenset(("jpg", "jpeg", "png", "webp"))  # endings that make an image of a key
CLIPS = frozenset(
    ending.removeprefix(".") for ending in VIDEOS
)  # and that make a clip of one
MEMBERS = ("cls", "txt")  # that are a label themselves
JSON_FIELDS = ("label", "cls", "class")
_ZEROS = bytes(BLOCK)
_FILES = (b"0", b"\0", b"7")
_WITHOUT_DATA = (
    b"1",
    b"2",
    b"3",
    b"4",
    b"5",
    b"6",
)  # links, devices, folders, whatever their size


@dataclass
class TarIndex:
    """The images of one tar file.

    Attributes:
        paths: (images,) in the tar, of numpy's StringDType, as the tar has them.
        offset, size: (images,) where the bytes are.
        label: (images,) index into `label_texts`, -1 for none.
        whole: (images,) whether the name is a key and an image's ending, no further one between.
        others: files that are left out because of their ending -> how many.
        replaced: paths of images that a later member replaces, at most a thousand.
    """

    paths: NDArray[Any]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int32]
    whole: NDArray[np.bool_]
    label_texts: list[str]
    others: dict[str, int] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)

    def at(self, rows: NDArray[Any]) -> TarIndex:
        offset = self.offset[rows]
        size = self.size[rows]
        label = self.label[rows]
        return replace(
            self,
            paths=self.paths[rows],
            offset=offset,
            size=size,
            label=label,
            whole=self.whole[rows],
        )


def index_tar(
    files: Files, name: str, size: int, label_key: str | None, clips: bool = False
) -> TarIndex:
    """Read the headers of a tar file.

    Args:
        files, name, size: the tar.
        label_key: `cls` or `txt`, the member with an image's label, or else a field of its
            `.json`. By default the first that an image has of `.cls`, the field `label`, `cls` or
            `class` of `.json`, and a `.txt` with a whole number.
        clips: index videos, not images.

    Raises:
        DataError: why it cannot be read as an uncompressed tar, or as a set of labelled images.
    """
    window = _Window(files, name, size)
    seen = _Seen(label_key, CLIPS if clips else IMAGES)
    wanted = is_video if clips else is_image
    try:
        if not size:
            raise ValueError("it is empty")
        others = Counter[str]()
        for path, offset, length in _members(window, 0, size, ""):
            base = path.rpartition("/")[2]
            ending = base.rpartition(".")[2].lower()
            if is_hidden(path):
                continue
            if wanted(base):
                seen.add_image(utf8(path), offset, length)
            elif seen.reads(ending) and length <= LABEL_MOST:
                seen.add_label(path, ending, window.read(offset, length))
            elif not (clips and is_image(base)):
                count_ending(others, base)
        return replace(seen.index(), others=dict(others))
    except (ValueError, RecursionError) as error:
        start = bytes(window.read(0, min(size, 4)))
        tool = next(
            (tool for magic, tool in PACKED.items() if start.startswith(magic)), None
        )
        why = f"it is compressed; unpack it: {tool}" if tool else str(error)
        raise DataError(f"cannot be read as an uncompressed tar: {why}") from None


def key_of(path: str) -> str:
    """The key of a member: its path up to the first dot behind its folder."""
    folder, slash, base = path.rpartition("/")
    return folder + slash + base.partition(".")[0]


class _Window:
    def __init__(self, files: Files, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size
        self._least = WINDOW if isinstance(files, Folder) else WINDOW_FAR
        self._at = 0
        self._data = b""

    def read(self, at: int, length: int) -> bytes:
        start = at - self._at
        if start < 0 or start + length > len(self._data):
            ahead = min(max(length, self._least), self._size - at)
            self._at, self._data, start = (
                at,
                self._files.read_range(self._name, at, ahead),
                0,
            )
        return self._data[start : start + length]


def _members(
    window: _Window, at: int, stop: int, prefix: str
) -> Iterator[tuple[str, int, int]]:
    """Path, offset and size of every file; those of a tar inside are below its name. Raises
    ValueError: no header where one should be, or the tar ends before a member does."""
    given: dict[str, str] = {}  # of the next member, from headers of its own
    while at < stop:
        if stop - at < BLOCK:
            raise ValueError(f"it ends in the middle of the header at byte {at}")
        head = window.read(at, BLOCK)
        if head == _ZEROS:
            return
        size = _size(head, at)
        kind = head[156:157]
        if kind in _FILES and "size" in given:
            size = int(given["size"])
        if kind in _WITHOUT_DATA:
            size = 0
        body = at + BLOCK
        at = body + -(-size // BLOCK) * BLOCK
        if body + size > stop:
            raise ValueError(f"it ends {body + size - stop} bytes too early")
        if kind in (b"L", b"x", b"X"):
            if size > PATH_MOST:
                raise ValueError(f"a name of {size} bytes before byte {at}")
            data = window.read(body, size)
            given |= {"path": _text(data)} if kind == b"L" else _pax(data)
        elif kind not in (b"K", b"g"):
            path = given.get("path") or _path(head)
            sparse = any(key.startswith("GNU.sparse") for key in given)
            given = {}
            if kind not in _FILES or sparse or path.endswith("/"):
                continue
            path = member_path(path)
            base = path.rpartition("/")[2]
            path = prefix + path
            if base.lower().endswith(".tar"):
                yield from _members(window, body, body + size, path[: -len(".tar")] + "/")
            else:
                yield path, body, size


def _size(head: bytes, at: int) -> int:
    try:
        matches = sum(head) - sum(head[148:156]) + 8 * ord(" ") == _number(head[148:156])
        size = _number(head[124:136])
    except ValueError:
        matches = False
    if not matches or size < 0:
        raise ValueError(f"no header at byte {at}, where one should be")
    return size


def _number(digits: bytes) -> int:
    """Octal digits, or a binary number behind a byte of its own."""
    if digits[0] & 0x80:
        return int.from_bytes(digits[1:], "big")
    return int(digits.partition(b"\0")[0].strip() or b"0", 8)


def _path(head: bytes) -> str:
    """The name in a header, with what POSIX puts before it."""
    before = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    if before:
        return f"{before}/{_text(head[:100])}"
    return _text(head[:100])


def _pax(data: bytes) -> dict[str, str]:
    """The records of an extended header: `LENGTH KEY=VALUE`. Raises ValueError: they are none."""
    found = {}
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        digits, blank, _ = data[at : at + 20].partition(b" ")
        length = int(digits)
        if not blank or length < len(digits) + 3 or at + length > len(data):
            raise ValueError("an extended header that is none")
        key, _, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        found[_text(key)] = _text(value)
        at += length
    return found


def _text(name: bytes) -> str:
    return name.partition(b"\0")[0].decode("utf-8", "surrogateescape")


class _Packed:
    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._fresh: list[str] = []

    def add(self, text: str) -> None:
        self._fresh.append(text)
        if len(self._fresh) == FLUSH:
            self.array()

    def array(self) -> NDArray[Any]:
        self._parts = [np.concatenate([*self._parts, strings(self._fresh)])]
        self._fresh = []
        return self._parts[0]


class _Seen:
    """The images that were found in a tar so far, and labels by their keys."""

    def __init__(self, label_key: str | None, endings: frozenset[str]) -> None:
        self._label_key = label_key
        self._kinds = endings
        # The last wins.
        self._endings: tuple[str, ...] = ("txt", "json", "cls")
        if label_key is not None:
            self._endings = (label_key,) if label_key in MEMBERS else ("json",)
        if label_key == NO_LABELS:
            self._endings = ()
        self._paths = _Packed()
        self._whole = array("b")
        self._offset = array("q")
        self._size = array("q")
        self._keys = _Packed()
        self._label = array("i")
        self._ending = array("b")
        self._codes: dict[str, int] = {}

    def reads(self, ending: str) -> bool:
        return ending in self._endings

    def add_image(self, path: str, offset: int, size: int) -> None:
        self._paths.add(path)
        self._whole.append(path.removeprefix(key_of(path))[1:].lower() in self._kinds)
        self._offset.append(offset)
        self._size.append(size)

    def add_label(self, path: str, ending: str, data: bytes) -> None:
        """Raises ValueError: not of the kind that its ending says."""
        try:
            text = (
                self._json_label(data)
                if ending == "json"
                else data.decode("utf-8").strip()
            )
        except DataError as error:
            raise ValueError(
                f"{path}: {error} (--label-key KEY names another, or none)"
            ) from None
        except (ValueError, RecursionError):
            raise ValueError(
                f"{path} is no {'JSON' if ending == 'json' else 'text'}"
            ) from None
        if (
            self._label_key is None
            and ending == "txt"
            and not text.removeprefix("-").isdigit()
        ):
            return  # a caption
        if text:
            self._keys.add(key_of(path))
            self._label.append(self._codes.setdefault(text, len(self._codes)))
            self._ending.append(self._endings.index(ending))

    def _json_label(self, data: bytes) -> str:
        fields = JSON_FIELDS if self._label_key is None else (self._label_key,)
        record = json.loads(data)
        values = (
            (record.get(field) for field in fields) if isinstance(record, dict) else ()
        )
        value = next((value for value in values if value is not None), None)
        return label_text(value)

    def index(self) -> TarIndex:
        """Raises ValueError: two images of one key, or a label without an image."""
        made = TarIndex(
            self._paths.array(),
            np.frombuffer(self._offset, np.int64)
            if self._offset
            else np.empty(0, np.int64),
            np.frombuffer(self._size, np.int64) if self._size else np.empty(0, np.int64),
            np.full(len(self._offset), -1, np.int32),
            np.array(self._whole, np.bool_),
            [],
        )
        replaced = _replaced(made)
        if replaced.any():
            paths = [str(path) for path in made.paths[replaced][:MAX_REPLACED_SHOWN]]
            made = replace(made.at(~replaced), replaced=paths)
        keys = self._keys.array()
        if len(keys):
            self._join(made, keys)
        return made

    def _join(self, made: TarIndex, label_keys: NDArray[Any]) -> None:
        packed = _Packed()
        for path in made.paths:
            packed.add(key_of(path))
        both = np.concatenate([label_keys, packed.array()])
        n = len(label_keys)
        order = np.argsort(both, kind="stable")
        ordered = both[order]
        group = np.empty(len(both), np.int64)
        group[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        of_labels = group[:n]
        of_images = group[n:]
        endings = np.array(self._ending)
        codes = np.array(self._label, np.int32)
        label = np.full(len(both), -1, np.int32)
        for ending in range(len(self._endings)):
            label[of_labels[endings == ending]] = codes[endings == ending]
        if (label[of_images] < 0).all():
            return
        n_images = np.bincount(of_images[made.whole], minlength=len(both))
        kinds = ", ".join(f".{ending}" for ending in sorted(self._kinds))
        if (n_images > 1).any():
            found = made.paths[made.whole & (of_images == np.argmax(n_images > 1))]
            raise ValueError(
                f"{found[0]} and {found[1]} are images of one key; expected one"
            )
        if len(alone := np.flatnonzero(n_images[of_labels] == 0)):
            raise ValueError(
                f"the key {label_keys[alone[0]]} has a label and no image; expected one of: {kinds}"
            )
        made.label = label[of_images]
        made.label_texts = list(self._codes)


def _replaced(index: TarIndex) -> NDArray[np.bool_]:
    """(images,) which have the path of another that was appended later."""
    order = np.argsort(index.paths, kind="stable")
    ordered = index.paths[order]
    replaced = np.zeros(len(order), np.bool_)
    replaced[order[:-1]] = ordered[1:] == ordered[:-1]
    return replaced
