"""Patches in memory with the labels of their pixels, for the solvers that need more than sums.

All patches of every training image where they fit into memory, else equally many of each image. The
pixels of a patch are those of the model's input that its cell covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.dense_probe.cells import CellSums, Places, count_places, merge_places
from vitsee_core.analyses.dense_probe.pixels import Labels, has_label
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.features import Patches
    from vitsee_core.analyses.dense_probe.labelled_images import Truth
    from vitsee_stores import Slab

RARE, ANY = "rare", "any"


@dataclass(frozen=True)
class Bank:
    """Patches of one site.

    Attributes:
        tokens: (n, dim).
        labels: (n, pixels) of each patch, see `pixels`.
        rows: (n,) rows of the store, those of the patches' images.
    """

    tokens: Float32
    labels: Labels
    rows: Integers

    def part(self, some: Mask) -> Bank:
        """Return the bank of the patches in the mask (n,)."""
        return Bank(self.tokens[some], self.labels[some], self.rows[some])

    def histograms(self) -> tuple[Integers, Float, Integers]:
        """Return the classes that occur, the number of pixels of each class in each patch (n,
        classes), and of those with any class (n,)."""
        n, classes = len(self.labels), np.unique(self.labels)
        classes = classes[classes != IGNORED].astype(np.int64)
        places = np.full(IGNORED + 1, -1)
        places[classes] = np.arange(len(classes))
        at = places[self.labels]
        index = (np.arange(n)[:, None] * len(classes) + at)[at >= 0]
        counts = np.bincount(index, minlength=n * len(classes)).reshape(n, -1)
        return classes, counts.astype(np.float64), counts.sum(1)


@dataclass(frozen=True)
class BankImages:
    """The images, and which of their patches are kept.

    Attributes:
        features, grids, truth: as in `ridge.TrainingImages`.
        most: the largest number of patches per image.
        choice: `RARE` keeps those with the lowest (sum over their classes of how many patches of
            the image have it) x uniform noise, as Balažević et al. 2023 do; `ANY` those with the
            lowest noise.
    """

    features: Mapping[str, Patches]
    grids: Mapping[str, str]
    truth: Truth
    most: int
    choice: str
    seed: int
    n_targets: int

    def chosen(self, labels: Labels, row: int) -> Integers:
        """Return the cells of an image that are kept, ascending; its labels are (cells, pixels)."""
        there = np.flatnonzero(has_label(labels).any(1))
        if len(there) <= self.most:
            return there
        index = int(self.truth.store.samples.index[row])
        noise = np.random.default_rng((self.seed, 4, index)).random(len(there))
        if self.choice == RARE:
            own = labels[there]
            present = np.stack([(own == number).any(1) for number in np.unique(own)], 1)
            present = present[:, np.unique(own) != IGNORED]
            noise *= present @ present.sum(0)
        return np.sort(there[np.argsort(noise, kind="stable")[: self.most]])


@dataclass
class BankParts:
    """The kept patches of every site by slab, to be filled by `streaming.fold`."""

    images: BankImages | None
    parts: dict[str, list[Bank]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the images out once there are patches: another process returns these alone."""
        return self.__dict__ | ({"images": None} if self.parts else {})

    def update(self, slab: Slab) -> None:
        """Keep patches of the images of a slab."""
        images = self.images
        assert images is not None
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()
        kept: dict[str, list[tuple[Integers, Labels]]] = {}
        for row in rows:
            for grid, labels in images.truth.cells(row).items():
                cells = images.chosen(labels, row)
                kept.setdefault(grid, []).append((cells, labels[cells]))
            for grid, pixels in images.truth.pixels(row).items():
                count_places(self.places, grid, CellSums.of(pixels), images.n_targets)
        for site, features in images.features.items():
            own = kept[images.grids[site]]
            tokens = features.of_slab(slab)
            bank = Bank(
                np.concatenate([x[cells] for x, (cells, _) in zip(tokens, own, strict=True)]),
                np.concatenate([labels for _, labels in own]),
                np.repeat(rows, [len(cells) for cells, _ in own]),
            )
            self.parts.setdefault(site, []).append(bank)

    def merge(self, other: BankParts) -> None:
        """Append the patches of later slabs."""
        for site, parts in other.parts.items():
            self.parts.setdefault(site, []).extend(parts)
        merge_places(self.places, other.places)

    def result(self) -> BankParts:
        """Return the patches themselves."""
        return self

    def bank(self, site: str) -> Bank:
        """Remove and return all patches of a site."""
        parts = self.parts.pop(site)
        return Bank(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.rows for part in parts]),
        )
