"""The columns of result tables: their names, their order, and the site columns.

Every table has its columns in one order, each only if the analysis has it:

1. `SITE`, where the row was measured; a comparison has these twice, `PAIR`;
2. `ABOUT`, what the row is about, then the analysis' own columns (`type`, `shots`, `l2`, `k`, ...);
3. `VALUES`: the metric's name, its value, the spread and what `std` is (`spread`);
   `NULL`, the value under chance;
4. counts (`n_images`, ...), then `baseline`, empty in the rows about the model.

`weights` distinguishes trained, random and ablated stores of one `model`, and clips whose frames
were taken otherwise (see `described_weights`).
`block` is the path of the site's block (`blocks.3`, `layer1.0`), empty outside of blocks, so that
the tables of different analyses join on store and block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vitsee_core.tables.text import visible
from vitsee_core.types import Integers, pl
from vitsee_stores.manifest import described_weights
from vitsee_stores.plan import SiteSpec

if TYPE_CHECKING:
    from vitsee_stores import Store, TokenLayout

SITE = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
PAIR = tuple(f"{name}_{side}" for side in "ab" for name in SITE)
ABOUT = (
    "token",
    "frame",
    "row",
    "col",
    "head",
    "class",
    "query",
    "video",
    "object",
    "segment",
)
VALUES = ("metric", "value", "std", "low", "high", "spread")
NULL = ("null_mean", "tau", "p", "p_family", "calibrated")
# Columns whose rows are about part of the images.
PARTS = ("group", "query", "video", "object", "segment")
BASELINE = "baseline"
REPLICATES = (
    "replicates"  # of a frame in memory: list of the value without each block of images
)
# What each column of the tables holds. Text that repeats is a category: four bytes a row, grouped
# without hashing; other text (names of files, reasons) is plain.
CATEGORIES = frozenset(
    (
        *(name for name in (*SITE, *PAIR) if "depth" not in name),
        *(
            "token",
            "at",
            "class",
            "query",
            "video",
            "image",
            "group",
            "part",
            "type",
            "time",
            "task",
        ),
        *("metric", "spread", "window", BASELINE),
    )
)
NUMBERS = frozenset(
    (
        *(name for name in (*SITE, *PAIR) if "rel_depth" in name),
        *(*VALUES[1:5], *NULL, "half_a", "half_b", "norm_from", "norm_to"),
        *("cap", "distance_px", "frequency", "null", "uniform"),
    )
)
INTEGERS = frozenset(
    (
        *(name for name in (*SITE, *PAIR) if name.startswith("depth")),
        *(
            "frame",
            "row",
            "col",
            "head",
            "channel",
            "component",
            "concept",
            "filter",
            "k",
            "shots",
        ),
    )
)


# Columns whose type is that of their values: text that does not repeat, and settings that are
# written as they were given.
AS_GIVEN = frozenset(
    (
        *(
            "object",
            "heads",
            "method",
            "base",
            "detail",
            "best",
            "file",
            "ties",
            "column",
        ),
        *("l2", "l2_relative", "other_row", "other_col"),
    )
)


# Columns that are added to any table whose attention has windows, or whose examples are clips.
ADDED = ("window", "frame")


def is_known(name: str) -> bool:
    """Whether the name is that of a column of vitsee's tables."""
    known = AS_GIVEN | CATEGORIES | NUMBERS | INTEGERS
    return name in known or name.startswith("n_")


def declared_type(name: str) -> pl.DataType | None:
    """The type of a column, by its name; counts are called `n_...`. None of another column (of a
    guest's table, or plain text), whose type is that of its values, or what a sidecar says."""
    if name in CATEGORIES:
        return pl.Categorical()
    if name in NUMBERS:
        return pl.Float64()
    if name in INTEGERS or name.startswith("n_"):
        return pl.Int64()
    return None


def typed(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with columns of Int64, Float64, String or Categorical. NaN and empty text become
    null: one rule of what is no value, as both are an empty cell on disk. Each column is one
    chunk: polars 2.1 fails (`assertion failed: i < self.len()`) where it joins texts of several."""
    columns = enumerate(frame.get_columns())
    return frame.with_columns(
        [_typed(column, pl.nth(i)) for i, column in columns]
    ).rechunk()


def _typed(column: pl.Series, own: pl.Expr) -> pl.Series | pl.Expr:
    """The column as its type; where possible as an expression of what it is in its frame, which
    evaluates those of all columns at once."""
    kind = column.dtype
    wanted = declared_type(column.name)
    if column.name == REPLICATES:
        return own.cast(pl.List(pl.Float64))
    if kind in (pl.Object, pl.Boolean):
        cells = column_of(column.name, column.to_list())
        return typed(cells.to_frame()).to_series()
    if kind == pl.Null:
        return own if wanted is None else own.cast(wanted)
    if kind.is_numeric():
        if wanted is None or not wanted.is_numeric():
            wanted = pl.Float64() if kind.is_float() else pl.Int64()
        if wanted.is_float():
            return own.cast(wanted).fill_nan(None)
        if kind != wanted:
            if kind.is_float():
                column = column.cast(pl.Float64).fill_nan(None)
            found = column.cast(
                wanted, strict=False
            )  # which leaves out what is too large for it
            if found.null_count() == column.null_count():
                return found
            return column
        return own
    if kind != pl.Categorical:
        own = own.cast(pl.String)
        own = pl.when(own != "").then(own)
    return own.cast(wanted) if wanted == pl.Categorical() else own


def column_of(name: str, values: Any) -> pl.Series:
    """A column of an array or a sequence: integers, floats or, where there is any text, text; None
    and NaN are null. `replicates`: an array (blocks,) or None per row."""
    if isinstance(values, pl.Series):
        return values.alias(name)
    if name == REPLICATES:
        if isinstance(values, np.ndarray):
            return pl.Series(name, np.asarray(values, np.float64)).cast(
                pl.List(pl.Float64)
            )
        each = [
            None if own is None else np.asarray(own, float).tolist() for own in values
        ]
        return pl.Series(name, each, pl.List(pl.Float64))
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return pl.Series(name, values)
    cells = values.tolist() if isinstance(values, np.ndarray) else values
    kinds = {*map(type, cells)} - {type(None)}
    if any(issubclass(kind, np.generic) for kind in kinds):
        cells = [cell.item() if isinstance(cell, np.generic) else cell for cell in cells]
        kinds = {*map(type, cells)} - {type(None)}
    if not kinds:
        return pl.Series(name, cells, pl.Null)
    if kinds <= {int, float}:
        return pl.Series(
            name, cells, pl.Float64 if float in kinds else pl.Int64, strict=False
        )
    texts = cells if kinds == {str} else [str(x) if is_given(x) else None for x in cells]
    try:
        return pl.Series(name, texts, pl.String)
    except UnicodeEncodeError:  # names of files that are no UTF-8
        return pl.Series(name, [text and visible(text) for text in texts], pl.String)


# Parts of a block that name a residual sublayer (`blocks.3.attn`).
SUBLAYERS = ("attn", "mlp", "token", "channel")


class Measured(Protocol):
    """A site, or a block or sublayer that is measured as a whole, with its name in rows, the
    path of its block, and its index among those of its kind, also over the last one's."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> str | None: ...
    @property
    def depth(self) -> int: ...
    @property
    def rel_depth(self) -> float: ...


@dataclass(frozen=True)
class StoredPart:
    """A block or sublayer that a store measured as a whole."""

    site: str  # its path
    depth: int  # its index in the model
    rel_depth: float  # that index over the last one's
    layout: TokenLayout  # of its tokens

    @property
    def name(self) -> str:
        return self.site

    @property
    def block(self) -> str:
        return self.site

    def as_site(self, *groups: str) -> SiteSpec:
        """The site in the form that selectors search, in these groups."""
        return SiteSpec(
            name=self.site,
            part="",
            block=self.block,
            groups=groups,
            kind="raw",
            dim=0,
            shape=(),
            layout=self.layout,
            depth=self.depth,
            rel_depth=self.rel_depth,
        )


def site_columns(store: Store, site: Measured, side: str = "") -> dict[str, Any]:
    """The cells of `SITE` for a row about a site of a store; side: "a" or "b" of a comparison."""
    model = store.manifest.model
    cells = (
        *(store.label, model.get("name", ""), described_weights(store.manifest)),
        *(site.name, site.block or "", site.depth, site.rel_depth),
    )
    end = f"_{side}" if side else ""
    return {f"{name}{end}": cell for name, cell in zip(SITE, cells, strict=True)}


def in_time(
    columns: Sequence[str], layouts: Iterable[TokenLayout | None]
) -> tuple[str, ...]:
    """The columns of a table about cells, with `frame` (the cell's place in time) before `row`
    where any of the layouts is a clip's."""
    if not any(layout is not None and layout.frames is not None for layout in layouts):
        return tuple(columns)
    at = columns.index("row")
    return (*columns[:at], "frame", *columns[at:])


def cell_columns(layout: TokenLayout, cells: Integers) -> dict[str, Integers]:
    """The columns `row` and `col`, of clips `frame` before them, of a grid's cells. cells: (n,)
    counted row by row, of clips frame by frame."""
    names = ("frame", "row", "col")[-len(layout.body) :]
    return dict(zip(names, np.unravel_index(cells, layout.body), strict=True))


def pair_columns(a: tuple[Store, Measured], b: tuple[Store, Measured]) -> dict[str, Any]:
    """The cells of `PAIR` for a row about two sites."""
    return site_columns(*a, "a") | site_columns(*b, "b")


def window_of(text: str | None) -> tuple[int, int] | None:
    """The rows and columns of the window that a cell of the column `window` names."""
    if not text:
        return None
    rows, cols = map(int, text.split(" x ")[-2:])
    return rows, cols


def block_of_sublayer(name: str) -> str:
    """`blocks.3` for the sublayer `blocks.3.attn`; a sublayer that is a whole block is its own."""
    block, _, part = name.rpartition(".")
    return block if part in SUBLAYERS else name


def is_given(value: Any) -> bool:
    """Whether a cell has a value, in memory or read from a CSV."""
    return value is not None and value != "" and value == value
