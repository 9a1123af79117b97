"""Token selections of a site: the values of `--tokens`, and the tokens each selects."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError

if TYPE_CHECKING:
    from vitsee_stores.plan import TokenLayout

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
    def parse(cls, text: str | tuple[int, ...], words: Iterable[str] = WORDS) -> TokenSelection:
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
        return None if (place := parse_place(self)) is None else (place[-2], place[-1])

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
        n, n_prefix = layout.n_tokens, layout.n_prefix
        if self == "cls":
            return layout.cls_tokens
        if (place := parse_place(self)) is not None:
            body = () if layout.grid is None else layout.body
            if len(place) != len(body) or any(i >= n for i, n in zip(place, body, strict=True)):
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
        """Like `members`, but at least one token.

        Raises:
            SiteError: the layout has none; `owner` names the store and the site.
        """
        if members := self.members(layout):
            return members
        special = {"cls": "class token", "rest": "tokens but the first"}
        what, counted = special.get(self, f"tokens {str(self)!r}"), ""
        if self.cell is not None:
            what, counted = f"token {self}", ", counted from 0"
        raise SiteError(f"{owner} has no {what}: it has {describe_layout(layout)}{counted}")


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
        return (*prefix, *(Token(f"{r},{c}", r, c) for r in range(rows) for c in range(cols)))
    places = itertools.product(range(layout.frames), range(rows), range(cols))
    return (*prefix, *(Token(f"{t},{r},{c}", r, c, t) for t, r, c in places))


def describe_layout(layout: TokenLayout) -> str:
    """A layout in words."""
    prefix = f"prefix {', '.join(layout.prefix)}" if layout.prefix else "no prefix tokens"
    if layout.grid is None:
        return f"{prefix} and {layout.rows} rows that are no image grid"
    grid = f"{prefix} and a grid of {layout.grid[0]} x {layout.grid[1]}"
    return grid if layout.frames is None else f"{grid} at {layout.frames} times"
