"""Images in zip files, read in place."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from vitsee_core.images.decoding import ZipMember, ZipOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import classify, utf8
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.sources.base import Asked


def open_zips(zips: Sequence[Path], asked: Asked) -> ImageSource:
    """The images of zip files, sorted by code point of their paths; nothing is unpacked.

    With several, the file's name without its suffix is prepended as a folder.

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
                    _take(found, member, k, prefix, path, asked)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a zip file: {one_line(error)}") from None
    opener = ZipOpener(tuple(str(path.absolute()) for path in zips))
    if not found:
        raise DataError(asked.nothing % asked.data)
    paths = sorted(found)
    labels, splits, class_names = classify(paths)
    locations = [found[p] for p in paths]
    return ImageSource(asked.data, opener, locations, paths, labels, splits, class_names)


def _take(
    found: dict[str, ZipMember],
    member: zipfile.ZipInfo,
    k: int,
    prefix: str,
    path: Path,
    asked: Asked,
) -> None:
    inner = utf8(prefix + member.filename.removeprefix("./"))
    if member.is_dir() or not asked.wants(inner):
        return
    if member.flag_bits & 1:
        raise DataError(f"{path} is encrypted; unpack it to a folder")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{path} is packed by another method than deflate; unpack it to a folder")
    deflated = member.compress_type == zipfile.ZIP_DEFLATED
    sizes = member.compress_size, member.file_size
    found[inner] = (k, inner, member.header_offset, *sizes, deflated, member.CRC)
