"""The rows that stand for a whole table on a card of the report (`at_a_glance` of an analysis)."""

from __future__ import annotations

import numpy as np

from vitsee_core.tables.results import Table
from vitsee_core.types import pl


def select_evenly(table: Table, **limits: int) -> Table:
    """Return the rows of a few values of each of these columns.

    The values are evenly spaced, with the first and the last; a single one is the first. Sites are
    chosen in each store. Rows without a value in a column stay.

        select_evenly(table, store=1, site=3)  # three sites of the first store

    Args:
        table: a table.
        limits: column -> largest number of its values.
    """
    rows = table.frame
    for name, limit in limits.items():
        if name not in rows.columns:
            continue
        frames = [rows]
        if name == "site":  # stores have sites of their own
            frames = rows.partition_by("store", maintain_order=True)
        rows = pl.concat(
            frame.filter(pl.col(name).is_null() | _is_chosen(frame[name], limit))
            for frame in frames
        )
    return table.with_frame(rows)


def most_varied(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the rows of that value of a column (of that image) whose `value` varies most.

    The measure is the standard deviation; of equal ones the first is taken.
    """
    spread = rows.group_by(column, maintain_order=True).agg(pl.col("value").std())
    return rows.filter(pl.col(column) == spread[column][spread["value"].arg_max() or 0])


def _is_chosen(column: pl.Series, limit: int) -> pl.Series:
    """Return which cells have one of `limit` evenly spaced values of the column."""
    values = column.drop_nulls().unique(maintain_order=True)
    n = min(len(values), limit)
    indices = np.linspace(0, len(values) - 1, n).round().astype(int)
    return column.is_in(values[indices.tolist()].implode())
