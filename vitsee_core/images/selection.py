"""Which samples, in which order: the store's order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.only import named_only
from vitsee_stores.samples import Samples

ORDERS = ("shuffled", "dataset")
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Selection:
    """Samples in the store's order. `notes` are remarks about requests that could not be met."""

    samples: Samples
    source: ImageSource
    identity: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> list[str] | None:
        return self.source.class_names

    def __len__(self) -> int:
        return len(self.samples.index)


def random_order(n: int, seed: int) -> NDArray[np.int64]:
    """A permutation of range(n) that depends on n and seed alone.

    The positions sorted by n raw 64-bit draws of PCG64(seed), the generator of
    `np.random.default_rng(seed)`. NumPy guarantees the raw draws across its versions, but not
    what `permutation` makes of them.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable").astype(np.int64)


def select(
    source: ImageSource,
    *,
    images: int | None = None,
    per_class: int | None = None,
    seed: int = 0,
    order: str = "shuffled",
    only: Path | None = None,
) -> Selection:
    """Choose samples and their order.

    `images` takes the first of the seeded random order (a random sample), or of the data set's
    order with `order="dataset"`. `per_class` takes the first of every class in the seeded random
    order, whatever `order` is; samples without a label are left out, and smaller values give
    subsets of larger ones. `order` is then how the chosen samples are stored. `only` is a file that
    names the images to choose from (see `named_only`).

    Raises:
        DataError: counts below 1, both counts, an unknown order, a negative seed, no labels for
            `per_class`, no samples, or a line of `only` without a match.
    """
    _check(source, images, per_class, seed, order)
    shuffled = random_order(len(source), seed)
    if only is not None:
        shuffled = shuffled[named_only(only, source.ids, source.name)[shuffled]]
    n, notes = len(shuffled), list[str]()
    index = shuffled if order == "shuffled" or per_class is not None else np.sort(shuffled)
    if per_class is not None:
        index, notes = _balanced(source, index, per_class)
    elif images is not None:
        if images > n:
            notes.append(f"{source.name} has {n} images, fewer than {images}: all taken")
        index = index[:images]
    if order == "dataset":
        index = np.sort(index)
    identity = {
        "seed": seed,
        "order": order,
        "images": images,
        "per_class": per_class,
        "split": source.split,
        "only": None if only is None else str(only),
    }
    return Selection(source.samples_at(index), source, identity, tuple(notes))


def _balanced(
    source: ImageSource, index: NDArray[np.int64], per_class: int
) -> tuple[NDArray[np.int64], list[str]]:
    """The first `per_class` of every class in the order of `index`, and a note on small classes."""
    labels = source.labels[index]
    # Rank of each sample among those of its class, in the order of `index`.
    by_class = np.argsort(labels, kind="stable")
    classes, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    rank = np.empty(len(index), np.int64)
    rank[by_class] = np.arange(len(index)) - np.repeat(starts, counts)
    names = source.class_names or []
    sizes = dict.fromkeys(range(len(names)), 0)  # named classes without an image are worth a word
    sizes |= {int(c): int(n) for c, n in zip(classes, counts, strict=True) if c >= 0}
    small = [
        f"{names[c] if names else c} ({size})" for c, size in sizes.items() if size < per_class
    ]
    notes = []
    if small:
        more = f" and {len(small) - _NAMES_SHOWN} more" if len(small) > _NAMES_SHOWN else ""
        shown = ", ".join(small[:_NAMES_SHOWN])
        notes.append(f"fewer than {per_class} images in {len(small)} classes: {shown}{more}")
    return index[(labels >= 0) & (rank < per_class)], notes


def _check(
    source: ImageSource, images: int | None, per_class: int | None, seed: int, order: str
) -> None:
    if order not in ORDERS:
        raise DataError(f"unknown order {order!r}; expected one of: {', '.join(ORDERS)}")
    if seed < 0:
        raise DataError(f"the seed is {seed}; expected 0 or more")
    if images is not None and per_class is not None:
        raise DataError("both a number of images and a number per class; expected one of them")
    for name, value in (("images", images), ("images per class", per_class)):
        if value is not None and value < 1:
            raise DataError(f"{value} {name}; expected 1 or more")
    if not len(source):
        raise DataError(f"{source.name} has no images")
    if per_class is not None and not (source.labels >= 0).any():
        raise DataError(f"{source.name} has no labels; images per class need them")
