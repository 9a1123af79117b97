"""Predictions of the test images, counted per class: one pass over tokens for every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.types import Integers, Mask

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.linear import Head
    from vitsee_core.analyses.dense_probe.truth import Truth
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab

BOTH, PREDICTED, LABELLED = range(3)
BOUNDARY_SHARE = 0.02  # of the image's diagonal, as in Cheng et al. 2021


@dataclass(frozen=True)
class HeadKey:
    """Whose predictions: of a site at an l2 or with k neighbours, or of a baseline on a grid."""

    of: str
    l2: float | None = None
    k: int | None = None
    baseline: str = ""


@dataclass
class Counts:
    """(blocks, 3, classes) pixels that are a class in prediction and label, in the prediction, in
    the label: `whole` of all pixels that count, `edge` of those near a boundary of their regions;
    without blocks where that is not asked for."""

    whole: Integers
    edge: Integers

    @classmethod
    def empty(cls, n_blocks: int, boundary: bool) -> Counts:
        """Of no pixel."""
        shape = 3, IGNORED
        return cls(
            np.zeros((n_blocks, *shape), np.int64),
            np.zeros((n_blocks if boundary else 0, *shape), np.int64),
        )

    def add(self, other: Counts) -> None:
        """Add those of others."""
        self.whole += other.whole
        self.edge += other.edge


@dataclass(frozen=True)
class TestImages:
    """What is predicted. heads: key -> a trained probe; several may read one site. features: site
    -> its patches. grids: site -> key of its grid in `truth.layouts`. blocks: (images,) of the
    jackknife, of all rows. boundary: whether pixels near boundaries are counted too."""

    heads: Mapping[HeadKey, Head]
    features: Mapping[str, SiteFeatures]
    grids: Mapping[str, str]
    truth: Truth
    blocks: Integers
    n_blocks: int
    boundary: bool


@dataclass
class HeadCounts:
    """Counts of every head, to be filled by `streaming.fold`."""

    images: TestImages | None
    counts: dict[HeadKey, Counts] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Another process gives back the counts alone."""
        return self.__dict__ | ({"images": None} if self.counts else {})

    def update(self, slab: Slab) -> None:
        """Count a slab's images."""
        images = self.images
        assert images is not None
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid].tolist()
        pixels = [images.truth.pixels(row) for row in rows]
        edges: dict[tuple[int, str], Mask] = {}
        if images.boundary:
            edges = {
                (i, key): near_boundary(own.labels)
                for i, of_grid in enumerate(pixels)
                for key, own in of_grid.items()
            }
        nothing = np.zeros((0, 0, 0))
        for key, head in images.heads.items():
            if key.baseline:
                for i, row in enumerate(rows):
                    own = pixels[i][key.of]
                    found = head.predict(nothing, own)
                    self._count(key, row, found, own.labels, edges.get((i, key.of)))
        for site, features in images.features.items():
            assert features.layout is not None and features.layout.grid is not None
            shape = *features.layout.grid, features.dim
            tokens = features.of_slab(slab, slice(0, len(features.tokens)))
            heads = {k: h for k, h in images.heads.items() if k.of == site and not k.baseline}
            for i, (row, x) in enumerate(zip(rows, tokens, strict=True)):
                z = x.astype(np.float64).reshape(shape)
                own = pixels[i][images.grids[site]]
                for key, head in heads.items():
                    edge = edges.get((i, images.grids[site]))
                    self._count(key, row, head.predict(z, own), own.labels, edge)

    def merge(self, other: HeadCounts) -> None:
        """Count what `other` counted."""
        for key, counts in other.counts.items():
            if key in self.counts:
                self.counts[key].add(counts)
            else:
                self.counts[key] = counts

    def result(self) -> dict[HeadKey, Counts]:
        """Of every head."""
        return self.counts

    def _count(
        self, key: HeadKey, row: int, found: ClassMap, labels: ClassMap, edge: Mask | None
    ) -> None:
        images = self.images
        assert images is not None
        if key not in self.counts:
            self.counts[key] = Counts.empty(images.n_blocks, images.boundary)
        counts, block = self.counts[key], int(images.blocks[row])
        found = np.where(labels == IGNORED, np.uint8(IGNORED), found)
        counts.whole[block] += counted(found, labels)
        if edge is not None:
            counts.edge[block] += counted(found, labels, near_boundary(found), edge)


def counted(
    found: ClassMap, labels: ClassMap, near: Mask | None = None, edge: Mask | None = None
) -> Integers:
    """(3, classes) counts of an image, see `Counts`; near, edge: only these pixels of the
    prediction and of the label."""
    if near is None or edge is None:
        near = edge = np.ones(found.shape, np.bool_)
    parts: Sequence[ClassMap] = (
        labels[(found == labels) & near & edge], found[near], labels[edge],
    )  # fmt: skip
    return np.stack([np.bincount(part, minlength=IGNORED + 1)[:IGNORED] for part in parts])


def near_boundary(labels: ClassMap) -> Mask:
    """Which pixels are near the boundary of the region of their class: a pixel of another class, or
    the image's border, is within `BOUNDARY_SHARE` of the diagonal, counted in pixels along the rows
    or columns, whichever is farther (the erosion by a square of Cheng et al. 2021). Pixels that are
    ignored are a region as others are."""
    from scipy.ndimage import maximum_filter, minimum_filter

    reach = max(1, round(BOUNDARY_SHARE * float(np.hypot(*labels.shape))))
    framed = np.pad(labels.astype(np.int16), 1, constant_values=-1)
    size = 2 * reach + 1
    low, high = (f(framed, size, mode="nearest") for f in (minimum_filter, maximum_filter))
    found: Mask = (low != high)[1:-1, 1:-1]
    return found
