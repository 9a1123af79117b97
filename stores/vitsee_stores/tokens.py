"""The array that a selection of a site's tokens stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError
from vitsee_stores.lazy import LazyArray, TokenArray, TokenMean
from vitsee_stores.token_selection import TokenSelection, describe_layout

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec, TokenLayout
    from vitsee_stores.reader import Store

Tokens = str | tuple[int, int]


def token_array(store: Store, spec: SiteSpec, layout: TokenLayout, tokens: Tokens) -> LazyArray:
    """The array that `Store.acts` describes, of a site with tokens that are all stored.

    Raises:
        SiteError: the site has no such tokens.
    """
    folder = f"acts/{spec.name}"
    body_path = f"{folder}/{'rows' if layout.grid is None else 'grid'}"
    owner = f"{store.label}: {spec.name}"
    chosen = TokenSelection.parse(tokens)
    members = chosen.require(layout, owner)
    if chosen == "patches" and layout.grid is None:
        raise SiteError(f"{owner} has no tokens 'patches': it has {describe_layout(layout)}")
    prefix = store.array(f"{folder}/prefix") if layout.prefix else None
    if chosen in ("all", "each", "mean-all", "rest"):
        everything = TokenArray(prefix, store.array(body_path))
        return TokenMean(everything, members.start) if chosen.is_mean else everything
    if chosen == "patches":
        return store.array(body_path)
    if chosen == "prefix" and prefix is not None:
        return prefix
    at = members.start - layout.n_prefix
    if at < 0:
        return store.array(f"{folder}/prefix", {1: members.start})
    if layout.grid is None:
        return store.array(body_path, {1: at})
    row, col = divmod(at, layout.grid[1])
    return store.array(body_path, {1: row, 2: col})
