"""Differences between rows of results, with intervals over the images that they share.

Two layers tested on the same images are right and wrong together, so that the interval of their
difference is narrower than their own intervals suggest. From the replicates r_b (each row's value
without block b of the images, kept by --replicates) of rows x and y over the same m blocks:

    value = x - y,  d_b = r_b(x) - r_b(y),  std = sqrt((m - 1) / m sum_b (d_b - mean d)^2)
    low, high = value -+ q std

(the delete-a-block jackknife, as for the rows themselves; Efron and Tibshirani 1993, chapter 11).
The best of many rows was chosen on these images, and seems better than it is: with Student's
quantile for q, of 13 layers that are equally good some is found worse than the best in 70 % of
the samples. So q is that of `jackknife.largest_t`, for all pairs of the rows it was chosen from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from vitsee_core.analyses.best_layer.layer_tasks import PENALTIES
from vitsee_core.statistics.jackknife import SIMULTANEOUS, largest_t, standard_error
from vitsee_core.tables.columns import PAIR, SITE, VALUES
from vitsee_core.tables.replicates import array_of
from vitsee_core.tables.results import ResultFile, read_replicates
from vitsee_stores.errors import StoreMismatch, VitseeError

PLACE = ("token", "row", "col", "head")
COLUMNS = (
    *PAIR,
    *(f"{name}_{side}" for side in "ab" for name in PLACE),
    *("task", "k", "shots", *PENALTIES, "class", *VALUES, "n_images", "n_blocks"),
)
METHOD = (
    "value: row a less row b; std: standard error of a delete-a-block jackknife over the blocks of "
    f"images that both rows share; {SIMULTANEOUS}"
)


def with_replicates(files: Sequence[ResultFile]) -> list[ResultFile]:
    """The results with their replicates in their tables.

    Raises:
        VitseeError: one has none beside it, or does not say over which blocks.
    """
    found = []
    for file in files:
        table = read_replicates(file)
        if not isinstance(table.notes.get("replicates"), dict):
            raise VitseeError(
                f"{file.path} does not say over which images its replicates are; expected the "
                f"sidecar {file.path.name}.json of knn, probe, retrieve or saliency beside it"
            )
        found.append(replace(file, table=table))
    return found


def differences(
    a: tuple[pl.DataFrame, int],
    others: Sequence[tuple[pl.DataFrame, int]],
    among: Sequence[pl.DataFrame],
    task: str,
    notes: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Rows about the differences of one row to others: a frame with replicates, and which of its
    rows. among: all rows of which they were chosen; notes: of each file's table.

    Raises:
        StoreMismatch: they are of other images, or of other blocks of them.
    """
    rows = [_difference(a, b, task, notes) for b in others]
    if rows:
        m = min(row["n_blocks"] for row in rows)
        found = [array_of(of) for of in among]
        chosen_from = [each[:, :m] for each in found if each is not None]
        reach = largest_t(np.concatenate(chosen_from)) if m > 1 else np.nan
        for row in rows:
            row["low"], row["high"] = (row["value"] + sign * reach * row["std"] for sign in (-1, 1))
    return rows


def _difference(
    a: tuple[pl.DataFrame, int], b: tuple[pl.DataFrame, int], task: str, notes: Mapping[str, Any]
) -> dict[str, Any]:
    (of_a, i), (of_b, j) = a, b
    first, second = of_a.row(i, named=True), of_b.row(j, named=True)
    blocks = [_blocks(notes[row["file"]], row["store"]) for row in (first, second)]
    if blocks[0]["digest"] != blocks[1]["digest"]:
        raise StoreMismatch(
            f"{first['store']} ({first['file']}) and {second['store']} ({second['file']}) were not "
            "tested on the same images in the same order; extract and test them on the same data, "
            "with the same --images and --seed"
        )
    m = int(blocks[0]["n_blocks"])
    value = float(of_a["value"].to_numpy()[i] - of_b["value"].to_numpy()[j])
    without = [array_of(of) for of in (of_a, of_b)]
    assert without[0] is not None and without[1] is not None
    std = float(standard_error(without[0][i, :m] - without[1][j, :m]))
    row: dict[str, Any] = {}
    for side, cells in (("a", first), ("b", second)):
        row |= {f"{name}_{side}": cells[name] for name in (*SITE, *PLACE)}
    names = ("k", "shots", *PENALTIES, "class", "metric", "n_images")
    settings = {name: first[name] for name in names}
    numbers = {"value": value, "std": std}
    return row | settings | numbers | {"task": task, "spread": "jackknife", "n_blocks": m}


def _blocks(notes: Mapping[str, Any], store: str) -> Mapping[str, Any]:
    """The sidecar's record of the blocks of a store's images. Raises VitseeError: it has none."""
    found = notes["replicates"].get(store)
    if not isinstance(found, dict) or not {"digest", "n_blocks"} <= {*found}:
        raise VitseeError(f"the sidecar does not say over which images {store} was tested")
    return found
