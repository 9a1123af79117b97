"""The class maps or depth maps of a store's images, as pixels of its grids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import (
    Labels,
    Pixels,
    cell_pixels,
    labelled_pixels,
    nothing,
    on_input,
)
from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import place
from vitsee_core.masks.class_maps import ClassMaps
from vitsee_core.masks.depth_maps import DepthMaps
from vitsee_core.masks.mask_truth import check_size, cut, match_rows
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Mask
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

EIGEN_SIZE = 480, 640
EIGEN_PART = np.s_[45:471, 41:601]


@dataclass(frozen=True)
class Truth:
    """The labels of the images that count. mask: (images,) over all rows of the store. numbers: row
    -> its map's number. layouts: the grids, by a key that sites share. eigen: only the pixels of
    the crop of Eigen et al. 2014 count."""

    store: Store
    maps: ClassMaps | DepthMaps
    mask: Mask
    numbers: Mapping[int, int]
    layouts: Mapping[str, TokenLayout]
    resolution: str
    eigen: bool = False

    @property
    def rows(self) -> Rows:
        """The images that count."""
        return Rows(self.mask, 0, "with a map")

    def labels(self, row: int) -> Labels:
        """(height, width) of the original image.

        Raises:
            VitseeError: it cannot be read, or is not of its image's size.
        """
        number = self.numbers[row]
        where = self.maps.where(number)
        found: Labels = self.maps.read(number)
        if self.eigen:
            found = eigen_crop(where, found)
        box = self.store.samples.box
        if box is not None and np.isfinite(box[row]).all():
            found = cut(where, found, box[row])
        height, width = self.store.sizes[row].tolist()
        check_size(where, found.shape, str(self.store.samples.file[row]), (height, width))
        return found

    def pixels(self, row: int) -> dict[str, Pixels]:
        """Grid -> the labelled pixels of an image.

        Raises:
            VitseeError: see `labels`.
        """
        truth = self.labels(row)
        transform = self.store.manifest.transform
        placement = place(transform, truth.shape)
        size = tuple(transform["input_size"][1:])
        return {
            key: labelled_pixels(truth, placement, layout, size, self.resolution)
            for key, layout in self.layouts.items()
        }

    def cells(self, row: int) -> dict[str, Labels]:
        """Grid -> (cells, pixels) the labels of each cell's pixels of the model's input; of cells
        whose middle is beside the image none.

        Raises:
            VitseeError: cells are not whole pixels; see `labels`.
        """
        truth = self.labels(row)
        transform = self.store.manifest.transform
        height, width = transform["input_size"][1:]
        placement = place(transform, truth.shape)
        seen = on_input(truth, placement, (height, width))
        found = {}
        for key, layout in self.layouts.items():
            cells = cell_pixels(seen, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal whole pixels "
                    "of the input; expected such for this --solver (ridge takes any grid)"
                )
            inside = placement.on_image(layout).reshape(-1, 1)
            found[key] = np.where(inside, cells, cells.dtype.type(nothing(cells)))
        return found


def eigen_crop(where: str, depths: Labels) -> Labels:
    """Depths (480, 640) within rows 45 to 470 and columns 41 to 600, none beside them.

    Raises:
        VitseeError: a map of another size.
    """
    if depths.shape != EIGEN_SIZE:
        raise VitseeError(
            f"{where} is {depths.shape[1]} x {depths.shape[0]} pixels; --eigen-crop expects NYU's "
            f"{EIGEN_SIZE[1]} x {EIGEN_SIZE[0]}"
        )
    found = np.full_like(depths, nothing(depths))
    found[EIGEN_PART] = depths[EIGEN_PART]
    return found


def find_truth(
    store: Store,
    maps: ClassMaps | DepthMaps,
    rows: Rows,
    layouts: Mapping[str, TokenLayout],
    resolution: str,
    eigen: bool = False,
) -> tuple[Truth, dict[str, int]]:
    """The maps of these images; those without one are left out, counted and logged.

    Raises:
        MissingInput: the store does not say how its images were resized, or their sizes.
        VitseeError: no image has a map, or the transform does more than resize and crop.
    """
    transform = store.manifest.transform
    if not transform:
        raise MissingInput(f"{store.label} does not say how its images were resized; extract anew")
    wanted = int((rows.mask & store.valid).sum())
    matched, numbers = match_rows(store, maps, rows)
    try:
        place(transform, store.sizes[matched[0]].tolist())
    except DataError as error:
        raise VitseeError(f"{store.label}: {error}") from None
    mask = np.zeros(store.n_images, bool)
    mask[matched] = True
    left = wanted - len(matched)
    if left:
        log.info("%s: %d of %d images are left out: without a map", store.label, left, wanted)
    of_row = dict(zip(matched.tolist(), numbers.tolist(), strict=True))
    counts = {"with_mask": len(matched), "left_out_without_mask": left}
    return Truth(store, maps, mask, of_row, layouts, resolution, eigen), counts
