"""Which tokens of a site: the words of `--tokens`, and the array that each stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError
from vitsee_stores.lazy import LazyArray, TokenArray, TokenMean

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec, TokenLayout
    from vitsee_stores.reader import Store

Tokens = str | tuple[int, int]
TOKENS = "all, patches, cls, prefix, mean, mean-all, first, rest, each or ROW,COL"


def token_array(store: Store, spec: SiteSpec, layout: TokenLayout, tokens: Tokens) -> LazyArray:
    """The array that `Store.acts` describes, of a site with tokens that are all stored.

    Raises:
        SiteError: the site has no such tokens.
    """
    folder = f"acts/{spec.name}"
    body_path = f"{folder}/{'rows' if layout.grid is None else 'grid'}"
    word = tokens if isinstance(tokens, str) else f"{tokens[0]},{tokens[1]}"
    prefix = store.array(f"{folder}/prefix") if layout.prefix else None
    everything = TokenArray(prefix, store.array(body_path))
    if word in ("all", "each"):
        return everything
    if word in ("mean-all", "rest"):
        return TokenMean(everything, first=int(word == "rest"))
    if word == "patches" and layout.grid is not None:
        return store.array(body_path)
    if word == "prefix" and prefix is not None:
        return prefix
    if word == "cls" and layout.cls is not None:
        return store.array(f"{folder}/prefix", {1: layout.cls})
    if word == "first" and prefix is not None:
        return store.array(f"{folder}/prefix", {1: 0})
    if word == "first":
        return store.array(body_path, {1: 0} if layout.grid is None else {1: 0, 2: 0})
    cell, grid = _cell(word), layout.grid or (0, 0)
    if cell is not None and cell[0] < grid[0] and cell[1] < grid[1]:
        return store.array(body_path, {1: cell[0], 2: cell[1]})
    raise SiteError(
        f"{store.label}: {spec.name} has no tokens {word!r}: it has {describe_layout(layout)} "
        f"(expected {TOKENS})"
    )


def _cell(word: str) -> tuple[int, int] | None:
    parts = word.split(",")
    if len(parts) == 2 and all(part.strip().isdigit() for part in parts):
        return int(parts[0]), int(parts[1])
    return None


def describe_layout(layout: TokenLayout) -> str:
    """A layout in words."""
    prefix = f"prefix {', '.join(layout.prefix)}" if layout.prefix else "no prefix tokens"
    if layout.grid is None:
        return f"{prefix} and {layout.rows} rows that are no image grid"
    return f"{prefix} and a grid of {layout.grid[0]} x {layout.grid[1]}"
