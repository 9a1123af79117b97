"""Site selectors on tables: which rows are about the selected sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import ENDS, NOT, select_names

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store


def rows_of_sites(table: Table, patterns: Sequence[str]) -> Table:
    """The rows about the sites that `patterns` select, in the grammar of `vitsee_stores.selectors`
    (names, globs, `depth:0.5`, `!norm`; groups only as far as a table reveals them: `all`, and
    `blocks`, the outs with the input of the first block; `first` and `last` are each store's in
    the table, which may lack the model's). A row about two sites stays if both are selected, and
    so does one about no site.

    Raises:
        SiteError: a pattern without a match.
        VitseeError: the table has no sites.
    """
    sides = [side for side in ("", "_a", "_b") if f"site{side}" in table.columns]
    if not sides:
        raise VitseeError("this table has no column of sites: leave --sites out")
    stores: dict[str, dict[str, _Row]] = {}
    for side in sides:
        names = (f"{name}{side}" for name in ("store", "site", "block", "depth", "rel_depth"))
        columns = [table.cells(name) for name in names]
        for store, site, block, depth, rel_depth in zip(*columns, strict=True):
            if site:
                row = _Row(site, str(block or ""), depth, rel_depth)
                stores.setdefault(str(store or ""), {}).setdefault(site, row)
    known = [_Sites(label, _placed([*rows.values()])) for label, rows in stores.items()]
    chosen = select_each(cast("list[Store]", known), patterns, _select)
    kept = {(store.label, site.name) for store, sites in chosen.members for site in sites}
    keep = np.ones(len(table), bool)
    for side in sides:
        pairs = zip(table.cells(f"store{side}"), table.cells(f"site{side}"), strict=True)
        keep &= np.array([not site or (str(s or ""), site) in kept for s, site in pairs], bool)
    return table.take(keep)


@dataclass(frozen=True)
class _Row:
    """A site as far as a table knows it, with the attributes that selectors use."""

    name: str
    block: str
    depth: Any
    rel_depth: Any
    stands: bool = False  # for its block
    alias_of: None = None
    site_path: None = None

    @property
    def part(self) -> str:
        if self.stands:
            return ""
        return self.name.removeprefix(self.block).lstrip(".") if self.block else self.name

    @property
    def groups(self) -> tuple[str, ...]:
        inside = self.part in ("out", "") if self.block else self.name in ("embed", "stem")
        return ("blocks", "all") if inside else ("all",)


def _placed(rows: Sequence[_Row]) -> Sequence[_Row]:
    """If no row is a block or its out, as for sublayers and heads, each stands for its block."""
    if any(row.block and row.part in ("out", "") for row in rows):
        return rows
    return [replace(row, stands=True) if row.block else row for row in rows]


@dataclass(frozen=True)
class _Sites:
    label: str
    rows: Sequence[_Row]


def _select(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    sites = cast(_Sites, store)
    rows = cast("Sequence[SiteSpec]", sites.rows)
    named = [name for pattern in patterns for name in _at_ends(pattern, sites.rows)]
    return select_names(named, rows, what=f"table, {sites.label}", hint="--sites all")


def _at_ends(pattern: str, rows: Sequence[_Row]) -> list[str]:
    """The names of the `first` or `last` of these rows; other patterns unchanged."""
    end = pattern.removeprefix(NOT)
    placed = [row for row in rows if row.block and row.part in ("out", "")]
    if end not in ENDS or not placed:
        return [pattern]
    depths = [row.rel_depth for row in placed]
    depth = min(depths) if end == "first" else max(depths)
    blocks = {row.block for row in placed if row.rel_depth == depth}
    left_out = NOT if pattern.startswith(NOT) else ""
    return [left_out + row.name for row in placed if row.block in blocks]
