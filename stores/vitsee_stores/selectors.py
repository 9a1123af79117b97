"""Selectors of sites and tokens.

Sites are chosen by names, globs, groups, indices from the end, or a depth in the model; the
tokens of a site by the values of `--tokens`. The grammar of site patterns:

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
MAX_RANGE = 1000
ENDS = ("first", "last")
DEPTH_WORDS = ("stage", "depth")
# A block's path from the container of its stage on: layer3.0, stages.2.blocks.5, blocks.1.0.
_STAGE = re.compile(
    r"(?:^|\.)(?:layer(?P<one>\d+)|(?:stages|layers|blocks)\.(?P<zero>\d+))\..*\d"
)


def select_names(
    patterns: Iterable[str],
    sites: Sequence[SiteSpec],
    *,
    owner: str = "model",
    hint: str = "vitsee sites MODEL",
) -> list[SiteSpec]:
    """Return the sites that match any of the patterns, each once, in the order of `sites`.

    Negative numbers count the neighbouring paths from the end (`stages.-1.blocks.-2.*`). A
    depth selects the output of a block, or the sites of that block if none has part "out". If
    no name matches, paths of the model's modules are tried (`site_path`). Groups give stored
    names, never aliases; an alias that a glob matches is left out if the site that it equals
    is selected.

    Args:
        patterns: comma lists of patterns.
        sites: sites to choose from.
        owner: what has the sites, for messages: "model" or "store, LABEL".
        hint: command that lists the sites, for messages.

    Raises:
        SiteError: no pattern; a pattern without a match, or one that cannot be parsed;
            patterns that only exclude, or that leave no site.
    """
    selected: set[str] = set()
    exact: set[str] = set()  # selected by name: aliases stay
    excluded: set[str] = set()
    terms = split_patterns(patterns)
    if not terms:
        raise SiteError(
            f"no site was asked for; name some of this {owner}, e.g. 'blocks' or 'all'"
        )
    for term in terms:
        pattern = term.removeprefix(NOT)
        matched = set(_match(pattern, sites, owner))
        if not matched:
            raise SiteError(
                f"no site matches {pattern!r}; sites of this {owner}: "
                f"{_list_names(sites)} (run: {hint})"
            )
        if term.startswith(NOT):
            excluded |= matched
            continue
        selected |= matched
        if not _is_glob(pattern):
            exact |= matched
    names = selected - excluded
    if excluded and not names:
        message = f"{','.join(terms)} leaves no site"
        if not selected:
            message += f"; name what to take too, as in 'all,{terms[0]}'"
        raise SiteError(message)
    return [
        site
        for site in sites
        if site.name in names and (site.alias_of not in names or site.name in exact)
    ]


def split_patterns(patterns: Iterable[str]) -> list[str]:
    """Split comma lists into single patterns, and ranges into a pattern for each number.

    A comma in brackets belongs to a glob.
    """
    expanded: list[str] = []
    for comma_list in patterns:
        for pattern in re.split(r",(?![^[]*\])", comma_list):
            expanded += _expand_range(pattern.strip())
    return expanded


def _expand_range(pattern: str) -> list[str]:
    """Return `blocks.6.out` and `blocks.7.out` for `blocks.6..7.out`.

    Raises:
        SiteError: the second number is smaller, or the range has more than `MAX_RANGE`.
    """
    match = re.search(r"(?<![\d-])(\d{1,6})\.\.(\d{1,6})(?![\d])", pattern)
    if match is None:
        return [pattern]
    first = int(match[1])
    last = int(match[2])
    if not first <= last < first + MAX_RANGE:
        raise SiteError(
            f"{pattern!r} is no range; expected two numbers, the smaller one first"
        )
    before = pattern[: match.start()]
    after = pattern[match.end() :]
    expanded: list[str] = []
    for number in range(first, last + 1):
        # The rest may have further ranges.
        expanded += _expand_range(f"{before}{number}{after}")
    return expanded


def _match(pattern: str, sites: Sequence[SiteSpec], owner: str) -> Iterator[str]:
    """Yield the names of the sites that one pattern matches; `owner` is for messages."""
    if pattern in GROUPS:
        for site in sites:
            if site.alias_of is None and (pattern == "all" or pattern in site.groups):
                yield site.name
        return
    if pattern in ENDS or pattern.partition(":")[0] in DEPTH_WORDS:
        yield from _match_depth(pattern, sites, owner)
        return
    matched = list(_match_keys(pattern, {site.name: site.name for site in sites}))
    # Paths of modules count only where no name of vitsee's is meant.
    paths = {site.site_path: site.name for site in sites if site.site_path}
    yield from matched or _match_keys(pattern, paths)


def _match_keys(pattern: str, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the keys that a name or glob matches."""
    for resolved in _without_negatives(pattern.split("."), list(names)):
        for key, name in names.items():
            if key == resolved or (_is_glob(resolved) and fnmatchcase(key, resolved)):
                yield name


# ---------------------------------------------------------------- depths in the model


def _match_depth(pattern: str, sites: Sequence[SiteSpec], owner: str) -> list[str]:
    """Return the outputs of the block at a depth, or the block's sites if none is one."""
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
            depth = float(text)
        except ValueError:
            depth = -1.0  # refused below
        if not 0 <= depth <= 1:
            raise SiteError(
                f"{pattern!r} is no place; expected depth:F with F from 0 to 1 "
                "(depth:0.5)"
            )
        # Rounded, as thirds are no exact numbers: a tie goes to the earlier.
        by_distance = sorted(
            candidates, key=lambda site: round(abs(site.rel_depth - depth), 9)
        )
        chosen = by_distance[:1]
    else:
        chosen = _last_of_stage(pattern, text, candidates, owner)
    blocks = {site.block for site in chosen}
    return [site.name for site in candidates if site.block in blocks]


def _last_of_stage(
    pattern: str, text: str, candidates: Sequence[SiteSpec], owner: str
) -> list[SiteSpec]:
    """Return the last of the candidates that belongs to a stage.

    Args:
        pattern: the whole pattern, for messages.
        text: number of the stage; a negative one counts from the end.
        candidates: sites of blocks.
        owner: what has the sites, for messages.

    Raises:
        SiteError: no number, no stages, or no such stage.
    """
    if not re.fullmatch(r"-?\d+", text):
        raise SiteError(
            f"{pattern!r} is no stage; expected stage:0, stage:1, ... or stage:-1"
        )
    stages: dict[int, SiteSpec] = {}
    for site in candidates:
        match = _STAGE.search(site.block or "")
        if match is not None:
            # `layer1` is stage 0; `stages` and `layers` count from 0.
            if match["one"] is None:
                number = int(match["zero"])
            else:
                number = int(match["one"]) - 1
            stages[number] = site  # the last one stays
    if len(stages) < 2 and not any(stages):
        raise SiteError(
            f"{pattern!r}: this {owner} has no stages; name a place by depth:F"
        )
    numbers = range(max(stages) + 1)
    index = int(text)
    if not -len(numbers) <= index < len(numbers) or numbers[index] not in stages:
        stage_list = ", ".join(map(str, sorted(stages)))
        raise SiteError(
            f"no stage matches {pattern!r}; stages of this {owner}: {stage_list}"
        )
    return [stages[numbers[index]]]


# ---------------------------------------------------------------- names


def _is_glob(pattern: str) -> bool:
    """Return whether a pattern may match several sites: a group, or a shell pattern."""
    return pattern in GROUPS or any(character in pattern for character in "*?[")


def _without_negatives(parts: list[str], names: Sequence[str]) -> list[str]:
    """Replace each negative number of a pattern by the index that it counts to.

    Args:
        parts: the pattern, split at dots.
        names: paths of all sites; `-1` is the last number that stands at its position behind
            one prefix.

    Returns:
        A pattern for each prefix that the parts before the number match.
    """
    for position, text in enumerate(parts):
        if not (text.startswith("-") and text[1:].isdigit()):
            continue
        # prefix -> the numbers that stand behind it
        siblings: dict[str, set[int]] = {}
        for name in names:
            name_parts = name.split(".")
            prefix = name_parts[:position]
            if (
                len(name_parts) > position
                and name_parts[position].isdigit()
                and all(map(fnmatchcase, prefix, parts[:position]))
            ):
                number = int(name_parts[position])
                siblings.setdefault(".".join(prefix), set()).add(number)
        resolved: list[str] = []
        for prefix_text, numbers in siblings.items():
            if int(text[1:]) <= len(numbers):
                number = sorted(numbers)[int(text)]
                head = prefix_text.split(".") if prefix_text else []
                # The parts behind it may have further negative numbers.
                resolved += _without_negatives(
                    [*head, str(number), *parts[position + 1 :]], names
                )
        return resolved
    return [".".join(parts)]


def _list_names(sites: Sequence[SiteSpec]) -> str:
    """Return the names of sites for a message, at most `SHOWN_NAMES`."""
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
    """Return (row, col) of `ROW,COL`; None for any other text."""
    match = _CELL.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_position(text: str) -> tuple[int, ...] | None:
    """Return (row, col) of `ROW,COL`, (frame, row, col) of `FRAME,ROW,COL`, else None."""
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
        position = parse_position(text)
        if position is not None:
            # Written anew, so that `07, 2` equals `7,2`.
            return cls(",".join(map(str, position)))
        words = tuple(words)
        if text not in words:
            raise SiteError(f"no tokens {text!r}; expected {', '.join(words)} or ROW,COL")
        return text if isinstance(text, cls) else cls(text)

    @property
    def cell(self) -> tuple[int, int] | None:
        """(row, col) if it is a cell of an image or a clip, else None."""
        position = parse_position(self)
        if position is None:
            return None
        return (position[-2], position[-1])

    @property
    def frame(self) -> int | None:
        """The index in time of a cell of a clip, else None."""
        position = parse_position(self)
        if position is None or len(position) < 3:
            return None
        return position[0]

    @property
    def is_mean(self) -> bool:
        """Whether it stands for the mean over its tokens."""
        return self in MEANS

    @property
    def is_vector(self) -> bool:
        """Whether it gives one vector per image."""
        return self in VECTOR_WORDS or self.cell is not None

    def members(self, layout: TokenLayout) -> range:
        """Return the indices of its tokens among all tokens of a layout; maybe none."""
        n = layout.n_tokens
        n_prefix = layout.n_prefix
        if self == "cls":
            return layout.cls_tokens
        cell = parse_position(self)
        if cell is not None:
            grid = () if layout.grid is None else layout.body
            if len(cell) != len(grid):
                return range(0)
            if any(i >= length for i, length in zip(cell, grid, strict=True)):
                return range(0)
            # C order; without numpy, which `vitsee --help` does not load
            cell_index = 0
            for i, length in zip(cell, grid, strict=True):
                cell_index = cell_index * length + i
            return range(n_prefix + cell_index, n_prefix + cell_index + 1)
        return {
            "first": range(min(n, 1)),
            "rest": range(1, max(n, 1)),
            "prefix": range(n_prefix),
            "patches": range(n_prefix, n),
            "mean": range(n_prefix, n),
        }.get(self, range(n))

    def require(self, layout: TokenLayout, owner: str) -> range:
        """Return the indices of its tokens, at least one.

        Args:
            layout: token layout of the site.
            owner: name of the store and the site, for messages.

        Raises:
            SiteError: the layout has no such token.
        """
        if members := self.members(layout):
            return members
        views = [name for name in layout.prefix if name.startswith("class.")]
        if self == "cls" and views:
            raise SiteError(
                f"{owner} has a class token of each view, {views[0]} to {views[-1]}, and no "
                "cls of all; expected --tokens prefix (the tokens before the patches), "
                "patches or mean"
            )
        special = {"cls": "class token", "rest": "tokens but the first"}
        lacking = special.get(self, f"tokens {str(self)!r}")
        counted = ""
        if self.cell is not None:
            lacking = f"token {self}"
            counted = ", counted from 0"
        raise SiteError(
            f"{owner} has no {lacking}: it has {describe_layout(layout)}{counted}"
        )


@dataclass(frozen=True)
class Token:
    """One token of a layout.

    Attributes:
        name: kind of a prefix token; `ROW,COL` or `FRAME,ROW,COL` of a cell; number of a plain
            row.
        row, col: position of a cell in the grid, else None.
        frame: index in time of a cell of a clip, else None.
    """

    name: str
    row: int | None = None
    col: int | None = None
    frame: int | None = None


@lru_cache(maxsize=32)
def layout_tokens(layout: TokenLayout) -> tuple[Token, ...]:
    """Return the tokens of a layout in the store's order."""
    tokens = [Token(name) for name in layout.prefix]
    if layout.grid is None:
        tokens += [Token(str(i)) for i in range(layout.rows)]
        return tuple(tokens)
    rows, cols = layout.grid
    if layout.frames is None:
        for row, col in itertools.product(range(rows), range(cols)):
            tokens.append(Token(f"{row},{col}", row, col))
        return tuple(tokens)
    cells = itertools.product(range(layout.frames), range(rows), range(cols))
    for frame, row, col in cells:
        tokens.append(Token(f"{frame},{row},{col}", row, col, frame))
    return tuple(tokens)


def describe_layout(layout: TokenLayout) -> str:
    """Describe a token layout in words."""
    prefix = f"prefix {', '.join(layout.prefix)}" if layout.prefix else "no prefix tokens"
    if layout.grid is None:
        return f"{prefix} and {layout.rows} rows that are no image grid"
    grid = f"{prefix} and a grid of {layout.grid[0]} x {layout.grid[1]}"
    if layout.frames is None:
        return grid
    return f"{grid} at {layout.frames} times"
