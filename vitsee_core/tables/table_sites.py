"""Site selectors on tables: which rows are about the selected sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
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
    rows = table.frame
    sides = [side for side in ("", "_a", "_b") if f"site{side}" in rows.columns]
    if not sides:
        raise VitseeError("this table has no column of sites: leave --sites out")
    stores: dict[str, dict[str, _Row]] = {}
    for side in sides:
        for store, site, block, depth, rel_depth in _sites(rows, side).rows():
            if site:
                row = _Row(site, block or "", depth, rel_depth)
                stores.setdefault(store or "", {}).setdefault(site, row)
    known = [_Sites(label, _placed([*own.values()])) for label, own in stores.items()]
    chosen = select_each(cast("list[Store]", known), patterns, _select)
    kept: dict[str, list[str]] = {}
    for store, sites in chosen.members:
        kept[store.label] = [site.name for site in sites]
    for side in sides:
        site = pl.col(f"site{side}")
        rules = [pl.col(f"site{side}").is_null()]
        for label, names in kept.items():
            named = f"store{side}" in rows.columns
            of_store = pl.col(f"store{side}") == label if named else pl.lit(True)
            rules.append(of_store & site.is_in(names))
        rows = rows.filter(pl.any_horizontal(rules))
    return table.with_frame(rows)


def block_part(rows: pl.DataFrame) -> pl.Expr:
    """The part of its block that each row's site is: `attn.branch`, `norm1`; `out` for whole
    blocks, for sites outside of the blocks, as in the column of depth, and for rows of no site."""
    if "block" not in rows.columns:
        return pl.lit("out")
    pairs = (
        rows.select("site", "block").unique().cast(pl.String).drop_nulls("site").rows()
    )
    parts = {
        site: site.removeprefix(block or site).lstrip(".") or "out"
        for site, block in pairs
    }
    return pl.col("site").cast(pl.String).replace_strict(parts, default="out")


def _sites(rows: pl.DataFrame, side: str) -> pl.DataFrame:
    """store, site, block, depth and rel_depth of the rows on one side, once each; null where there
    is no such column."""
    names = ("store", "site", "block", "depth", "rel_depth")
    cells = (
        (
            pl.col(f"{name}{side}") if f"{name}{side}" in rows.columns else pl.lit(None)
        ).alias(name)
        for name in names
    )
    return rows.select(cells).unique(maintain_order=True)


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
        if self.block:
            return self.name.removeprefix(self.block).lstrip(".")
        return self.name

    @property
    def groups(self) -> tuple[str, ...]:
        inside = (
            self.part in ("out", "") if self.block else self.name in ("embed", "stem")
        )
        return ("blocks", "all") if inside else ("all",)


def _placed(rows: Sequence[_Row]) -> Sequence[_Row]:
    """The rows that stand for blocks: if no row is a block or its out, as for sublayers and heads,
    each stands for its block."""
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
