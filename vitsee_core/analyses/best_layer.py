"""The best layer of each model for each task, from result files (Walmer et al. 2023, Tables 1, 5).

A task is a metric of the result files: the command that wrote it, the metric, and where the file
has them k, shots, class and (where it compares several) the token that stands for an image and the
l2. For each task and store the best row is taken: the one with the largest value, or the smallest
where lower is better (`metrics.direction`); metrics without a direction are left out. Of equal rows
the first is taken, which is the lower layer; the others are named, and so is the number of layers
whose interval overlaps the best one's. Layers are named by their site and counted from 0 as in the
results (the paper's tables count from 1). Choosing the best of many layers on the images that are
reported favours all models alike, but the value is higher than a layer chosen elsewhere would get;
no l2 is chosen so. Rows about one query, video, object, segment or group of images are not scores
of a layer and are left out, as are those of each image's best head.

The figure shows the curves that were compared. Where a CKA self-comparison is among the files it
also shows the CKA of each layer with the last one beside the tasks' scores: layers that resemble
the last one may be redundant (Kornblith et al. 2019, their figure of redundant layers).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.columns import SITE
from vitsee_core.figures.best_layers import draw_best_layers
from vitsee_core.figures.redundancy import PAIRS, to_last
from vitsee_core.metrics import direction
from vitsee_core.paired import COLUMNS as PAIRED
from vitsee_core.paired import METHOD, difference, with_replicates
from vitsee_core.plotting import styled
from vitsee_core.results import ResultFile, Table, read_result
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

NEEDS: tuple[str, ...] | None = None  # works on tables

RESULT = ("store", "site", "depth", "metric", "value")
SETTINGS = ("k", "shots", "class")  # with the metric they make the task
COLUMNS = (
    *(*SITE, "token", "row", "col", "head", "class"),
    *("task", "k", "shots", "l2", "ties", "file"),
    *("metric", "value", "std", "low", "high", "n_images", "n_layers", "n_overlap", "baseline"),
)
OPTIONAL = frozenset(
    (
        *("model", "block", "token", "row", "col", "head"),
        *(*SETTINGS, "l2", "ties", "std", "low", "high", "n_images", "n_overlap"),
    )
)
AMONG = ("layers", "models")
PLACE = (
    *("depth", "rel_depth", "head", "token", "row", "col", "l2"),
    *("std", "low", "high", "n_images"),
)
MADE = frozenset(("task", "ties", "n_layers", "n_overlap"))
# Columns whose rows are about a part of the images.
PARTS = ("group", "query", "video", "object", "segment")
RULE = (
    "the largest value (the smallest where lower is better) over sites (and heads, tokens), of "
    "equal ones the first; chosen on the images that are reported"
)


def read(paths: Sequence[str | Path]) -> list[ResultFile]:
    """The result files, in their order.

    Raises:
        VitseeError: a file that is neither a result with one value per layer nor a CKA
            self-comparison, or no result among them.
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
                f"{file.path} is not a result with one value per layer: it has the columns "
                f"{file.describe_columns()}; expected {', '.join(RESULT)} (probe, knn, cluster, "
                f"...) or {', '.join(PAIRS)} (cka)"
            )
    if all(file.has(PAIRS) for file in files):
        raise VitseeError(
            "only CKA results were given; expected at least one with one value per layer "
            "(probe, knn, cluster, ...)"
        )
    return files


def _opened(files: str | Path | Sequence[ResultFile | str | Path]) -> list[ResultFile]:
    """The result files; paths are read."""
    given = [files] if isinstance(files, str | Path) else files
    paths = [file for file in given if isinstance(file, str | Path)]
    if not paths:
        return [file for file in given if isinstance(file, ResultFile)]
    return read([file if isinstance(file, str | Path) else file.path for file in given])


def run(
    files: str | Path | Sequence[ResultFile | str | Path], metrics: Sequence[str] = ()
) -> Table:
    """One row per task, store and baseline: its best layer.

    Columns: those of `COLUMNS` that the files have; `value`, `std`, `low`, `high` of the chosen
    row, `n_layers` the sites with a value, `ties` the others with the same value, `n_overlap` how
    many other sites have an interval that overlaps the best one's, `baseline` empty in the models'
    rows. NaN and no site: no site has a value.

    Args:
        files: results that other analyses wrote, by path or from `read`.
        metrics: only these; by default all that have a direction, except those of single classes.

    Raises:
        VitseeError: a file is no such result, none of them has such a metric, or the metric has no
            direction.
    """
    files = _opened(files)
    remarks = []
    found = tasks(files, metrics)
    if not metrics and (others := [m for m in _known(files) if direction(m) == "none"]):
        remarks.append(f"left out, as neither side is better: {', '.join(others)}")
    rows = []
    for task, table in found.items():
        for store, of_store in table.groups("store"):
            for baseline, part in of_store.groups("baseline"):
                row = _best(task, part)
                rows.append(row)
                if not _given(baseline):
                    remarks += [f"{task}, {store}: {said}" for said in _remarks(row, part)]
    for remark in remarks:
        log.info("%s", remark)
    names = [
        name
        for name in COLUMNS
        if name not in OPTIONAL or any(_given(row.get(name)) for row in rows)
    ]
    notes = {"rule": RULE, "remarks": remarks, "files": [str(f.path) for f in files]}
    return Table.from_rows(rows, names, notes)


def compare(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), among: str = "layers"
) -> Table:
    """One row a difference: the best row of each store less that of each of its other layers, or
    less the best rows of the stores after it; with intervals over the images that both share.

    Columns: those of `paired.COLUMNS` that the files have; `value`, in the metric's unit, is above
    0 where row a has the larger value. NaN (`std`, `low`, `high`): a row without replicates.

    Args:
        files: from `read`, with their replicates beside them.
        metrics: as for `run`.
        among: "layers" or "models".

    Raises:
        StoreMismatch: stores that were not tested on the same images.
        VitseeError: as `run`; no replicates; one layer or one store only.
    """
    if among not in AMONG:
        raise VitseeError(f"no comparison of {among!r}; expected {' or '.join(AMONG)}")
    scored = with_replicates([file for file in files if not file.has(PAIRS)])
    notes = {str(file.path): file.table.notes for file in scored}
    rows = []
    for task, table in tasks(scored, metrics).items():
        table = table.take(np.array([not _given(b) for b in table["baseline"].tolist()], bool))
        stores = [(of, _best_place(of)) for _, of in table.groups("store")]
        for number, (of_store, best) in enumerate(stores):
            others = stores[number + 1 :]
            if among == "layers":
                sites = [
                    of for name, of in of_store.groups("site") if name != _site(of_store, best)
                ]
                others = [(of, _best_place(of)) for of in sites]
            rows += [difference((of_store, best), other, task, notes) for other in others]
    if not rows:
        raise VitseeError(
            f"there is nothing to compare: the results are of one {among.removesuffix('s')} only"
        )
    names = [
        name
        for name in PAIRED
        if name.removesuffix("_a").removesuffix("_b") not in OPTIONAL
        or any(_given(row.get(name)) for row in rows)
    ]
    return Table.from_rows(rows, names, {"interval": METHOD, "files": [*notes]})


def _site(table: Table, row: int) -> str:
    return str(table["site"][row])


def _known(files: Sequence[ResultFile]) -> list[str]:
    """The metrics of the files."""
    results = [file.table for file in files if not file.has(PAIRS)]
    return list(dict.fromkeys(metric for table in results for metric in table.unique("metric")))


def _remarks(row: dict[str, Any], rows: Table) -> Iterator[str]:
    """What to say of one store's best layer."""
    missing = int((~np.isfinite(rows["value"].astype(float))).sum())
    if missing:
        yield f"{missing} of {len(rows)} rows have no value"
    if _given(row["ties"]):
        yield f"{_place(row)} is the first of equal ones: {row['ties']}"
    if row["n_overlap"]:
        yield (
            f"the intervals of {row['n_overlap']} of the other {row['n_layers'] - 1} layers "
            f"overlap that of {row['site']}"
        )


def tasks(files: Sequence[ResultFile], metrics: Sequence[str] = ()) -> dict[str, Table]:
    """Task -> its rows in the files' order, with those of `COLUMNS` that stand in files.

    Where two files have the same task for the same store, the later one's is a task of its own.
    """
    known = _known(files)
    for metric in metrics:
        if metric not in known:
            raise VitseeError(f"no result has the metric {metric!r}; they have {', '.join(known)}")
        if direction(metric) == "none":
            raise VitseeError(
                f"no layer is the best by {metric}: neither a higher nor a lower value is better"
            )
    if not any(direction(metric) != "none" for metric in known):
        raise VitseeError(
            "no result has a metric of which one side is better (accuracies, purity, iou, ...); "
            f"they have {', '.join(known)}"
        )
    parts: dict[str, list[Table]] = {}
    for file in files:
        if file.has(PAIRS):
            continue
        table = _uniform(file)
        columns = [table[name].tolist() for name in ("metric", *SETTINGS)]
        poolings, l2s = _poolings(table), _l2s(table)
        keys = list(zip(*columns, poolings, l2s, strict=True))
        # A baseline without a token is that of every token.
        of_all = [
            any(poolings) and not word and _given(baseline)
            for word, baseline in zip(poolings, table["baseline"].tolist(), strict=True)
        ]
        for key in dict.fromkeys(k for k, every in zip(keys, of_all, strict=True) if not every):
            metric, settings = key[0], dict(zip((*SETTINGS, "token", "l2"), key[1:], strict=True))
            if metric not in metrics and (metrics or _given(settings["class"])):
                continue
            if direction(metric) == "none":
                continue
            given = [f"{name} = {value}" for name, value in settings.items() if _given(value)]
            task = ", ".join([f"{file.command} {metric}".strip(), *given])
            same = [
                other == key or (every and (*other[:-2], key[-2], other[-1]) == key)
                for other, every in zip(keys, of_all, strict=True)
            ]
            rows = table.take(np.array(same, bool))
            taken = {store for part in parts.get(task, ()) for store in part.unique("store")}
            if taken & {*rows.unique("store")}:
                task = f"{task} ({file.path})"
            parts.setdefault(task, []).append(rows)
    if not parts:
        raise VitseeError(
            "no result has rows about whole layers: all are about parts of the images"
        )
    return {task: Table.concat(some) for task, some in parts.items()}


def _uniform(file: ResultFile) -> Table:
    """A result's rows about whole layers, with all columns that a best row takes over; None where
    it has none."""
    given = file.table
    for name in PARTS:
        if name in given.columns:
            given = given.take(np.array([not _given(v) for v in given[name].tolist()], bool))
    if "best" in given.columns:
        given = given.take(given["best"] != "image")
    n, columns = len(given), given.columns
    empty = {"baseline": np.full(n, "", object), "file": np.full(n, str(file.path), object)}
    nothing = np.full(n, None, object)
    return Table(
        {
            name: empty.get(name, nothing)
            if name not in columns or name == "file"
            else columns[name]
            for name in COLUMNS
            if name not in MADE
        },
        replicates=given.replicates,
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


def _order(rows: Table) -> NDArray[np.float64]:
    """(rows,) larger is better; -inf without a value."""
    values = rows["value"].astype(float)
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    return np.where(np.isfinite(values), sign * values, -np.inf)


def _best_place(rows: Table) -> int:
    """The row number of the best value, of equal ones the first."""
    return int(np.argmax(_order(rows)))


def _best(task: str, rows: Table) -> dict[str, Any]:
    values, order = rows["value"].astype(float), _order(rows)
    finite = np.isfinite(values)
    place = int(np.argmax(order))
    cells = {name: column.tolist() for name, column in rows.columns.items()}
    row = {name: column[place] for name, column in cells.items()}
    row |= {"task": task, "ties": None, "n_overlap": None}
    row["n_layers"] = len({*rows["site"][finite].tolist()})
    if not finite.any():
        # What is left is who it is.
        return row | dict.fromkeys(PLACE) | {"site": "", "block": "", "value": np.nan}
    equal = np.flatnonzero(finite & (values == values[place]))
    if len(equal) > 1:
        others = [{name: column[i] for name, column in cells.items()} for i in equal[1:]]
        row["ties"] = "; ".join(dict.fromkeys(map(_place, others)))
    row["n_overlap"] = _overlapping(rows, order, place)
    return row


def _place(row: Mapping[str, Any]) -> str:
    """`blocks.3`, `blocks.3 head 5`, `blocks.3.out token 0,4`."""
    named = [f"{name} {row[name]}" for name in ("token", "head") if _given(row[name])]
    if _given(row["row"]) and not _given(row["token"]):
        named.append(f"patch {row['row']},{row['col']}")
    return " ".join([str(row["site"]), *named])


def _overlapping(rows: Table, order: NDArray[np.float64], place: int) -> int | None:
    """How many other sites' best rows have an interval that overlaps that of the best one; None
    where it has none."""
    low, high = (
        np.array([np.nan if v is None else v for v in rows[name].tolist()], float)
        for name in ("low", "high")
    )
    sites = rows["site"].tolist()
    if not np.isfinite(low[place]) or not np.isfinite(high[place]):
        return None
    best: dict[str, int] = {}
    for i in np.flatnonzero(np.isfinite(order)).tolist():
        if sites[i] not in best or order[i] > order[best[sites[i]]]:
            best[sites[i]] = i
    others = np.array([i for site, i in best.items() if site != sites[place]], np.int64)
    return int(((low[others] <= high[place]) & (high[others] >= low[place])).sum())


@styled
def plot(table: Table, files: Sequence[ResultFile], metrics: Sequence[str] = ()) -> Figure:
    """One panel per task: its curves against relative depth, the best layer of each store as a star
    and baselines dashed. One panel per store of a CKA self-comparison: CKA with the last layer
    beside the scores of all tasks. Below, the table itself: tasks by stores.

    Args:
        table: from `run`.
        files: from `read`, what it was made of.
        metrics: as for `run`.
    """
    redundancy = [part for file in files if file.has(PAIRS) for part in to_last(file.table)]
    return draw_best_layers(table, tasks(files, metrics), redundancy)
