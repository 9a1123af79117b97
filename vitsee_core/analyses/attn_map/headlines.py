"""Headlines of tables of attention maps and of numbers per head."""

from __future__ import annotations

import numpy as np
import polars as pl

from vitsee_core.tables.headlines import Answer, by_store, extremes, measured, number, picked
from vitsee_core.tables.results import Table


def headline(table: Table) -> list[Answer]:
    """The strongest sink; or the share of attention to the middle of the image, or to prefix
    tokens."""
    found: list[Answer] = []
    for store, rows in by_store(table, metric="sink_max"):
        i = extremes(rows)[1]
        head = f"head {rows['head'][i]} of {rows['site'][i]}"
        text = f"the strongest key draws {measured(rows, i)} times an even share ({head})"
        found.append((store, text))
    for metric in ("mean_cls", "mean_spatial"):
        for store, rows in by_store(table, metric=metric, image=None):
            found.append((store, _middle(rows)))
    of_heads = {"prefix_mass": "of attention goes to prefix tokens", "entropy": "nats"}
    for metric, unit in of_heads.items():
        for store, rows in by_store(table, metric=metric, image=None, query=None):
            ends = dict.fromkeys((str(rows["site"][0]), str(rows["site"][-1])))
            means = [picked(rows, site=site)["value"].to_numpy().mean() for site in ends]
            said = [f"{number(m)} at {site}" for m, site in zip(means, ends, strict=True)]
            found.append((store, f"{', '.join(said)} {unit}, mean over heads"))
    return found


def _middle(rows: pl.DataFrame) -> str:
    """The share of attention to patches that the middle half of rows and columns gets in the last
    block, mean over heads."""
    rows = picked(rows, site=str(rows["site"][-1]))
    inside = np.ones(len(rows), bool)
    for name in ("row", "col"):
        cells = rows[name].to_numpy()
        size = cells.max() + 1
        inside &= (cells >= size / 4) & (cells + 1 <= size - size / 4)
    values = rows["value"].to_numpy()
    share, even = values[inside].sum() / values.sum(), inside.mean()
    return (
        f"in {rows['site'][0]} the middle of the grid gets {number(float(share))} of the attention "
        f"to patches, by its size {number(float(even))}"
    )
