"""Patches in memory with the labels of their pixels, for the solvers that need more than sums.

All patches of every training image where they fit into memory, else equally many of each image. The
pixels of a patch are those of the model's input that its cell covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.analyses.dense_probe.cells import CellSums, Places, count_places
from vitsee_core.analyses.dense_probe.pixels import Labels, has_label
from vitsee_core.analyses.dense_probe.work import Part, Sums, counted_rows
from vitsee_core.masks.class_maps import IGNORED
from vitsee_core.types import Float, Float32, Integers, Mask

if TYPE_CHECKING:
    from vitsee_stores import Slab

RARE, ANY = "rare", "any"


@dataclass(frozen=True)
class Bank:
    """Patches of one site: tokens (n, dim), labels (n, pixels) of each, and rows (n,) of the store,
    those of their images."""

    tokens: Float32
    labels: Labels
    rows: Integers

    def part(self, some: Mask) -> Bank:
        """The patches in the mask (n,)."""
        return Bank(self.tokens[some], self.labels[some], self.rows[some])

    def histograms(self) -> tuple[Integers, Float, Integers]:
        """The classes that occur, the number of pixels of each class in each patch (n,
        classes), and of those with any class (n,)."""
        n, classes = len(self.labels), np.unique(self.labels)
        classes = classes[classes != IGNORED].astype(np.int64)
        places = np.full(IGNORED + 1, -1)
        places[classes] = np.arange(len(classes))
        at = places[self.labels]
        index = (np.arange(n)[:, None] * len(classes) + at)[at >= 0]
        counts = np.bincount(index, minlength=n * len(classes)).reshape(n, -1)
        return classes, counts.astype(np.float64), counts.sum(1)


def chosen_cells(labels: Labels, most: int, choice: str, seed: tuple[int, ...]) -> Integers:
    """The cells of an image that are kept, ascending; labels: (cells, pixels).

    Args:
        labels: cells without any are never kept.
        most: the largest number that is.
        choice: `RARE` keeps those with the lowest (sum over their classes of how many patches of
            the image have it) x uniform noise, as Balažević et al. 2023 do; `ANY` those with the
            lowest noise.
        seed: of the noise.
    """
    there = np.flatnonzero(has_label(labels).any(1))
    if len(there) <= most:
        return there
    noise = np.random.default_rng(seed).random(len(there))
    if choice == RARE:
        own = labels[there]
        numbers = np.unique(own)
        present = np.stack([(own == n).any(1) for n in numbers[numbers != IGNORED]], 1)
        noise *= present @ present.sum(0)
    return np.sort(there[np.argsort(noise, kind="stable")[:most]])


@dataclass(frozen=True)
class Collecting:
    """The images, and which of their patches are kept; see `chosen_cells`."""

    part: Part
    most: int
    choice: str
    seed: int


@dataclass
class BankParts(Sums[Collecting]):
    """The kept patches of every site by slab, and the sums of the baselines."""

    parts: dict[str, list[Bank]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def update(self, slab: Slab) -> None:
        """Keep patches of the images of a slab."""
        assert self.work is not None
        work, part, rows = self.work, self.work.part, counted_rows(slab)
        kept: dict[str, list[tuple[Integers, Labels]]] = {}
        for row in rows:
            seed = work.seed, 4, int(part.store.samples.index[row])
            for grid, labels in part.truth.cells(row).items():
                cells = chosen_cells(labels, work.most, work.choice, seed)
                kept.setdefault(grid, []).append((cells, labels[cells]))
            for grid, pixels in part.truth.pixels(row).items():
                count_places(self.places, grid, CellSums.of(pixels), part.task.n_targets)
        for site, features in part.features.items():
            own = kept[part.grids[site]]
            tokens = features.of_slab(slab)
            bank = Bank(
                np.concatenate([x[cells] for x, (cells, _) in zip(tokens, own, strict=True)]),
                np.concatenate([labels for _, labels in own]),
                np.repeat(rows, [len(cells) for cells, _ in own]),
            )
            self.parts.setdefault(site, []).append(bank)

    def bank(self, site: str) -> Bank:
        """Remove and return all patches of a site."""
        every = zip(*(vars(part).values() for part in self.parts.pop(site)), strict=True)
        return Bank(*map(np.concatenate, every))
