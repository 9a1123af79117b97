"""A data set: identified samples in a fixed order, each of which can be read on its own.

`ImageSource.part` picks some of them by a split expression: `train`, `train[:45000]`,
`test[10%:20%]`, `train+test`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.images.decoding import JointOpener, Opener
from vitsee_core.images.errors import DataError, ImageError
from vitsee_stores.samples import Samples

# NAME, NAME[a:b] or [a:b]; bounds are numbers or percentages, checked by _BOUND.
_TERM = re.compile(
    r"(?P<name>[^\[\]+]*)(?:\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?"
)
_BOUND = re.compile(r"-?\d+|\d+(?:\.\d+)?%")
_SYNONYMS = (
    ("train", "training"),
    ("val", "valid", "validation", "eval", "evaluation"),
    ("test", "testing"),
)
SPLIT_NAMES = frozenset(name for group in _SYNONYMS for name in group)
EVERY_SPLIT = "all"


@dataclass(frozen=True)
class ImageSource:
    """Samples in the data set's own order, which does not depend on the machine.

    Attributes:
        name: the data set's name, for messages.
        opener: reads the image at a location.
        locations: each sample's location, in the form that `opener` reads.
        ids: each sample's id, all distinct.
        labels: (samples,) class numbers, -1 for no label.
        splits: each sample's split, "" for none.
        class_names: the classes' names; None if labels are bare numbers or absent.
        split: the expression that selected these samples, if any.
        boxes: (samples, 4) x0, y0, x1, y1 of the part of a file that is the image, NaN for whole
            files; None if all are whole files.
    """

    name: str
    opener: Opener
    locations: Sequence[Any]
    ids: Sequence[str]
    labels: NDArray[np.int64]
    splits: list[str]
    class_names: list[str] | None = None
    split: str | None = None
    boxes: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def samples(self) -> Samples:
        """All samples, in the data set's order."""
        return self.samples_at(np.arange(len(self), dtype=np.int64))

    def samples_at(self, index: NDArray[np.int64]) -> Samples:
        """Return the samples at these positions of the data set, in the order of `index`."""
        return Samples(
            index=index,
            ids=[self.ids[i] for i in index],
            labels=self.labels[index],
            splits=[self.splits[i] for i in index],
            boxes=self._boxes_at(index),
        )

    def _boxes_at(self, index: Any) -> NDArray[np.float32] | None:
        """Return the boxes at these positions, None if the data set has no boxes."""
        if self.boxes is None:
            return None
        return self.boxes[index]

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return a decoded image, in its own mode, and the 64-bit hash of its encoded bytes.

        For arrays the hash is that of the image's shape and pixels.

        Raises:
            ImageError: the image is missing, damaged, or not an image.
        """
        with self._errors_with_id(index):
            return self.opener.load(self.locations[index])

    def hash(self, index: int) -> int:
        """Return the hash that `read` returns, without decoding the image.

        Raises:
            ImageError: the image is missing or truncated.
        """
        with self._errors_with_id(index):
            return self.opener.hash(self.locations[index])

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of the image that `read` returns, from its header if possible.

        Raises:
            ImageError: the image is missing, or not an image.
        """
        with self._errors_with_id(index):
            return self.opener.size(self.locations[index])

    @contextmanager
    def _errors_with_id(self, index: int) -> Iterator[None]:
        """Let errors name an image by its id, not by its location, within this context."""
        try:
            yield
        except ImageError as error:
            raise ImageError(self.ids[index], error.reason) from None

    def part(self, expression: str) -> ImageSource:
        """Return the samples that a split expression picks, such as `train[:45000]`.

        Raises:
            DataError: an unknown split, or a slice that does not fit it.
        """
        positions, names = apply_split(expression, self.splits, self.name)
        return replace(
            self,
            # Copies, as locations may be made only when indexed (tar files, clips).
            locations=[self.locations[i] for i in positions],
            ids=[self.ids[i] for i in positions],
            labels=self.labels[positions],
            splits=names,
            split=expression,
            boxes=self._boxes_at(positions),
        )


def join(name: str, sources: Sequence[ImageSource]) -> ImageSource:
    """Return the concatenation of several sources.

    Raises:
        DataError: the sources name different classes.
    """
    class_names = sources[0].class_names
    if any(source.class_names != class_names for source in sources):
        raise DataError(
            f"the splits of {name} name different classes; extract them one by one"
        )
    # JointOpener finds the source of a location by its first entry.
    locations = []
    for k, source in enumerate(sources):
        locations += [(k, location) for location in source.locations]
    return ImageSource(
        name=name,
        opener=JointOpener(tuple(source.opener for source in sources)),
        locations=locations,
        ids=[image_id for source in sources for image_id in source.ids],
        labels=np.concatenate([source.labels for source in sources]),
        splits=[split for source in sources for split in source.splits],
        class_names=class_names,
    )


@dataclass(frozen=True)
class Term:
    """A term of a split expression: the split's name, its bounds as written, and the whole term."""

    name: str
    start: str
    stop: str
    text: str


def parse_split(expression: str) -> list[Term]:
    """Return the terms of a split expression.

    Raises:
        DataError: it is not of the form NAME, NAME[a:b], or several of these joined by '+'.
    """
    terms = []
    for text in expression.split("+"):
        match = _TERM.fullmatch(text.strip())
        if match is None or not text.strip():
            raise _unreadable_split(expression)
        start = _parse_bound(match["start"], expression)
        stop = _parse_bound(match["stop"], expression)
        name = match["name"].strip() or EVERY_SPLIT
        terms.append(Term(name, start, stop, text.strip()))
    return terms


def _parse_bound(text: str | None, expression: str) -> str:
    """Return a bound of a slice without blanks, "" for none; raise DataError if it is malformed."""
    bound = (text or "").strip()
    if bound and not _BOUND.fullmatch(bound):
        raise _unreadable_split(expression)
    return bound


def match_name(name: str, present: Sequence[str]) -> str | None:
    """Return the split among those present that has a name or a synonym of it, else None.

    Synonyms are train and training; val, valid, validation, eval and evaluation; test and testing.
    """
    if name in present:
        return name
    for group in _SYNONYMS:
        if name.lower() in group:
            return next((other for other in present if other.lower() in group), None)
    return None


def apply_split(
    expression: str, splits: Sequence[str], data: str
) -> tuple[list[int], list[str]]:
    """Return the positions that a split expression picks, and the split name of each.

    Slices count in the data set's own order and are half open; percentages are rounded down to
    whole images, so that neighbouring slices meet. `all` (or no name) is every sample. A sample
    keeps the name of its split; but if a split appears in several terms (`train[:900]` and
    `train[900:]`), its samples have the term as written instead.

    Args:
        expression: the split expression.
        splits: each sample's split, "" for none.
        data: the data set's name, for messages.

    Raises:
        DataError: an unknown split, bounds outside of it, an empty slice, or a sample picked twice.
    """
    members: dict[str, list[int]] = {}
    for position, sample_split in enumerate(splits):
        members.setdefault(sample_split, []).append(position)
    present = [name for name in members if name]
    terms = parse_split(expression)
    split_of_terms = [match_name(term.name, present) for term in terms]  # None for `all`
    n_terms = Counter(split_of_terms)
    positions: list[int] = []
    names: list[str] = []
    for term, split in zip(terms, split_of_terms, strict=True):
        if split is None and term.name != EVERY_SPLIT:
            known = f"its splits: {', '.join(present)}" if present else "it has no splits"
            raise DataError(f"{data} has no split {term.name!r}; {known}")
        # In the data set's own order, in which bounds count.
        pool = list(range(len(splits))) if split is None else members[split]
        start, stop = _split_bounds(term, len(pool))
        picked = pool[start:stop]
        if not picked:
            raise DataError(
                f"{term.text!r} picks none of the {len(pool)} images of {data}"
            )
        positions += picked
        if split is None or n_terms[split] == 1:
            names += [splits[i] for i in picked]
        else:
            names += [term.text] * len(picked)
    if len(set(positions)) < len(positions):
        raise DataError(
            f"the parts of {expression!r} overlap; expected parts that share no image"
        )
    return positions, names


def _split_bounds(term: Term, n: int) -> tuple[int, int]:
    """Return the half-open range of a term's slice in a split of n images."""
    start = _resolve_bound(term, term.start, n) if term.start else 0
    stop = _resolve_bound(term, term.stop, n) if term.stop else n
    return start, stop


def _resolve_bound(term: Term, bound: str, n: int) -> int:
    """Return the position that a bound stands for; raise DataError if it is not in 0 to n."""
    if bound.endswith("%"):
        # A fraction, since 0.29 * 100 is 28.999999999999996 in floating point.
        fraction = Fraction(bound[:-1]) / 100
        is_within = fraction <= 1
        position = int(fraction * n)
    else:
        position = int(bound)
        if bound.startswith("-"):
            position += n  # counted from the end, as in Python
        is_within = 0 <= position <= n
    if not is_within:
        raise DataError(f"{term.text!r} reaches outside the {n} images of that split")
    return position


def _unreadable_split(expression: str) -> DataError:
    """Return the error for an expression that does not have the form of a split."""
    return DataError(
        f"cannot read the split {expression!r}; expected NAME, NAME[:1000], NAME[1000:], "
        "NAME[10%:20%], or several joined by '+'"
    )
