"""Positions of the pairs' keypoints on the model's input.

They are in pixels of the input whose centres are integers, x before y.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitsee_core.analyses.keypoints.protocol import Protocol
from vitsee_core.analyses.keypoints.spair import Pair
from vitsee_core.images.folders import image_stem
from vitsee_core.images.placement import Placement, place
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores.errors import MissingInput, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store

log = logging.getLogger(__name__)


_NAMES_SHOWN = 2  # of images, in messages
_AMBIGUOUS = -2  # in place of a row
ROUNDING = 1e-6  # pixels by which a point may be beyond the input
RECIPE = (
    "extract the images anew with --crop-mode border --crop-pct 1, which shows them whole"
)


class SearchGroup(NamedTuple):
    """Keypoints that are searched together: in one image, within one window.

    Attributes:
        row: row of the image in the store.
        window: (4,) left, top, right, bottom of the searched area.
        points: indices of the keypoints.
    """

    row: int
    window: Float
    points: Integers


@dataclass(frozen=True)
class LocatedKeypoints:
    """The pairs whose images a store holds, and their keypoints on the model's input.

    Attributes:
        pairs: those pairs.
        source_row, target_row: (pairs,) rows of the store.
        pair_index: (points,) the pair of each keypoint.
        source_xy, target_xy: (points, 2) x, y.
        still_xy: (points, 2) the target if it had the source's position relative to its image.
        pixel_size: (points, 2) width and height of an input pixel, in the unit of `side_length`:
            pixels of the original image, or of the input for `vit_analysis`.
        side_length: (points,) the length that alpha is a fraction of.
        window: (points, 4) left, top, right, bottom of the area searched for the target.
        input_size: (height, width) of the model's input.
        counts: numbers of used and skipped pairs, for a sidecar.
    """

    pairs: list[Pair]
    source_row: Integers
    target_row: Integers
    pair_index: Integers
    source_xy: Float
    target_xy: Float
    still_xy: Float
    pixel_size: Float
    side_length: Float
    window: Float
    input_size: tuple[int, int]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.pair_index)

    def describe(self) -> dict[str, int]:
        """Return the numbers of pairs, images and points for the table's notes."""
        return {**self.counts, "points": len(self)}

    def search_groups(self) -> list[SearchGroup]:
        """Return the keypoints by searched image and window, in the order of the store's rows."""
        rows = self.target_row[self.pair_index]
        keys = np.concatenate([rows[:, None], self.window], axis=1)  # (points, 5)
        unique_keys, group_index = np.unique(keys, axis=0, return_inverse=True)
        # Stable, so that the points of a group keep the order of the pairs.
        order = np.argsort(group_index, kind="stable")
        ends = np.cumsum(np.bincount(group_index))[:-1]
        return [
            SearchGroup(row=int(key[0]), window=key[1:], points=points)
            for key, points in zip(unique_keys, np.split(order, ends), strict=True)
        ]

    def squared_error(self, positions: Float) -> Float:
        """Return the squared distances of (points, 2) x, y from their targets: (points,).

        They are in the unit of `side_length`, squared.
        """
        offsets = (positions - self.target_xy) * self.pixel_size
        return (offsets**2).sum(1)


def locate(store: Store, pairs: Sequence[Pair], protocol: Protocol) -> LocatedKeypoints:
    """Return the keypoints of the pairs whose images the store holds.

    Other pairs, and pairs without a keypoint, are left out, counted and logged.

    Raises:
        MissingInput: the store does not record how its images were resized, or crops them so that
            keypoints are outside.
        VitseeError: most of the images are not in the store, or one is of another size.
    """
    transform = store.manifest.transform
    if not transform:
        raise MissingInput(
            f"{store.label} does not say how its images were resized; extract anew"
        )
    usable, image_rows, counts = _match_images(store, pairs)
    stored_sizes = [tuple(size) for size in store.sizes.tolist()]
    for pair, (source_row, target_row) in zip(usable, image_rows, strict=True):
        _require_size(
            store, pair, pair.source, stored_sizes[source_row], pair.source_size
        )
        _require_size(
            store, pair, pair.target, stored_sizes[target_row], pair.target_size
        )
    height, width = transform["input_size"][1:3]  # after the channels
    input_size = int(height), int(width)
    # Cached, since the images of a set have few sizes: all pairs of 26 images are 650.
    placement_of = cache(partial(place, transform))
    columns_by_pair = [
        _point_columns(
            pair,
            placement_of(pair.source_size),
            placement_of(pair.target_size),
            input_size,
            protocol,
        )
        for pair in usable
    ]
    columns = {
        name: np.concatenate([columns[name] for columns in columns_by_pair])
        for name in columns_by_pair[0]
    }
    outside = columns.pop("outside") > 0
    if outside.any():
        raise MissingInput(
            f"{int(outside.sum())} of {len(outside)} keypoints lie outside of what the "
            f"model of {store.label} saw of its images; {RECIPE}"
        )
    return LocatedKeypoints(
        pairs=usable,
        source_row=np.array([source for source, _ in image_rows], np.int64),
        target_row=np.array([target for _, target in image_rows], np.int64),
        pair_index=np.repeat(np.arange(len(usable)), [pair.n_points for pair in usable]),
        input_size=input_size,
        counts=counts,
        **columns,
    )


def _require_size(
    store: Store,
    pair: Pair,
    image: str,
    stored_size: tuple[int, ...],
    pair_size: tuple[int, int],
) -> None:
    """Raise VitseeError if the store and the pair state different (height, width) of an image."""
    if stored_size != pair_size:
        raise VitseeError(
            f"{image} has {stored_size[1]} x {stored_size[0]} pixels in {store.label}, "
            f"{pair_size[1]} x {pair_size[0]} in the pair {pair.name}; expected the same "
            "images"
        )


def _match_images(
    store: Store, pairs: Sequence[Pair]
) -> tuple[list[Pair], list[tuple[int, int]], dict[str, int]]:
    """Return the usable pairs, their (source, target) rows of the store, and counts for notes.

    A pair is usable if the store holds both of its images and it has a keypoint. Logs how many
    are not.

    Raises:
        VitseeError: most of the images are missing, or no pair is usable.
    """
    # Each image is looked up once: it is in many pairs.
    image_rows = _ImageRows(store, {pair.category for pair in pairs})
    row_by_image: dict[tuple[str, str], int] = {}
    usable = []
    usable_rows = []
    n_empty = 0
    for pair in pairs:
        source_key = (pair.category, pair.source)
        target_key = (pair.category, pair.target)
        for key in (source_key, target_key):
            if key not in row_by_image:
                row_by_image[key] = image_rows.find(*key)
        rows = row_by_image[source_key], row_by_image[target_key]
        if min(rows) < 0:
            continue
        if not pair.n_points:
            n_empty += 1
            continue
        usable.append(pair)
        usable_rows.append(rows)
    missing = [
        f"{category}/{image}"
        for (category, image), row in row_by_image.items()
        if row < 0
    ]
    # Some images of a set are unreadable; if most are missing, it is another set.
    if 2 * len(missing) > len(row_by_image):
        raise VitseeError(
            f"{len(missing)} of the {len(row_by_image)} images of the pairs are not in "
            f"{store.label} ({abbreviate(missing, _NAMES_SHOWN)}); its images are called "
            f"{abbreviate(store.samples.id.tolist(), _NAMES_SHOWN)}; expected those "
            "below JPEGImages"
        )
    if not usable:
        raise VitseeError(
            f"none of the {len(pairs)} pairs has both images in {store.label} and a "
            "keypoint"
        )
    n_without_image = len(pairs) - len(usable) - n_empty
    if missing:
        log.warning(
            "%s: %d of the pairs' %d images are missing or could not be read (%s): %s",
            store.label,
            len(missing),
            len(row_by_image),
            abbreviate(missing, _NAMES_SHOWN),
            f"{n_without_image} of {len(pairs)} pairs are left out",
        )
    if n_empty:
        log.info("%s: %d pairs without a keypoint are left out", store.label, n_empty)
    counts = {
        "pairs": len(usable),
        "images": len(row_by_image) - len(missing),
        "left_out_without_image": n_without_image,
        "left_out_without_keypoint": n_empty,
    }
    return usable, usable_rows, counts


class _ImageRows:
    """Finds the row of an image in a store.

    Images are identified by folder and name; if folders are not categories, by name.
    """

    def __init__(self, store: Store, categories: set[str]) -> None:
        self._label = store.label
        self._row_in_folder: dict[tuple[str, str], int] = {}
        self._row_elsewhere: dict[str, int] = {}
        valid = store.valid
        for index, sample_id in enumerate(store.samples.id.tolist()):
            # The last folder is the category, as in JPEGImages/cat/2008_000345.jpg.
            folder_path, _, file = sample_id.rpartition("/")
            folder = folder_path.rpartition("/")[2]
            name = image_stem(file)
            row = index if valid[index] else -1
            if folder in categories:
                is_second = (folder, name) in self._row_in_folder
                self._row_in_folder[folder, name] = _AMBIGUOUS if is_second else row
            else:
                is_second = name in self._row_elsewhere
                self._row_elsewhere[name] = _AMBIGUOUS if is_second else row

    def find(self, category: str, image: str) -> int:
        """Return the image's row, -1 if the store has none that could be read.

        Raises:
            VitseeError: several images have this name.
        """
        name = image_stem(image)
        row = self._row_in_folder.get((category, name), self._row_elsewhere.get(name, -1))
        if row == _AMBIGUOUS:
            raise VitseeError(
                f"{self._label} has several images called {category}/{image}; expected one"
            )
        return row


def _point_columns(
    pair: Pair,
    source: Placement,
    target: Placement,
    input_size: tuple[int, int],
    protocol: Protocol,
) -> dict[str, Float]:
    """Return the fields of `LocatedKeypoints` with an entry per keypoint, of one pair.

    `outside`, (points,), is beside them: 1 where a keypoint is not on the input, else 0.
    """
    n = pair.n_points
    height, width = pair.target_size
    seen_source = _clipped_points(source, pair.source_xy, pair.source_size)
    seen_target = _clipped_points(target, pair.target_xy, pair.target_size)
    box = np.array(pair.box).reshape(
        2, 2
    )  # upper left and lower right corner, x before y
    if protocol.alpha_of == "box":
        longer_side = max(box[1] - box[0])
    else:
        longer_side = max(height, width)
    # As a share of the image's width and height, from its edges.
    relative_xy = (pair.source_xy + 0.5) / pair.source_size[::-1]
    still_xy = relative_xy * (width, height) - 0.5
    if protocol.match == "vit_analysis":
        # Their code scales coordinates by a factor, without the half pixel of centres.
        source_scale = _isotropic_scale(pair, source, pair.source_size)
        target_scale = _isotropic_scale(pair, target, pair.target_size)
        target_corner = (target.left, target.top)
        source_xy = pair.source_xy * source_scale + (source.left, source.top)
        target_xy = pair.target_xy * target_scale + target_corner
        still_xy = still_xy * target_scale + target_corner
        box_edges = box * target_scale + target_corner
        pixel_size = np.ones(2)  # errors in pixels of the input
        side_length = longer_side * target_scale
    else:
        source_xy = seen_source
        target_xy = seen_target
        still_xy = target.points(still_xy, pair.target_size)
        box_edges = target.points(box, pair.target_size)
        # Errors in pixels of the original image.
        pixel_size = np.array([width, height]) / _extent(target)[::-1]
        side_length = float(longer_side)
    if protocol.candidates == "canvas":
        window = np.array([-0.5, -0.5, input_size[1] - 0.5, input_size[0] - 0.5])
    elif protocol.candidates == "image":
        window = np.array([target.left, target.top, target.right, target.bottom]) - 0.5
    else:
        window = box_edges.ravel()
    outside = _is_off_input(seen_source, input_size) | _is_off_input(
        seen_target, input_size
    )
    return {
        "source_xy": source_xy,
        "target_xy": target_xy,
        "still_xy": still_xy,
        "pixel_size": np.tile(pixel_size, (n, 1)),
        "side_length": np.full(n, side_length),
        "window": np.tile(window, (n, 1)),
        "outside": outside.astype(np.float64),
    }


def _clipped_points(placement: Placement, xy: Float, size: tuple[int, int]) -> Float:
    """Return (points, 2) of an image of (height, width) on the input, after a clip to the border.

    Keypoints may lie up to `spair.BORDER_TOLERANCE` beyond it.
    """
    clipped = np.clip(xy, -0.5, (size[1] - 0.5, size[0] - 0.5))
    return placement.points(clipped, size)


def _is_off_input(xy: Float, input_size: tuple[int, int]) -> Mask:
    """Return which points are beyond the edges of the input: (points,)."""
    last_edge = np.array(input_size[::-1]) - 0.5
    beyond = (xy < -0.5 - ROUNDING) | (xy > last_edge + ROUNDING)
    return np.any(beyond, axis=1)


def _extent(placement: Placement) -> Float:
    """Return height and width of the whole image in input pixels."""
    return np.array([placement.bottom - placement.top, placement.right - placement.left])


def _isotropic_scale(pair: Pair, placement: Placement, size: tuple[int, int]) -> float:
    """Return the input pixels per pixel of an image of (height, width), along its longer side.

    The shorter side's scale differs by rounding only.

    Raises:
        MissingInput: the image did not keep its shape.
    """
    extent = _extent(placement)
    scale = float(extent.max() / max(size))
    # Resizing rounds the shorter side to whole pixels.
    if np.abs(extent - scale * np.array(size)).max() > 1:
        raise MissingInput(
            f"the images of the pair {pair.name} were squashed; matches vit_analysis are "
            f"of images that keep their shape: {RECIPE}"
        )
    return scale
