"""Parts of a data set: `train`, `train[:45000]`, `test[10%:20%]`, `train+test`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from vitsee_core.images.errors import DataError

_TERM = re.compile(r"(?P<name>[^\[\]+]*)(?:\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?")
_BOUND = re.compile(r"-?\d+|\d+(?:\.\d+)?%")
_SYNONYMS = (
    ("train", "training"),
    ("val", "valid", "validation", "eval", "evaluation"),
    ("test", "testing"),
)
NAMES = frozenset(name for group in _SYNONYMS for name in group)
EVERYTHING = "all"


@dataclass(frozen=True)
class Term:
    """One part of a split expression: a split's name and bounds as written."""

    name: str
    start: str
    stop: str
    text: str


def parse(expression: str) -> list[Term]:
    """The terms of a split expression.

    Raises:
        DataError: it is not of the form NAME, NAME[a:b], or several of these joined by '+'.
    """
    terms = []
    for text in expression.split("+"):
        match = _TERM.fullmatch(text.strip())
        if match is None or not text.strip():
            raise _unreadable(expression)
        start, stop = (match["start"] or "").strip(), (match["stop"] or "").strip()
        if any(bound and not _BOUND.fullmatch(bound) for bound in (start, stop)):
            raise _unreadable(expression)
        terms.append(Term(match["name"].strip() or EVERYTHING, start, stop, text.strip()))
    return terms


def match_name(name: str, present: Sequence[str]) -> str | None:
    """The split of that name or of a synonym (val, validation, ...) among those present."""
    if name in present:
        return name
    for group in _SYNONYMS:
        if name.lower() in group:
            return next((other for other in present if other.lower() in group), None)
    return None


def apply(expression: str, splits: Sequence[str], data: str) -> tuple[list[int], list[str]]:
    """Positions that the expression picks from samples with these splits, and their split names.

    Slices count in the data set's own order and are half open; percentages are rounded down to
    whole images, so that neighbouring slices meet. `all` (or no name) is every sample. A sample
    keeps the name of its split; where one split appears in several terms (`train[:900]` and
    `train[900:]`), its samples carry the term as written.

    Raises:
        DataError: unknown split, bounds outside it, an empty part, or a sample picked twice.
    """
    members: dict[str, list[int]] = {}
    for position, split in enumerate(splits):
        members.setdefault(split, []).append(position)
    present = [name for name in members if name]
    terms = parse(expression)
    found = [match_name(term.name, present) for term in terms]
    uses = Counter(found)
    positions: list[int] = []
    names: list[str] = []
    for term, name in zip(terms, found, strict=True):
        if name is None and term.name != EVERYTHING:
            known = f"its splits: {', '.join(present)}" if present else "it has no splits"
            raise DataError(f"{data} has no split {term.name!r}; {known}")
        pool = list(range(len(splits))) if name is None else members[name]
        start, stop = _bounds(term, len(pool))
        picked = pool[start:stop]
        if not picked:
            raise DataError(f"{term.text!r} picks none of the {len(pool)} images of {data}")
        positions += picked
        own = name is None or uses[name] == 1
        names += [splits[i] if own else term.text for i in picked]
    if len(set(positions)) < len(positions):
        raise DataError(f"the parts of {expression!r} overlap; expected parts that share no image")
    return positions, names


def _bounds(term: Term, n: int) -> tuple[int, int]:
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
