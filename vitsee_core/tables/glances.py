"""The rows that stand for a whole table on a card of the report (`at_a_glance` of an analysis)."""

from __future__ import annotations

import numpy as np

from vitsee_core.tables.results import Table
from vitsee_core.types import pl


def some_of(table: Table, **most: int) -> Table:
    """The rows of so many values of each of these columns: evenly spaced with the first and the
    last, of one the first; sites are chosen in each store. Rows without a value in a column stay.

        some_of(table, store=1, site=3)  # of the first store three sites
    """
    rows = table.frame
    for name, n in most.items():
        if name not in rows.columns:
            continue
        parts = (
            rows.partition_by("store", maintain_order=True) if name == "site" else [rows]
        )
        kept = [
            part.filter(pl.col(name).is_null() | _among(part[name], n)) for part in parts
        ]
        rows = pl.concat(kept)
    return table.with_frame(rows)


def most_varied(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """The rows of the value of a column (an image) that differ most among themselves, by the
    standard deviation of `value`; of equal ones the first."""
    spread = rows.group_by(column, maintain_order=True).agg(pl.col("value").std())
    return rows.filter(pl.col(column) == spread[column][spread["value"].arg_max() or 0])


def _among(column: pl.Series, n: int) -> pl.Series:
    values = column.drop_nulls().unique(maintain_order=True)
    places = np.linspace(0, len(values) - 1, min(len(values), n)).round().astype(int)
    return column.is_in(values[places.tolist()].implode())
