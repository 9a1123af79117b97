"""Every figure shows its table: a value that changes moves its own mark, and that alone.

A figure may be drawn from the right rows and still show them at wrong places: a heat map that is
transposed, a curve in the order of names, a map turned. Here single values of a table are changed,
and what moved is read back from the artists of the figure that is drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tests.every_command import TABLES, vitsee
from vitsee_core.tables.results import Table

Row = dict[str, Any]
ROWS_PER_METRIC = 1  # whose marks are looked at
TRIES_PER_METRIC = 3  # rows that are changed: a figure need not draw all of a metric
DODGE = 0.02  # curves of several models lie beside each other by less than this share of the depth
# Drawn from more than their table, or not from its values.
ELSEWHERE = {
    "best-layer": "needs the results that it compared: tests/test_best_layer.py",
    "cka-heads": "values by attention distance: tests/test_cka_heads.py",
    "concepts": "cuts of photographs: tests/test_concepts.py",
    "localize": "curves of maxima over maps: tests/test_localize.py",
    "head-types": "types in words, decided by thresholds: tests/test_head_types.py",
    "pca": "three components are one colour: tests/test_pca.py",
}
# Metrics from which a figure calculates the places of lines.
DERIVED_LINES = {
    ("attn-dist", "distance_relative"),  # the uniform line is a distance over it
    ("erf", "gradient"),  # the centre of the map is marked on it
}
# Curves of running sums: a part moves every point behind it.
CUMULATIVE = {"logit-attribution"}
# Kinds of figures that a fast test draws: a heat map, and curves by depth. The others are slow.
FAST = {("cka", 1), ("attn-dist", 0)}


class Move(NamedTuple):
    """A number of an artist that changed.

    Attributes:
        kind: "cell" of an image, "line along x", "line along y", "scatter along x" or
            "scatter along y".
        place: (i, j) of a cell; of a line's or a scatter's point, the coordinate that is not moved.
        before: the number that was drawn.
        after: the number that is drawn now.
        shape: of the artist's numbers.
    """

    kind: str
    place: tuple[float, ...]
    before: float
    after: float
    shape: tuple[int, ...]


def drawn(figure: Figure) -> dict[tuple[int, str, int], NDArray[Any]]:
    """Artist (axes, kind, number) -> its numbers: (x and y, points) or an image's cells."""
    numbers: dict[tuple[int, str, int], NDArray[Any]] = {}
    for a, axes in enumerate(figure.axes):
        for k, line in enumerate(axes.lines):
            xy = [np.asarray(data) for data in (line.get_xdata(), line.get_ydata())]
            if all(data.dtype.kind in "fiu" for data in xy):
                numbers[a, "line", k] = np.asarray(xy, float)
        for k, image in enumerate(axes.images):
            cells: NDArray[Any] = np.ma.filled(
                np.ma.asarray(image.get_array(), float), np.nan
            )
            numbers[a, "cells", k] = cells
        for k, collection in enumerate(axes.collections):
            if isinstance(collection, PathCollection):
                offsets: NDArray[Any] = np.ma.filled(
                    np.ma.asarray(collection.get_offsets(), float), np.nan
                )
                numbers[a, "scatter", k] = offsets.T
    return numbers


def moves(
    before: dict[tuple[int, str, int], NDArray[Any]],
    after: dict[tuple[int, str, int], NDArray[Any]],
) -> Iterator[Move]:
    """Each number that differs between two drawings of a figure."""
    assert before.keys() == after.keys()
    for (axes, kind, k), old in before.items():
        new = after[axes, kind, k]
        assert old.shape == new.shape
        differs = ~((old == new) | (np.isnan(old) & np.isnan(new)))
        for index in np.argwhere(differs).tolist():
            place = tuple(index)
            values = float(old[place]), float(new[place])
            if kind == "cells":
                yield Move("cell", place[:2], *values, old.shape)
            else:
                moved = "along y" if place[0] == 1 else "along x"
                across = float(old[1 - place[0], place[1]])
                yield Move(f"{kind} {moved}", (across,), *values, old.shape)


def allowed_x(row: Row, table: Table) -> list[float]:
    """Where a row's mark may stand along x: at its depth, or at its number of something."""
    columns = ("rel_depth", "depth", "head", "component", "k", "rank", "frequency")
    places = [float(row[name]) for name in columns if row.get(name) is not None]
    if "site" in row:
        # Along the parts that have the metric, in their order.
        sites = list(dict.fromkeys(table.filter(metric=row["metric"])["site"]))
        places.append(float(sites.index(row["site"])))
    return places


def partners(row: Row, table: Table) -> list[float]:
    """The other values about a row's site and head: what a scatter has along its other axis."""
    suffix = "_a" if "site_a" in row else ""
    names = [f"store{suffix}", f"site{suffix}", "head"]
    about = {name: row[name] for name in names if row.get(name) is not None}
    values = table.filter(**about)["value"].astype(float)
    return values[np.isfinite(values)].tolist()


def allowed_cells(row: Row, table: Table, shape: tuple[int, ...]) -> set[tuple[int, int]]:
    """The cells (i, j) of an image that a row may colour."""
    n_rows, n_cols = shape[:2]
    if "site_a" in row:
        # A heat map of sites: those of the first store downwards, those of the second to the right.
        i = list(dict.fromkeys(table["site_a"])).index(row["site_a"])
        j = list(dict.fromkeys(table["site_b"])).index(row["site_b"])
        return {(i, j)}
    if row.get("other_row") is not None:
        # A map of all positions within the tile of one.
        height = int(np.nanmax(np.asarray(table["other_row"], float))) + 1
        width = int(np.nanmax(np.asarray(table["other_col"], float))) + 1
        i = row["row"] * (height + 1) + row["other_row"]
        j = row["col"] * (width + 1) + row["other_col"]
        return {(i, j)}
    if row.get("row") is not None:
        site_table = table.filter(store=row["store"], site=row["site"])
        rows = np.asarray([v for v in site_table["row"] if v is not None], float)
        cols = np.asarray([v for v in site_table["col"] if v is not None], float)
        height = int(np.nanmax(rows) - np.nanmin(rows)) + 1
        width = int(np.nanmax(cols) - np.nanmin(cols)) + 1
        i = int(row["row"] - np.nanmin(rows))
        j = int(row["col"] - np.nanmin(cols))
        # One column of tokens in reading order, or maps in tiles with a gap of one cell.
        if n_cols == 1:
            return {(i * width + j, 0)}
        tiles_down = range(0, n_rows, height + 1)
        tiles_right = range(0, n_cols, width + 1)
        return {(top + i, left + j) for top in tiles_down for left in tiles_right}
    if row.get("head") is not None and row.get("depth") is not None:
        return {(int(row["depth"]), int(row["head"]))}
    return set()


def figures() -> Iterator[Any]:
    """Command, number of its figure in `TABLES`."""
    for command, runs in TABLES.items():
        if command in ELSEWHERE:
            continue
        for run in range(len(runs)):
            marks = [] if (command, run) in FAST else [pytest.mark.slow]
            yield pytest.param(command, run, marks=marks, id=f"{command}-{run}")


@pytest.mark.parametrize(("command", "run"), figures())
def test_a_changed_value_moves_its_mark(
    command: str,
    run: int,
    everything: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(everything)
    vitsee(command, *TABLES[command][run], "-o", tmp_path / "r.csv")
    table = Table.read(tmp_path / "r.csv")
    before = drawn(table.plot())
    values = table["value"].astype(float)
    rng = np.random.default_rng(0)
    n_shown = 0
    for metric in dict.fromkeys(table["metric"]):
        candidates = np.flatnonzero((table["metric"] == metric) & np.isfinite(values))
        n_of_metric = 0
        n_tries = TRIES_PER_METRIC if n_shown else 4 * TRIES_PER_METRIC
        for index in rng.permutation(candidates)[:n_tries]:
            step = small_step(values[index], values[candidates])
            # Shares that are all 0 have no panel.
            if step == 0:
                continue
            changed = values.copy()
            changed[index] += step
            column = pl.Series("value", changed)
            again = drawn(table.with_frame(table.frame.with_columns(column)).plot())
            row = table.frame.row(int(index), named=True)
            moved = list(moves(before, again))
            for move in moved:
                if (command, metric) in DERIVED_LINES and move.kind != "cell":
                    continue
                check(move, row, table, step=step, is_sum=command in CUMULATIVE)
            n_of_metric += bool(moved)
            if n_of_metric == ROWS_PER_METRIC:
                break
        n_shown += n_of_metric
    assert n_shown, f"none of the metrics of {command} is drawn"


def small_step(value: float, others: NDArray[Any]) -> float:
    """A step towards the middle that passes no other value: orders and ranges stay.

    Of equal values a small one; 0 if all are 0.
    """
    gaps = np.abs(others - value)
    gaps = gaps[gaps > 0]
    if not len(gaps):
        return 1e-3 * abs(value)
    return float(np.copysign(gaps.min() / 2, np.median(others) - value))


def check(move: Move, row: Row, table: Table, *, step: float, is_sum: bool) -> None:
    """Check that what moved is the mark of a row whose value changed by a step."""
    if move.kind == "cell":
        assert move.place in allowed_cells(row, table, move.shape), (row, move)
        return
    places = allowed_x(row, table)
    if move.kind.startswith("scatter"):
        places += partners(row, table)
    if is_sum:
        places += np.arange(places[-1], move.shape[1]).tolist()
    # Of dots beside each other's names nothing along the other axis is in the table.
    if move.kind != "line along x":
        distances = [abs(move.place[0] - place) for place in places]
        assert min(distances) < DODGE, (row, move)
    # The value itself, or a mean of which it is one.
    share = (move.after - move.before) / step
    assert 0 < share < 1 + 1e-3, (row, move)


def test_exceptions_name_tests_that_are_there() -> None:
    for reason in ELSEWHERE.values():
        assert Path(__file__).parents[1].joinpath(reason.split(": ")[1]).exists()
