"""The grammar that chooses sites: names, globs, groups, indices from the end, places in depth; and
tokens of a site, as the values of `--tokens` name them.

blocks,norm           a comma list of groups, names; `!embed` leaves out of what the others choose
blocks.*.out          a case-sensitive glob; blocks.-1.out counts from the end
blocks.6..11.out      the numbers from 6 to 11
first, last           the first and the last block's out
stage:-1              the last out of a stage (of `stages`, `layers`, `layer1` to `layer4`)
depth:0.5             the out with the nearest relative depth, of equal ones the earlier"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec, TokenLayout

GROUPS = ("blocks", "head", "residual", "norms", "hidden", "heads", "modules", "all")
SHOWN_NAMES = 12
NOT = "!"
MOST_OF_A_RANGE = 1000
ENDS = ("first", "last")
PLACES = ("stage", "depth")
# A block's path from the container of its stage on: layer3.0, stages.2.blocks.5, blocks.1.0.
_STAGE = re.compile(
    r"(?:^|\.)(?:layer(?P<one>\d+)|(?:stages|layers|blocks)\.(?P<zero>\d+))\..*\d"
)


def select_names(
    patterns: Iterable[str],
    sites: Sequence[SiteSpec],
    *,
    what: str = "model",
    hint: str = "vitsee sites MODEL",
) -> list[SiteSpec]:
    """The sites that match any of `patterns`, each once, in the order of `sites`.

    Negative numbers count the neighbouring paths from the end (`stages.-1.blocks.-2.*`). A place in
    depth selects the block's out, or what `sites` has of that block if there are no outs. If no
    name matches, the path of one of the model's own modules does (`site_path`). Groups give stored
    names, never aliases; an alias matched by a glob is excluded if the site it equals is selected.
    Raises SiteError: no pattern; a pattern without a match (names `what` was searched and `hint` to
    run); one that cannot be parsed; patterns that only exclude, or leave nothing.
    """
    chosen: set[str] = set()
    exact: set[str] = set()
    without: set[str] = set()
    parts = split_patterns(patterns)
    if not parts:
        raise SiteError(
            f"no site was asked for; name some of this {what}, e.g. 'blocks' or 'all'"
        )
    for part in parts:
        pattern = part.removeprefix(NOT)
        matched = set(_match(pattern, sites, what))
        if not matched:
            raise SiteError(
                f"no site matches {pattern!r}; sites of this {what}: {_shown(sites)} (run: {hint})"
            )
        if part.startswith(NOT):
            without |= matched
            continue
        chosen |= matched
        if not _is_glob(pattern):
            exact |= matched
    if without and not chosen - without:
        raise SiteError(
            f"{','.join(parts)} leaves no site"
            + ("" if chosen else f"; name what to take too, as in 'all,{parts[0]}'")
        )
    return [
        site
        for site in sites
        if site.name in chosen - without
        and (site.alias_of not in chosen - without or site.name in exact)
    ]


def split_patterns(patterns: Iterable[str]) -> list[str]:
    """Comma lists as single patterns, ranges as one each; a comma in brackets belongs to a glob."""
    parts = [
        part.strip()
        for pattern in patterns
        for part in re.split(r",(?![^[]*\])", pattern)
    ]
    return [one for part in parts for one in _each_number(part)]


def _each_number(part: str) -> list[str]:
    """`blocks.6.out`, `blocks.7.out` for `blocks.6..7.out`. Raises SiteError: no such range."""
    match = re.search(r"(?<![\d-])(\d{1,6})\.\.(\d{1,6})(?![\d])", part)
    if match is None:
        return [part]
    first = int(match[1])
    last = int(match[2])
    if not first <= last < first + MOST_OF_A_RANGE:
        raise SiteError(
            f"{part!r} is no range; expected two numbers, the smaller one first"
        )
    return [
        one
        for number in range(first, last + 1)
        for one in _each_number(f"{part[: match.start()]}{number}{part[match.end() :]}")
    ]


def _match(pattern: str, sites: Sequence[SiteSpec], what: str) -> Iterator[str]:
    if pattern in GROUPS:
        for site in sites:
            if site.alias_of is None and (pattern == "all" or pattern in site.groups):
                yield site.name
        return
    if pattern in ENDS or pattern.partition(":")[0] in PLACES:
        yield from _at_place(pattern, sites, what)
        return
    matched = list(_named(pattern, {site.name: site.name for site in sites}))
    # Modules' own paths count where no name of vitsee's is meant.
    yield from matched or _named(
        pattern, {s.site_path: s.name for s in sites if s.site_path}
    )


def _named(pattern: str, names: Mapping[str, str]) -> Iterator[str]:
    """The values of the keys that match."""
    for wanted in _without_negatives(pattern.split("."), list(names)):
        for key, name in names.items():
            if key == wanted or (_is_glob(wanted) and fnmatchcase(key, wanted)):
                yield name


# ---------------------------------------------------------------- places in depth


def _at_place(pattern: str, sites: Sequence[SiteSpec], what: str) -> list[str]:
    """The outs (or their substitutes) of the block at a place in depth."""
    outs = [site for site in sites if site.part == "out" and site.block]
    # Tables of blocks or of sublayers have no parts; their first entry has depth 0.
    first_depth = 1 if outs else 0
    candidates = outs or [site for site in sites if site.part == "" and site.block]
    word, _, text = pattern.partition(":")
    if word == "first":
        chosen = [site for site in candidates if site.depth == first_depth]
    elif word == "last":
        chosen = [site for site in candidates if site.rel_depth == 1]
    elif word == "depth":
        try:
            place = float(text)
        except ValueError:
            place = -1.0
        if not 0 <= place <= 1:
            raise SiteError(
                f"{pattern!r} is no place; expected depth:F with F from 0 to 1 (depth:0.5)"
            )
        # Rounded, as thirds are no exact numbers: a tie goes to the earlier.
        by_distance = sorted(
            candidates, key=lambda site: round(abs(site.rel_depth - place), 9)
        )
        chosen = by_distance[:1]
    else:
        chosen = _of_stage(pattern, text, candidates, what)
    blocks = {site.block for site in chosen}
    return [site.name for site in candidates if site.block in blocks]


def _of_stage(
    pattern: str, text: str, found: Sequence[SiteSpec], what: str
) -> list[SiteSpec]:
    if not re.fullmatch(r"-?\d+", text):
        raise SiteError(
            f"{pattern!r} is no stage; expected stage:0, stage:1, ... or stage:-1"
        )
    stages: dict[int, SiteSpec] = {}
    for site in found:
        match = _STAGE.search(site.block or "")
        if match is not None:
            number = int(match["zero"]) if match["one"] is None else int(match["one"]) - 1
            stages[number] = site  # the last one stays
    if len(stages) < 2 and not any(stages):
        raise SiteError(
            f"{pattern!r}: this {what} has no stages; name a place by depth:F"
        )
    numbers = range(max(stages) + 1)
    wanted = int(text)
    if not -len(numbers) <= wanted < len(numbers) or numbers[wanted] not in stages:
        has = ", ".join(map(str, sorted(stages)))
        raise SiteError(f"no stage matches {pattern!r}; stages of this {what}: {has}")
    return [stages[numbers[wanted]]]


# ---------------------------------------------------------------- names


def _is_glob(pattern: str) -> bool:
    return pattern in GROUPS or any(character in pattern for character in "*?[")


def _without_negatives(parts: list[str], names: Sequence[str]) -> list[str]:
    """The pattern with each negative number replaced by the index it counts to, once for each path
    that the parts before it match."""
    for place, part in enumerate(parts):
        if not (part.startswith("-") and part[1:].isdigit()):
            continue
        siblings: dict[str, set[int]] = {}
        for name in names:
            own = name.split(".")
            before = own[:place]
            if (
                len(own) > place
                and own[place].isdigit()
                and all(map(fnmatchcase, before, parts[:place]))
            ):
                siblings.setdefault(".".join(before), set()).add(int(own[place]))
        resolved: list[str] = []
        for before_text, numbers in siblings.items():
            if int(part[1:]) <= len(numbers):
                number = sorted(numbers)[int(part)]
                head = before_text.split(".") if before_text else []
                resolved += _without_negatives(
                    [*head, str(number), *parts[place + 1 :]], names
                )
        return resolved
    return [".".join(parts)]


def _shown(sites: Sequence[SiteSpec]) -> str:
    names = [site.name for site in sites]
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
    return (", ".join(names[:SHOWN_NAMES]) + more) or "none"


# ---------------- tokens of a site

WORDS = ("all", "patches", "cls", "prefix", "mean", "mean-all", "first", "rest", "each")
MEANS = ("mean", "mean-all", "rest")
VECTOR_WORDS = ("cls", "mean", "mean-all", "first", "rest")  # one vector per image

_CELL = re.compile(r"([0-9]+) *, *([0-9]+)")
_CELL_IN_TIME = re.compile(rf"([0-9]+) *, *{_CELL.pattern}")


def parse_cell(text: str) -> tuple[int, int] | None:
    """(row, col) of `ROW,COL`; None for any other text."""
    match = _CELL.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_place(text: str) -> tuple[int, ...] | None:
    """(row, col) of `ROW,COL`, (frame, row, col) of `FRAME,ROW,COL`; None for any other text."""
    match = _CELL_IN_TIME.fullmatch(text) or _CELL.fullmatch(text)
    return None if match is None else tuple(map(int, match.groups()))


class TokenSelection(str):
    """One checked value of `--tokens`: a word, or one grid cell: `ROW,COL`, of clips
    `FRAME,ROW,COL`.

    A string, so that it compares with words and is JSON-compatible; created by `parse`.
    """

    __slots__ = ()

    @classmethod
    def parse(
        cls, text: str | tuple[int, ...], words: Iterable[str] = WORDS
    ) -> TokenSelection:
        """Parse a word or a cell, `ROW,COL` or (row, col), of clips with the frame before them.

        Args:
            text: a selection is returned unchanged.
            words: the allowed words; cells are always allowed.

        Raises:
            SiteError: neither an allowed word nor a cell.
        """
        if isinstance(text, tuple):
            return cls(",".join(map(str, text)))
        if (place := parse_place(text)) is not None:
            return cls(",".join(map(str, place)))
        words = tuple(words)
        if text not in words:
            raise SiteError(f"no tokens {text!r}; expected {', '.join(words)} or ROW,COL")
        return text if isinstance(text, cls) else cls(text)

    @property
    def cell(self) -> tuple[int, int] | None:
        """(row, col) if it is a cell of an image or a clip, else None."""
        if (place := parse_place(self)) is None:
            return None
        return (place[-2], place[-1])

    @property
    def frame(self) -> int | None:
        """The place in time of a cell of a clip, else None."""
        place = parse_place(self)
        return place[0] if place is not None and len(place) == 3 else None

    @property
    def is_mean(self) -> bool:
        """Whether it stands for the mean over its tokens."""
        return self in MEANS

    @property
    def is_vector(self) -> bool:
        """Whether it gives one vector per image."""
        return self in VECTOR_WORDS or self.cell is not None

    def members(self, layout: TokenLayout) -> range:
        """Indices of its tokens among all tokens of the layout; empty if there are none."""
        n = layout.n_tokens
        n_prefix = layout.n_prefix
        if self == "cls":
            return layout.cls_tokens
        if (place := parse_place(self)) is not None:
            body = () if layout.grid is None else layout.body
            if len(place) != len(body) or any(
                i >= n for i, n in zip(place, body, strict=True)
            ):
                return range(0)
            at = 0  # row by row; without numpy, which `vitsee --help` does not load
            for i, n_along in zip(place, body, strict=True):
                at = at * n_along + i
            return range(n_prefix + at, n_prefix + at + 1)
        return {
            "first": range(min(n, 1)),
            "rest": range(1, max(n, 1)),
            "prefix": range(n_prefix),
            "patches": range(n_prefix, n),
            "mean": range(n_prefix, n),
        }.get(self, range(n))

    def require(self, layout: TokenLayout, owner: str) -> range:
        """Like `members`, but at least one token. Raises SiteError: the layout has none; `owner`
        names the store and the site."""
        if members := self.members(layout):
            return members
        special = {"cls": "class token", "rest": "tokens but the first"}
        what = special.get(self, f"tokens {str(self)!r}")
        counted = ""
        if self.cell is not None:
            what = f"token {self}"
            counted = ", counted from 0"
        raise SiteError(
            f"{owner} has no {what}: it has {describe_layout(layout)}{counted}"
        )


@dataclass(frozen=True)
class Token:
    """One token; row, col and, of a clip, frame are those of a cell."""

    # its kind in the prefix, `ROW,COL` or `FRAME,ROW,COL` for a cell, the number of a plain row
    name: str
    row: int | None = None
    col: int | None = None
    frame: int | None = None


@lru_cache(maxsize=32)
def layout_tokens(layout: TokenLayout) -> tuple[Token, ...]:
    prefix = (Token(name) for name in layout.prefix)
    if layout.grid is None:
        return (*prefix, *(Token(str(i)) for i in range(layout.rows)))
    rows, cols = layout.grid
    if layout.frames is None:
        return (
            *prefix,
            *(Token(f"{r},{c}", r, c) for r in range(rows) for c in range(cols)),
        )
    places = itertools.product(range(layout.frames), range(rows), range(cols))
    return (*prefix, *(Token(f"{t},{r},{c}", r, c, t) for t, r, c in places))


def describe_layout(layout: TokenLayout) -> str:
    """A layout in words."""
    prefix = f"prefix {', '.join(layout.prefix)}" if layout.prefix else "no prefix tokens"
    if layout.grid is None:
        return f"{prefix} and {layout.rows} rows that are no image grid"
    grid = f"{prefix} and a grid of {layout.grid[0]} x {layout.grid[1]}"
    if layout.frames is None:
        return grid
    return f"{grid} at {layout.frames} times"
