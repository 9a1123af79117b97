"""The index of one tar file: where its images lie and which labels stand beside them.

Headers are read here and not by tarfile, which takes twice as long, keeps an object for every
member, and asks a server for each header: an index of a million members is a few arrays.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

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

BLOCK = 512  # bytes; headers and contents start at multiples of it
MAX_PATH_BYTES = 1 << 16
MAX_LABEL_BYTES = 1 << 20
# Bytes read at a time. From a disk, fewer than an image has, so that its contents are skipped; from
# a server, whose answers take longer to arrive than to be transferred, those of several images.
WINDOW = 1 << 14
REMOTE_WINDOW = 1 << 20
MAX_REPLACED_SHOWN = 1000
PACK_AFTER = 1 << 15  # so many Python strings are packed into an array at a time
PACKED = {  # first bytes of a compressed file -> the tool that unpacks it
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
_WHOLE_NUMBER = re.compile("-?[0-9]+")
_ZEROS = bytes(BLOCK)
# The header's type flag.
_FILES = (b"0", b"\0", b"7")
# Links, devices and folders, which have no contents whatever the size in their header.
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")


@dataclass
class TarIndex:
    """The images of one tar file.

    Attributes:
        paths: (images,) paths as the tar has them, of numpy's StringDType.
        offset, size: (images,) first byte and number of bytes of the contents.
        label: (images,) index into `label_texts`, -1 for none.
        is_single: (images,) whether the name is a key and an image's ending, as `k.jpg` is and
            `k.seg.png` is not.
        label_texts: the distinct labels.
        others: ending -> number of files that are left out because of it.
        replaced: paths of images that a later member replaces, at most a thousand.
    """

    paths: NDArray[Any]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    label: NDArray[np.int32]
    is_single: NDArray[np.bool_]
    label_texts: list[str]
    others: dict[str, int] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)

    def at(self, rows: NDArray[Any]) -> TarIndex:
        """Return the index of the images that a mask or an array of positions picks."""
        return replace(
            self,
            paths=self.paths[rows],
            offset=self.offset[rows],
            size=self.size[rows],
            label=self.label[rows],
            is_single=self.is_single[rows],
        )


def index_tar(
    files: Files, name: str, size: int, label_key: str | None, clips: bool = False
) -> TarIndex:
    """Return the index of a tar file, for which its headers and labels are read.

    Args:
        files: the folder or URL of the tar.
        name: the tar's name in it.
        size: the tar's size in bytes.
        label_key: `cls` or `txt`, the member with an image's label, or else a field of its
            `.json`. By default the first that an image has of `.cls`, the field `label`, `cls` or
            `class` of `.json`, and a `.txt` with a whole number.
        clips: index videos, not images.

    Raises:
        DataError: it is not an uncompressed tar, or not a set of labelled images. The message
            starts with a verb: the caller puts the tar's name before it. Those of labels name
            the option that leaves them out.
    """
    window = _Window(files, name, size)
    builder = _IndexBuilder(label_key, CLIPS if clips else IMAGES)
    is_sample = is_video if clips else is_image
    try:
        if not size:
            raise ValueError("it is empty")
        others = Counter[str]()
        for path, offset, length in _members(window, 0, size, ""):
            base = path.rpartition("/")[2]
            ending = base.rpartition(".")[2].lower()
            if is_hidden(path):
                continue
            if is_sample(base):
                builder.add_image(utf8(path), offset, length)
            elif builder.reads(ending) and length <= MAX_LABEL_BYTES:
                builder.add_label(path, ending, window.read(offset, length))
            elif not (clips and is_image(base)):  # images may be previews of the videos
                count_ending(others, base)
        return replace(builder.index(), others=dict(others))
    except (ValueError, RecursionError) as error:
        start = bytes(window.read(0, min(size, 4)))
        tool = next(
            (tool for magic, tool in PACKED.items() if start.startswith(magic)), None
        )
        why = f"it is compressed; unpack it: {tool}" if tool else str(error)
        raise DataError(f"cannot be read as an uncompressed tar: {why}") from None


def key_of(path: str) -> str:
    """Return the key of a member: its path up to the first dot behind its folder.

    Members of the same key belong together, as webdataset defines it: `0001.jpg`, `0001.cls`.
    """
    folder, slash, base = path.rpartition("/")
    return folder + slash + base.partition(".")[0]


class _Window:
    """Reads a file from front to back, a window at a time."""

    def __init__(self, files: Files, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size
        self._window_bytes = WINDOW if isinstance(files, Folder) else REMOTE_WINDOW
        self._offset = 0  # of the window in the file
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on; a new window starts there if it is needed."""
        start = offset - self._offset
        if start < 0 or start + length > len(self._data):
            n_bytes = min(max(length, self._window_bytes), self._size - offset)
            self._data = self._files.read_range(self._name, offset, n_bytes)
            self._offset = offset
            start = 0
        return self._data[start : start + length]


def _members(
    window: _Window, at: int, stop: int, prefix: str
) -> Iterator[tuple[str, int, int]]:
    """Yield path, offset and size of each file between two offsets of a tar.

    The files of a tar inside the tar are yielded too, below its name.

    Args:
        window: reads the tar.
        at: the offset of the first header.
        stop: the offset behind the tar.
        prefix: put before each path.

    Raises:
        ValueError: there is no header where one should be, or the tar ends before a member does.
    """
    # Long names and other fields that do not fit into a header precede it as members of their own.
    overrides: dict[str, str] = {}
    while at < stop:
        if stop - at < BLOCK:
            raise ValueError(f"it ends in the middle of the header at byte {at}")
        head = window.read(at, BLOCK)
        if head == _ZEROS:
            return
        size = _size_in_header(head, at)
        kind = head[156:157]
        if kind in _FILES and "size" in overrides:
            size = int(overrides["size"])
        if kind in _WITHOUT_DATA:
            size = 0
        body = at + BLOCK
        # The next header is at the next multiple of BLOCK (-(-a // b) rounds up).
        at = body + -(-size // BLOCK) * BLOCK
        if body + size > stop:
            raise ValueError(f"it ends {body + size - stop} bytes too early")
        if kind in (b"L", b"x", b"X"):  # GNU's long name, or an extended header of pax
            if size > MAX_PATH_BYTES:
                raise ValueError(f"a name of {size} bytes before byte {at}")
            data = window.read(body, size)
            if kind == b"L":
                overrides["path"] = _decode_name(data)
            else:
                overrides |= _pax_records(data)
        elif kind not in (b"K", b"g"):  # not a long link name, nor pax's global header
            path = overrides.get("path") or _path_in_header(head)
            sparse = any(key.startswith("GNU.sparse") for key in overrides)
            overrides = {}
            if kind not in _FILES or sparse or path.endswith("/"):
                continue
            path = member_path(path)
            base = path.rpartition("/")[2]
            path = prefix + path
            if base.lower().endswith(".tar"):
                yield from _members(window, body, body + size, path[: -len(".tar")] + "/")
            else:
                yield path, body, size


def _size_in_header(head: bytes, at: int) -> int:
    """Return the size of a member; raise ValueError if `head` is not a header.

    Args:
        head: the 512 bytes at `at`.
        at: their offset in the tar, for the message.
    """
    try:
        # The checksum is the sum of all bytes, with blanks in place of the checksum itself.
        checksum = sum(head) - sum(head[148:156]) + 8 * ord(" ")
        matches = checksum == _parse_number(head[148:156])
        size = _parse_number(head[124:136])
    except ValueError:
        matches = False
    if not matches or size < 0:
        raise ValueError(f"no header at byte {at}, where one should be")
    return size


def _parse_number(field: bytes) -> int:
    """Return the number in a header's field: octal digits, or binary if the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _path_in_header(head: bytes) -> str:
    """Return the path in a header: a name, behind the folder that POSIX has in a second field."""
    name = _decode_name(head[:100])
    if head[257:263] == b"ustar\0":
        folder = _decode_name(head[345:500])
        if folder:
            return f"{folder}/{name}"
    return name


def _pax_records(data: bytes) -> dict[str, str]:
    """Return the records, each `LENGTH KEY=VALUE`, of pax's extended header.

    Raises:
        ValueError: the data are not such records.
    """
    records = {}
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        digits, blank, _ = data[at : at + 20].partition(b" ")
        length = int(digits)
        if not blank or length < len(digits) + 3 or at + length > len(data):
            raise ValueError("an extended header that is none")
        key, _, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        records[_decode_name(key)] = _decode_name(value)
        at += length
    return records


def _decode_name(name: bytes) -> str:
    """Return the text up to the first NUL; bytes that are not UTF-8 are kept as surrogates."""
    return name.partition(b"\0")[0].decode("utf-8", "surrogateescape")


class _PackedStrings:
    """A growing array of strings, of which only the last few are Python objects."""

    def __init__(self) -> None:
        self._packed: list[NDArray[Any]] = []
        self._unpacked: list[str] = []

    def add(self, text: str) -> None:
        """Append a string."""
        self._unpacked.append(text)
        if len(self._unpacked) == PACK_AFTER:
            self.array()

    def array(self) -> NDArray[Any]:
        """Return all strings as an array of StringDType."""
        self._packed = [np.concatenate([*self._packed, strings(self._unpacked)])]
        self._unpacked = []
        return self._packed[0]


class _IndexBuilder:
    """Collects the images of a tar, and labels by their keys, until `index` joins them."""

    def __init__(self, label_key: str | None, image_endings: frozenset[str]) -> None:
        self._label_key = label_key
        self._image_endings = image_endings
        # Endings of members with labels, by increasing precedence.
        self._label_endings: tuple[str, ...] = ("txt", "json", "cls")
        if label_key is not None:
            self._label_endings = (label_key,) if label_key in MEMBERS else ("json",)
        if label_key == NO_LABELS:
            self._label_endings = ()
        # An item for each image.
        self._paths = _PackedStrings()
        self._is_single = array("b")
        self._offset = array("q")
        self._size = array("q")
        # An item for each label: its key, the index of its text, the index of its ending.
        self._label_keys = _PackedStrings()
        self._label_codes = array("i")
        self._label_ending = array("b")
        self._code_of_text: dict[str, int] = {}

    def reads(self, ending: str) -> bool:
        """Return whether members with this ending are read as labels."""
        return ending in self._label_endings

    def add_image(self, path: str, offset: int, size: int) -> None:
        """Add an image's path and where its bytes are."""
        endings = path.removeprefix(key_of(path))[1:].lower()
        self._paths.add(path)
        self._is_single.append(endings in self._image_endings)
        self._offset.append(offset)
        self._size.append(size)

    def add_label(self, path: str, ending: str, data: bytes) -> None:
        """Add the label in a member's bytes; a .txt that may be a caption is passed over.

        Raises:
            DataError: the member is not of the kind that its ending says, or holds no label.
        """
        is_json = ending == "json"
        may_be_caption = self._label_key is None and ending == "txt"
        try:
            text = self._json_label(data) if is_json else data.decode("utf-8").strip()
        except DataError as error:
            _refuse_labels(f"has a label that is none in {path}: {error}")
        except (ValueError, RecursionError):
            if may_be_caption:
                return  # in another encoding, or some other file beside the image
            _refuse_labels(f"has a label in {path}, which is no {_kind_of_text(ending)}")
        if may_be_caption and not _WHOLE_NUMBER.fullmatch(text):
            return
        if text:
            self._label_keys.add(key_of(path))
            code = self._code_of_text.setdefault(text, len(self._code_of_text))
            self._label_codes.append(code)
            self._label_ending.append(self._label_endings.index(ending))

    def _json_label(self, data: bytes) -> str:
        """Return the label in a JSON member, "" if it has none; raise ValueError if damaged."""
        fields = JSON_FIELDS if self._label_key is None else (self._label_key,)
        record = json.loads(data)
        value = None
        if isinstance(record, dict):
            present = [record[name] for name in fields if record.get(name) is not None]
            value = next(iter(present), None)
        return label_text(value)

    def index(self) -> TarIndex:
        """Return the index of the images that were added, with their labels.

        Raises:
            DataError: two images of a labelled set have the same key, or a label has no image.
        """
        index = TarIndex(
            paths=self._paths.array(),
            offset=np.array(self._offset, np.int64),
            size=np.array(self._size, np.int64),
            label=np.full(len(self._offset), -1, np.int32),
            is_single=np.array(self._is_single, np.bool_),
            label_texts=[],
        )
        replaced = _is_replaced(index)
        if replaced.any():
            paths = [str(path) for path in index.paths[replaced][:MAX_REPLACED_SHOWN]]
            index = replace(index.at(~replaced), replaced=paths)
        label_keys = self._label_keys.array()
        if len(label_keys):
            self._join_labels(index, label_keys)
        return index

    def _join_labels(self, index: TarIndex, label_keys: NDArray[Any]) -> None:
        """Set the labels of an index by joining label keys with the images' keys.

        The join sorts all keys, which are arrays: a dict of a million keys takes ten times as much
        memory.
        """
        image_keys = _PackedStrings()
        for path in index.paths:
            image_keys.add(key_of(path))
        keys = np.concatenate([label_keys, image_keys.array()])
        n_labels = len(label_keys)
        # Number the distinct keys: a key's number goes up where the sorted keys change.
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        key_number = np.empty(len(keys), np.int64)
        key_number[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        key_of_label = key_number[:n_labels]
        key_of_image = key_number[n_labels:]
        endings = np.array(self._label_ending)
        codes = np.array(self._label_codes, np.int32)
        code_of_key = np.full(len(keys), -1, np.int32)
        # By increasing precedence, so that a later ending replaces an earlier one.
        for ending in range(len(self._label_endings)):
            code_of_key[key_of_label[endings == ending]] = codes[endings == ending]
        if (code_of_key[key_of_image] < 0).all():
            return  # the labels belong to files of another kind
        n_images = np.bincount(key_of_image[index.is_single], minlength=len(keys))
        if (n_images > 1).any():
            first_key = np.argmax(n_images > 1)
            paths = index.paths[index.is_single & (key_of_image == first_key)]
            _refuse_labels(f"has two images of one key, {paths[0]} and {paths[1]}")
        without_image = np.flatnonzero(n_images[key_of_label] == 0)
        if len(without_image):
            kinds = ", ".join(f".{ending}" for ending in sorted(self._image_endings))
            _refuse_labels(
                f"has a label of the key {label_keys[without_image[0]]}, and no image; expected "
                f"one of: {kinds}"
            )
        index.label = code_of_key[key_of_image]
        index.label_texts = list(self._code_of_text)


def _kind_of_text(ending: str) -> str:
    """Return what a member with a label holds, by its ending."""
    return "JSON" if ending == "json" else "text in UTF-8"


def _refuse_labels(why: str) -> NoReturn:
    """Raise DataError with what is wrong with a tar's labels, and how to do without them."""
    raise DataError(f"{why} (--label-key KEY names another label, or none)")


def _is_replaced(index: TarIndex) -> NDArray[np.bool_]:
    """Return (images,) whether a later image of the tar has the same path."""
    # The sort is stable, so the last of equal paths is the one that was appended last.
    order = np.argsort(index.paths, kind="stable")
    ordered = index.paths[order]
    replaced = np.zeros(len(order), np.bool_)
    replaced[order[:-1]] = ordered[1:] == ordered[:-1]
    return replaced
