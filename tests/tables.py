"""Tables compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest

from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError


def equal(a: Table, b: Table, *without: str) -> bool:
    """Bit for bit, NaN equal to NaN; but for the columns `without`."""
    return list(a.written.columns) == list(b.written.columns) and all(
        np.array_equal(a[c], b[c], equal_nan=a[c].dtype.kind == "f")
        for c in a.written.columns
        if c not in without
    )


def having(table: Table, **wanted: Any) -> Table:
    """The rows with these cells; "" and None stand for an empty one, a list for any of several."""
    rules = []
    for name, value in wanted.items():
        choices = value if isinstance(value, (list, tuple)) else [value]
        given = [choice for choice in choices if choice not in ("", None)]
        empty = pl.col(name).is_null() if len(given) < len(choices) else False
        rules.append(pl.col(name).is_in(given).fill_null(False) | empty)
    return table.filter(*rules)


def unique(table: Table, name: str) -> list[Any]:
    """The cells of a column, each once, "" for an empty text."""
    return list(dict.fromkeys(table[name].tolist()))


def groups_of(table: Table, name: str) -> list[tuple[Any, Table]]:
    """A column's cells, each with its rows."""
    parts = table.frame.partition_by(name, maintain_order=True)
    return [(own[name][0], table.with_frame(own)) for own in parts]


def check_chosen_metrics(
    run: Callable[..., Table],
    plot: Callable[[Table], Any],
    rows_of: Mapping[str, Sequence[str]],
    name: str,
) -> None:
    """Each metric alone gives its rows (those named) of the whole table and a figure; an unknown
    one is refused in a line that names those of the command.

    Args:
        run: takes `metrics`.
        rows_of: metric -> the metrics of its rows; the first makes the figure, too.
        name: of the command.
    """
    whole = run()
    for number, (metric, own) in enumerate(rows_of.items()):
        table = run(metrics=[metric])
        expected = whole.filter(pl.col("metric").is_in(own))
        assert len(expected) and {*expected["metric"].tolist()} == {*own}
        assert equal(table, expected), metric
        if number == 0:
            assert any(axes.has_data() for axes in plot(table).axes)
    known = f"no metric 'zz'; metrics of {name}: .*{next(iter(rows_of))}"
    with pytest.raises(VitseeError, match=known):
        run(metrics=["zz"])
