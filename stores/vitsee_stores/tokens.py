"""The array for a token selection of a site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitsee_stores.errors import SiteError
from vitsee_stores.lazy import LazyArray, LazyTokenMean, TokenArray
from vitsee_stores.token_selection import TokenSelection, describe_layout

if TYPE_CHECKING:
    from vitsee_stores.plan import SiteSpec, TokenLayout
    from vitsee_stores.store_contents import StoreContents

Tokens = str | tuple[int, int]


def token_array(
    store: StoreContents, spec: SiteSpec, layout: TokenLayout, tokens: Tokens
) -> LazyArray:
    """The array that `Store.acts` describes, for a site whose tokens are all stored.

    Raises:
        SiteError: the site has no such tokens.
    """
    owner, folder = f"{store.label}: {spec.name}", f"acts/{spec.name}"
    body = f"{folder}/{'rows' if layout.grid is None else 'grid'}"
    chosen = TokenSelection.parse(tokens)
    members = chosen.require(layout, owner)
    if chosen == "patches" and layout.grid is None:
        raise SiteError(f"{owner} has no tokens 'patches': it has {describe_layout(layout)}")
    prefix = store.array(f"{folder}/prefix") if layout.prefix else None
    if chosen in ("all", "each", "mean-all", "rest"):
        everything = TokenArray(prefix, store.array(body))
        return LazyTokenMean(everything, members.start) if chosen.is_mean else everything
    if chosen == "patches":
        return store.array(body)
    if chosen == "prefix" and prefix is not None:
        return prefix
    at = members.start - layout.n_prefix
    if at < 0:
        return store.array(f"{folder}/prefix", {1: members.start})
    if layout.grid is None:
        return store.array(body, {1: at})
    row, col = divmod(at, layout.grid[1])
    return store.array(body, {1: row, 2: col})
