"""One pass over all patches: a dictionary reconstructs them and assigns each to a concept, and the
strongest patches of each concept are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitsee_core.dictionaries.dictionary import Dictionary, explained
from vitsee_core.types import Float, Integers

if TYPE_CHECKING:
    from vitsee_core.features import SiteFeatures
    from vitsee_stores import Slab

AT_ONCE = 4096  # tokens


@dataclass(frozen=True)
class Task:
    """features: patches; blocks: (images,) block of the jackknife, -1 for none; labels: (draws,
    images) classes, the own ones and shuffled ones, without any draw where there are none; n_top:
    patches kept of each concept."""

    features: SiteFeatures
    dictionary: Dictionary
    blocks: Integers
    labels: Integers
    n_top: int

    def __call__(self) -> ConceptSums:
        """An empty accumulator."""
        return ConceptSums(self)

    @property
    def n_blocks(self) -> int:
        return int(self.blocks.max()) + 1


class Top(NamedTuple):
    """The patches of each concept with the highest activation, of one image each: (K, n) values,
    rows of the store, and cells."""

    values: Float
    rows: Integers
    cells: Integers


@dataclass
class ConceptSums:
    """See above; an accumulator, see `streaming`."""

    task: Task
    n: NDArray[Any] = field(init=False)  # (blocks,) patches
    error: Float = field(init=False)  # (blocks,) sum of |x - x'|^2
    squares: Float = field(init=False)  # (blocks,) sum of |x|^2
    total: Float = field(init=False)  # (blocks, D) sum of x
    counts: Integers = field(init=False)  # (K,) patches assigned
    classes: Integers = field(init=False)  # (draws, blocks, K, classes) of them, with a label
    top: Top = field(init=False)

    def __post_init__(self) -> None:
        d, m = self.task.dictionary, self.task.n_blocks
        labels = self.task.labels
        self.n, self.error, self.squares = np.zeros(m, np.int64), np.zeros(m), np.zeros(m)
        self.total = np.zeros((m, d.dim))
        self.counts = np.zeros(d.n, np.int64)
        n_classes = int(labels.max(initial=-1)) + 1
        self.classes = np.zeros((len(labels), m, d.n, n_classes), np.int64)
        nothing = np.zeros((d.n, 0), np.int64)
        self.top = Top(np.zeros((d.n, 0)), nothing, nothing)

    def update(self, slab: Slab) -> None:
        """Count a slab."""
        task, d = self.task, self.task.dictionary
        tokens = task.features.of_slab(slab, slice(0, len(task.features.tokens)))
        rows = np.arange(slab.rows.start, slab.rows.stop)[slab.valid]
        step = max(1, AT_ONCE // tokens.shape[1])
        for start in range(0, len(rows), step):
            own = rows[start : start + step]
            x = d.target(tokens[start : start + step].reshape(-1, d.dim))
            codes = d.encode(x)
            wide = x.astype(np.float64)
            block, shape = task.blocks[own], (len(own), -1)
            np.add.at(self.n, block, tokens.shape[1])
            np.add.at(self.error, block, ((wide - d.decode(codes)) ** 2).reshape(shape).sum(1))
            np.add.at(self.squares, block, (wide**2).reshape(shape).sum(1))
            np.add.at(self.total, block, wide.reshape(len(own), -1, d.dim).sum(1))
            self._assign(codes, own, np.repeat(block, tokens.shape[1]))
            self._strongest(d.activation(x, codes), own)

    def _assign(self, codes: Any, own: Integers, block: Integers) -> None:
        """Each patch to the concept with the largest code, in magnitude; none with codes of 0."""
        size = np.abs(codes)
        concept = size.argmax(1)
        counted = size[np.arange(len(size)), concept] > 0
        np.add.at(self.counts, concept[counted], 1)
        for draw, labels in enumerate(self.task.labels):
            label = np.repeat(labels[own], len(block) // len(own))
            use = counted & (label >= 0)
            np.add.at(self.classes[draw], (block[use], concept[use], label[use]), 1)

    def _strongest(self, activation: Any, own: Integers) -> None:
        """Keep for each concept its best images so far, an image counting by its strongest
        patch."""
        by_image = activation.reshape(len(own), -1, activation.shape[-1])
        cells = by_image.argmax(1)  # (images, K)
        values = np.take_along_axis(by_image, cells[:, None], 1)[:, 0].astype(np.float64)
        rows = np.broadcast_to(own[:, None], cells.shape)
        self.top = _best([self.top, Top(values.T, rows.T, cells.T)], self.task.n_top)

    def merge(self, other: ConceptSums) -> None:
        """Add another accumulator."""
        for name in ("n", "error", "squares", "total", "counts", "classes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.top = _best([self.top, other.top], self.task.n_top)

    def result(self) -> ConceptSums:
        """The accumulator itself."""
        return self

    def r2(self, without: int | None = None) -> float:
        """See `dictionary.explained`; without: a block of images."""
        keep = np.arange(len(self.n)) != (-1 if without is None else without)
        sums = (self.n, self.error, self.squares, self.total)
        return explained(*(of_blocks[keep].sum(0) for of_blocks in sums))

    def purity(self, draw: int, without: int | None = None) -> float:
        """(1 / n) sum over concepts of the largest number of patches of images of one class."""
        keep = np.arange(len(self.n)) != (-1 if without is None else without)
        table = self.classes[draw, keep].sum(0)
        return float(table.max(1).sum() / table.sum()) if table.sum() else np.nan


def _best(parts: list[Top], n: int) -> Top:
    """The highest of each concept, the first rows of equal ones."""
    values, rows, cells = (np.concatenate(some, 1) for some in zip(*parts, strict=True))
    order = np.lexsort((rows, -values), axis=1)[:, :n]
    return Top(*(np.take_along_axis(some, order, 1) for some in (values, rows, cells)))
