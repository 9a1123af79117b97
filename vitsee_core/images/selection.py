"""Which samples, in which order: the store's order; and the images that the lines of a file name
(`--only FILE`, as data sets publish their lists)."""

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
_NAMES_SHOWN = 5

MAX_BYTES = 1 << 28  # of a file of names
_SHOWN = 60  # letters of a line in a message
Places = dict[str, list[int]]


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
    names the images to choose from (see `named_only`). Raises DataError: counts below 1, both
    counts, an unknown order, a negative seed, no labels for `per_class`, no samples, or a line of
    `only` without a match.
    """
    if order not in ORDERS:
        raise DataError(f"unknown order {order!r}; expected one of: {', '.join(ORDERS)}")
    if seed < 0:
        raise DataError(f"the seed is {seed}; expected 0 or more")
    if images is not None and per_class is not None:
        raise DataError(
            "both a number of images and a number per class; expected one of them"
        )
    for name, value in (("images", images), ("images per class", per_class)):
        if value is not None and value < 1:
            raise DataError(f"{value} {name}; expected 1 or more")
    if not len(source):
        raise DataError(f"{source.name} has no images")
    if per_class is not None and not (source.labels >= 0).any():
        raise DataError(f"{source.name} has no labels; images per class need them")
    shuffled = random_order(len(source), seed)
    if only is not None:
        shuffled = shuffled[named_only(only, source.ids, source.name)[shuffled]]
    n = len(shuffled)
    notes = list[str]()
    index = (
        shuffled if order == "shuffled" or per_class is not None else np.sort(shuffled)
    )
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
    classes, starts, counts = np.unique(
        labels[by_class], return_index=True, return_counts=True
    )
    rank = np.empty(len(index), np.int64)
    rank[by_class] = np.arange(len(index)) - np.repeat(starts, counts)
    names = source.class_names or []
    sizes = dict.fromkeys(
        range(len(names)), 0
    )  # named classes without an image are worth a word
    sizes |= {int(c): int(n) for c, n in zip(classes, counts, strict=True) if c >= 0}
    small = [
        f"{names[c] if names else c} ({size})"
        for c, size in sizes.items()
        if size < per_class
    ]
    notes = []
    if small:
        more = (
            f" and {len(small) - _NAMES_SHOWN} more" if len(small) > _NAMES_SHOWN else ""
        )
        shown = ", ".join(small[:_NAMES_SHOWN])
        notes.append(
            f"fewer than {per_class} images in {len(small)} classes: {shown}{more}"
        )
    return index[(labels >= 0) & (rank < per_class)], notes


def read_only(path: Path, option: str = "--only") -> list[tuple[int, str]]:
    """Number and text of the lines that are not blank. option: what the file was given to. Raises
    DataError: the file is missing, too large, not UTF-8, or has no line."""
    try:
        if not path.is_file():
            raise DataError(
                f"no file {path}; {option} expects a list of images, one a line"
            )
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} has more than {MAX_BYTES} bytes; expected a list of images"
            )
        text = path.read_text("utf-8-sig")
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
    """(images,) which of `ids` the lines of a file name.

    A line is an id; an id without its ending; a folder of ids, also by the last parts of its path;
    or a file's name without folders and ending, where one image has it. Of a line that is none of
    these, the first word counts: lists of classes have its name in words behind it.

    Args:
        path: the file.
        ids: of the data set, unique.
        name: of the data set, for the message.

    Raises:
        DataError: a line that names no image, or several by a bare name; see `read_only`.
    """
    lines = read_only(path)
    by_file = _places(map(_bare_name, ids))
    finders = (_places(ids), _places(map(image_stem, ids)), _by_folder(ids), by_file)
    chosen = np.zeros(len(ids), bool)
    unmatched = []
    for number, line in lines:
        keys = [line, line.removeprefix("./").strip("/")]  # `bear/` is the folder bear
        keys.append(line.split()[0])  # `n01440764 tench, Tinca tinca`
        found = next((f[key] for f in finders for key in keys if key in f), None)
        if found is None:
            unmatched.append((number, line))
        elif len(found) > 1 and any(found is by_file.get(key) for key in keys):
            raise DataError(
                f"line {number} of {path}, {line[:_SHOWN]!r}, names {len(found)} images of {name}: "
                f"{ids[found[0]]} and {ids[found[1]]}; expected their folders too"
            )
        else:
            chosen[found] = True
    if unmatched:
        number, line = unmatched[0]
        more = f", and {len(unmatched) - 1} more lines" if len(unmatched) > 1 else ""
        raise DataError(
            f"line {number} of {path}, {line[:_SHOWN]!r}, names no image of {name}{more}; expected "
            f"ids as {ids[0]!r}, with or without ending, folders of them, or names of files"
        )
    return chosen


def _places(keys: Iterable[str]) -> Places:
    found: Places = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _by_folder(ids: Sequence[str]) -> Places:
    """The images below each folder, by its whole path and by the last parts of it."""
    found: Places = {}
    for place, key in enumerate(ids):
        parts = key.split("/")[:-1]
        for stop in range(1, len(parts) + 1):
            for start in range(stop):
                found.setdefault("/".join(parts[start:stop]), []).append(place)
    return found


def shorter_ids(own: str) -> set[str]:
    """An image's id without its ending, without its folders, without both."""
    return {image_stem(own), own.rpartition("/")[2], _bare_name(own)}


def _bare_name(name: str) -> str:
    return image_stem(name.rpartition("/")[2])
