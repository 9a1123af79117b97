"""Images in uncompressed tar files, read in place."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from vitsee_core.images.decoding import TarOpener, one_line
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import classify, is_image, utf8
from vitsee_core.images.image_source import ImageSource

Member = tuple[str, int, int]


def open_tars(tars: Sequence[Path], name: str) -> ImageSource:
    """The images of tar files, sorted by code point of their paths; nothing is unpacked.

    A path is the one in the tar; with several tars, and for a tar inside another, the tar's name
    without its suffix is a folder before it, so that one tar per class gives class folders. A
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
    if not found:
        raise DataError(f"no images in {name}; expected .jpg, .png or other image files")
    paths = sorted(found)
    labels, splits, class_names = classify(paths)
    opener = TarOpener(tuple(str(tar.absolute()) for tar in tars))
    return ImageSource(name, opener, [found[p] for p in paths], paths, labels, splits, class_names)


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
