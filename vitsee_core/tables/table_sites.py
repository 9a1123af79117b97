"""Site selectors on tables: which rows are about the selected sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vitsee_core.runtime.store_selection import select_each
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError
from vitsee_stores.selectors import ENDS, NOT, select_names

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

SITE_COLUMNS = ("store", "site", "block", "depth", "rel_depth")


def rows_of_sites(table: Table, patterns: Sequence[str]) -> Table:
    """Return the rows about the sites that `patterns` select.

    The grammar is that of `vitsee_stores.selectors`: names, globs, `depth:0.5`, `!norm`. Groups are
    selected as far as a table reveals them: `all`, and `blocks`, the outputs of blocks with the
    input of the first one. `first` and `last` are the first and last block in the table, per store;
    the model may have blocks beyond them. A row about two sites stays if both are selected; a row
    about no site stays, too.

    Args:
        table: with a column `site`, or `site_a` and `site_b`.
        patterns: selectors, including comma lists.

    Raises:
        SiteError: a pattern without a match.
        VitseeError: the table has no sites.
    """
    rows = table.frame
    # The endings of the columns: a comparison has two sites a row.
    sides = []
    for side in ("", "_a", "_b"):
        if f"site{side}" in rows.columns:
            sides.append(side)
    if not sides:
        raise VitseeError("this table has no column of sites: leave --sites out")
    stores = _stores_in(rows, sides)
    # The selection takes whatever has a label: tables know sites, but open no stores.
    selection = select_each(cast("list[Store]", stores), patterns, _select)
    for side in sides:
        site = pl.col(f"site{side}")
        is_selected = [site.is_null()]
        for store, sites in selection.members:
            names = [selected.name for selected in sites]
            # A name is one store's: another may have left the site out.
            is_store = pl.lit(True)
            if f"store{side}" in rows.columns:
                is_store = pl.col(f"store{side}") == store.label
            is_selected.append(is_store & site.is_in(names))
        rows = rows.filter(pl.any_horizontal(is_selected))
    return table.with_frame(rows)


def block_part(rows: pl.DataFrame) -> pl.Expr:
    """Return an expression: the part of its block that each row's site is.

    It is `attn.branch` or `norm1`, for example; `out` for the outputs of blocks, for sites outside
    of blocks (as the column of depth has them), and for rows without a site.
    """
    if "block" not in rows.columns:
        return pl.lit("out")
    pairs = rows.select("site", "block").unique().cast(pl.String).drop_nulls("site")
    parts = {}
    for site, block in pairs.rows():
        parts[site] = site.removeprefix(block or site).lstrip(".") or "out"
    return pl.col("site").cast(pl.String).replace_strict(parts, default="out")


class _TableSite(NamedTuple):
    """A site as far as a table knows it, with the attributes that selectors read."""

    name: str
    block: str
    depth: Any
    rel_depth: Any
    represents_block: bool = (
        False  # a sublayer or head, in a table without outputs of blocks
    )
    alias_of: None = None
    site_path: None = None

    @property
    def part(self) -> str:
        """The name within the block; "" for a block's output, or what represents it."""
        if self.represents_block:
            return ""
        if self.block:
            return self.name.removeprefix(self.block).lstrip(".")
        return self.name

    @property
    def is_block_output(self) -> bool:
        """Whether it lies in a block and is its output, or represents it."""
        return bool(self.block) and self.part in ("out", "")

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of selectors to which it belongs."""
        is_input = not self.block and self.name in ("embed", "stem")
        if self.is_block_output or is_input:
            return ("blocks", "all")
        return ("all",)


class _TableStore(NamedTuple):
    """The sites of one store in a table; the label names it in messages."""

    label: str
    sites: Sequence[_TableSite]


def _stores_in(rows: pl.DataFrame, sides: Sequence[str]) -> list[_TableStore]:
    """Return the stores of the rows, of both sides of a comparison, with their sites."""
    sites_of: dict[str, dict[str, _TableSite]] = {}
    for side in sides:
        for store, name, block, depth, rel_depth in _distinct_sites(rows, side).rows():
            if name:
                site = _TableSite(name, block or "", depth, rel_depth)
                sites_of.setdefault(store or "", {}).setdefault(name, site)
    stores = []
    for label, by_name in sites_of.items():
        sites = list(by_name.values())
        # Tables of sublayers or heads have no outputs of blocks: each stands for its block.
        if not any(site.is_block_output for site in sites):
            sites = [site._replace(represents_block=bool(site.block)) for site in sites]
        stores.append(_TableStore(label, sites))
    return stores


def _distinct_sites(rows: pl.DataFrame, side: str) -> pl.DataFrame:
    """Return the distinct `SITE_COLUMNS` of one side; null where there is no such column."""
    cells = []
    for name in SITE_COLUMNS:
        if f"{name}{side}" in rows.columns:
            cells.append(pl.col(f"{name}{side}").alias(name))
        else:
            cells.append(pl.lit(None).alias(name))
    return rows.select(cells).unique(maintain_order=True)


def _select(store: Store, patterns: Sequence[str]) -> list[SiteSpec]:
    """Return the sites of a `_TableStore` that the patterns select."""
    table_store = cast("_TableStore", store)
    names = []
    for pattern in patterns:
        names += _names_at_end(pattern, table_store.sites)
    sites = cast("Sequence[SiteSpec]", table_store.sites)
    what = f"table, {table_store.label}"
    return select_names(names, sites, owner=what, hint="--sites all")


def _names_at_end(pattern: str, sites: Sequence[_TableSite]) -> list[str]:
    """Return the names of the sites that `first` or `last` selects; other patterns unchanged."""
    end = pattern.removeprefix(NOT)
    outputs = [site for site in sites if site.is_block_output]
    if end not in ENDS or not outputs:
        return [pattern]
    # All sites of the block at that end, several where they stand for one block.
    depths = [site.rel_depth for site in outputs]
    end_depth = min(depths) if end == "first" else max(depths)
    blocks = {site.block for site in outputs if site.rel_depth == end_depth}
    negation = NOT if pattern.startswith(NOT) else ""
    return [negation + site.name for site in outputs if site.block in blocks]
