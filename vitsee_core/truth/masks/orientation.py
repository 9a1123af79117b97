"""Truth of images that were turned upright by EXIF: its PNG files follow the same rule."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from vitsee_core.images import ImageError
from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.picture_remarks import EXIF_IGNORED, remarks_on
from vitsee_core.truth.masks.class_maps import SegmentMaps
from vitsee_core.truth.masks.depth_maps import DepthMaps, PngDepths
from vitsee_core.truth.masks.labels import PixelSource
from vitsee_core.truth.masks.panoptic import PanopticMasks
from vitsee_core.truth.masks.png_maps import PngMaps
from vitsee_core.truth.masks.sources import MaskFolder, Several

Source = TypeVar("Source")

log = logging.getLogger(__name__)

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks in which Pillow finds an orientation: EXIF, and texts with XMP or ImageMagick's raw EXIF.
_CHUNKS_WITH_ORIENTATION = frozenset((b"eXIf", b"iTXt", b"tEXt", b"zTXt"))
_LENGTH_BYTES = 4
_TYPE_BYTES = 4
_CHECKSUM_BYTES = 4


def oriented_as(transform: Mapping[str, Any], source: Source) -> Source:
    """Return the source of masks, class maps or depths with its files turned as its images are.

    Its PNG files are turned upright by their own EXIF orientation where the images were (`extract
    --exif`), and nowhere else. Outlines in COCO files and NYU's .mat have no orientation: they are
    in the pixels of the images as the store has them.

    Args:
        transform: the store's.
        source: as the user gave it.
    """
    return _upright(source) if transform.get("exif") else source


def _upright(source: Any) -> Any:
    if isinstance(source, Several):
        return replace(
            source, sources=tuple(_upright(member) for member in source.sources)
        )
    if isinstance(source, SegmentMaps):
        return replace(source, source=_upright(source.source))
    if isinstance(source, DepthMaps):
        return replace(source, files=_upright(source.files))
    # Sources of PNG files; outlines and .mat have no orientation.
    if isinstance(source, MaskFolder | PngMaps | PanopticMasks | PngDepths):
        return replace(source, exif=True)
    return source


def say_orientations(
    label: str, exif: bool, source: PixelSource, numbers: Iterable[int]
) -> None:
    """Log how many of a store's masks have an EXIF orientation, and what was done with it.

    Args:
        label: the store's, for the remark.
        exif: whether the store's images, and so the masks, are turned upright.
        source: the masks, class maps or depths.
        numbers: of those that are used.
    """
    files = [Path(source.where(number)) for number in numbers]
    say_oriented_files(label, exif, files)


def say_oriented_files(label: str, exif: bool, files: Iterable[Path]) -> int:
    """Log how many files of masks have an EXIF orientation, see `say_orientations`; return it.

    Names that are not of PNG files, as of entries of annotation files, do not count.
    """
    is_turned = [has_orientation(file) for file in files]
    n_turned = sum(is_turned)
    if n_turned:
        done = "were turned upright by it, as images are with --exif"
        if not exif:
            done = "were left as they are, as the images were (extract --exif turns both)"
        log.info(
            "%s: %d of %d masks have an EXIF orientation and %s",
            label,
            n_turned,
            len(is_turned),
            done,
        )
    return n_turned


def has_orientation(path: Path) -> bool:
    """Return whether a PNG file says by EXIF that it is not upright.

    A file that cannot be read does not: whoever reads its pixels says what is wrong.
    """
    # Sources name places that are no files, too ("depth map 3 of FILE").
    if path.suffix.lower() != ".png" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            if not _may_have_orientation(file):
                return False
        # Decoded only where a chunk may hold one: Pillow then says which.
        image, _ = FileOpener(str(path.parent)).load(path.name)
    except (OSError, ImageError):
        return False
    return EXIF_IGNORED in remarks_on(image)


def _may_have_orientation(file: IO[bytes]) -> bool:
    """Return whether a file has a chunk that can hold an orientation, or is not PNG.

    Only the heads of chunks are read, since the chunk may stand behind the pixels: Pillow would
    decode the pixels of every mask to find it.
    """
    if file.read(len(_PNG_SIGNATURE)) != _PNG_SIGNATURE:
        return True
    # A chunk is length, type, data and checksum (PNG specification, 5.3).
    while len(head := file.read(_LENGTH_BYTES + _TYPE_BYTES)) == (
        _LENGTH_BYTES + _TYPE_BYTES
    ):
        if head[_LENGTH_BYTES:] in _CHUNKS_WITH_ORIENTATION:
            return True
        length = int.from_bytes(head[:_LENGTH_BYTES], "big")
        file.seek(length + _CHECKSUM_BYTES, 1)
    return False
