"""The labelled pixels of images, and their places on a grid of tokens.

Labels are classes, `IGNORED` where there is none, or depths, NaN where there is none. They
come from class maps or depth maps, placed as the transform of the store placed its images
(`Truth`).

Pixels are one of three kinds (`RESOLUTIONS`):

- `label`: those of the class map as it was distributed. Nothing is resampled but the
  scores, which is what `interpolate(scores, size=label.shape, mode="bilinear",
  align_corners=False)` does where a grid covers its image;
- `input`: those of the model's input; the map is resampled by the nearest pixel;
- `patch`: one per token, its class the most frequent one among the input pixels of its
  cell (of equally frequent ones the lowest; none where most pixels have none).

Pixels that the model did not see, as they were cropped, have no label; cells whose middle
is beside the image (padding, canvases) have no part in any pixel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import cell_edges, nearest_places, place
from vitsee_core.runtime.streaming import Rows
from vitsee_core.truth.masks.class_maps import ClassMaps
from vitsee_core.truth.masks.depth_maps import DepthMaps
from vitsee_core.truth.masks.mask_truth import cut_to_image, match_rows
from vitsee_core.truth.masks.orientation import oriented_as
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap, near_boundary
from vitsee_core.types import Float, Integers, Mask
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_core.images.placement import Placement
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

Labels = NDArray[Any]  # uint8 classes, or float32 depths
RESOLUTIONS = ("label", "input", "patch")
EDGE_ROUNDING = 1e-6  # pixels; an edge this near to a pixel's edge lies on it
# NYU's (height, width), and the crop of it on which Eigen et al. 2014 test.
EIGEN_SIZE = (480, 640)
EIGEN_CROP = np.s_[45:471, 41:601]


@dataclass(frozen=True)
class Pixels:
    """The labelled pixels of an image, and their places on a grid of tokens.

    Attributes:
        labels: (height, width), with no label for pixels that do not count.
        row_weights: (height, rows) share of each row of cells in each row of pixels; a row
            of pixels has shares that add up to 1.
        col_weights: (width, cols) the same for columns.
        centres: (height,) and (width,) where the pixels' middles lie on the model's input,
            in px.
    """

    labels: Labels
    row_weights: Float
    col_weights: Float
    centres: tuple[Float, Float]

    @cached_property
    def weights(self) -> Float:
        """The weights (height, width): 1 for pixels that count, 0 for others."""
        return has_label(self.labels).astype(np.float64)

    @cached_property
    def boundary(self) -> Mask:
        """A mask (height, width) of pixels near a boundary of classes, from
        `near_boundary`."""
        return near_boundary(self.labels)

    @property
    def is_depth(self) -> bool:
        """Whether the labels are depths."""
        return self.labels.dtype.kind == "f"

    @cached_property
    def present(self) -> list[int]:
        """The numbers of the targets that occur: classes, or [0] for depths."""
        if self.is_depth:
            return [0] if self.weights.any() else []
        n_pixels = np.bincount(self.labels.ravel(), minlength=IGNORED + 1)
        return np.flatnonzero(n_pixels[:IGNORED]).tolist()

    @property
    def targets(self) -> list[Float]:
        """An array (height, width) per entry of `present`: 1 for the pixels of a class, or
        the depths; 0 for pixels that do not count."""
        if not self.is_depth:
            return [(self.labels == number).astype(np.float64) for number in self.present]
        if not self.present:
            return []
        return [np.nan_to_num(self.labels, nan=0.0).astype(np.float64)]

    @property
    def nearest_cells(self) -> tuple[Integers, Integers]:
        """The row (height,) and the column (width,) of the cell nearest to each pixel."""
        return self.row_weights.argmax(1), self.col_weights.argmax(1)

    def sums_of_cells(self, values: Float) -> Float:
        """Return U'v (rows, cols): values (height, width) summed by the cells' shares
        in pixels."""
        return self.row_weights.T @ values @ self.col_weights


def has_label(labels: Labels) -> Mask:
    """Return a mask of the pixels that have a class or a depth."""
    if labels.dtype.kind == "f":
        return np.isfinite(labels)
    return labels != IGNORED


def no_label(labels: Labels) -> int | float:
    """Return the value that stands for no label in an array of classes or depths."""
    return np.nan if labels.dtype.kind == "f" else IGNORED


class Side(NamedTuple):
    """Where an image begins and ends on the model's input along one axis, in px."""

    start: float
    stop: float


def labelled_pixels(
    truth: Labels,
    placement: Placement,
    layout: TokenLayout,
    input_size: tuple[int, int],
    resolution: str,
) -> Pixels:
    """Return the pixels of one image, placed on the tokens of one grid.

    Args:
        truth: (height, width) labels of the original image.
        placement: its place on the model's input.
        layout: layout of the tokens on the model's input.
        input_size: (height, width) of the model's input.
        resolution: one of `RESOLUTIONS`.
    """
    assert layout.grid is not None and layout.stride_px is not None
    if resolution == "label":
        labels, centres = _seen_pixels(truth, placement, input_size)
    else:
        labels = on_input(truth, placement, input_size)
        centres = [np.arange(n, dtype=np.float64) + 0.5 for n in input_size]
    if resolution == "patch":
        labels = most_frequent(labels, layout)
        centres = []
        for axis, n_cells in enumerate(layout.grid):
            steps = np.arange(n_cells, dtype=np.float64) + 0.5
            centres.append(layout.offset_px[axis] + steps * layout.stride_px[axis])
    is_on_image = placement.on_image(layout)  # (rows, cols)
    weights = []
    for axis, n_cells in enumerate(layout.grid):
        cells = np.flatnonzero(is_on_image.any(1 - axis))
        if not len(cells):
            return _without_labels(labels, layout, (centres[0], centres[1]))
        if resolution == "patch":
            beside_image = np.delete(np.arange(n_cells), cells)
            labels[_index_along(axis, beside_image)] = IGNORED
            weights.append(np.eye(n_cells))
            continue
        # In cells: 0 is the middle of the first.
        positions = (centres[axis] - layout.offset_px[axis]) / layout.stride_px[
            axis
        ] - 0.5
        first = int(cells[0])
        last = int(cells[-1])
        weights.append(interpolation(positions, first, last, n_cells))
    return Pixels(labels, weights[0], weights[1], (centres[0], centres[1]))


def _sides(placement: Placement) -> tuple[Side, Side]:
    """Return the sides of an image on the model's input, down and across."""
    down = Side(placement.top, placement.bottom)
    across = Side(placement.left, placement.right)
    return down, across


def _seen_pixels(
    truth: Labels, placement: Placement, input_size: tuple[int, int]
) -> tuple[Labels, list[Float]]:
    """Return an original image's labels, without those that were cropped, and its pixels'
    middles.

    The middles lie on the model's input: one array for each axis, in px.
    """
    labels = truth.copy()
    centres = []
    for axis, side in enumerate(_sides(placement)):
        n = truth.shape[axis]
        middles = side.start + (np.arange(n) + 0.5) * (side.stop - side.start) / n
        is_cropped = (middles < 0) | (middles > input_size[axis])
        labels[_index_along(axis, is_cropped)] = no_label(labels)
        centres.append(middles)
    return labels, centres


def _without_labels(
    labels: Labels, layout: TokenLayout, centres: tuple[Float, Float]
) -> Pixels:
    """Return pixels like `labels` that have no label, as no cell is on the image."""
    assert layout.grid is not None
    height, width = labels.shape
    rows, cols = layout.grid
    return Pixels(
        labels=np.full_like(labels, no_label(labels)),
        row_weights=np.zeros((height, rows)),
        col_weights=np.zeros((width, cols)),
        centres=centres,
    )


def on_input(truth: Labels, placement: Placement, size: tuple[int, int]) -> Labels:
    """Return the labels on the model's input, with no label beside the image.

    Each pixel has the label of the original pixel that its middle lies on, as in Pillow's
    nearest resize.

    Args:
        truth: (height, width) labels of the original image.
        placement: its place on the model's input.
        size: (height, width) of the model's input.
    """
    indices = []
    inside = []
    for axis, side in enumerate(_sides(placement)):
        n_original = truth.shape[axis]
        # The input's ends, in pixels of the original.
        length = side.stop - side.start
        start = n_original * (0 - side.start) / length
        stop = n_original * (size[axis] - side.start) / length
        nearest = nearest_places(
            n_original, size[axis], _snapped_edge(start), _snapped_edge(stop)
        )
        indices.append(np.clip(nearest, 0, n_original - 1))
        inside.append((nearest >= 0) & (nearest < n_original))
    labels: Labels = truth[indices[0][:, None], indices[1]]
    is_inside = inside[0][:, None] & inside[1]
    labels[~is_inside] = no_label(truth)
    return labels


def _snapped_edge(edge: float) -> float:
    """Return an edge, rounded if it differs from a pixel's edge by rounding only."""
    if abs(edge - round(edge)) < EDGE_ROUNDING:
        return float(round(edge))
    return edge


def most_frequent(labels: ClassMap, layout: TokenLayout) -> ClassMap:
    """Return the most frequent class (rows, cols) of each cell's pixels of the model's
    input."""
    row_edges, col_edges = cell_edges(layout, labels.shape)
    shape = (len(row_edges) - 1, len(col_edges) - 1)
    classes = np.full(shape, IGNORED, np.uint8)
    for row, col in np.ndindex(shape):
        cell = labels[
            row_edges[row] : row_edges[row + 1], col_edges[col] : col_edges[col + 1]
        ]
        if cell.size:
            classes[row, col] = np.bincount(cell.ravel()).argmax()
    return classes


def interpolation(positions: Float, first: int, last: int, n: int) -> Float:
    """Return the weights (pixels, n) of cells in pixels along one axis.

    Beyond the cells from `first` to `last` it is the nearest of them.

    Args:
        positions: (pixels,) in cells, 0 is the middle of the first.
        first: number of the first cell that counts.
        last: number of the last one.
        n: number of cells.
    """
    positions = np.clip(positions, first, last)
    low = np.floor(positions).astype(np.int64)
    upper_weight = positions - low
    weights = np.zeros((len(positions), n))
    pixels: Integers = np.arange(len(positions))
    weights[pixels, low] = 1 - upper_weight
    # At the last cell both are the same cell, whose weight of 0 is added.
    weights[pixels, np.minimum(low + 1, last)] += upper_weight
    return weights


def cell_pixels(labels: Labels, layout: TokenLayout) -> Labels | None:
    """Return the labels (cells, pixels) of each cell's pixels of the model's input, row by
    row.

    It is None where the cells are not all of the same number of whole pixels.
    """
    row_edges, col_edges = cell_edges(layout, labels.shape)
    heights = np.unique(np.diff(row_edges))
    widths = np.unique(np.diff(col_edges))
    if len(heights) != 1 or len(widths) != 1 or heights[0] < 1 or widths[0] < 1:
        return None
    rows = len(row_edges) - 1
    cols = len(col_edges) - 1
    height = int(heights[0])
    width = int(widths[0])
    covered = labels[row_edges[0] : row_edges[-1], col_edges[0] : col_edges[-1]]
    # (rows, height, cols, width) -> (rows, cols, height, width)
    cells = covered.reshape(rows, height, cols, width).swapaxes(1, 2)
    return cells.reshape(-1, height * width)


def _index_along(axis: int, selection: Integers | Mask) -> tuple[slice | np.ndarray, ...]:
    """Return the index of a selection of rows (axis 0) or of columns (axis 1)."""
    return (selection,) if axis == 0 else (slice(None), selection)


@dataclass(frozen=True)
class Truth:
    """The labels of a store's images.

    Attributes:
        store: the store.
        maps: the class maps or depth maps.
        mask: (images,) which rows of the store have a map.
        map_number_of_row: row of the store -> the number of its map.
        layouts: key that sites share -> the layout of their tokens on the input.
        resolution: where pixels are counted, one of `RESOLUTIONS`.
        eigen_crop: count only pixels in the crop of Eigen et al. 2014.
    """

    store: Store
    maps: ClassMaps | DepthMaps
    mask: Mask
    map_number_of_row: Mapping[int, int]
    layouts: Mapping[str, TokenLayout]
    resolution: str
    eigen_crop: bool = False

    @classmethod
    def find(
        cls,
        store: Store,
        maps: ClassMaps | DepthMaps,
        rows: Rows,
        layouts: Mapping[str, TokenLayout],
        resolution: str,
        eigen_crop: bool = False,
    ) -> tuple[Truth, dict[str, int]]:
        """Return the labels of some images, and the numbers of images with and without a
        map.

        Images without a map are left out and logged.

        Raises:
            MissingInput: the store does not say how its images were resized, or their
                sizes.
            VitseeError: no image has a map, or the transform does more than resize and
                crop.
        """
        transform = store.manifest.transform
        if not transform:
            raise MissingInput(
                f"{store.label} does not say how its images were resized; extract anew"
            )
        n_selected = int((rows.mask & store.valid).sum())
        maps = oriented_as(transform, maps)
        matched, map_numbers = match_rows(store, maps, rows)
        # Tried on one image, so that a transform that cannot be followed is an error at
        # once.
        try:
            place(transform, store.sizes[matched[0]].tolist())
        except DataError as error:
            raise VitseeError(f"{store.label}: {error}") from None
        mask = np.zeros(store.n_images, bool)
        mask[matched] = True
        n_left_out = n_selected - len(matched)
        if n_left_out:
            log.info(
                "%s: %d of %d images are left out: without a map",
                store.label,
                n_left_out,
                n_selected,
            )
        truth = cls(
            store=store,
            maps=maps,
            mask=mask,
            map_number_of_row=dict(
                zip(matched.tolist(), map_numbers.tolist(), strict=True)
            ),
            layouts=layouts,
            resolution=resolution,
            eigen_crop=eigen_crop,
        )
        counts = {"with_mask": len(matched), "left_out_without_mask": n_left_out}
        return truth, counts

    @property
    def rows(self) -> Rows:
        """The images that have a map."""
        return Rows(self.mask, 0, "with a map")

    def labels(self, row: int) -> Labels:
        """Return the labels of one image at its original size, (height, width): uint8 classes,
        or float32 depths.

        row: of the store.

        Raises:
            VitseeError: the map cannot be read, or is not of its image's size.
        """
        map_number = self.map_number_of_row[row]
        path = self.maps.where(map_number)
        labels: Labels = self.maps.read(map_number)
        if self.eigen_crop:
            labels = crop_as_eigen(path, labels)
        file = str(self.store.samples.file[row])
        height, width = self.store.sizes[row].tolist()
        boxes = self.store.samples.box
        box = None if boxes is None else boxes[row]
        return cut_to_image(path, labels, file, (height, width), box)

    def pixels(self, row: int) -> dict[str, Pixels]:
        """Return the labelled pixels of an image for each grid.

        Raises:
            VitseeError: the map cannot be read, or is not of its image's size.
        """
        labels = self.labels(row)
        transform = self.store.manifest.transform
        placement = place(transform, labels.shape)
        size = tuple(transform["input_size"][1:])
        return {
            key: labelled_pixels(labels, placement, layout, size, self.resolution)
            for key, layout in self.layouts.items()
        }

    def cells(self, row: int) -> dict[str, Labels]:
        """Return the labels of each cell's pixels of the model's input, for each grid.

        They are (cells, pixels); a cell whose middle is beside the image has no labels.

        Raises:
            VitseeError: cells are not whole pixels, or the map cannot be read.
        """
        labels = self.labels(row)
        transform = self.store.manifest.transform
        height, width = transform["input_size"][1:]
        placement = place(transform, labels.shape)
        input_labels = on_input(labels, placement, (height, width))
        labels_of_grids = {}
        for key, layout in self.layouts.items():
            cells = cell_pixels(input_labels, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal "
                    "whole pixels of the input; expected such for this --solver (ridge "
                    "takes any grid)"
                )
            is_on_image = placement.on_image(layout).reshape(-1, 1)
            missing = cells.dtype.type(no_label(cells))
            labels_of_grids[key] = np.where(is_on_image, cells, missing)
        return labels_of_grids


def crop_as_eigen(path: str, depths: Labels) -> Labels:
    """Return a depth map (480, 640) without the depths outside of rows 45 to 470 and
    columns 41 to 600, the crop on which Eigen et al. 2014 test.

    Args:
        path: of the map, for errors.
        depths: (480, 640).

    Raises:
        VitseeError: a map of another size.
    """
    if depths.shape != EIGEN_SIZE:
        raise VitseeError(
            f"{path} is {depths.shape[1]} x {depths.shape[0]} pixels; --eigen-crop "
            f"expects NYU's {EIGEN_SIZE[1]} x {EIGEN_SIZE[0]}"
        )
    cropped = np.full_like(depths, no_label(depths))
    cropped[EIGEN_CROP] = depths[EIGEN_CROP]
    return cropped
