"""The images that train a dense probe, choose its l2 and test it, and the labels of their pixels.

Labels come from class maps or depth maps, placed as the transform of the store placed its images.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe import pixels
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels, nothing
from vitsee_core.features import require_comparable
from vitsee_core.images.errors import DataError
from vitsee_core.images.only import named_only
from vitsee_core.images.placement import place
from vitsee_core.labels.labelled_rows import in_split
from vitsee_core.masks.class_maps import ClassMaps
from vitsee_core.masks.depth_maps import DepthMaps
from vitsee_core.masks.mask_truth import cut_to_image, match_rows
from vitsee_core.runtime.streaming import Rows
from vitsee_core.types import Mask
from vitsee_stores import Store, open_store
from vitsee_stores.errors import MissingInput, VitseeError

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_stores.layout import TokenLayout

CHOOSING = 0.1  # of the training images
EIGEN_SIZE = 480, 640
EIGEN_PART = np.s_[45:471, 41:601]

Images = tuple[Store, Rows]

log = logging.getLogger(__name__)


def pairs(
    train: Store,
    tests: Sequence[Store],
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """The images that train and those that test, for each store that tests."""
    if not tests:
        ours, theirs = split_images(train, execution, split, holdout)
        return [((train, ours), (train, theirs))]
    require_comparable(train, tests)
    ours = execution.rows(train)
    return [((train, ours), (test, execution.rows(test))) for test in tests]


def pairs_of_untrained(
    places: Sequence[Path],
    n_tests: int,
    split: str | None,
    holdout: float | None,
    execution: Execution,
) -> list[tuple[Images, Images]]:
    """Like `pairs`, for the stores of an untrained model.

    Raises:
        VitseeError: their number differs from that of the trained model's stores.
    """
    if not places:
        return []
    if len(places) != 1 + n_tests:
        raise VitseeError(
            f"--untrained was given {len(places)} times; expected {1 + n_tests}: the stores of a "
            f"model with random weights for {'TRAIN and each TEST' if n_tests else 'the store'}, "
            "in this order"
        )
    first, *others = [open_store(place) for place in places]
    return pairs(first, others, split, holdout, execution)


def split_images(
    store: Store, execution: Execution, split: str | None, holdout: float | None
) -> tuple[Rows, Rows]:
    """The images of one store that train, and those that test: those of a split of its data, or in
    the list of a file; or a share that is held out, drawn over the data set's own order.

    Raises:
        VitseeError: no such split, or nothing is left to train or to test.
    """
    rows = execution.rows(store)
    if split is not None:
        tested, how = _named(store, split), f"of split {split}"
    else:
        assert holdout is not None
        tested = drawn(store, rows.mask, holdout, (execution.seed, 2))
        how = f"{holdout:g} held out with seed {execution.seed}"
    parts = rows.mask & ~tested, rows.mask & tested
    for mask, use in zip(parts, ("train", "test"), strict=True):
        if not (mask & store.valid).any():
            raise VitseeError(f"{store.label}: no image is left to {use} ({rows.how}, {how})")
    return tuple(  # type: ignore[return-value]
        replace(rows, mask=mask, n_invalid=int((mask & ~store.valid).sum()), how=f"{use} {how}")
        for mask, use in zip(parts, ("not", "those"), strict=True)
    )


def _named(store: Store, split: str) -> Mask:
    """(images,) which are in a split, or in the list of a file."""
    if not Path(split).is_file():
        return in_split(store, split)
    try:
        return named_only(Path(split), store.samples.id.tolist(), store.label)
    except DataError as error:
        raise VitseeError(str(error)) from None


def drawn(store: Store, among: Mask, share: float, seed: tuple[int, ...]) -> Mask:
    """(images,) this share of some images, one at least and not all, drawn over the data set's own
    order, so that a shuffled store gives the same ones."""
    places = np.flatnonzero(among & store.valid)
    found = np.zeros(len(among), bool)
    if len(places) < 2:
        return found
    places = places[np.argsort(store.samples.index[places], kind="stable")]
    n = min(max(1, round(share * len(places))), len(places) - 1)
    found[np.random.default_rng(seed).permutation(places)[:n]] = True
    return found


@dataclass(frozen=True)
class Truth:
    """The labels of a store's images.

    Attributes:
        maps: the class maps or depth maps.
        mask: (images,) which rows of the store have a map.
        numbers: row -> the number of its map.
        layouts: the grids of tokens, by a key that sites share.
        resolution: one of `pixels.RESOLUTIONS`.
        eigen: only pixels in the crop of Eigen et al. 2014 count.
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
        """Find the maps of these images; images without one are left out, counted and logged.

        Raises:
            MissingInput: the store does not say how its images were resized, or their sizes.
            VitseeError: no image has a map, or the transform does more than resize and crop.
        """
        transform = store.manifest.transform
        if not transform:
            raise MissingInput(
                f"{store.label} does not say how its images were resized; extract anew"
            )
        wanted = int((rows.mask & store.valid).sum())
        matched, numbers = match_rows(store, maps, rows)
        try:
            place(transform, store.sizes[matched[0]].tolist())
        except DataError as error:
            raise VitseeError(f"{store.label}: {error}") from None
        mask = np.zeros(store.n_images, bool)
        mask[matched] = True
        if left := wanted - len(matched):
            log.info("%s: %d of %d images are left out: without a map", store.label, left, wanted)
        of_row = dict(zip(matched.tolist(), numbers.tolist(), strict=True))
        counts = {"with_mask": len(matched), "left_out_without_mask": left}
        return cls(store, maps, mask, of_row, layouts, resolution, eigen), counts

    @property
    def rows(self) -> Rows:
        """The images that have a map."""
        return Rows(self.mask, 0, "with a map")

    def labels(self, row: int) -> Labels:
        """The labels of an original image, (height, width).

        Raises:
            VitseeError: it cannot be read, or is not of its image's size.
        """
        number = self.numbers[row]
        where = self.maps.where(number)
        found: Labels = self.maps.read(number)
        if self.eigen:
            found = eigen_crop(where, found)
        box = self.store.samples.box
        name, (height, width) = str(self.store.samples.file[row]), self.store.sizes[row].tolist()
        part = None if box is None else box[row]
        return cut_to_image(where, found, name, (height, width), part)

    def pixels(self, row: int) -> dict[str, Pixels]:
        """The labelled pixels of an image for each grid; raises as `labels`."""
        truth = self.labels(row)
        transform = self.store.manifest.transform
        placement = place(transform, truth.shape)
        size = tuple(transform["input_size"][1:])
        return {
            key: pixels.labelled_pixels(truth, placement, layout, size, self.resolution)
            for key, layout in self.layouts.items()
        }

    def cells(self, row: int) -> dict[str, Labels]:
        """For each grid the labels (cells, pixels) of each cell's pixels of the model's input; none
        of cells whose middle is beside the image.

        Raises:
            VitseeError: cells are not whole pixels; see `labels`.
        """
        truth = self.labels(row)
        transform = self.store.manifest.transform
        height, width = transform["input_size"][1:]
        placement = place(transform, truth.shape)
        seen = pixels.on_input(truth, placement, (height, width))
        found = {}
        for key, layout in self.layouts.items():
            cells = pixels.cell_pixels(seen, layout)
            if cells is None:
                raise VitseeError(
                    f"{self.store.label}: cells of the grid {key} px are not of equal whole pixels "
                    "of the input; expected such for this --solver (ridge takes any grid)"
                )
            inside = placement.on_image(layout).reshape(-1, 1)
            found[key] = np.where(inside, cells, cells.dtype.type(nothing(cells)))
        return found


def eigen_crop(where: str, depths: Labels) -> Labels:
    """Keep the depths of a map (480, 640) in rows 45 to 470 and columns 41 to 600 alone.

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
