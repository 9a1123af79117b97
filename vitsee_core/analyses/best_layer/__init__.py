"""Best layers: which layer of each model is best for which task?

Walmer et al. 2023, Tables 1, 5.

A task is a metric of the result files: the command that wrote it, the metric, and where the file
has them k, shots, class and (where it compares several) the token that stands for an image and the
l2. A layer of which every token was probed (`--tokens each`) is scored by the mean over its tokens
(Raghu et al. 2021, Fig. 11); its best token is a task of its own, where it is asked for. For each
task and store the best row is taken: the one with the largest value, or the smallest where lower is
better (`metrics.direction`); metrics without a direction are left out. Of equal rows the first is
taken, which is the lower layer; the others are named, and so is the number of layers whose interval
overlaps the best one's. Layers are named by their site and counted from 0 as in the results (the
paper's tables count from 1). Choosing the best of many layers on the images that are reported
favours all models alike, but the value is higher than a layer chosen elsewhere would get; no l2 is
chosen so. Rows about one query, video, object, segment or group of images are not scores of a layer
and are left out, as are those of each image's best head.

The figure shows the curves that were compared. Where a CKA self-comparison is among the files it
also shows the CKA of each layer with the last one beside the tasks' scores: layers that resemble
the last one may be redundant (Kornblith et al. 2019, their figure of redundant layers).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.analyses.best_layer.figures import (
    CONTROLS,
    draw_best_layers,
    draw_differences,
)
from vitsee_core.analyses.best_layer.layer_tasks import (
    BEST,
    COLUMNS,
    METHOD,
    OPTIONAL,
    PAIRS,
    PENALTIES,
    about_patches,
    differences,
    known_metrics,
    tasks,
    to_last,
    with_replicates,
)
from vitsee_core.analyses.best_layer.layer_tasks import PAIRED_COLUMNS as PAIRED
from vitsee_core.declaration import Analysis
from vitsee_core.figures.curve_looks import of_models
from vitsee_core.figures.plotting import styled
from vitsee_core.runtime.machine import plural
from vitsee_core.tables.columns import REPLICATES, is_given
from vitsee_core.tables.headlines import Answer, picked
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import ResultFile, Table, read_result
from vitsee_core.tables.same_labels import tell_apart
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


RESULT = ("store", "site", "depth", "metric", "value")
TOKENS = ("store", "site", "token", "row")
AMONG = ("layers", "models")
PLACE = (
    *("depth", "rel_depth", "head", "token", "row", "col", *PENALTIES),
    *("std", "low", "high", "n_images"),
)
RULE = (
    "the largest value (the smallest where lower is better) over sites (and heads, tokens), of "
    "equal ones the first; chosen on the images that are reported"
)


def read(paths: Sequence[str | Path], names: Sequence[str] = ()) -> list[ResultFile]:
    """The result files, in their order.

    Args:
        paths: of tables.
        names: what the tasks of each are called, in place of the command that wrote it; "" leaves
            that.

    Raises:
        VitseeError: a file that is neither a result with one value per layer nor a CKA
            self-comparison, or no result among them.
    """
    files = [
        replace(found, command=name or found.command)
        for found, name in zip(
            map(read_result, paths), names or [""] * len(paths), strict=True
        )
    ]
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
    files: str | Path | Sequence[ResultFile | str | Path],
    metrics: Sequence[str] = (),
    best_token: bool = False,
) -> Table:
    """One row per task, store and baseline: its best layer.

    Columns: those of `COLUMNS` that the files have; `value`, `std`, `low`, `high` of the chosen
    row, `n_layers` the sites with a value, `ties` the others with the same value, `n_overlap` how
    many other sites have an interval that overlaps the best one's, `baseline` empty in the models'
    rows. NaN and no site: no site has a value.

    Args:
        files: results that other analyses wrote, by path or from `read`.
        metrics: only these; by default all that have a direction, except those of single classes.
        best_token: add a task for the best single token of each layer.

    Raises:
        VitseeError: a file is no such result, none of them has such a metric, or the metric has no
            direction.
    """
    files = tell_apart(_opened(files))
    remarks = []
    found = tasks(files, metrics, best_token)
    single = [f.table.frame.filter(about_patches()) for f in files if f.has(TOKENS)]
    left = sum(map(len, single))
    if left and not best_token:
        remarks.append(
            f"left out: {plural(left, 'rows')} about single tokens, as their mean stands for the "
            "layer (--best-token adds the best token)"
        )
    if not metrics and (
        others := [m for m in known_metrics(files) if direction(m) == "none"]
    ):
        remarks.append(f"left out, as neither side is better: {', '.join(others)}")
    rows = []
    for task, scores in found.items():
        for of_store in scores.partition_by("store", maintain_order=True):
            for part in of_store.partition_by("baseline", maintain_order=True):
                row = _best(task, part)
                rows.append(row)
                if row["baseline"] is None:
                    remarks += [
                        f"{task}, {row['store']}: {said}" for said in _remarks(row, part)
                    ]
    for remark in remarks:
        log.info("%s", remark)
    names = [name for name in COLUMNS if name not in OPTIONAL or _filled(rows, name)]
    controls = {str(row["baseline"]) for row in rows} & CONTROLS.keys()
    notes = {
        "rule": RULE,
        "remarks": remarks,
        "files": [str(f.path) for f in files],
        "baselines": {name: CONTROLS[name] for name in sorted(controls)},
    }
    return Table.from_rows(rows, names, notes)


def compare(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), among: str = "layers"
) -> Table:
    """One row a difference: the best row of each store less that of each of its other layers, or
    less the best rows of the stores after it; with intervals over the images that both share, which
    hold for all differences at once, however the best was chosen; see `layer_tasks`.

    Columns: those of `PAIRED_COLUMNS` that the files have; `value`, in the metric's unit, is above
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
    scored = tell_apart(with_replicates([file for file in files if not file.has(PAIRS)]))
    notes = {str(file.path): file.table.notes for file in scored}
    rows = []
    for task, scores in tasks(scored, metrics).items():
        own = of_models(scores).partition_by("store", maintain_order=True)
        stores = [(of, _best_place(of)) for of in own]
        for number, (of_store, best) in enumerate(stores):
            others = stores[number + 1 :]
            chosen_from = [of for of, _ in stores]
            if among == "layers":
                chosen_from = [of_store]
                rest = of_store.filter(pl.col("site").ne_missing(of_store["site"][best]))
                sites = rest.partition_by("site", maintain_order=True)
                others = [(of, _best_place(of)) for of in sites]
            rows += differences((of_store, best), others, chosen_from, task, notes)
    if not rows:
        one = among.removesuffix("s")
        raise VitseeError(
            f"there is nothing to compare: the results are of one {one} only"
        )
    plain = {name: name.removesuffix("_a").removesuffix("_b") for name in PAIRED}
    names = [
        name for name in PAIRED if plain[name] not in OPTIONAL or _filled(rows, name)
    ]
    return Table.from_rows(rows, names, {"interval": METHOD, "files": [*notes]})


def _filled(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(is_given(row.get(name)) for row in rows)


def _remarks(row: dict[str, Any], rows: pl.DataFrame) -> Iterator[str]:
    missing = len(rows) - len(picked(rows))
    if missing:
        yield f"{missing} of {len(rows)} rows have no value"
    if row["ties"]:
        yield f"{_place(row)} is the first of equal ones: {row['ties']}"
    if row["n_overlap"]:
        yield (
            f"the intervals of {row['n_overlap']} of the other {row['n_layers'] - 1} layers "
            f"overlap that of {row['site']}"
        )


def _order(rows: pl.DataFrame) -> pl.Series:
    """(rows,) larger is better; null without a finite value."""
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    value = pl.col("value")
    return rows.select(pl.when(value.is_finite()).then(sign * value)).to_series()


def _best_place(rows: pl.DataFrame) -> int:
    """Index of the best row; the first of ties, or of all if none has a value."""
    return _order(rows).arg_max() or 0


def _best(task: str, rows: pl.DataFrame) -> dict[str, Any]:
    best = rows.drop(REPLICATES, strict=False).row(_best_place(rows), named=True)
    scores = picked(rows)
    row = best | {"task": task, "ties": None, "n_overlap": None}
    row["n_layers"] = scores["site"].n_unique()
    if not len(scores):
        # What is left is who it is.
        return row | dict.fromkeys(PLACE) | {"site": "", "block": "", "value": np.nan}
    equal = scores.filter(value=best["value"])
    if len(equal) > 1:
        row["ties"] = "; ".join(dict.fromkeys(map(_place, equal[1:].rows(named=True))))
    row["n_overlap"] = _overlapping(scores, best)
    return row


def _place(row: Mapping[str, Any]) -> str:
    """`blocks.3`, `blocks.3 head 5`, `blocks.3.out token 0,4`."""
    named = [f"{name} {row[name]}" for name in ("token", "head") if is_given(row[name])]
    if is_given(row["row"]) and not is_given(row["token"]):
        named.append(f"patch {row['row']},{row['col']}")
    return " ".join([str(row["site"]), *named])


def _overlapping(rows: pl.DataFrame, best: Mapping[str, Any]) -> int | None:
    """How many other sites' best rows have an interval that overlaps that of the best one; None
    where it has none."""
    low = best["low"]
    high = best["high"]
    if low is None or high is None or not np.isfinite([low, high]).all():
        return None
    of_sites = rows.with_columns(order=_order(rows)).filter(
        pl.col("site") != best["site"]
    )
    of_sites = of_sites.sort("order", descending=True, maintain_order=True)
    others = of_sites.unique("site", keep="first")
    return len(others.filter(pl.col("low") <= high, pl.col("high") >= low))


@styled
def plot(
    table: Table, files: Sequence[ResultFile] = (), metrics: Sequence[str] = ()
) -> Figure:
    """One panel per task: its curves against relative depth, the best layer of each store as a star
    and baselines dashed. One panel per store of a CKA self-comparison: CKA with the last layer
    beside the scores of all tasks. Below, the table itself: tasks by stores. Of `compare`: its
    differences with their intervals; all others need the files, from `read`.

    Raises:
        VitseeError: the files are missing.
    """
    if "store_a" in table.frame.columns:
        return draw_differences(table.frame)
    if not files:
        raise VitseeError(
            "best-layer draws the curves of the results that it compared: give them too, as "
            "plot(table, files=read(paths))"
        )
    files = tell_apart(files)
    redundancy = [
        part for file in files if file.has(PAIRS) for part in to_last(file.table.frame)
    ]
    best_token = any(
        task.endswith(f"token = {BEST}") for task in table.frame["task"].unique()
    )
    return draw_best_layers(table, tasks(files, metrics, best_token), redundancy)


def headline(table: Table) -> list[Answer]:
    """The layers that are best at most tasks; of `compare`: how many differences exclude 0."""
    found = []
    if "store_a" in table.frame.columns:
        for (store,), rows in table.frame.group_by("store_a", maintain_order=True):
            apart = rows.filter((pl.col("low") > 0) | (pl.col("high") < 0))
            text = f"{len(apart)} of {plural(len(rows), 'differences')} have an interval without 0"
            found.append((str(store), text))
        return found
    for (store,), rows in picked(table, baseline=None).group_by(
        "store", maintain_order=True
    ):
        sites = Counter(rows["site"]).most_common()
        first, *others = [f"{site} {n}" for site, n in sites[:3]]
        text = f"best at {plural(len(rows), 'tasks')}: {first} times"
        found.append((str(store), ", ".join([text, *others])))
    return found


ANALYSIS = Analysis(
    module=__name__,
    needs=None,
    reading=(
        "One panel per task: its score against relative depth, the best layer of each model as "
        "a star, baselines dashed. The best layer of many is chosen on the same images that are "
        "reported, so that its score is a little too high; the number of layers whose intervals "
        "overlap it says how far it stands out. Differences have intervals that allow for the "
        "choice."
    ),
    source="Walmer et al. 2023, Tables 1, 5; Kornblith et al. 2019",
    columns=COLUMNS,
    metrics=("*",),
    run=run,
    plot=plot,
    headline=headline,
    read_inputs=read,
)
