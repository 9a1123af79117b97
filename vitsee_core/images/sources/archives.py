"""Images in zip files and in uncompressed tar files (webdataset's shards among them).

They are read where they are; nothing is unpacked. An index of tar files that took more than a
second to make is kept in the user's cache folder. When a set of tar files changes, only the files
with another size or time of modification are indexed again.
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
    labels_of_files,
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
_CACHE_VERSION = 3
# TarIndex's attribute -> the name of its array in a cache file
_CACHED_ARRAYS = {
    "offset": "offset",
    "size": "size",
    "label": "label",
    "is_single": "whole",
}
Stamp = tuple[int, str]  # a file's size and its time of modification or version

log = logging.getLogger(__name__)


def open_zips(zips: Sequence[Path], request: SourceRequest) -> ImageSource:
    """Return the images of zip files, sorted by code point of their paths.

    If there are several zip files, each one's name without its suffix becomes the first folder of
    its images' paths.

    Raises:
        DataError: a damaged or encrypted zip, a member that is packed by another method than
            deflate, or no image in any of them.
    """
    # By path, so that a member that was appended later replaces the earlier one.
    members: dict[str, ZipMember] = {}
    replaced: list[str] = []
    others = Counter[str]()
    for zip_index, path in enumerate(zips):
        prefix = f"{path.stem}/" if len(zips) > 1 else ""
        try:
            with zipfile.ZipFile(path) as file:
                for member in file.infolist():
                    # The format knows forward slashes only; some programs of Windows do not.
                    path_inside = member_path(member.filename.replace("\\", "/"))
                    inner = utf8(prefix + path_inside)
                    if member.is_dir() or is_hidden(path_inside):
                        continue
                    if not request.wants(inner):
                        request.count_other(others, inner)
                        continue
                    if member.flag_bits & 1:  # the format's bit for encryption
                        raise DataError(f"{path} is encrypted; unpack it to a folder")
                    deflated = member.compress_type == zipfile.ZIP_DEFLATED
                    if not deflated and member.compress_type != zipfile.ZIP_STORED:
                        why = "packed by another method than deflate"
                        raise DataError(f"{path} is {why}; unpack it to a folder")
                    if inner in members:
                        replaced.append(inner)
                    members[inner] = (
                        zip_index,
                        inner,
                        member.header_offset,
                        member.compress_size,
                        member.file_size,
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
    if not members:
        raise DataError(_no_images_message(request, others))
    request.say_left_out(others)
    _warn_of_replaced(request, replaced)
    paths = sorted(members)
    labels, splits, class_names = classify(paths)
    return ImageSource(
        name=request.data,
        opener=opener,
        locations=[members[path] for path in paths],
        ids=paths,
        labels=labels,
        splits=splits,
        class_names=class_names,
    )


def open_tars(request: SourceRequest, tars: MatchedFiles) -> ImageSource:
    """Return the images of tar files, sorted by code point of their paths.

    A path is the one in the tar. If images have labels beside them (see `index_tar`), these are
    their labels; otherwise folders are classes. The tars' names without their suffix become the
    first folders of the paths if two tars have an image of the same path, and for all tars of a
    folder without labels, so that a tar for each class gives class folders. A member that was
    appended again replaces the earlier one, as in unpacking.

    Raises:
        DataError: a damaged or compressed tar, no image in any of them, or labels that do not fit.
    """
    indexes = _index_all(request, tars)
    others = Counter[str]()
    for index in indexes:
        others.update(index.others)
    labelled = any(index.label_texts for index in indexes)
    if labelled:
        # In a labelled set, `k.seg.png` is an annotation of `k.jpg` and not an image.
        indexes = [index.at(index.is_single) for index in indexes]
    elif request.label_key not in (None, NO_LABELS):
        key = request.label_key
        expected = f"KEY.{key}" if key in MEMBERS else f"a field {key!r} of KEY.json"
        raise DataError(
            f"no image of {request.data} has a label {key!r} beside it; expected {expected}"
        )
    stems = [PurePosixPath(name).stem for name in tars.names]
    lengths = [len(index.paths) for index in indexes]
    # (images,) the number of each image's tar
    tar = np.repeat(np.arange(len(indexes), dtype=np.int32), lengths)
    paths = np.concatenate([index.paths for index in indexes])
    if not len(paths):
        raise DataError(_no_images_message(request, others))
    request.say_left_out(others)
    _warn_of_replaced(request, [path for index in indexes for path in index.replaced])
    # None if two tars have an image of one path: then each tar's name goes in front.
    order = _order_if_unique(paths)
    is_class_per_tar = not tars.explicit and not labelled
    if len(indexes) > 1 and (order is None or is_class_per_tar):
        paths = np.concatenate(
            [
                strings([f"{stem}/"]) + index.paths
                for stem, index in zip(stems, indexes, strict=True)
            ]
        )
        order = _order_if_unique(paths)
    # Even with their names in front: two tars of one name.
    if order is None:
        twice = next(stem for stem, n in Counter(stems).most_common())
        raise DataError(
            f"several tar files of {request.data} are called {twice} and have the same images; "
            "rename one of them"
        )
    paths = paths[order]
    tar = tar[order]
    ids = cast(Sequence[str], paths)  # packed: a list of a million names takes 100 MB
    if labelled:
        # Images of the same key are neighbours in this order.
        for before, path in pairwise(ids):
            if key_of(path) == key_of(before):
                raise DataError(
                    f"{request.data} has two images of one key, {before} and {path} "
                    "(--label-key KEY names another label, or none)"
                )
        try:
            labels, class_names = labels_of_files(
                (index.label, index.label_texts) for index in indexes
            )
        except DataError as error:
            raise DataError(
                f"{request.data}: {error} (--label-key KEY names another label, or none)"
            ) from None
        labels = labels[order]
        splits = [""] * len(paths)
    else:
        labels, splits, class_names = classify(ids)
    # (images,) bytes from the beginning of the tar
    offset = np.concatenate([index.offset for index in indexes])[order]
    size = np.concatenate([index.size for index in indexes])[order]
    return ImageSource(
        name=request.data,
        opener=TarOpener(tars.files, tuple(tars.names)),
        locations=cast(Sequence[Any], _TarLocations(tar, paths, offset, size)),
        ids=ids,
        labels=labels,
        splits=splits,
        class_names=class_names,
    )


def _no_images_message(request: SourceRequest, others: Mapping[str, int]) -> str:
    """Return the message for archives without images, with the endings that were left out."""
    message = request.nothing % request.data
    if line := left_out_line(request.data, others):
        message += f" ({line})"
    return message


def _warn_of_replaced(request: SourceRequest, replaced: Sequence[str]) -> None:
    """Log the paths that an archive has twice, since files were appended to it."""
    if replaced:
        log.warning(
            "of members of one path in %s the last is taken, and %d before it left out: %s",
            request.data,
            len(replaced),
            abbreviate(sorted(set(replaced))),
        )


def _order_if_unique(paths: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the argsort of the paths, or None if two of them are equal."""
    order = np.argsort(paths, kind="stable")
    ordered = paths[order]
    if (ordered[1:] == ordered[:-1]).any():
        return None
    return order


@dataclass(frozen=True)
class _TarLocations:
    """The locations of a `TarOpener`, each made when it is indexed.

    Tuples for all of a million images would take 200 MB.
    """

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


# ---------------- the index and its cache


def _index_all(request: SourceRequest, tars: MatchedFiles) -> list[TarIndex]:
    """Return the index of each tar, from the cache or by reading the tar, with progress."""
    began = time.monotonic()

    def read(name: str) -> tuple[Stamp, TarIndex]:
        """Return a tar's stamp and index; called in threads where a server answers."""
        try:
            stamp = tars.files.stamp(name)
            cached_stamp, index = cached.get(name, (None, None))
            if index is None or cached_stamp != stamp:
                index = index_tar(
                    tars.files,
                    name,
                    size=stamp[0],
                    label_key=request.label_key,
                    clips=request.clips,
                )
                read_anew.append(name)
        except NoAnswer as error:
            raise no_answer(tars.shown(name), error) from None
        except OSError as error:
            raise DataError(f"cannot read {tars.shown(name)}: {reason(error)}") from None
        except DataError as error:
            raise DataError(f"{tars.shown(name)} {error}") from None
        progress.advance(1)
        return stamp, index

    cache_file = _cache_file(request, tars)
    cached = _read_cache(cache_file)
    read_anew = list[str]()
    with counting(request.progress, len(tars.names), "tar files") as progress:
        stamped_indexes = tars.files.each_in_threads(read, tars.names)
    if read_anew and time.monotonic() - began > CACHE_AFTER_SECONDS:
        _write_cache(cache_file, dict(zip(tars.names, stamped_indexes, strict=True)))
    return [index for _, index in stamped_indexes]


def _cache_file(request: SourceRequest, tars: MatchedFiles) -> Path:
    """Return the path of the cached index of this set of tars, read with these options."""
    folder = tars.files.place.absolute()
    kind = ["clips"] if request.clips else []
    key = json.dumps([_CACHE_VERSION, str(folder), request.label_key, *kind, *tars.names])
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return user_caches() / f"{digest[:24]}{TAR_INDEX}"


def _read_cache(path: Path) -> dict[str, tuple[Stamp, TarIndex]]:
    """Return name -> stamp and index from a cache file; {} if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            path_bytes = file["paths"]
            arrays = {name: file[key] for name, key in _CACHED_ARRAYS.items()}
        return dict(_split_by_tar(head, path_bytes, arrays))
    except FileNotFoundError:
        return {}
    except Exception as error:  # numpy and zipfile raise nearly anything on damaged files
        log.debug("%s is not used: %r", path, error)
        return {}


def _split_by_tar(
    head: Any, path_bytes: NDArray[np.uint8], arrays: dict[str, NDArray[Any]]
) -> Iterator[tuple[str, tuple[Stamp, TarIndex]]]:
    """Yield name, stamp and index of each tar of a cache file.

    Args:
        head: a list for each tar, as `_write_cache` writes it.
        path_bytes: the paths of all images, separated by NUL within a tar.
        arrays: the arrays of all tars, concatenated.

    Raises:
        ValueError: the arrays are shorter than the head says.
    """
    row = 0
    byte = 0
    for name, size, version, n_images, n_bytes, texts, others, replaced in head:
        rows = slice(row, row + n_images)
        text = path_bytes[byte : byte + n_bytes].tobytes()
        paths = strings(text.decode().split("\0") if n_images else [])
        index = TarIndex(
            paths=paths,
            offset=arrays["offset"][rows],
            size=arrays["size"][rows],
            label=arrays["label"][rows],
            is_single=arrays["is_single"][rows],
            label_texts=texts,
            others=others,
            replaced=replaced,
        )
        if {len(paths), len(index.offset), len(index.is_single)} != {n_images}:
            raise ValueError("cut short")
        yield name, ((size, version), index)
        row += n_images
        byte += n_bytes


def _write_cache(path: Path, indexes: dict[str, tuple[Stamp, TarIndex]]) -> None:
    """Write name -> stamp and index to a cache file.

    If there is no room or no permission, the log says so: the index is only a matter of time.
    """
    blobs = ["\0".join(index.paths).encode() for _, index in indexes.values()]
    head = []
    for (name, (stamp, index)), blob in zip(indexes.items(), blobs, strict=True):
        size, version = stamp
        counts = [len(index.paths), len(blob)]
        head.append(
            [
                name,
                size,
                version,
                *counts,
                index.label_texts,
                index.others,
                index.replaced,
            ]
        )
    arrays = {
        key: np.concatenate([getattr(index, name) for _, index in indexes.values()])
        for name, key in _CACHED_ARRAYS.items()
    }
    arrays["paths"] = np.frombuffer(b"".join(blobs), np.uint8)
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    # Written under another name and renamed, so that no reader sees half a file.
    temporary = Path(temporary_name(path, ".partial"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            np.savez(file, **cast(dict[str, Any], arrays))
        os.replace(temporary, path)
    except OSError as error:
        log.info("the index of the tar files is not kept: %s", reason(error))
        with suppress(OSError):
            temporary.unlink()
