"""Masks of images that were turned upright by EXIF: the files of masks follow the same rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from vitsee_core.truth.masks.class_maps import PngMaps
from vitsee_core.truth.masks.sources import MaskFolder, Several

Source = TypeVar("Source")


def oriented_as(transform: Mapping[str, Any], source: Source) -> Source:
    """The source, whose files are turned upright by their own EXIF orientation where the images
    were (`extract --exif`), and nowhere else. COCO files have no orientation: what they say is in
    the pixels of the images as the store has them. transform: the store's."""
    return _upright(source) if transform.get("exif") else source


def _upright(source: Any) -> Any:
    if isinstance(source, Several):
        return replace(
            source, sources=tuple(_upright(member) for member in source.sources)
        )
    if isinstance(source, MaskFolder | PngMaps):
        return replace(source, exif=True)
    return source
