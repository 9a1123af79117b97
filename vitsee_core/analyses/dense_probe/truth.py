"""The labels of a store's images: of the original, on the model's input, and of each cell."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe import pixels
from vitsee_core.analyses.dense_probe.pixels import (
    Labels,
    Pixels,
    nothing,
)
from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import place
from vitsee_core.runtime.streaming import Rows
from vitsee_core.truth.masks.class_maps import ClassMaps
from vitsee_core.truth.masks.depth_maps import DepthMaps
from vitsee_core.truth.masks.mask_truth import cut_to_image, match_rows
from vitsee_core.truth.masks.orientation import oriented_as
from vitsee_core.types import Mask
from vitsee_stores import Store
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_stores.layout import TokenLayout


# NYU's (height, width), and the crop of it on which Eigen et al. 2014 test.
log = logging.getLogger(__name__)

EIGEN_SIZE = (480, 640)


EIGEN_CROP = np.s_[45:471, 41:601]


@dataclass(frozen=True)
class Truth:
    """The labels of a store's images.

    Attributes:
        store: the store.
        maps: the class maps or depth maps.
        mask: (images,) which rows of the store have a map.
        numbers: row -> the number of its map.
        layouts: key that sites share -> the layout of their tokens on the input.
        resolution: where pixels are counted, one of `pixels.RESOLUTIONS`.
        eigen: count only pixels in the crop of Eigen et al. 2014.
    """

    store: Store
    maps: ClassMaps | DepthMaps
    mask: Mask
    numbers: Mapping[int, int]
    layouts: Mapping[str, TokenLayout]
    resolution: str
    eigen: bool = False

    @classmethod
    def find(
        cls,
        store: Store,
        maps: ClassMaps | DepthMaps,
        rows: Rows,
        layouts: Mapping[str, TokenLayout],
        resolution: str,
        eigen: bool = False,
    ) -> tuple[Truth, dict[str, int]]:
        """Return the labels of some images, and the numbers of images with and without a map.

        Images without a map are left out and logged.

        Raises:
            MissingInput: the store does not say how its images were resized, or their sizes.
            VitseeError: no image has a map, or the transform does more than resize and crop.
        """
        transform = store.manifest.transform
        if not transform:
            raise MissingInput(
                f"{store.label} does not say how its images were resized; extract anew"
            )
        n_selected = int((rows.mask & store.valid).sum())
        maps = oriented_as(transform, maps)
        matched, numbers = match_rows(store, maps, rows)
        # Tried on one image, so that a transform that cannot be followed is an error at once.
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
            numbers=dict(zip(matched.tolist(), numbers.tolist(), strict=True)),
            layouts=layouts,
            resolution=resolution,
            eigen=eigen,
        )
        counts = {"with_mask": len(matched), "left_out_without_mask": n_left_out}
        return truth, counts

    @property
    def rows(self) -> Rows:
        """The images that have a map."""
        return Rows(self.mask, 0, "with a map")

    def labels(self, row: int) -> Labels:
        """Return the labels of an original image, (height, width).

        Raises:
            VitseeError: the map cannot be read, or is not of its image's size.
        """
        number = self.numbers[row]
        path = self.maps.where(number)
        labels: Labels = self.maps.read(number)
        if self.eigen:
            labels = eigen_crop(path, labels)
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
            key: pixels.labelled_pixels(labels, placement, layout, size, self.resolution)
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
        input_labels = pixels.on_input(labels, placement, (height, width))
        labels_of_grids = {}
        for key, layout in self.layouts.items():
            cells = pixels.cell_pixels(input_labels, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal whole pixels "
                    "of the input; expected such for this --solver (ridge takes any grid)"
                )
            is_on_image = placement.on_image(layout).reshape(-1, 1)
            no_label = cells.dtype.type(nothing(cells))
            labels_of_grids[key] = np.where(is_on_image, cells, no_label)
        return labels_of_grids


def eigen_crop(path: str, depths: Labels) -> Labels:
    """Return a depth map (480, 640) without the depths outside of rows 45 to 470 and columns 41 to
    600, the crop on which Eigen et al. 2014 test.

    Args:
        path: of the map, for errors.
        depths: (480, 640).

    Raises:
        VitseeError: a map of another size.
    """
    if depths.shape != EIGEN_SIZE:
        raise VitseeError(
            f"{path} is {depths.shape[1]} x {depths.shape[0]} pixels; --eigen-crop expects NYU's "
            f"{EIGEN_SIZE[1]} x {EIGEN_SIZE[0]}"
        )
    cropped = np.full_like(depths, nothing(depths))
    cropped[EIGEN_CROP] = depths[EIGEN_CROP]
    return cropped
