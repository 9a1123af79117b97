"""The columns of result tables: their names, their order, and the site columns.

Every table has its columns in one order, each only if the analysis has it:

1. `SITE`, where the row was measured; a comparison has these twice, `PAIR`;
2. `ABOUT`, what the row is about, then the analysis' own columns (`type`, `shots`, `l2`, `k`, ...);
3. `VALUES`: the metric's name, its value, the spread and what `std` is (`spread`);
   `NULL`, the value under chance;
4. counts (`n_images`, ...), then `baseline`, empty in the rows about the model.

`weights` distinguishes trained, random and ablated stores of one `model`, and clips whose frames
were taken otherwise (see `described_weights`; `weights_labels` for several stores).
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
from vitsee_stores.plan import SiteSpec
from vitsee_stores.weights_names import described_weights

if TYPE_CHECKING:
    from vitsee_stores import Store, TokenLayout

SITE = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
PAIR = tuple(f"{name}_{side}" for side in "ab" for name in SITE)
SITE_NAMES = SITE + PAIR
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
# A row with a value in one of these is about a subset of the images.
SUBSET_COLUMNS = ("group", "query", "video", "object", "segment")
BASELINE = "baseline"
# Of a frame in memory: per row, the list of the value without each block of images.
REPLICATES = "replicates"
# Text that repeats is a category: four bytes a row, grouped without hashing. Other text (names of
# files, reasons) is a plain string.
CATEGORIES = frozenset(
    (
        *(name for name in SITE_NAMES if "depth" not in name),
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
        "metric",
        "spread",
        "window",
        BASELINE,
    )
)
NUMBERS = frozenset(
    (
        *(name for name in SITE_NAMES if "rel_depth" in name),
        "value",
        "std",
        "low",
        "high",
        *NULL,
        "half_a",
        "half_b",
        "norm_from",
        "norm_to",
        "cap",
        "distance_px",
        "frequency",
        "null",
        "uniform",
    )
)
INTEGERS = frozenset(
    (
        *(name for name in SITE_NAMES if name.startswith("depth")),
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
    )
)
# The type of these columns is that of their values: text that does not repeat, and settings that
# are written as the user gave them.
UNTYPED_COLUMNS = frozenset(
    (
        "object",
        "heads",
        "method",
        "base",
        "detail",
        "best",
        "file",
        "ties",
        "column",
        "l2",
        "l2_relative",
        "other_row",
        "other_col",
    )
)
# Columns that are added to any table whose attention has windows, or whose examples are clips.
ADDED_COLUMNS = ("window", "frame")


def has_known_type(name: str) -> bool:
    """Return whether vitsee declares what a column of this name holds."""
    declared = UNTYPED_COLUMNS | CATEGORIES | NUMBERS | INTEGERS
    return name in declared or name.startswith("n_")


def declared_type(name: str) -> pl.DataType | None:
    """Return the polars type of a column by its name; names of counts begin with `n_`.

    None for a column whose type is that of its values, or what a sidecar says: a guest's column, or
    plain text.
    """
    if name in CATEGORIES:
        return pl.Categorical()
    if name in NUMBERS:
        return pl.Float64()
    if name in INTEGERS or name.startswith("n_"):
        return pl.Int64()
    return None


def cast_columns(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with every column as Int64, Float64, String or Categorical.

    NaN and empty text become null: on disk both are an empty cell, so that a table in memory equals
    the one read back.
    """
    casts = []
    for i, column in enumerate(frame.get_columns()):
        casts.append(_cast_column(column, pl.nth(i)))
    # One chunk per column: polars 2.1 fails (`assertion failed: i < self.len()`) where it joins
    # texts of several chunks.
    return frame.with_columns(casts).rechunk()


def _cast_column(column: pl.Series, expression: pl.Expr) -> pl.Series | pl.Expr:
    """Return the column in its declared type, or in the type of its values if none is declared.

    Args:
        column: decides which cast is needed.
        expression: the same column in its frame. Most casts are returned as expressions of it, as
            polars evaluates those of all columns at once.
    """
    dtype = column.dtype
    target = declared_type(column.name)
    if column.name == REPLICATES:
        return expression.cast(pl.List(pl.Float64))
    if dtype in (pl.Object, pl.Boolean):
        cells = build_column(column.name, column.to_list())
        return cast_columns(cells.to_frame()).to_series()
    if dtype == pl.Null:
        return expression if target is None else expression.cast(target)
    if dtype.is_numeric():
        # Numbers in a column of text stay numbers.
        if target is None or not target.is_numeric():
            target = pl.Float64() if dtype.is_float() else pl.Int64()
        if target.is_float():
            return expression.cast(target).fill_nan(None)
        if dtype == target:
            return expression
        return _cast_to_integers(column, target)
    if dtype != pl.Categorical:
        text = expression.cast(pl.String)
        expression = pl.when(text != "").then(text)
    return expression.cast(target) if target == pl.Categorical() else expression


def _cast_to_integers(column: pl.Series, target: pl.DataType) -> pl.Series:
    """Return the numbers as integers, or as they are if one of them does not fit."""
    if column.dtype.is_float():
        column = column.cast(pl.Float64).fill_nan(None)
    integers = column.cast(target, strict=False)  # null where a number is too large
    if integers.null_count() == column.null_count():
        return integers
    return column


def build_column(name: str, values: Any) -> pl.Series:
    """Return a column of integers, floats or, if any value is text, of text.

    Args:
        name: of the column.
        values: an array or a sequence, one value per row; None and NaN are empty cells. For
            `replicates`, one array (blocks,) or None per row.
    """
    if isinstance(values, pl.Series):
        return values.alias(name)
    if name == REPLICATES:
        return _build_replicates(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return pl.Series(name, values)
    cells = values.tolist() if isinstance(values, np.ndarray) else values
    cell_types = {*map(type, cells)} - {type(None)}
    if any(issubclass(cell_type, np.generic) for cell_type in cell_types):
        cells = [cell.item() if isinstance(cell, np.generic) else cell for cell in cells]
        cell_types = {*map(type, cells)} - {type(None)}
    if not cell_types:
        return pl.Series(name, cells, pl.Null)
    if cell_types <= {int, float}:
        dtype = pl.Float64 if float in cell_types else pl.Int64
        # Not strict: ints among floats are converted.
        return pl.Series(name, cells, dtype, strict=False)
    texts = cells
    if cell_types != {str}:
        texts = [str(cell) if has_value(cell) else None for cell in cells]
    try:
        return pl.Series(name, texts, pl.String)
    except UnicodeEncodeError:  # names of files that are not UTF-8
        return pl.Series(name, [text and visible(text) for text in texts], pl.String)


def _build_replicates(values: Any) -> pl.Series:
    """Return the column `replicates`, lists of float64, from (rows, blocks) or a row each."""
    list_type = pl.List(pl.Float64)
    if isinstance(values, np.ndarray):
        return pl.Series(REPLICATES, np.asarray(values, np.float64)).cast(list_type)
    lists = [
        None if replicates is None else np.asarray(replicates, float).tolist()
        for replicates in values
    ]
    return pl.Series(REPLICATES, lists, list_type)


# Parts of a block that name a residual sublayer (`blocks.3.attn`).
SUBLAYERS = ("attn", "mlp", "token", "channel")


class MeasuredSite(Protocol):
    """A site, or a block or sublayer that is measured as a whole: what a row says about it."""

    @property
    def name(self) -> str:
        """The name in rows, `blocks.3.attn.branch`."""
        ...

    @property
    def block(self) -> str | None:
        """The path of its block, `blocks.3`; None or "" outside of blocks."""
        ...

    @property
    def depth(self) -> int:
        """Its index among the model's sites of its kind."""
        ...

    @property
    def rel_depth(self) -> float:
        """That index over the last one's, 0 to 1."""
        ...


@dataclass(frozen=True)
class StoredPart:
    """A block or sublayer that a store measured as a whole."""

    site: str  # its path
    depth: int  # its index in the model
    rel_depth: float  # that index over the last one's
    layout: TokenLayout  # of its tokens

    @property
    def name(self) -> str:
        """The name in rows: the path."""
        return self.site

    @property
    def block(self) -> str:
        """The path of its block; a sublayer counts as a block of its own."""
        return self.site

    def as_site(self, *groups: str) -> SiteSpec:
        """Return it in the form that selectors search, in these groups."""
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


def site_columns(store: Store, site: MeasuredSite, side: str = "") -> dict[str, Any]:
    """Return the cells of `SITE` for a row about a site of a store.

    Args:
        store: names the store, the model and its weights.
        site: names the site, its block and its depth.
        side: "a" or "b" in a comparison of two sites; ends the names of the columns.
    """
    cells = {
        "store": store.label,
        "model": store.manifest.model.get("name", ""),
        "weights": described_weights(store.manifest),
        "site": site.name,
        "block": site.block or "",
        "depth": site.depth,
        "rel_depth": site.rel_depth,
    }
    if not side:
        return cells
    return {f"{name}_{side}": cell for name, cell in cells.items()}


def with_frame_column(
    columns: Sequence[str], layouts: Iterable[TokenLayout | None]
) -> tuple[str, ...]:
    """Return the columns, with `frame` before `row` if any of the layouts is a clip's.

    Args:
        columns: of a table about grid positions; `row` is one of them.
        layouts: the token layouts of the sites in the table.
    """
    if not any(layout is not None and layout.frames is not None for layout in layouts):
        return tuple(columns)
    row_index = columns.index("row")
    return (*columns[:row_index], "frame", *columns[row_index:])


def cell_columns(layout: TokenLayout, cells: Integers) -> dict[str, Integers]:
    """Return the columns `row` and `col` of grid positions, in clips `frame` before them.

    Args:
        layout: its body is the grid, (rows, cols) or (frames, rows, cols).
        cells: (n,) indices into the flattened grid: row by row, in clips frame by frame.
    """
    names = ("frame", "row", "col")[-len(layout.body) :]
    return dict(zip(names, np.unravel_index(cells, layout.body), strict=True))


def pair_columns(
    a: tuple[Store, MeasuredSite], b: tuple[Store, MeasuredSite]
) -> dict[str, Any]:
    """Return the cells of `PAIR` for a row about two sites, each with its store."""
    return site_columns(*a, side="a") | site_columns(*b, side="b")


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Return rows and columns of an attention window from a cell of the column `window`.

    The cell of an image's window is `7 x 7`, that of a clip's `8 x 7 x 7`; an empty one is None.
    """
    if not text:
        return None
    rows, cols = map(int, text.split(" x ")[-2:])
    return rows, cols


def block_of_sublayer(name: str) -> str:
    """Return `blocks.3` for the sublayer `blocks.3.attn`; a sublayer that is a block stays."""
    block, _, part = name.rpartition(".")
    return block if part in SUBLAYERS else name


def has_value(value: Any) -> bool:
    """Return whether a cell has a value: it is not None, "" or NaN."""
    is_nan = value != value  # NaN alone differs from itself
    return value is not None and value != "" and not is_nan
