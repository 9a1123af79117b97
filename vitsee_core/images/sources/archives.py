"""Images in zip files and in uncompressed tar files (webdataset's shards among them), read in
place.

An index of tar files that took a second to make is kept in the user's cache folder, and of a set
that changed only the files with another size or time of modification are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.class_labels import NO_LABELS
from vitsee_core.images.decoding import TarOpener, ZipMember, ZipOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import classify, is_hidden, member_path, utf8
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.left_out import left_out_line
from vitsee_core.images.sources.base import (
    MatchedFiles,
    SourceRequest,
    labels_of,
    no_answer,
    strings,
)
from vitsee_core.images.sources.tar_index import MEMBERS, TarIndex, index_tar, key_of
from vitsee_core.runtime.machine import TAR_INDEX, user_caches
from vitsee_core.runtime.progress import counting
from vitsee_stores.disk import temporary_name
from vitsee_stores.errors import reason
from vitsee_stores.files import NoAnswer
from vitsee_stores.manifest import abbreviate

CACHE_AFTER_SECONDS = 1.0
_VERSION = 2
_ARRAYS = ("offset", "size", "label", "whole")
Stamp = tuple[int, str]

log = logging.getLogger(__name__)


def open_zips(zips: Sequence[Path], asked: SourceRequest) -> ImageSource:
    """The images of zip files, sorted by code point of their paths; nothing is unpacked.

    With several, the file's name without its suffix is prepended as a folder. Raises DataError: a
    damaged or encrypted zip, members with a compression other than deflate, or none with an image.
    """
    found: dict[str, ZipMember] = {}
    replaced: list[str] = []
    others = Counter[str]()
    for k, path in enumerate(zips):
        prefix = f"{path.stem}/" if len(zips) > 1 else ""
        try:
            with zipfile.ZipFile(path) as file:
                for member in file.infolist():
                    # The format knows forward slashes only; some programs of Windows do not.
                    path_inside = member_path(member.filename.replace("\\", "/"))
                    inner = utf8(prefix + path_inside)
                    if member.is_dir() or is_hidden(path_inside):
                        continue
                    if not asked.wants(inner):
                        asked.count_other(others, inner)
                        continue
                    if member.flag_bits & 1:
                        raise DataError(f"{path} is encrypted; unpack it to a folder")
                    deflated = member.compress_type == zipfile.ZIP_DEFLATED
                    if not deflated and member.compress_type != zipfile.ZIP_STORED:
                        why = "packed by another method than deflate"
                        raise DataError(f"{path} is {why}; unpack it to a folder")
                    sizes = member.compress_size, member.file_size
                    if inner in found:
                        replaced.append(inner)
                    found[inner] = (
                        k,
                        inner,
                        member.header_offset,
                        *sizes,
                        deflated,
                        member.CRC,
                    )
        except (
            zipfile.BadZipFile,
            EOFError,
            NotImplementedError,
            OSError,
            ValueError,
        ) as error:
            raise DataError(
                f"{path} cannot be read as a zip file: {one_line(error)}"
            ) from None
    opener = ZipOpener(tuple(str(path.absolute()) for path in zips))
    if not found:
        raise DataError(_nothing(asked, others))
    asked.say_left_out(others)
    _say_replaced(asked, replaced)
    paths = sorted(found)
    labels, splits, class_names = classify(paths)
    locations = [found[p] for p in paths]
    return ImageSource(asked.data, opener, locations, paths, labels, splits, class_names)


def open_tars(asked: SourceRequest, found: MatchedFiles) -> ImageSource:
    """The images of tar files, sorted by code point of their paths; nothing is unpacked.

    A path is the one in the tar. Where images have labels beside them (see `index_tar`), these are
    their labels; otherwise folders are classes. The tars' names without their suffix are prepended
    as folders where two tars have an image of the same path, and for all tars of a folder without
    labels, so that one tar per class gives class folders. A member that was appended again replaces
    the earlier one, as in unpacking. Raises DataError: a damaged or compressed tar, or none with an
    image; labels that do not fit.
    """
    indexes = _indexes(asked, found)
    others = Counter[str]()
    for index in indexes:
        others.update(index.others)
    if labelled := any(index.label_texts for index in indexes):
        indexes = [index.at(index.whole) for index in indexes]
    elif asked.label_key not in (None, NO_LABELS):
        key = asked.label_key
        expected = f"KEY.{key}" if key in MEMBERS else f"a field {key!r} of KEY.json"
        raise DataError(
            f"no image of {asked.data} has a label {key!r} beside it; expected {expected}"
        )
    stems = [PurePosixPath(name).stem for name in found.names]
    lengths = [len(index.paths) for index in indexes]
    tar = np.repeat(np.arange(len(indexes), dtype=np.int32), lengths)
    paths = np.concatenate([index.paths for index in indexes])
    if not len(paths):
        raise DataError(_nothing(asked, others))
    asked.say_left_out(others)
    _say_replaced(asked, [path for index in indexes for path in index.replaced])
    order = _in_order(paths)
    if len(indexes) > 1 and (order is None or not (found.given or labelled)):
        paths = np.concatenate(
            [
                strings([f"{stem}/"]) + own.paths
                for stem, own in zip(stems, indexes, strict=True)
            ]
        )
        order = _in_order(paths)
    if order is None:
        twice = next(stem for stem, n in Counter(stems).most_common())
        raise DataError(
            f"several tar files of {asked.data} are called {twice} and have the same images; "
            "rename one of them"
        )
    paths = paths[order]
    tar = tar[order]
    ids = cast(Sequence[str], paths)  # packed: a list of a million names takes 100 MB
    if labelled:
        for before, path in pairwise(
            ids
        ):  # those of one key are neighbours in this order
            if key_of(path) == key_of(before):
                raise DataError(
                    f"{before} and {path} are images of one key; expected one"
                )
        try:
            labels, class_names = labels_of(
                (own.label, own.label_texts) for own in indexes
            )
        except DataError as error:
            raise DataError(
                f"{asked.data}: {error} (--label-key KEY names another)"
            ) from None
        labels = labels[order]
        splits = [""] * len(paths)
    else:
        labels, splits, class_names = classify(ids)
    offset, size = (
        np.concatenate([getattr(index, name) for index in indexes])[order]
        for name in ("offset", "size")
    )
    members = cast(Sequence[Any], _Members(tar, paths, offset, size))
    opener = TarOpener(found.files, tuple(found.names))
    return ImageSource(asked.data, opener, members, ids, labels, splits, class_names)


def _nothing(asked: SourceRequest, others: Mapping[str, int]) -> str:
    """The message for archives without images."""
    line = left_out_line(asked.data, others)
    return asked.nothing % asked.data + (f" ({line})" if line else "")


def _say_replaced(asked: SourceRequest, replaced: Sequence[str]) -> None:
    """Log the paths that an archive has twice, as one to which files were appended."""
    if replaced:
        log.warning(
            "of members of one path in %s the last is taken, and %d before it left out: %s",
            *(asked.data, len(replaced), abbreviate(sorted(set(replaced)))),
        )


def _in_order(paths: NDArray[Any]) -> NDArray[np.int64] | None:
    """The order of the paths; None if two are equal."""
    order = np.argsort(paths, kind="stable")
    ordered = paths[order]
    return None if (ordered[1:] == ordered[:-1]).any() else order


@dataclass(frozen=True)
class _Members:
    """The locations of a `TarOpener`, made when they are asked for."""

    tar: NDArray[np.int32]
    paths: NDArray[Any]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[int, str, int, int]:
        return (
            int(self.tar[row]),
            self.paths[row],
            int(self.offset[row]),
            int(self.size[row]),
        )


# the index and its cache ----------------------------------------------------------------------


def _indexes(asked: SourceRequest, found: MatchedFiles) -> list[TarIndex]:
    """The index of each tar: as it was kept, or read in threads, with progress."""
    began = time.monotonic()

    def read(name: str) -> tuple[Stamp, TarIndex]:
        try:
            stamp = found.files.stamp(name)
            index = known[name][1] if known.get(name, ((), None))[0] == stamp else None
            if index is None:
                index = index_tar(
                    found.files, name, stamp[0], asked.label_key, asked.clips
                )
                read_anew.append(name)
        except NoAnswer as error:
            raise no_answer(found.shown(name), error) from None
        except OSError as error:
            raise DataError(f"cannot read {found.shown(name)}: {reason(error)}") from None
        except DataError as error:
            raise DataError(f"{found.shown(name)} {error}") from None
        progress.advance(1)
        return stamp, index

    place = _cache_file(asked, found)
    known = _kept(place)
    read_anew = list[str]()
    with counting(asked.progress, len(found.names), "tar files") as progress:
        made = found.files.each(read, found.names)
    if read_anew and time.monotonic() - began > CACHE_AFTER_SECONDS:
        _keep(place, dict(zip(found.names, made, strict=True)))
    return [index for _, index in made]


def _cache_file(asked: SourceRequest, found: MatchedFiles) -> Path:
    place = found.files.place.absolute()
    kind = ["clips"] if asked.clips else []
    names = json.dumps([_VERSION, str(place), asked.label_key, *kind, *found.names])
    digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
    return user_caches() / f"{digest[:24]}{TAR_INDEX}"


def _kept(place: Path) -> dict[str, tuple[Stamp, TarIndex]]:
    """Name -> stamp and index, as far as they were kept; a damaged file counts as none."""
    try:
        with np.load(place, allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            arrays = {name: file[name] for name in ("paths", *_ARRAYS)}
        return dict(_unpacked(head, arrays))
    except FileNotFoundError:
        return {}
    except Exception as error:  # numpy and zipfile raise nearly anything on damaged files
        log.debug("%s is not used: %r", place, error)
        return {}


def _unpacked(
    head: Any, arrays: dict[str, NDArray[Any]]
) -> Iterator[tuple[str, tuple[Stamp, TarIndex]]]:
    row = byte = 0
    for name, size, version, n_images, n_bytes, texts, others, replaced in head:
        rows = slice(row, row + n_images)
        text = arrays["paths"][byte : byte + n_bytes].tobytes()
        paths = strings(text.decode().split("\0") if n_images else [])
        offset, length, label, whole = (arrays[key][rows] for key in _ARRAYS)
        index = TarIndex(paths, offset, length, label, whole, texts, others, replaced)
        if {len(paths), len(index.offset), len(index.whole)} != {n_images}:
            raise ValueError("cut short")
        yield name, ((size, version), index)
        row = row + n_images
        byte = byte + n_bytes


def _keep(place: Path, made: dict[str, tuple[Stamp, TarIndex]]) -> None:
    """Write the index; without room or right to, a line in the log is all."""
    blobs = ["\0".join(index.paths).encode() for _, index in made.values()]
    head = [
        [
            *(name, *stamp, len(index.paths), len(blob)),
            *(index.label_texts, index.others, index.replaced),
        ]
        for (name, (stamp, index)), blob in zip(made.items(), blobs, strict=True)
    ]
    arrays = {
        key: np.concatenate([getattr(index, key) for _, index in made.values()])
        for key in _ARRAYS
    }
    arrays["paths"] = np.frombuffer(b"".join(blobs), np.uint8)
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    temporary = Path(temporary_name(place, ".partial"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            np.savez(file, **cast(dict[str, Any], arrays))
        os.replace(temporary, place)
    except OSError as error:
        log.info("the index of the tar files is not kept: %s", reason(error))
        with suppress(OSError):
            temporary.unlink()
