"""Choose which samples of a data set are extracted, and in which order the store has them.

A choice is a number of images, a number per class, or the images that the lines of a file name
(`--only FILE`, in the forms in which data sets publish their lists).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import image_stem
from vitsee_core.images.image_source import ImageSource
from vitsee_stores.errors import reason
from vitsee_stores.samples import Samples

ORDERS = ("shuffled", "dataset")
_MAX_CLASSES_NAMED = 5  # in a note about small classes

MAX_BYTES = 1 << 28  # of a file of names
_MAX_LINE_CHARACTERS = 60  # of a line that a message quotes
Positions = dict[str, list[int]]  # name -> positions in the data set's ids


@dataclass(frozen=True)
class Selection:
    """Samples in the store's order.

    Attributes:
        samples: ids, labels and positions of the chosen samples.
        source: the data set from which they were chosen.
        identity: the options of the choice, as the store's metadata has them.
        notes: remarks about requests that could not be met, for the user.
    """

    samples: Samples
    source: ImageSource
    identity: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> list[str] | None:
        """The data set's class names, None if it has none."""
        return self.source.class_names

    def __len__(self) -> int:
        return len(self.samples.index)


def random_order(n: int, seed: int) -> NDArray[np.int64]:
    """Return a permutation of range(n) that depends on n and seed alone.

    It is the argsort of n raw 64-bit draws of PCG64(seed), the generator behind
    `np.random.default_rng(seed)`. NumPy guarantees the same raw draws in all its versions, but
    does not guarantee what `permutation` makes of them, and a store may be grown years later.
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
    """Choose samples of a data set, and their order.

    Args:
        source: the data set.
        images: the number of samples: the first ones in the seeded random order (a random sample),
            or the first ones in the data set's order if `order` is "dataset". All by default.
        per_class: the number of samples of each class, instead of `images`: the first ones in the
            seeded random order, whatever `order` is, so that a smaller number gives a subset of
            what a larger one gives. Samples without a label are left out.
        seed: of the random order.
        order: in which order the chosen samples are stored, "shuffled" or "dataset".
        only: a file that names the images to choose from, see `named_only`.

    Raises:
        DataError: a count below 1, both counts, an unknown order, a negative seed, no labels for
            `per_class`, no samples, or a line of `only` without a match.
    """
    if order not in ORDERS:
        raise DataError(f"unknown order {order!r}; expected one of: {', '.join(ORDERS)}")
    if seed < 0:
        raise DataError(f"the seed is {seed}; expected 0 or more")
    if images is not None and per_class is not None:
        raise DataError(
            "both a number of images and a number per class; expected one of them"
        )
    if images is not None and images < 1:
        raise DataError(f"{images} images; expected 1 or more")
    if per_class is not None and per_class < 1:
        raise DataError(f"{per_class} images per class; expected 1 or more")
    if not len(source):
        raise DataError(f"{source.name} has no images")
    if per_class is not None and not (source.labels >= 0).any():
        raise DataError(f"{source.name} has no labels; images per class need them")
    shuffled = random_order(len(source), seed)
    if only is not None:
        shuffled = shuffled[named_only(only, source.ids, source.name)[shuffled]]
    n = len(shuffled)
    notes = list[str]()
    if per_class is not None:
        index, notes = _first_of_each_class(source, shuffled, per_class)
    else:
        # "dataset" takes the first images of the data set, so it sorts before it cuts.
        index = np.sort(shuffled) if order == "dataset" else shuffled
        if images is not None:
            if images > n:
                notes.append(
                    f"{source.name} has {n} images, fewer than {images}: all taken"
                )
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


def _first_of_each_class(
    source: ImageSource, index: NDArray[np.int64], per_class: int
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the first `per_class` samples of each class, and a note if classes are smaller.

    Args:
        source: the data set.
        index: positions in the data set, in the order in which "first" is meant.
        per_class: the number of samples of each class.
    """
    labels = source.labels[index]
    # rank: the position of each sample among those of its class, in the order of `index`. The sort
    # is stable, so a class keeps that order; its samples then count up from the class' start.
    by_class = np.argsort(labels, kind="stable")
    classes, starts, counts = np.unique(
        labels[by_class], return_index=True, return_counts=True
    )
    rank = np.empty(len(index), np.int64)
    rank[by_class] = np.arange(len(index)) - np.repeat(starts, counts)
    names = source.class_names or []
    # Named classes without any image are noted as well, so sizes start from 0.
    sizes = dict.fromkeys(range(len(names)), 0)
    sizes |= {int(c): int(n) for c, n in zip(classes, counts, strict=True) if c >= 0}
    small = [
        f"{names[c] if names else c} ({size})"
        for c, size in sizes.items()
        if size < per_class
    ]
    notes = []
    if small:
        listed = ", ".join(small[:_MAX_CLASSES_NAMED])
        n_unlisted = len(small) - _MAX_CLASSES_NAMED
        if n_unlisted > 0:
            listed += f" and {n_unlisted} more"
        notes.append(f"fewer than {per_class} images in {len(small)} classes: {listed}")
    return index[(labels >= 0) & (rank < per_class)], notes


def read_only(path: Path, option: str = "--only") -> list[tuple[int, str]]:
    """Return (line number from 1, stripped text) of each line of a file that is not blank.

    Args:
        path: the file.
        option: the option that the file was given to, for messages.

    Raises:
        DataError: the file is missing, too large, not UTF-8, or has no line.
    """
    try:
        if not path.is_file():
            raise DataError(
                f"no file {path}; {option} expects a list of images, one a line"
            )
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} has more than {MAX_BYTES} bytes; expected a list of images"
            )
        text = path.read_text("utf-8-sig")  # with or without the mark that Excel writes
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not UTF-8 text; {option} expects a list of images"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from None
    lines = [
        (k, line.strip()) for k, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    if not lines:
        raise DataError(f"{path} is empty; {option} expects a list of images, one a line")
    return lines


def named_only(path: Path, ids: Sequence[str], name: str) -> NDArray[np.bool_]:
    """Return (images,) whether the lines of a file name each image of a data set.

    A line is an id; an id without its ending; a folder of ids, also by the last parts of its path;
    or a file's name without folders and ending, if a single image has it. If a line is none of
    these, its first word is looked up: lists of classes have the class's name in words behind it.

    Args:
        path: the file.
        ids: the data set's ids, which are unique.
        name: the data set's name, for messages.

    Raises:
        DataError: a line that names no image, or several images by a bare name, or a file that
            `read_only` refuses.
    """
    lines = read_only(path)
    by_id = _positions_by_key(ids)
    by_stem = _positions_by_key(map(image_stem, ids))
    by_bare_name = _positions_by_key(map(_bare_name, ids))
    # The most specific meaning first.
    lookups = (by_id, by_stem, _positions_by_folder(ids), by_bare_name)
    chosen = np.zeros(len(ids), bool)
    unmatched = []
    for number, line in lines:
        keys = [
            line,
            line.removeprefix("./").strip("/"),  # `bear/` is the folder bear
            line.split()[0],  # `n01440764 tench, Tinca tinca`
        ]
        positions = next(
            (lookup[key] for lookup in lookups for key in keys if key in lookup), None
        )
        if positions is None:
            unmatched.append((number, line))
            continue
        is_bare_name = any(positions is by_bare_name.get(key) for key in keys)
        if len(positions) > 1 and is_bare_name:
            raise DataError(
                f"line {number} of {path}, {line[:_MAX_LINE_CHARACTERS]!r}, names "
                f"{len(positions)} images of {name}: {ids[positions[0]]} and "
                f"{ids[positions[1]]}; expected their folders too"
            )
        chosen[positions] = True
    if unmatched:
        number, line = unmatched[0]
        more = f", and {len(unmatched) - 1} more lines" if len(unmatched) > 1 else ""
        raise DataError(
            f"line {number} of {path}, {line[:_MAX_LINE_CHARACTERS]!r}, names no image of "
            f"{name}{more}; expected ids as {ids[0]!r}, with or without ending, folders of them, "
            "or names of files"
        )
    return chosen


def _positions_by_key(keys: Iterable[str]) -> Positions:
    """Return key -> its positions among `keys`."""
    positions: Positions = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return positions


def _positions_by_folder(ids: Sequence[str]) -> Positions:
    """Return folder -> positions of the ids below it.

    A folder is there by its whole path and by each run of folders within a path: of "a/b/c.jpg"
    these are "a", "b" and "a/b".
    """
    positions: Positions = {}
    for position, image_id in enumerate(ids):
        folders = image_id.split("/")[:-1]
        for stop in range(1, len(folders) + 1):
            for start in range(stop):
                key = "/".join(folders[start:stop])
                positions.setdefault(key, []).append(position)
    return positions


def shorter_ids(image_id: str) -> set[str]:
    """Return an image's id without its ending, without its folders, and without both."""
    return {image_stem(image_id), image_id.rpartition("/")[2], _bare_name(image_id)}


def _bare_name(name: str) -> str:
    """Return a file's name without its folders and its ending."""
    return image_stem(name.rpartition("/")[2])
