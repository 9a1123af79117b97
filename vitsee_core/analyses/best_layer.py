"""The best layer of each model for each task, from result files (Walmer et al. 2023, Tables 1, 5).

A task is a metric of the result files: the command that wrote it, the metric, and where the file
has them k, shots, class and (where it compares several) the token that stands for an image and the
l2. For each task and store the row with the largest value is taken; of equal ones the first, which
is the lower layer. Layers are named by their site and counted from 0 as in the results (the
paper's tables count from 1). Choosing the best of many layers on the images that are reported
favours all models alike, but the value is higher than a layer chosen elsewhere would get; no l2 is
chosen so.

The figure shows the curves that were compared. Where a CKA self-comparison is among the files it
also shows the CKA of each layer with the last one beside the tasks' scores: layers that resemble
the last one already know what it knows (Kornblith et al. 2019, their figure of redundant layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.columns import SITE
from vitsee_core.figures.depth_curves import (
    BEST,
    add_curve_legend,
    curve_numbers,
    draw_depth_curves,
    site_kind,
)
from vitsee_core.figures.redundancy import PAIRS, draw_redundancy, to_last
from vitsee_core.plotting import GREY, colour, new_figure, shorten, styled
from vitsee_core.result_files import ResultFile, read_result
from vitsee_core.results import Table
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULT = ("store", "site", "depth", "metric", "value")
SETTINGS = ("k", "shots", "class")  # with the metric they make the task
COLUMNS = (
    *(*SITE, "token", "row", "col", "head", "class"),
    *("task", "k", "shots", "l2", "file"),
    *("metric", "value", "std", "low", "high", "n_images", "n_layers", "baseline"),
)
OPTIONAL = frozenset(
    (
        *("model", "block", "token", "row", "col", "head"),
        *(*SETTINGS, "l2", "std", "low", "high", "n_images"),
    )
)
PLACE = (
    *("depth", "rel_depth", "head", "token", "row", "col", "l2"),
    *("std", "low", "high", "n_images"),
)
MADE = frozenset(("task", "n_layers"))
RULE = (
    "the largest value over sites (and heads, tokens), of equal ones the first; chosen on the "
    "images that are reported"
)
ACROSS = 3


def read(paths: Sequence[str | Path]) -> list[ResultFile]:
    """The result files, in their order.

    Raises:
        VitseeError: a file that is no result with a value a layer and no CKA self-comparison, or
            no result among them.
    """
    files = [read_result(path) for path in paths]
    for i, file in enumerate(files):
        if any(file.path.resolve() == other.path.resolve() for other in files[:i]):
            raise VitseeError(f"{file.path} is given twice; name each result once")
    for file in files:
        if file.has(PAIRS):
            others = {*file.table["store_a"]} ^ {*file.table["store_b"]}
            if others or not any(file.table["store_a"] == file.table["store_b"]):
                raise VitseeError(
                    f"{file.path} compares {', '.join(sorted(others)) or 'stores'} with each "
                    "other; expected a comparison of a store with itself (vitsee cka STORE)"
                )
        elif not file.has(RESULT):
            raise VitseeError(
                f"{file.path} is no result with a value a layer: it has the columns "
                f"{file.describe_columns()}; expected {', '.join(RESULT)} (probe, knn, cluster, "
                f"...) or {', '.join(PAIRS)} (cka)"
            )
    if all(file.has(PAIRS) for file in files):
        raise VitseeError(
            "only CKA results were given; expected at least one with a value a layer (probe, knn, "
            "cluster, ...)"
        )
    return files


def run(files: Sequence[ResultFile], metrics: Sequence[str] = ()) -> Table:
    """One row a task, store and baseline: its best layer.

    Columns: those of `COLUMNS` that the files have; `value`, `std`, `low`, `high` of the chosen
    row, `n_layers` the sites with a value, `baseline` empty in the models' rows. NaN and no site:
    no site has a value.

    Args:
        files: from `read`.
        metrics: only these; by default all, single classes' left out.

    Raises:
        VitseeError: none of the files has such a metric.
    """
    rows = [
        _best(task, part)
        for task, table in tasks(files, metrics).items()
        for _, of_store in table.groups("store")
        for _, part in of_store.groups("baseline")
    ]
    names = [
        name
        for name in COLUMNS
        if name not in OPTIONAL or any(_given(row.get(name)) for row in rows)
    ]
    return Table.from_rows(rows, names, {"rule": RULE, "files": [str(f.path) for f in files]})


def tasks(files: Sequence[ResultFile], metrics: Sequence[str] = ()) -> dict[str, Table]:
    """Task -> its rows in the files' order, with those of `COLUMNS` that stand in files.

    Where two files have the same task for the same store, the later one's is a task of its own.
    """
    results = [file for file in files if not file.has(PAIRS)]
    known = dict.fromkeys(m for file in results for m in file.table.unique("metric"))
    for metric in metrics:
        if metric not in known:
            raise VitseeError(f"no result has the metric {metric!r}; they have {', '.join(known)}")
    parts: dict[str, list[Table]] = {}
    for file in results:
        table = _uniform(file)
        columns = [table[name].tolist() for name in ("metric", *SETTINGS)]
        keys = list(zip(*columns, _poolings(table), _l2s(table), strict=True))
        for key in dict.fromkeys(keys):
            metric, settings = key[0], dict(zip((*SETTINGS, "token", "l2"), key[1:], strict=True))
            if metric not in metrics and (metrics or _given(settings["class"])):
                continue
            given = [f"{name} = {value}" for name, value in settings.items() if _given(value)]
            task = ", ".join([f"{file.command} {metric}".strip(), *given])
            rows = table.take(np.array([other == key for other in keys], bool))
            taken = {store for part in parts.get(task, ()) for store in part.unique("store")}
            if taken & {*rows.unique("store")}:
                task = f"{task} ({file.path})"
            parts.setdefault(task, []).append(rows)
    return {task: Table.concat(some) for task, some in parts.items()}


def _uniform(file: ResultFile) -> Table:
    """A result's rows with all columns that a best row takes over; None where it has none."""
    n, columns = len(file.table), file.table.columns
    empty = {"baseline": np.full(n, "", object), "file": np.full(n, str(file.path), object)}
    nothing = np.full(n, None, object)
    return Table(
        {
            name: empty.get(name, nothing)
            if name not in columns or name == "file"
            else columns[name]
            for name in COLUMNS
            if name not in MADE
        }
    )


def _poolings(table: Table) -> list[str]:
    """What stands for an image in each row (`cls`, `mean`), where the file compares several; ""
    for a patch, which has a row and a column."""
    words = [
        str(token) if _given(token) and not _given(row) else ""
        for token, row in zip(table["token"].tolist(), table["row"].tolist(), strict=True)
    ]
    return words if len({*words} - {""}) > 1 else [""] * len(words)


def _l2s(table: Table) -> list[str]:
    """Each row's l2, where the file reports the same probe at several of them; else ""."""
    names = ("store", "site", "head", "token", "row", "col", "metric", *SETTINGS, "baseline")
    cells = (map(str, table[name].tolist()) for name in names)
    repeated = len({*zip(*cells, strict=True)}) < len(table)
    l2s = table["l2"].tolist()
    return [str(value) if repeated and _given(value) else "" for value in l2s]


def _given(value: Any) -> bool:
    return value is not None and value != "" and value == value


def _best(task: str, rows: Table) -> dict[str, Any]:
    values = rows["value"].astype(float)
    finite = np.isfinite(values)
    place = int(np.argmax(np.where(finite, values, -np.inf)))
    row = {name: column.tolist()[place] for name, column in rows.columns.items()}
    if not finite.any():
        # What is left is who it is.
        row |= dict.fromkeys(PLACE) | {"site": "", "block": "", "value": np.nan}
    return {**row, "task": task, "n_layers": len({*rows["site"][finite].tolist()})}


@styled
def plot(table: Table, files: Sequence[ResultFile], metrics: Sequence[str] = ()) -> Figure:
    """One panel a task: its curves against relative depth, the best layer of each store as a star
    and baselines dashed. One panel a store of a CKA self-comparison: CKA with the last layer beside
    the scores of all tasks. Below, the table itself: tasks by stores.

    Args:
        table: from `run`.
        files: from `read`, what it was made of.
        metrics: as for `run`.
    """
    compared = list(tasks(files, metrics).items())
    redundancy = [part for file in files if file.has(PAIRS) for part in to_last(file.table)]
    everything = Table.concat([_curve(rows) for _, rows in compared])
    n = len(compared) + len(redundancy)
    across = min(n, ACROSS)
    lines = -(-n // across)
    below = 0.2 + 0.26 * (1 + len(compared))
    figure = new_figure(max(4.4 * across, 7.0), 3.3 * lines + below + 0.4)
    grid = figure.add_gridspec(lines + 1, across, height_ratios=[*[3.3] * lines, below])
    panels = [figure.add_subplot(grid[divmod(i, across)]) for i in range(n)]
    for axes, (task, rows) in zip(panels, compared, strict=False):
        draw_depth_curves(axes, _curve(rows), ylabel=rows["metric"][0], among=everything)
        _draw_stars(axes, table.where(task=task, baseline=""), everything)
        axes.set_title(shorten(task, 44))
    for axes, (store, last, rows) in zip(panels[len(compared) :], redundancy, strict=True):
        scores = {task: _curve(of).where(store=store, baseline="") for task, of in compared}
        draw_redundancy(axes, store, last, rows, scores)
    add_curve_legend(figure, panels[: len(compared)])
    _draw_table(figure.add_subplot(grid[lines, :]), table)
    return figure


def _curve(rows: Table) -> Table:
    """One row a store, site and baseline: the best of its heads and tokens."""
    values = rows["value"].astype(float)
    best: dict[Any, int] = {}
    keys = zip(*(rows[n].tolist() for n in ("store", "site", "baseline")), strict=True)
    for i, key in enumerate(keys):
        if key not in best or values[i] > values[best[key]]:
            best[key] = i
    chosen = rows.take(np.array([*best.values()], np.int64))
    depth = chosen["depth"].astype(float)
    top = {
        store: np.nan_to_num(part["depth"].astype(float)).max(initial=1)
        for store, part in chosen.groups("store")
    }
    relative = depth / np.array([top[s] for s in chosen["store"].tolist()])
    columns: dict[str, NDArray[Any]] = {
        name: chosen[name] for name in ("store", "site", "baseline", "value")
    }
    given = chosen["rel_depth"].astype(float)
    columns["rel_depth"] = np.where(np.isfinite(given), given, relative)
    # Best rows have no intervals where no file has any.
    nothing = np.full(len(chosen), np.nan)
    for name in ("low", "high"):
        columns[name] = chosen.columns.get(name, nothing).astype(float)
    return Table(columns)


def _draw_stars(axes: Axes, best: Table, everything: Table) -> None:
    """A star at each store's best layer. everything: what gives the curves their colours."""
    numbers = curve_numbers(everything)
    ticks = dict(
        zip((text.get_text() for text in axes.get_xticklabels()), axes.get_xticks(), strict=True)
    )
    for store, row in best.groups("store"):
        site, value = row["site"][0], row["value"][0]
        if value != value:
            continue
        kind = site_kind(site)
        x = ticks[site] if kind == "head" else _curve(row)["rel_depth"][0]
        style: dict[str, Any] = {
            "color": colour(numbers[store, kind]),
            "linestyle": "none",
            "zorder": 4,
        }
        axes.plot([x], [value], marker="*", markersize=12, markeredgecolor="white", **style)
    axes.plot([], [], marker="*", markersize=9, color=GREY, linestyle="none", label=BEST)


def _draw_table(axes: Axes, table: Table) -> None:
    """Tasks by stores: best value and its layer."""
    axes.set_axis_off()
    real = table.where(baseline="")
    stores = real.unique("store")
    cells = []
    for task, rows in real.groups("task"):
        of: dict[str, Table] = dict(rows.groups("store"))
        best = [f"{of[s]['value'][0]:.3f}  {of[s]['site'][0]}" if s in of else "" for s in stores]
        cells.append([shorten(task, 40), *best])
    drawn = axes.table(
        cells,
        colLabels=["best layer", *(shorten(store, 28) for store in stores)],
        loc="upper center",
        cellLoc="left",
        colLoc="left",
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    for cell in drawn.get_celld().values():
        cell.set(edgecolor=GREY, linewidth=0.5)
