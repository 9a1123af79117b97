"""Positions of the pairs' keypoints on the input of a store's model, and those where they may be
found again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.keypoints.spair import Pair, Protocol
from vitsee_core.images.folders import image_stem
from vitsee_core.images.placement import Placement, place
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- candidates
#
# Candidates are the product of rows and columns of positions, so that a map over all of them takes
# one product per axis. What is interpolated between the centres of tokens without rescaling is
# bilinear there and has its largest value at a corner: for `vit_analysis` only the pixels next to
# centres, and the first and last of each border, are candidates of all the pixels. Pixels beyond
# the outer centres are equal; of equal ones the first is taken, while the released code leaves the
# lower and right border to rounding.


@dataclass(frozen=True)
class Cells:
    """n tokens along one axis: cell i begins at pixel `offset` + i `stride`."""

    n: int
    stride: float
    offset: float

    @property
    def centres(self) -> Float:
        """(n,) in pixels whose centres are integers."""
        return (
            self.offset - 0.5 + (np.arange(self.n, dtype=np.float64) + 0.5) * self.stride
        )

    def places(self, at: Float) -> Float:
        """Pixels in units of cells, 0 the first centre; clamped to the first and last centre, as
        interpolation repeats the border."""
        return np.clip((at + 0.5 - self.offset) / self.stride - 0.5, 0, self.n - 1)

    def weights(self, at: Float) -> Float:
        """(positions, n) bilinear weights of the tokens."""
        place = self.places(at)
        low = np.minimum(np.floor(place), max(self.n - 2, 0)).astype(np.int64)
        rows = np.arange(len(at))
        weights = np.zeros((len(at), self.n))
        weights[rows, low] = 1 - (place - low)
        weights[rows, np.minimum(low + 1, self.n - 1)] += place - low
        return weights

    def nearest(self, at: Float) -> Float:
        """(positions, n) weights of 1 for the nearest token, the later of two."""
        return np.eye(self.n)[np.floor(self.places(at) + 0.5).astype(np.int64)]


@dataclass(frozen=True)
class CandidateAxis:
    """Candidate positions of the target along one axis."""

    at: Float  # (positions,) pixels
    weights: Float  # (positions, cells) of the tokens


def cells_of(layout: TokenLayout) -> tuple[Cells, Cells]:
    assert layout.grid is not None and layout.stride_px is not None
    rows, cols = (
        Cells(n, stride, offset)
        for n, stride, offset in zip(
            layout.grid, layout.stride_px, layout.offset_px, strict=True
        )
    )
    return rows, cols


def candidates(
    layout: TokenLayout, size: tuple[int, int], window: Float, match: str
) -> tuple[CandidateAxis, CandidateAxis]:
    """Candidate positions: every row of the first axis with every column of the second.

    Args:
        layout: with a grid.
        size: of the input, (height, width).
        window: left, top, right, bottom of the searched area. If it contains no position, the one
            nearest to its middle is used.
        match: one of `spair.MATCHES`.
    """
    rows, cols = cells_of(layout)
    left, top, right, bottom = window.tolist()
    return _axis(rows, size[0], top, bottom, match), _axis(
        cols, size[1], left, right, match
    )


def _axis(
    cells: Cells, length: int, low: float, high: float, match: str
) -> CandidateAxis:
    if match == "token":
        chosen = _within(cells.centres, low, high)
        return CandidateAxis(cells.centres[chosen], np.eye(cells.n)[chosen])
    pixels = np.arange(length, dtype=np.float64)
    at = pixels[_within(pixels, low, high)]
    if match == "vit_analysis":
        at = _corners(cells, at)
    return CandidateAxis(at, cells.weights(at))


def _within(at: Float, low: float, high: float) -> Integers:
    inside = np.flatnonzero((at >= low) & (at <= high))
    if len(inside):
        return inside
    return np.array([np.abs(at - (low + high) / 2).argmin()])


def _corners(cells: Cells, pixels: Float) -> Float:
    """The first and last of the pixels between every two centres, where what is linear between
    centres has its largest value."""
    between = np.floor((pixels + 0.5 - cells.offset) / cells.stride - 0.5)
    # On a centre a pixel belongs to both sides: either has it as an end.
    between = np.clip(between, -1, cells.n - 1)
    last = np.append(between[1:] != between[:-1], True)
    first = np.append(True, last[:-1])
    return pixels[first | last]


# ---------------------------------------------------------------- the pairs' keypoints


_NAMES_SHOWN = 2
_AMBIGUOUS = -2  # in place of a row
ROUNDING = 1e-6  # pixels
RECIPE = (
    "extract the images anew with --crop-mode border --crop-pct 1, which shows them whole"
)


@dataclass(frozen=True)
class Located:
    """The pairs whose images a store holds, and their keypoints on the input, in pixels whose
    centres are integers.

    Attributes:
        pairs: those pairs.
        source_row, target_row: (pairs,) rows of the store.
        pair: (points,) the pair of each keypoint.
        source, target: (points, 2) x, y.
        still: (points, 2) the target if it had the source's position relative to its image.
        unit: (points, 2) size of an input pixel in x and y.
        side: (points,) the length that alpha is a fraction of, in the same measure.
        window: (points, 4) left, top, right, bottom of the area searched for the target.
        size: the input's (height, width).
        counts: numbers of used and skipped pairs, for a sidecar.
    """

    pairs: list[Pair]
    source_row: Integers
    target_row: Integers
    pair: Integers
    source: Float
    target: Float
    still: Float
    unit: Float
    side: Float
    window: Float
    size: tuple[int, int]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.pair)

    def describe(self) -> dict[str, int]:
        return {**self.counts, "points": len(self)}

    def groups(self) -> list[Target]:
        """The keypoints grouped by searched image and window, in the order of the store's rows."""
        keys = np.concatenate([self.target_row[self.pair][:, None], self.window], 1)
        each, which = np.unique(keys, axis=0, return_inverse=True)
        points = np.split(
            np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1]
        )
        return [
            Target(int(key[0]), key[1:], own)
            for key, own in zip(each, points, strict=True)
        ]

    def squared_error(self, found: Float) -> Float:
        """(points,) of positions (points, 2), in the measure of `side`."""
        return (((found - self.target) * self.unit) ** 2).sum(1)


@dataclass(frozen=True)
class Target:
    """Keypoints that are searched together: in one image, within one window."""

    row: int  # the image's
    window: Float  # (4,), as in `Located`
    points: Integers  # their numbers


def locate(store: Store, pairs: Sequence[Pair], protocol: Protocol) -> Located:
    """The keypoints of the pairs whose images the store holds; others are left out, counted and
    logged, as are pairs without a keypoint.

    Raises:
        MissingInput: the store does not record how its images were resized, or crops them so that
            keypoints are outside.
        VitseeError: most of the images are not in the store, or one is of another size.
    """
    if not store.manifest.transform:
        raise MissingInput(
            f"{store.label} does not say how its images were resized; extract anew"
        )
    kept, rows, counts = _matched(store, pairs)
    sizes = store.sizes
    for pair, both in zip(kept, rows, strict=True):
        for row, size, image in zip(
            both,
            (pair.source_size, pair.target_size),
            (pair.source, pair.target),
            strict=True,
        ):
            if tuple(sizes[row].tolist()) != size:
                raise VitseeError(
                    f"{image} has {sizes[row][1]} x {sizes[row][0]} pixels in "
                    f"{store.label}, {size[1]} x {size[0]} in the pair {pair.name}; "
                    "expected the same images"
                )
    transform = store.manifest.transform
    size = int(transform["input_size"][1]), int(transform["input_size"][2])
    placed = cache(partial(place, transform))
    parts = [
        _points(pair, placed(pair.source_size), placed(pair.target_size), size, protocol)
        for pair in kept
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    outside = columns.pop("outside") > 0
    if outside.any():
        raise MissingInput(
            f"{int(outside.sum())} of {len(outside)} keypoints lie outside of what the "
            f"model of {store.label} saw of its images; {RECIPE}"
        )
    return Located(
        pairs=kept,
        source_row=np.array([source for source, _ in rows], np.int64),
        target_row=np.array([target for _, target in rows], np.int64),
        pair=np.repeat(np.arange(len(kept)), [pair.n_points for pair in kept]),
        size=size,
        counts=counts,
        **columns,
    )


def _matched(
    store: Store, pairs: Sequence[Pair]
) -> tuple[list[Pair], list[tuple[int, int]], dict[str, int]]:
    """The pairs with both images in the store and a keypoint, their rows, and counts of the
    others."""
    row_of = _Rows(store, {pair.category for pair in pairs})
    images: dict[tuple[str, str], int] = {}
    kept = []
    rows = []
    n_empty = 0
    for pair in pairs:
        for image in (pair.source, pair.target):
            if (pair.category, image) not in images:
                images[pair.category, image] = row_of(pair.category, image)
        both = images[pair.category, pair.source], images[pair.category, pair.target]
        if min(both) < 0:
            continue
        if not pair.n_points:
            n_empty += 1
            continue
        kept.append(pair)
        rows.append(both)
    missing = [
        f"{category}/{image}" for (category, image), row in images.items() if row < 0
    ]
    if 2 * len(missing) > len(images):
        raise VitseeError(
            f"{len(missing)} of the {len(images)} images of the pairs are not in "
            f"{store.label} ({abbreviate(missing, _NAMES_SHOWN)}); its images are called "
            f"{abbreviate(store.samples.id.tolist(), _NAMES_SHOWN)}; expected those "
            "below JPEGImages"
        )
    if not kept:
        raise VitseeError(
            f"none of the {len(pairs)} pairs has both images in {store.label} and a "
            "keypoint"
        )
    n_left = len(pairs) - len(kept) - n_empty
    if missing:
        log.warning(
            "%s: %d of the pairs' %d images are missing or could not be read (%s): %d "
            "of %d pairs are left out",
            store.label,
            len(missing),
            len(images),
            abbreviate(missing, _NAMES_SHOWN),
            n_left,
            len(pairs),
        )
    if n_empty:
        log.info("%s: %d pairs without a keypoint are left out", store.label, n_empty)
    counts = {
        "pairs": len(kept),
        "images": len(images) - len(missing),
        "left_out_without_image": n_left,
        "left_out_without_keypoint": n_empty,
    }
    return kept, rows, counts


class _Rows:
    """(category, image name) -> row of the store, -1 if no readable one exists. Images are
    identified by folder and name; if folders are not categories, by name."""

    def __init__(self, store: Store, categories: set[str]) -> None:
        self._in_folder: dict[tuple[str, str], int] = {}
        self._loose: dict[str, int] = {}
        ids = store.samples.id.tolist()
        valid = store.valid
        for row, text in enumerate(ids):
            folder, _, file = text.rpartition("/")
            folder = folder.rpartition("/")[2]
            file = image_stem(file)
            own = row if valid[row] else -1
            if folder in categories:
                known = (folder, file) in self._in_folder
                self._in_folder[folder, file] = _AMBIGUOUS if known else own
            else:
                self._loose[file] = _AMBIGUOUS if file in self._loose else own
        self._label = store.label

    def __call__(self, category: str, image: str) -> int:
        name = image_stem(image)
        row = self._in_folder.get((category, name), self._loose.get(name, -1))
        if row == _AMBIGUOUS:
            raise VitseeError(
                f"{self._label} has several images called {category}/{image}; expected one"
            )
        return row


def _points(
    pair: Pair,
    source: Placement,
    target: Placement,
    size: tuple[int, int],
    protocol: Protocol,
) -> dict[str, Float]:
    """The fields of `Located` with an entry per keypoint."""
    n = pair.n_points
    height, width = pair.target_size
    seen = [  # points in the rim are moved to the border
        where.points(np.clip(xy, -0.5, (own[1] - 0.5, own[0] - 0.5)), own)
        for where, xy, own in (
            (source, pair.source_xy, pair.source_size),
            (target, pair.target_xy, pair.target_size),
        )
    ]
    box = np.array(pair.box).reshape(2, 2)
    long = max(box[1] - box[0]) if protocol.threshold == "box" else max(height, width)
    relative = (pair.source_xy + 0.5) / pair.source_size[::-1]
    still = relative * (width, height) - 0.5
    if protocol.match == "vit_analysis":
        scales = [
            _one_scale(pair, where, own)
            for where, own in ((source, pair.source_size), (target, pair.target_size))
        ]
        scale = scales[1]
        begin = (target.left, target.top)
        at_source = pair.source_xy * scales[0] + (source.left, source.top)
        at_target, at_still = (xy * scale + begin for xy in (pair.target_xy, still))
        edges = box * scale + begin
        unit = np.ones(2)
        side = long * scale
    else:
        at_source, at_target = seen
        at_still, edges = (target.points(xy, pair.target_size) for xy in (still, box))
        unit = np.array([width, height]) / _extent(target)[::-1]
        side = float(long)
    window = {
        "canvas": np.array([-0.5, -0.5, size[1] - 0.5, size[0] - 0.5]),
        "image": np.array([target.left, target.top, target.right, target.bottom]) - 0.5,
        "box": edges.ravel(),
    }[protocol.candidates]
    return {
        "source": at_source,
        "target": at_target,
        "still": at_still,
        "unit": np.tile(unit, (n, 1)),
        "side": np.full(n, side),
        "window": np.tile(window, (n, 1)),
        "outside": (_off(seen[0], size) | _off(seen[1], size)).astype(np.float64),
    }


def _off(xy: Float, size: tuple[int, int]) -> Mask:
    """Which points are beyond the edges of the input."""
    last = np.array(size[::-1]) - 0.5
    beyond = (xy < -0.5 - ROUNDING) | (xy > last + ROUNDING)
    return np.any(beyond, axis=1)


def _extent(where: Placement) -> Float:
    """Height and width of the whole image in input pixels."""
    return np.array([where.bottom - where.top, where.right - where.left])


def _one_scale(pair: Pair, where: Placement, size: tuple[int, int]) -> float:
    """Input pixels per pixel of an image, along its longer side; the shorter side's differs by
    rounding only."""
    extent = _extent(where)
    scale = float(extent.max() / max(size))
    if np.abs(extent - scale * np.array(size)).max() > 1:
        raise MissingInput(
            f"the images of the pair {pair.name} were squashed; matches vit_analysis are "
            f"of images that keep their shape: {RECIPE}"
        )
    return scale
