"""Images in zip and uncompressed tar files, read in place."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vitsee_core.images.decoding import Opener, TarOpener, ZipMember, ZipOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import classify, is_image, utf8
from vitsee_core.images.image_source import ImageSource

Member = tuple[str, int, int]


def open_tars(tars: Sequence[Path], name: str) -> ImageSource:
    """The images of tar files, sorted by code point of their paths; nothing is unpacked.

    A path is the one in the tar; with several tars, and for a tar inside another, the tar's name
    without its suffix is prepended as a folder, so that one tar per class gives class folders. A
    member that was appended again replaces the earlier one, as in unpacking.

    Raises:
        DataError: a damaged or compressed tar, or none with an image.
    """
    found: dict[str, tuple[int, str, int, int]] = {}
    for k, tar in enumerate(tars):
        prefix = f"{tar.stem}/" if len(tars) > 1 else ""
        try:
            with tar.open("rb") as file:
                for path, offset, size in _members(file, prefix, 0):
                    found[path] = (k, path, offset, size)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(
                f"{tar} cannot be read as an uncompressed tar: {one_line(error)}"
            ) from None
    return _source(name, TarOpener(tuple(str(tar.absolute()) for tar in tars)), found)


def open_zips(zips: Sequence[Path], name: str) -> ImageSource:
    """The images of zip files, by the rules of `open_tars`; nothing is unpacked.

    Raises:
        DataError: a damaged or encrypted zip, members with a compression other than deflate, or
            none with an image.
    """
    found: dict[str, ZipMember] = {}
    for k, path in enumerate(zips):
        prefix = f"{path.stem}/" if len(zips) > 1 else ""
        try:
            with zipfile.ZipFile(path) as file:
                for member in file.infolist():
                    _take(found, member, k, prefix, path)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a zip file: {one_line(error)}") from None
    return _source(name, ZipOpener(tuple(str(path.absolute()) for path in zips)), found)


def _source(name: str, opener: Opener, found: Mapping[str, Any]) -> ImageSource:
    """The images found, by path, as a source."""
    if not found:
        raise DataError(f"no images in {name}; expected .jpg, .png or other image files")
    paths = sorted(found)
    labels, splits, class_names = classify(paths)
    return ImageSource(name, opener, [found[p] for p in paths], paths, labels, splits, class_names)


def _take(
    found: dict[str, ZipMember], member: zipfile.ZipInfo, k: int, prefix: str, path: Path
) -> None:
    inner = utf8(prefix + member.filename.removeprefix("./"))
    if member.is_dir() or not is_image(os.path.basename(inner)):
        return
    if member.flag_bits & 1:
        raise DataError(f"{path} is encrypted; unpack it to a folder")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{path} is packed by another method than deflate; unpack it to a folder")
    deflated = member.compress_type == zipfile.ZIP_DEFLATED
    sizes = member.compress_size, member.file_size
    found[inner] = (k, inner, member.header_offset, *sizes, deflated, member.CRC)


def _members(file: IO[bytes], prefix: str, base: int) -> Iterator[Member]:
    """Path, offset in the outermost file, and size of every image."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if not member.isreg() or member.issparse():
                continue
            folder, base_name = os.path.split(member.name.removeprefix("./"))
            path = f"{prefix}{folder}/{base_name}" if folder else f"{prefix}{base_name}"
            offset = base + member.offset_data
            if is_image(base_name):
                yield utf8(path), offset, member.size
            elif base_name.lower().endswith(".tar"):
                inner = tar.extractfile(member)
                if inner is not None:
                    yield from _members(inner, path[: -len(".tar")] + "/", offset)
