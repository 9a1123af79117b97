"""Kinds of files by their names, and the order of names. Loading workers import this module."""

from __future__ import annotations

import os
import re

EXTENSIONS = frozenset(
    f".{kind}"
    for kind in (
        *("avif", "bmp", "gif", "jp2", "jpe", "jpeg", "jpg", "pbm"),
        *("pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"),
    )
)
VIDEOS = frozenset((".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))


def is_image(name: str) -> bool:
    """Whether a file's name ends like an image's and does not start with a dot."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def is_video(name: str) -> bool:
    """Whether a file's name ends like a video's and does not start with a dot."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in VIDEOS


def image_stem(name: str) -> str:
    """A name without the ending of an image file."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in EXTENSIONS else name


def natural_key(text: str) -> tuple[list[int | str], str]:
    """Sorts digits by their value and letters without case; ties by code point."""
    pieces = re.split(r"([0-9]+)", text.lower())
    return [int(p) if k % 2 else p for k, p in enumerate(pieces)], text
