"""A data set: identified samples in a fixed order, each readable on its own, and its parts:
`train`, `train[:45000]`, `test[10%:20%]`, `train+test`."""

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
        ids: unique.
        labels: -1 for none.
        splits: "" for none.
        class_names: None if labels are bare numbers or absent.
        split: the expression that selected these samples, if any.
        boxes: (samples, 4) the parts of their files that images are, NaN for whole ones, None if
            all are whole.
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
        return self.samples_at(np.arange(len(self), dtype=np.int64))

    def samples_at(self, index: NDArray[np.int64]) -> Samples:
        """The samples at these positions of the data set's order, in the order given."""
        return Samples(
            index=index,
            ids=[self.ids[i] for i in index],
            labels=self.labels[index],
            splits=[self.splits[i] for i in index],
            boxes=None if self.boxes is None else self.boxes[index],
        )

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One decoded image, in its own mode, and the 64-bit hash of its encoded bytes.

        For arrays the hash is of the image's shape and pixels. Raises ImageError: the image is
        missing, damaged, or not an image.
        """
        with self._named(index):
            return self.opener.load(self.locations[index])

    def hash(self, index: int) -> int:
        """The hash that `read` returns, without decoding the image. Raises ImageError: the image is
        missing or truncated."""
        with self._named(index):
            return self.opener.hash(self.locations[index])

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of the result of `read`, from the image's header if possible. Raises
        ImageError: the image is missing, or not an image."""
        with self._named(index):
            return self.opener.size(self.locations[index])

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Errors name the image by its id."""
        try:
            yield
        except ImageError as error:
            raise ImageError(self.ids[index], error.reason) from None

    def part(self, expression: str) -> ImageSource:
        """The samples of a split expression (see `vitsee_core.images.image_source`). Raises
        DataError: an unknown split, or a slice that does not fit it."""
        positions, names = apply_split(expression, self.splits, self.name)
        return replace(
            self,
            locations=[self.locations[i] for i in positions],
            ids=[self.ids[i] for i in positions],
            labels=self.labels[positions],
            splits=names,
            split=expression,
            boxes=None if self.boxes is None else self.boxes[positions],
        )


def join(name: str, parts: Sequence[ImageSource]) -> ImageSource:
    """Several sources concatenated; they must name the same classes. Raises DataError: the parts
    name different classes."""
    first = parts[0]
    if any(part.class_names != first.class_names for part in parts):
        raise DataError(
            f"the splits of {name} name different classes; extract them one by one"
        )
    return ImageSource(
        name=name,
        opener=JointOpener(tuple(part.opener for part in parts)),
        locations=[
            (k, place) for k, part in enumerate(parts) for place in part.locations
        ],
        ids=[sample for part in parts for sample in part.ids],
        labels=np.concatenate([part.labels for part in parts]),
        splits=[split for part in parts for split in part.splits],
        class_names=first.class_names,
    )


@dataclass(frozen=True)
class Term:
    """One part of a split expression: a split's name and bounds as written."""

    name: str
    start: str
    stop: str
    text: str


def parse_split(expression: str) -> list[Term]:
    """The terms of a split expression. Raises DataError: it is not of the form NAME, NAME[a:b], or
    several of these joined by '+'."""
    terms = []
    for text in expression.split("+"):
        match = _TERM.fullmatch(text.strip())
        if match is None or not text.strip():
            raise _unreadable(expression)
        start = (match["start"] or "").strip()
        stop = (match["stop"] or "").strip()
        if any(bound and not _BOUND.fullmatch(bound) for bound in (start, stop)):
            raise _unreadable(expression)
        terms.append(
            Term(match["name"].strip() or EVERY_SPLIT, start, stop, text.strip())
        )
    return terms


def match_name(name: str, present: Sequence[str]) -> str | None:
    """The split of that name or of a synonym (val, validation, ...) among those present."""
    if name in present:
        return name
    for group in _SYNONYMS:
        if name.lower() in group:
            return next((other for other in present if other.lower() in group), None)
    return None


def apply_split(
    expression: str, splits: Sequence[str], data: str
) -> tuple[list[int], list[str]]:
    """Positions that the expression picks from samples with these splits, and their split names.

    Slices count in the data set's own order and are half open; percentages are rounded down to
    whole images, so that neighbouring slices meet. `all` (or no name) is every sample. A sample
    keeps the name of its split; where one split appears in several terms (`train[:900]` and
    `train[900:]`), its samples carry the term as written. Raises DataError: unknown split, bounds
    outside it, an empty part, or a sample picked twice.
    """
    members: dict[str, list[int]] = {}
    for position, split in enumerate(splits):
        members.setdefault(split, []).append(position)
    present = [name for name in members if name]
    terms = parse_split(expression)
    found = [match_name(term.name, present) for term in terms]
    uses = Counter(found)
    positions: list[int] = []
    names: list[str] = []
    for term, name in zip(terms, found, strict=True):
        if name is None and term.name != EVERY_SPLIT:
            known = f"its splits: {', '.join(present)}" if present else "it has no splits"
            raise DataError(f"{data} has no split {term.name!r}; {known}")
        pool = list(range(len(splits))) if name is None else members[name]
        start, stop = _split_bounds(term, len(pool))
        picked = pool[start:stop]
        if not picked:
            raise DataError(
                f"{term.text!r} picks none of the {len(pool)} images of {data}"
            )
        positions += picked
        own = name is None or uses[name] == 1
        names += [splits[i] if own else term.text for i in picked]
    if len(set(positions)) < len(positions):
        raise DataError(
            f"the parts of {expression!r} overlap; expected parts that share no image"
        )
    return positions, names


def _split_bounds(term: Term, n: int) -> tuple[int, int]:
    """First and one past the last position, within a split of n images."""
    values = []
    for text, default in ((term.start, 0), (term.stop, n)):
        if not text:
            value = default
        elif text.endswith("%"):
            share = Fraction(text[:-1]) / 100
            value = int(share * n) if share <= 1 else n + 1
        else:
            value = int(text) + (n if text.startswith("-") else 0)
        if not 0 <= value <= n:
            raise DataError(f"{term.text!r} reaches outside the {n} images of that split")
        values.append(value)
    return values[0], values[1]


def _unreadable(expression: str) -> DataError:
    return DataError(
        f"cannot read the split {expression!r}; expected NAME, NAME[:1000], NAME[1000:], "
        "NAME[10%:20%], or several joined by '+'"
    )
