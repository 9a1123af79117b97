"""Which mask belongs to which image, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.catalogue import EXTENSIONS


def match_names(images: Sequence[str], masks: Sequence[str]) -> NDArray[np.int64]:
    """(images,) the number of each image's mask, -1 for none.

    Names are paths; an image's ending is ignored. First the whole paths are compared, then,
    for what is left, the last parts of both (`JPEGImages/7.jpg` and `SegmentationClass/7.png`),
    where these name one image and one mask only.
    """
    whole = [_stem(name) for name in images]
    by_path = _only([_stem(name) for name in masks])
    by_file = _only([_last(_stem(name)) for name in masks])
    single = _only([_last(name) for name in whole])
    found = np.full(len(images), -1, np.int64)
    for i, name in enumerate(whole):
        if name in by_path:
            found[i] = by_path[name]
        elif _last(name) in single:
            found[i] = by_file.get(_last(name), -1)
    return found


def _stem(name: str) -> str:
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in EXTENSIONS else name


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _only(names: Iterable[str]) -> dict[str, int]:
    """Name -> its place, of names that occur once."""
    places: dict[str, int] = {}
    again = set()
    for i, name in enumerate(names):
        if name in places:
            again.add(name)
        places[name] = i
    return {name: i for name, i in places.items() if name not in again}
