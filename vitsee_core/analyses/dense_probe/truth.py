"""The class maps of a store's images, as pixels of its grids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.pixels import Pixels, cell_pixels, labelled_pixels, on_input
from vitsee_core.images.errors import DataError
from vitsee_core.images.placement import place
from vitsee_core.masks.class_maps import ClassMap, ClassMaps
from vitsee_core.masks.mask_truth import check_size, cut, match_rows
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Mask
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Truth:
    """The class maps of the images that count. mask: (images,) over all rows of the store. numbers:
    row -> its map's number. layouts: the grids, by a key that sites share."""

    store: Store
    maps: ClassMaps
    mask: Mask
    numbers: Mapping[int, int]
    layouts: Mapping[str, TokenLayout]
    resolution: str

    @property
    def rows(self) -> Rows:
        """The images that count."""
        return Rows(self.mask, 0, "with a class map")

    def class_map(self, row: int) -> ClassMap:
        """(height, width) of the original image.

        Raises:
            VitseeError: it cannot be read, or is not of its image's size.
        """
        number = self.numbers[row]
        where, found = self.maps.where(number), self.maps.read(number)
        box = self.store.samples.box
        if box is not None and np.isfinite(box[row]).all():
            found = cut(where, found, box[row])
        height, width = self.store.sizes[row].tolist()
        check_size(where, found.shape, str(self.store.samples.file[row]), (height, width))
        return found

    def pixels(self, row: int) -> dict[str, Pixels]:
        """Grid -> the labelled pixels of an image.

        Raises:
            VitseeError: see `class_map`.
        """
        class_map = self.class_map(row)
        transform = self.store.manifest.transform
        placement = place(transform, class_map.shape)
        size = tuple(transform["input_size"][1:])
        return {
            key: labelled_pixels(class_map, placement, layout, size, self.resolution)
            for key, layout in self.layouts.items()
        }

    def cells(self, row: int) -> dict[str, ClassMap]:
        """Grid -> (cells, pixels) the classes of each cell's pixels of the model's input.

        Raises:
            VitseeError: cells are not whole pixels; see `class_map`.
        """
        class_map = self.class_map(row)
        transform = self.store.manifest.transform
        height, width = transform["input_size"][1:]
        seen = on_input(class_map, place(transform, class_map.shape), (height, width))
        found = {}
        for key, layout in self.layouts.items():
            cells = cell_pixels(seen, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal whole pixels "
                    "of the input; expected such for this --solver (ridge takes any grid)"
                )
            found[key] = cells
        return found


def find_truth(
    store: Store,
    maps: ClassMaps,
    rows: Rows,
    layouts: Mapping[str, TokenLayout],
    resolution: str,
) -> tuple[Truth, dict[str, int]]:
    """The class maps of these images; those without one are left out, counted and logged.

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
        log.info("%s: %d of %d images are left out: without a mask", store.label, left, wanted)
    of_row = dict(zip(matched.tolist(), numbers.tolist(), strict=True))
    counts = {"with_mask": len(matched), "left_out_without_mask": left}
    return Truth(store, maps, mask, of_row, layouts, resolution), counts
