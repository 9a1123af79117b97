"""Pairs of images with corresponding keypoints, in the files of SPair-71k (Min et al. 2019).

    SPair-71k/PairAnnotation/test/000001-2008_002719-2008_004100:aeroplane.json    a pair each
    SPair-71k/Layout/large/test.txt                                  names of pairs, one a line

Some unpackers write `_` for the `:`, so that the category is taken from inside the file. Names in
the files are compared with those of images, and never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from vitsee_core.types import Float
from vitsee_stores.disk import read_regular
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.plan import Side
from vitsee_stores.schema import check_name, checked

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
MOST_POINTS = 10_000
RIM = 1.0  # pixels beyond the border that a keypoint may have: counting may begin at 0 or at 1

Coordinate = Annotated[float, Meta(ge=-1e7, le=1e7)]
Variation = Annotated[int, Meta(ge=0, le=1000)] | None
Lengths = Annotated[
    list[Side], Meta(min_length=2, max_length=3)
]  # width, height, channels
Points = list[tuple[Coordinate, Coordinate]]


class Annotation(Struct):
    """The fields of an annotation that are used, as the files have them."""

    category: str
    src_imname: str
    trg_imname: str
    src_imsize: Lengths
    trg_imsize: Lengths
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
        raise VitseeError(
            f"no file or folder {path}; expected {LAYOUT}, or a list of their names"
        )
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
        known = (
            sorted(one.name for one in above.glob("*/"))
            if above.name == ANNOTATIONS
            else []
        )
        splits = f"; it has the splits {', '.join(known)}" if known else ""
        raise VitseeError(
            f"no pairs of the split {split or DEFAULT_SPLIT} below {folder}{splits}; "
            f"expected {LAYOUT}"
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
            f"{path} lies in no folder with {ANNOTATIONS}; expected "
            "SPair-71k/Layout/SIZE/SPLIT.txt"
        )
    known = above / ANNOTATIONS / path.stem
    folder = (
        above / ANNOTATIONS / (split or (path.stem if known.is_dir() else DEFAULT_SPLIT))
    )
    files = {_plain(file.stem): file for file in _annotations(folder)}
    listed = []
    for number_, line in enumerate(lines, 1):
        if not (word := line.strip()):
            continue
        if _plain(word) not in files:
            raise VitseeError(
                f"{path}, line {number_}: no pair {word[:80]!r} in {folder}"
            )
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
        return _pair(path.stem, checked(document, Annotation))
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    except RecursionError:
        raise VitseeError(
            f"{path} is not a pair of SPair-71k: nested too deeply"
        ) from None
    except ValueError as error:
        why = re.sub(r"\s+", " ", str(error))[:200]
        raise VitseeError(f"{path} is not a pair of SPair-71k: {why}") from None


def _pair(stem: str, data: Annotation) -> Pair:
    if data.mirror not in (0, None):
        raise ValueError("mirror is set; expected pairs of images as they are (mirror 0)")
    for key in ("category", "src_imname", "trg_imname"):
        check_name(getattr(data, key), key)
    sizes = [(height, width) for width, height, *_ in (data.src_imsize, data.trg_imsize)]
    if len(data.src_kps) != len(data.trg_kps):
        raise ValueError(
            f"src_kps has {len(data.src_kps)} keypoints and trg_kps {len(data.trg_kps)}; "
            "expected those seen in both images"
        )
    box = data.trg_bndbox
    if len(box) != 4 or box[0] >= box[2] or box[1] >= box[3]:
        raise ValueError(f"trg_bndbox is {box}; expected [x0, y0, x1, y1] with an area")
    x0, y0, x1, y1 = box
    variations = {word: getattr(data, key) for word, key in VARIATIONS.items()}
    return Pair(
        name=stem,
        category=data.category,
        source=data.src_imname,
        target=data.trg_imname,
        source_size=sizes[0],
        target_size=sizes[1],
        box=(x0, y0, x1, y1),
        source_xy=_points("src_kps", data.src_kps, sizes[0]),
        target_xy=_points("trg_kps", data.trg_kps, sizes[1]),
        variations={
            word: value for word, value in variations.items() if value is not None
        },
    )


def _points(key: str, points: Points, size: tuple[int, int]) -> Float:
    """(points, 2) x, y, all of them in the image."""
    if len(points) > MOST_POINTS:
        raise ValueError(
            f"{key} has {len(points)} keypoints; expected at most {MOST_POINTS}"
        )
    for i, (x, y) in enumerate(points):
        if not (-RIM <= x <= size[1] - 1 + RIM and -RIM <= y <= size[0] - 1 + RIM):
            raise ValueError(
                f"{key}[{i}] is ({x:g}, {y:g}), outside of the image of {size[1]} x "
                f"{size[0]} pixels"
            )
    return np.array(points, np.float64).reshape(-1, 2)


# ---------------------------------------------------------------- protocols: settings by name


MATCHES = ("smooth", "token", "vit_analysis")
CANDIDATES = ("image", "canvas", "box")
THRESHOLDS = ("box", "image")
CLASS = "class"
GROUPS = (*VARIATIONS, CLASS)
ALPHAS = (0.1, 0.05, 0.01)
PRESETS = {
    "walmer": (
        "Walmer et al. 2023, appendix E: 20 pairs of each class, here drawn without "
        "replacement over the sorted pairs, their code's matches on the whole input, its "
        "black border included"
    )
}
WALMER_PAIRS = 20
MATCHED = {
    "smooth": "cosine of the features at input pixels, bilinear between the unit vectors of tokens "
    "and scaled to unit length again; the source at its place between pixels; measured in pixels "
    "of the original image",
    "token": "cosine of tokens; the nearest token at the source, its centre at the target; "
    "measured in pixels of the original image",
    "vit_analysis": "product of features at input pixels, bilinear between the unit vectors of "
    "tokens, not scaled again; the source at pixel (trunc x, round y); of equal pixels the first, "
    "which at the upper and left border is the border's; measured in pixels of the input",
}


@dataclass(frozen=True)
class Protocol:
    """Settings of matching and scoring.

    Attributes:
        match: one of `MATCHES`.
        candidates: positions of the target, one of `CANDIDATES`.
        threshold: whose longer side alpha is a fraction of, one of `THRESHOLDS`.
        alphas: descending.
        pairs_per_class: number of pairs drawn, None for all.
        by: some of `GROUPS`.
    """

    match: str
    candidates: str
    threshold: str
    alphas: tuple[float, ...]
    pairs_per_class: int | None
    by: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        sides = {"box": "the target object's box", "image": "the target image"}
        where = {
            "image": "where the target image lies on the input",
            "canvas": "the whole input",
            "box": "in the target object's box",
        }
        return {
            "match": f"{self.match}: {MATCHED[self.match]}",
            "candidates": f"{self.candidates}: {where[self.candidates]}",
            "found": f"nearer than alpha times the longer side of {sides[self.threshold]}",
            "pairs_per_class": self.pairs_per_class,
        }


def choose_protocol(
    preset: str | None = None,
    *,
    match: str | None = None,
    candidates: str | None = None,
    threshold: str | None = None,
    alphas: Sequence[float] = (),
    pairs_per_class: int | None = None,
    by: Sequence[str] = (),
) -> Protocol:
    """The user's choices, else the preset's (one of `PRESETS`), else the defaults: `smooth`,
    `image`, `box`, `ALPHAS`, all pairs. Raises VitseeError: an unknown word, or a number that is
    not positive."""
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    theirs = preset == "walmer"
    chosen = Protocol(
        match or ("vit_analysis" if theirs else "smooth"),
        candidates or ("canvas" if theirs else "image"),
        threshold or "box",
        tuple(sorted({float(alpha) for alpha in alphas or ALPHAS}, reverse=True)),
        WALMER_PAIRS if theirs and pairs_per_class is None else pairs_per_class,
        tuple(dict.fromkeys(by)),
    )
    for what, words, known in (
        ("match", [chosen.match], MATCHES),
        ("set of candidates", [chosen.candidates], CANDIDATES),
        ("threshold", [chosen.threshold], THRESHOLDS),
        ("group", chosen.by, GROUPS),
    ):
        for word in words:
            if word not in known:
                raise VitseeError(f"no {what} {word!r}; expected {', '.join(known)}")
    for alpha in chosen.alphas:
        if not (alpha > 0 and math.isfinite(alpha)):
            raise VitseeError(f"alpha is {alpha:g}; expected a number above 0, e.g. 0.1")
    if chosen.pairs_per_class is not None and chosen.pairs_per_class < 1:
        raise VitseeError(
            f"--pairs-per-class is {chosen.pairs_per_class}; expected at least 1"
        )
    return chosen
