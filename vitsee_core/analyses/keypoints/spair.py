"""Pairs of images with corresponding keypoints, in the files of SPair-71k (Min et al. 2019).

    SPair-71k/PairAnnotation/test/000001-2008_002719-2008_004100:aeroplane.json    a pair each
    SPair-71k/Layout/large/test.txt                                  names of pairs, one a line

Some unpackers write `_` for the `:`, so that the category is taken from inside the file. Names in
the files are compared with those of images, and never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_core.types import Float
from vitsee_stores.disk import read_regular
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.json_schema import Fields, integer, items, number, unexpected

# Variations of pairs, and their names in the files.
VARIATIONS = {
    "viewpoint": "viewpoint_variation",
    "scale": "scale_variation",
    "truncation": "truncation",
    "occlusion": "occlusion",
}
DEFAULT_SPLIT = "test"
ANNOTATIONS = "PairAnnotation"
LAYOUT = "SPair-71k/PairAnnotation/SPLIT/*.json"
MOST_BYTES = 1 << 20  # of one annotation; the published ones have about 2000
MOST_LIST_BYTES = 1 << 28
MOST_SIDE, MOST_COORDINATE, MOST_POINTS, MOST_VARIATION = 1 << 20, 1e7, 10_000, 1000
RIM = 1.0  # pixels beyond the border that a keypoint may have: counting may begin at 0 or at 1

_side = partial(integer, low=1, high=MOST_SIDE)
_coordinate = partial(number, low=-MOST_COORDINATE, high=MOST_COORDINATE)


@dataclass(frozen=True)
class Pair:
    """Two images of one category.

    Attributes:
        source, target: their names.
        source_size, target_size: (height, width).
        box: x0, y0, x1, y1 of the object in the target.
        source_xy, target_xy: (points, 2) x, y of the keypoints seen in both, in pixels of the
            originals.
        variations: those of `VARIATIONS` that the file states.
    """

    name: str
    category: str
    source: str
    target: str
    source_size: tuple[int, int]
    target_size: tuple[int, int]
    box: tuple[float, float, float, float]
    source_xy: Float
    target_xy: Float
    variations: dict[str, int]

    @property
    def n_points(self) -> int:
        return len(self.source_xy)


def read_pairs(path: str | Path, split: str | None = None) -> list[Pair]:
    """The pairs of a split, by name.

    Args:
        path: the folder SPair-71k, its folder PairAnnotation or PairAnnotation/SPLIT, or a list of
            names of pairs in it (Layout/large/test.txt).
        split: its name; by default that of the list, else `test`.

    Raises:
        VitseeError: no such files, or one that is damaged or contradicts itself.
    """
    path = Path(path)
    if not path.exists():
        raise VitseeError(f"no file or folder {path}; expected {LAYOUT}, or a list of their names")
    files = _files(path, split) if path.is_dir() else _listed(path, split)
    pairs = [_read(file) for file in files]
    known: dict[str, Path] = {}
    for pair, file in zip(pairs, files, strict=True):
        first = known.setdefault(_plain(pair.name), file)
        if first is not file:
            raise VitseeError(f"{first} and {file} are one pair; expected each pair once")
    return pairs


def draw_pairs(pairs: Sequence[Pair], n: int | None, seed: int = 0) -> list[Pair]:
    """At most `n` pairs of each category, drawn without replacement from its pairs by name; all if
    `n` is None. A category's draw does not depend on the other categories' pairs."""
    by_category: dict[str, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: _plain(pair.name)):
        by_category.setdefault(pair.category, []).append(pair)
    drawn = []
    for category, own in sorted(by_category.items()):
        if n is not None and n < len(own):
            rng = np.random.default_rng((seed, *category.encode()))
            own = [own[i] for i in np.sort(rng.choice(len(own), n, replace=False))]
        drawn += own
    return drawn


def _files(folder: Path, split: str | None) -> list[Path]:
    """The annotations of a split below one of the accepted folders."""
    above = folder / ANNOTATIONS if (folder / ANNOTATIONS).is_dir() else folder
    if split is None and (files := _annotations(above)):
        return files
    files = _annotations(above / (split or DEFAULT_SPLIT))
    if not files:
        known = sorted(one.name for one in above.glob("*/")) if above.name == ANNOTATIONS else []
        splits = f"; it has the splits {', '.join(known)}" if known else ""
        raise VitseeError(
            f"no pairs of the split {split or DEFAULT_SPLIT} below {folder}{splits}; expected "
            f"{LAYOUT}"
        )
    return files


def _annotations(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _listed(path: Path, split: str | None) -> list[Path]:
    """The annotations that a list names."""
    try:
        lines = read_regular(path, MOST_LIST_BYTES).decode().splitlines()
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise VitseeError(f"{path} is no list of pairs: it is not text") from None
    above = next((p for p in path.resolve().parents if (p / ANNOTATIONS).is_dir()), None)
    if above is None:
        raise VitseeError(
            f"{path} lies in no folder with {ANNOTATIONS}; expected SPair-71k/Layout/SIZE/SPLIT.txt"
        )
    known = above / ANNOTATIONS / path.stem
    folder = above / ANNOTATIONS / (split or (path.stem if known.is_dir() else DEFAULT_SPLIT))
    files = {_plain(file.stem): file for file in _annotations(folder)}
    listed = []
    for number_, line in enumerate(lines, 1):
        if not (word := line.strip()):
            continue
        if _plain(word) not in files:
            raise VitseeError(f"{path}, line {number_}: no pair {word[:80]!r} in {folder}")
        listed.append(files[_plain(word)])
    if not listed:
        raise VitseeError(f"{path} names no pair; expected one a line")
    return listed


def _plain(text: str) -> str:
    """A pair's name, whichever way its category is separated."""
    return text.replace(":", "_")


def _read(path: Path) -> Pair:
    try:
        document = json.loads(read_regular(path, MOST_BYTES))
        return _pair(path.stem, Fields(document))
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except RecursionError:
        raise VitseeError(f"{path} is not a pair of SPair-71k: nested too deeply") from None
    except ValueError as error:
        raise VitseeError(f"{path} is not a pair of SPair-71k: {_line(error)}") from None


def _line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]


def _pair(stem: str, data: Fields) -> Pair:
    if "mirror" in data and data.get("mirror") != 0:
        raise ValueError("mirror is set; expected pairs of images as they are (mirror 0)")
    sizes = [_size(data, f"{side}_imsize") for side in ("src", "trg")]
    points = [
        _points(data, f"{side}_kps", size) for side, size in zip(("src", "trg"), sizes, strict=True)
    ]
    if len(points[0]) != len(points[1]):
        raise ValueError(
            f"src_kps has {len(points[0])} keypoints and trg_kps {len(points[1])}; expected "
            "those seen in both images"
        )
    box = data.list("trg_bndbox", _coordinate)
    if len(box) != 4 or box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError(f"trg_bndbox is {list(box)}; expected [x0, y0, x1, y1] with an area")
    x0, y0, x1, y1 = box
    return Pair(
        name=stem,
        category=data.name("category"),
        source=data.name("src_imname"),
        target=data.name("trg_imname"),
        source_size=sizes[0],
        target_size=sizes[1],
        box=(x0, y0, x1, y1),
        source_xy=points[0],
        target_xy=points[1],
        variations={
            word: data.integer(key, 0, MOST_VARIATION)
            for word, key in VARIATIONS.items()
            if key in data
        },
    )


def _size(data: Fields, key: str) -> tuple[int, int]:
    """(height, width) of [width, height, channels]."""
    lengths = data.list(key, _side)
    if len(lengths) not in (2, 3):
        raise ValueError(f"{key} is {list(lengths)}; expected [width, height, channels]")
    return lengths[1], lengths[0]


def _points(data: Fields, key: str, size: tuple[int, int]) -> Float:
    """(points, 2) x, y, all of them in the image."""
    points = data.list(key, _point)
    if len(points) > MOST_POINTS:
        raise ValueError(f"{key} has {len(points)} keypoints; expected at most {MOST_POINTS}")
    for i, (x, y) in enumerate(points):
        if not (-RIM <= x <= size[1] - 1 + RIM and -RIM <= y <= size[0] - 1 + RIM):
            raise ValueError(
                f"{key}[{i}] is ({x:g}, {y:g}), outside of the image of {size[1]} x {size[0]} "
                "pixels"
            )
    return np.array(points, np.float64).reshape(-1, 2)


def _point(value: Any, where: str) -> tuple[float, float]:
    xy = items(value, where, _coordinate)
    if len(xy) != 2:
        raise unexpected(where, value, "[x, y]")
    return xy[0], xy[1]
