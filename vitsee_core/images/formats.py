"""The formats of image files that are opened, and the endings of their names.

Pillow tries some forty formats on any file, whatever its name, and starts Ghostscript on the
PostScript that it finds: none but these is tried.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress

from PIL import Image

# Ending -> format, as Pillow calls it; a JPEG may hold several pictures (MPO).
FORMAT_OF_ENDING = {
    ".avif": "AVIF",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jfif": "JPEG",
    ".jp2": "JPEG2000",
    ".jpe": "JPEG",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pbm": "PPM",
    ".pgm": "PPM",
    ".png": "PNG",
    ".pnm": "PPM",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
FORMAT_NAMES = "AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PNM, TIFF and WebP"
# Modules of Pillow, of which some need a library that not all builds have.
_PLUGINS = ("Avif", "Bmp", "Gif", "Jpeg", "Jpeg2K", "Png", "Ppm", "Tiff", "WebP")


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """The formats that are opened, as far as this build of Pillow knows them."""
    for plugin in _PLUGINS:
        with suppress(ImportError):
            importlib.import_module(f"PIL.{plugin}ImagePlugin")
    return tuple(sorted(set(FORMAT_OF_ENDING.values()) & set(Image.OPEN)))
