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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from vitsee_core.types import Float
from vitsee_stores.disk import read_regular
from vitsee_stores.errors import VitseeError, reason, reason_of_text
from vitsee_stores.plan import Side
from vitsee_stores.schema import check_name, checked

# Words of `--by` -> the fields of the files.
VARIATIONS = {
    "viewpoint": "viewpoint_variation",
    "scale": "scale_variation",
    "truncation": "truncation",
    "occlusion": "occlusion",
}
DEFAULT_SPLIT = "test"
ANNOTATIONS = "PairAnnotation"
LAYOUT = "SPair-71k/PairAnnotation/SPLIT/*.json"

# Bounds of what a file may claim, since files may be a stranger's.
MAX_ANNOTATION_BYTES = 1 << 20  # of one pair; the published ones have about 2000
MAX_LIST_BYTES = 1 << 28
MAX_POINTS = 10_000

# Pixels that a keypoint may lie beyond the border: files may count from 0 or from 1.
BORDER_TOLERANCE = 1.0

Coordinate = Annotated[float, Meta(ge=-1e7, le=1e7)]
Variation = Annotated[int, Meta(ge=0, le=1000)] | None
# width, height and, in most files, channels
ImageLengths = Annotated[list[Side], Meta(min_length=2, max_length=3)]
Points = list[tuple[Coordinate, Coordinate]]


class Annotation(Struct):
    """The fields of an annotation that are used, as the files have them.

    Names follow SPair-71k: src and trg are source and target, kps keypoints as [x, y], bndbox the
    box of the object. Other fields are ignored.
    """

    category: str
    src_imname: str
    trg_imname: str
    src_imsize: ImageLengths
    trg_imsize: ImageLengths
    src_kps: Points
    trg_kps: Points
    trg_bndbox: list[Coordinate]
    mirror: Any = 0
    viewpoint_variation: Variation = None
    scale_variation: Variation = None
    truncation: Variation = None
    occlusion: Variation = None


@dataclass(frozen=True)
class Pair:
    """Two images of one category.

    Attributes:
        name: name of the file, without its suffix.
        category: class of the objects.
        source, target: names of the images.
        source_size, target_size: (height, width).
        box: x0, y0, x1, y1 of the object in the target, in pixels.
        source_xy, target_xy: (points, 2) x, y of the keypoints seen in both, in pixels of the
            originals.
        variations: variation -> its level, of those of `VARIATIONS` that the file states.
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
        """Return the number of keypoints seen in both images."""
        return len(self.source_xy)


def read_pairs(path: str | Path, split: str | None = None) -> list[Pair]:
    """Return the pairs of a split, sorted by name, or in the order of the list.

    Args:
        path: the folder SPair-71k, its folder PairAnnotation or PairAnnotation/SPLIT, or a list of
            names of pairs in it (Layout/large/test.txt).
        split: name of the split; by default that of the list, else `test`.

    Raises:
        VitseeError: no such files, or one that is damaged or contradicts itself.
    """
    path = Path(path)
    if not path.exists():
        raise VitseeError(
            f"no file or folder {path}; expected {LAYOUT}, or a list of their names"
        )
    if path.is_dir():
        files = _find_annotations(path, split)
    else:
        files = _read_list(path, split)
    pairs = [_read_pair(file) for file in files]
    # A pair listed twice, or unpacked under both names, would count twice.
    file_by_name: dict[str, Path] = {}
    for pair, file in zip(pairs, files, strict=True):
        first_file = file_by_name.setdefault(_plain_name(pair.name), file)
        if first_file is not file:
            raise VitseeError(
                f"{first_file} and {file} are one pair; expected each pair once"
            )
    return pairs


def draw_pairs(pairs: Sequence[Pair], n: int | None, seed: int = 0) -> list[Pair]:
    """Draw at most `n` pairs of each category without replacement; all if `n` is None.

    A category's draw does not depend on the other categories' pairs, nor on the order of `pairs`.
    """
    by_category: dict[str, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: _plain_name(pair.name)):
        by_category.setdefault(pair.category, []).append(pair)
    drawn = []
    for category, category_pairs in sorted(by_category.items()):
        if n is None or n >= len(category_pairs):
            drawn += category_pairs
            continue
        # The category's bytes are part of the seed, for a stream of its own.
        rng = np.random.default_rng((seed, *category.encode()))
        indices = rng.choice(len(category_pairs), n, replace=False)
        drawn += [category_pairs[i] for i in np.sort(indices)]
    return drawn


def _find_annotations(folder: Path, split: str | None) -> list[Path]:
    """Return the annotations of a split below one of the folders that `read_pairs` accepts."""
    parent = folder
    if (folder / ANNOTATIONS).is_dir():
        parent = folder / ANNOTATIONS
    # PairAnnotation/SPLIT itself has files, and then no split needs to be named.
    if split is None and (files := _annotation_files(parent)):
        return files
    split = split or DEFAULT_SPLIT
    files = _annotation_files(parent / split)
    if not files:
        existing = ""
        if parent.name == ANNOTATIONS:
            names = sorted(subfolder.name for subfolder in parent.glob("*/"))
            if names:
                existing = f"; it has the splits {', '.join(names)}"
        raise VitseeError(
            f"no pairs of the split {split} below {folder}{existing}; expected {LAYOUT}"
        )
    return files


def _annotation_files(folder: Path) -> list[Path]:
    """Return the JSON files of a folder, sorted; none if it does not exist."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _read_list(path: Path, split: str | None) -> list[Path]:
    """Return the annotations that a list names, in its order."""
    try:
        lines = read_regular(path, MAX_LIST_BYTES).decode().splitlines()
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise VitseeError(f"{path} is no list of pairs: it is not text") from None
    parents = path.resolve().parents
    root = next((folder for folder in parents if (folder / ANNOTATIONS).is_dir()), None)
    if root is None:
        raise VitseeError(
            f"{path} lies in no folder with {ANNOTATIONS}; expected "
            "SPair-71k/Layout/SIZE/SPLIT.txt"
        )
    if not split:
        # Layout/large/test.txt lists pairs of PairAnnotation/test.
        is_split = (root / ANNOTATIONS / path.stem).is_dir()
        split = path.stem if is_split else DEFAULT_SPLIT
    folder = root / ANNOTATIONS / split
    file_by_name = {_plain_name(file.stem): file for file in _annotation_files(folder)}
    files = []
    for line_number, line in enumerate(lines, 1):
        name = line.strip()
        if not name:
            continue
        if _plain_name(name) not in file_by_name:
            raise VitseeError(
                f"{path}, line {line_number}: no pair {name[:80]!r} in {folder}"
            )
        files.append(file_by_name[_plain_name(name)])
    if not files:
        raise VitseeError(f"{path} names no pair; expected one a line")
    return files


def _plain_name(name: str) -> str:
    """Return a pair's name with `_` before its category, whichever separator it has."""
    return name.replace(":", "_")


def _read_pair(path: Path) -> Pair:
    """Return the pair of a file; raise VitseeError if it cannot be read or is not one."""
    try:
        document = json.loads(read_regular(path, MAX_ANNOTATION_BYTES))
        return _to_pair(path.stem, checked(document, Annotation))
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except RecursionError:
        raise VitseeError(
            f"{path} is not a pair of SPair-71k: nested too deeply"
        ) from None
    except ValueError as error:
        # Names in the file may contain line breaks; an error is one line.
        message = re.sub(r"\s+", " ", reason_of_text(error))[:200]
        raise VitseeError(f"{path} is not a pair of SPair-71k: {message}") from None


def _to_pair(name: str, annotation: Annotation) -> Pair:
    """Return the pair that an annotation describes; raise ValueError if it contradicts itself."""
    if annotation.mirror not in (0, None):
        raise ValueError("mirror is set; expected pairs of images as they are (mirror 0)")
    for key in ("category", "src_imname", "trg_imname"):
        check_name(getattr(annotation, key), key)
    # Files have width before height.
    source_width, source_height = annotation.src_imsize[:2]
    target_width, target_height = annotation.trg_imsize[:2]
    source_points = annotation.src_kps
    target_points = annotation.trg_kps
    if len(source_points) != len(target_points):
        raise ValueError(
            f"src_kps has {len(source_points)} keypoints and trg_kps "
            f"{len(target_points)}; expected those seen in both images"
        )
    box = annotation.trg_bndbox
    if len(box) != 4 or box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError(f"trg_bndbox is {box}; expected [x0, y0, x1, y1] with an area")
    x0, y0, x1, y1 = box
    levels = {word: getattr(annotation, key) for word, key in VARIATIONS.items()}
    return Pair(
        name=name,
        category=annotation.category,
        source=annotation.src_imname,
        target=annotation.trg_imname,
        source_size=(source_height, source_width),
        target_size=(target_height, target_width),
        box=(x0, y0, x1, y1),
        source_xy=_to_points("src_kps", source_points, (source_height, source_width)),
        target_xy=_to_points("trg_kps", target_points, (target_height, target_width)),
        variations={word: level for word, level in levels.items() if level is not None},
    )


def _to_points(key: str, points: Points, size: tuple[int, int]) -> Float:
    """Return (points, 2) x, y; raise ValueError if one lies outside of the (height, width)."""
    if len(points) > MAX_POINTS:
        raise ValueError(
            f"{key} has {len(points)} keypoints; expected at most {MAX_POINTS}"
        )
    height, width = size
    max_x = width - 1 + BORDER_TOLERANCE
    max_y = height - 1 + BORDER_TOLERANCE
    for i, (x, y) in enumerate(points):
        if not (-BORDER_TOLERANCE <= x <= max_x and -BORDER_TOLERANCE <= y <= max_y):
            raise ValueError(
                f"{key}[{i}] is ({x:g}, {y:g}), outside of the image of {width} x "
                f"{height} pixels"
            )
    return np.array(points, np.float64).reshape(-1, 2)
