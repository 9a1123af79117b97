"""The array for a token selection of a site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vitsee_stores.errors import SiteError
from vitsee_stores.lazy import LazyArray, LazyTokenMean, StoredArray, TokenArray
from vitsee_stores.token_selection import TokenSelection, describe_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vitsee_stores.plan import SiteSpec

Tokens = str | tuple[int, int]


class Arrays(Protocol):
    """Signature of `Store.array`."""

    def __call__(self, path: str, fixed: Mapping[int, int] | None = None, /) -> StoredArray: ...


def token_array(array: Arrays, owner: str, spec: SiteSpec, tokens: Tokens) -> LazyArray:
    """The array that `Store.acts` describes, for a site with a layout whose tokens are all stored.

    Args:
        array: reads arrays of the store.
        owner: the store and the site, for messages.
        spec: the site.
        tokens: which of its tokens.

    Raises:
        SiteError: the site has no such tokens.
    """
    layout = spec.layout
    assert layout is not None
    folder = f"acts/{spec.name}"
    body_path = f"{folder}/{'rows' if layout.grid is None else 'grid'}"
    chosen = TokenSelection.parse(tokens)
    members = chosen.require(layout, owner)
    if chosen == "patches" and layout.grid is None:
        raise SiteError(f"{owner} has no tokens 'patches': it has {describe_layout(layout)}")
    prefix = array(f"{folder}/prefix") if layout.prefix else None
    if chosen in ("all", "each", "mean-all", "rest"):
        everything = TokenArray(prefix, array(body_path))
        return LazyTokenMean(everything, members.start) if chosen.is_mean else everything
    if chosen == "patches":
        return array(body_path)
    if chosen == "prefix" and prefix is not None:
        return prefix
    at = members.start - layout.n_prefix
    if at < 0:
        return array(f"{folder}/prefix", {1: members.start})
    if layout.grid is None:
        return array(body_path, {1: at})
    row, col = divmod(at, layout.grid[1])
    return array(body_path, {1: row, 2: col})
