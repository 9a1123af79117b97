"""Best layers: which layer of each model is best for which task?

Walmer et al. 2023, Tables 1, 5.

A task is a metric of the result files together with its settings: the command that wrote it, the
metric, and, where the file has them, k, shots and class. A file that compares several tokens or
several l2 has a task for each. A layer of which every token was probed (`--tokens each`) is scored
by the mean over its tokens (Raghu et al. 2021, Fig. 11); its best token is a task of its own, if
`best_token` asks for it. Rows about one query, video, object, segment or group of images are not
scores of a layer and are left out, as are those of each image's best head.

For each task and store the best row is chosen: the one with the largest value, or with the smallest
if lower is better (`metrics.direction`). Metrics without a direction are left out. Among equal rows
the first is chosen, which is the lower layer; the table names the others, and counts the layers
whose interval overlaps the best one's. Layers are named by their site and counted from 0 as in the
results (the paper's tables count from 1).

The best layer is chosen on the images that are reported. This favours all models alike, but the
value is higher than that of a layer chosen on other images. An l2 is never chosen in this way.

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

from vitsee_core.analyses.best_layer.best_table import CONTROLS
from vitsee_core.analyses.best_layer.figures import draw_best_layers, draw_differences
from vitsee_core.analyses.best_layer.layer_tasks import (
    BEST,
    COLUMNS,
    METHOD,
    OPTIONAL,
    PAIRS,
    PENALTIES,
    LastLayerCka,
    ScoredRow,
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
from vitsee_core.tables.columns import REPLICATES, has_value
from vitsee_core.tables.headlines import Answer, picked
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import ResultFile, Table, read_result
from vitsee_core.tables.same_labels import disambiguate_labels
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

# Columns of a result with one value per layer, and of rows about tokens.
RESULT = ("store", "site", "depth", "metric", "value")
TOKENS = ("store", "site", "token", "row")
AMONG = ("layers", "models")
# The columns that say which layer a row is about and how well it was measured.
LAYER_COLUMNS = (
    *("depth", "rel_depth", "head", "token", "row", "col", *PENALTIES),
    *("std", "low", "high", "n_images"),
)
RULE = (
    "the largest value (the smallest where lower is better) over sites (and heads, "
    "tokens), of equal ones the first; chosen on the images that are reported"
)


def read(paths: Sequence[str | Path], names: Sequence[str] = ()) -> list[ResultFile]:
    """Read the result files and return them in the order of their paths.

    Args:
        paths: the tables of other analyses, each with its sidecar beside it.
        names: for each path the word that its tasks begin with; by default, and where it is "",
            the command that wrote the file.

    Raises:
        VitseeError: a file is neither a result with one value per layer nor a CKA
            self-comparison, or all files are CKA self-comparisons.
    """
    files = [read_result(path) for path in paths]
    if names:
        files = [
            replace(file, command=name or file.command)
            for file, name in zip(files, names, strict=True)
        ]
    # Paths are compared after resolving links: `r.csv` and `./r.csv` would make every task twice.
    for i, file in enumerate(files):
        if file.path.resolve() in {earlier.path.resolve() for earlier in files[:i]}:
            raise VitseeError(f"{file.path} is given twice; name each result once")
    for file in files:
        if file.has(PAIRS):
            # Stores that stand on one side alone; a self-comparison has each on both.
            others = {*file.table["store_a"]} ^ {*file.table["store_b"]}
            if others or not any(file.table["store_a"] == file.table["store_b"]):
                raise VitseeError(
                    f"{file.path} compares {', '.join(sorted(others)) or 'stores'} with "
                    "each other; expected a comparison of a store with itself (vitsee "
                    "cka STORE)"
                )
        elif not file.has(RESULT):
            raise VitseeError(
                f"{file.path} is not a result with one value per layer: it has the "
                f"columns {file.describe_columns()}; expected {', '.join(RESULT)} "
                f"(probe, knn, cluster, ...) or {', '.join(PAIRS)} (cka)"
            )
    if all(file.has(PAIRS) for file in files):
        raise VitseeError(
            "only CKA results were given; expected at least one with one value per layer "
            "(probe, knn, cluster, ...)"
        )
    return files


def _read_unless_opened(
    files: str | Path | Sequence[ResultFile | str | Path],
) -> list[ResultFile]:
    """Return the files as they are if all of them are read already; else read all from disk."""
    if isinstance(files, str | Path):
        return read([files])
    opened = [file for file in files if isinstance(file, ResultFile)]
    if len(opened) == len(files):
        return opened
    # All together, because `read` also compares the files with each other.
    return read([file.path if isinstance(file, ResultFile) else file for file in files])


def run(
    files: str | Path | Sequence[ResultFile | str | Path],
    metrics: Sequence[str] = (),
    best_token: bool = False,
) -> Table:
    """Return a table with the best layer of each task, store and baseline.

    The table has those of `COLUMNS` that the files have. `value`, `std`, `low` and `high` are those
    of the chosen row. `n_layers` counts the sites with a value, `ties` names the other sites with
    the same value, and `n_overlap` counts the other sites whose interval overlaps the best one's.
    `baseline` is empty in the rows of models. Where no site has a value, `value` is NaN and `site`
    is empty.

    Args:
        files: results that other analyses wrote, as paths or as `read` returns them.
        metrics: the metrics to choose by; by default all that have a direction, without those of
            single classes.
        best_token: add a task for the best single token of each layer.

    Raises:
        VitseeError: a file is not such a result, none of them has such a metric, or the metric has
            no direction.

    Examples:
        >>> import vitsee
        >>> vitsee.knn("train.zarr", "vit.zarr").to_csv("knn.csv")
        >>> best = vitsee.best_layer("knn.csv")
        >>> best["metric"].tolist(), best["site"].tolist(), best["value"].round(2).tolist()
        (['top1', 'top5'], ['blocks.5.out', 'blocks.4.out'], [0.86, 0.99])
    """
    files = disambiguate_labels(_read_unless_opened(files))
    remarks = []
    rows_by_task = tasks(files, metrics, best_token)
    token_rows = [f.table.frame.filter(about_patches()) for f in files if f.has(TOKENS)]
    n_token_rows = sum(len(frame) for frame in token_rows)
    if n_token_rows and not best_token:
        remarks.append(
            f"left out: {plural(n_token_rows, 'rows')} about single tokens, as their "
            "mean stands for the layer (--best-token adds the best token)"
        )
    undirected = [name for name in known_metrics(files) if direction(name) == "none"]
    if undirected and not metrics:
        remarks.append(f"left out, as neither side is better: {', '.join(undirected)}")
    best_rows = []
    for task, task_rows in rows_by_task.items():
        for store_rows in task_rows.partition_by("store", maintain_order=True):
            # The rows of the model itself, whose `baseline` is null, are a group here too.
            for candidates in store_rows.partition_by("baseline", maintain_order=True):
                best_row = _best_row(task, candidates)
                best_rows.append(best_row)
                if best_row["baseline"] is None:
                    for remark in _remarks_on_choice(best_row, candidates):
                        remarks.append(f"{task}, {best_row['store']}: {remark}")
    for remark in remarks:
        log.info("%s", remark)
    # A column that only some commands write is left out where no row has a value.
    names = [
        name for name in COLUMNS if name not in OPTIONAL or _any_filled(best_rows, name)
    ]
    controls = {str(row["baseline"]) for row in best_rows} & CONTROLS.keys()
    notes = {
        "rule": RULE,
        "remarks": remarks,
        "files": [str(f.path) for f in files],
        "baselines": {name: CONTROLS[name] for name in sorted(controls)},
    }
    return Table.from_rows(best_rows, names, notes)


def compare(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), among: str = "layers"
) -> Table:
    """Return a table of paired differences between best rows, one row per difference.

    Among layers, the best row of each store is compared with the best row of each of its other
    sites. Among models, the best row of each store is compared with the best rows of the stores
    after it. Intervals are over the images that both rows share and hold for all differences at
    once, although the best row was chosen on the same images (the formula stands in the docstring
    of `layer_tasks`).

    The table has those of `PAIRED_COLUMNS` that the files have. `value` is row a less row b in the
    metric's unit. `std`, `low` and `high` are NaN for a row without replicates.

    Args:
        files: results as `read` returns them, with their replicates beside them on disk.
        metrics: the metrics to compare by, as for `run`.
        among: "layers" or "models".

    Raises:
        StoreMismatch: two stores were not tested on the same images.
        VitseeError: as for `run`; a file has no replicates; or there is one layer or one store
            only.
    """
    if among not in AMONG:
        raise VitseeError(f"no comparison of {among!r}; expected {' or '.join(AMONG)}")
    scored = disambiguate_labels(
        with_replicates([file for file in files if not file.has(PAIRS)])
    )
    notes = {str(file.path): file.table.notes for file in scored}
    rows = []
    for task, task_rows in tasks(scored, metrics).items():
        by_store = of_models(task_rows).partition_by("store", maintain_order=True)
        bests = [ScoredRow(frame, _best_index(frame)) for frame in by_store]
        for number, best in enumerate(bests):
            # The interval has to allow for the choice of the best among these candidates.
            if among == "layers":
                candidates = [best.frame]
                best_site = best.frame["site"][best.row_index]
                other_rows = best.frame.filter(pl.col("site").ne_missing(best_site))
                by_site = other_rows.partition_by("site", maintain_order=True)
                others = [ScoredRow(frame, _best_index(frame)) for frame in by_site]
            else:  # the stores before have been compared with this one
                candidates = by_store
                others = bests[number + 1 :]
            rows += differences(
                best, others, candidates=candidates, task=task, notes=notes
            )
    if not rows:
        raise VitseeError(
            "there is nothing to compare: the results are of one "
            f"{among.removesuffix('s')} only"
        )
    names = []
    for name in PAIRED:
        plain_name = name.removesuffix("_a").removesuffix("_b")
        if plain_name not in OPTIONAL or _any_filled(rows, name):
            names.append(name)
    return Table.from_rows(rows, names, {"interval": METHOD, "files": [*notes]})


def _any_filled(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a row has a value in this column."""
    return any(has_value(row.get(name)) for row in rows)


def _remarks_on_choice(row: Mapping[str, Any], candidates: pl.DataFrame) -> Iterator[str]:
    """Yield a sentence for each reason to doubt that the best row is better than the others."""
    missing = len(candidates) - len(picked(candidates))
    if missing:
        yield f"{missing} of {len(candidates)} rows have no value"
    if row["ties"]:
        yield f"{_describe_layer(row)} is the first of equal ones: {row['ties']}"
    if row["n_overlap"]:
        yield (
            f"the intervals of {row['n_overlap']} of the other {row['n_layers'] - 1} "
            f"layers overlap that of {row['site']}"
        )


def _goodness(rows: pl.DataFrame) -> pl.Series:
    """Return each row's value with the sign that makes larger better; null if it is not finite."""
    sign = -1 if direction(str(rows["metric"][0])) == "lower" else 1
    value = pl.col("value")
    return rows.select(pl.when(value.is_finite()).then(sign * value)).to_series()


def _best_index(rows: pl.DataFrame) -> int:
    """Return the index of the best row: the first one if rows are equal or none has a value."""
    return _goodness(rows).arg_max() or 0


def _best_row(task: str, candidates: pl.DataFrame) -> dict[str, Any]:
    """Return the best of the rows of one task, store and baseline, as a row of `run`'s table."""
    # Replicates are about single rows, not about the best of many.
    plain = candidates.drop(REPLICATES, strict=False)
    best = plain.row(_best_index(candidates), named=True)
    scores = picked(candidates)
    row = {**best, "task": task, "ties": None, "n_overlap": None}
    row["n_layers"] = scores["site"].n_unique()
    if len(scores) == 0:
        # No layer has a value: the row keeps its store and task and loses all that names a layer.
        row.update(dict.fromkeys(LAYER_COLUMNS))
        row.update(site="", block="", value=np.nan)
        return row
    equal = scores.filter(value=best["value"])
    if len(equal) > 1:
        ties = [_describe_layer(tie) for tie in equal[1:].rows(named=True)]
        row["ties"] = "; ".join(dict.fromkeys(ties))
    row["n_overlap"] = _count_overlapping_sites(scores, best)
    return row


def _describe_layer(row: Mapping[str, Any]) -> str:
    """Return the row's site with its token, patch and head, e.g. `blocks.3 head 5`."""
    words = [str(row["site"])]
    if has_value(row["token"]):
        words.append(f"token {row['token']}")
    if has_value(row["head"]):
        words.append(f"head {row['head']}")
    if has_value(row["row"]) and not has_value(row["token"]):
        words.append(f"patch {row['row']},{row['col']}")
    return " ".join(words)


def _count_overlapping_sites(rows: pl.DataFrame, best: Mapping[str, Any]) -> int | None:
    """Count the other sites whose best row has an interval that overlaps the best row's.

    Returns None if the best row has no interval.
    """
    low = best["low"]
    high = best["high"]
    if low is None or high is None or not np.isfinite([low, high]).all():
        return None
    others = rows.with_columns(goodness=_goodness(rows))
    others = others.filter(pl.col("site") != best["site"])
    # After sorting, the first row of a site is its best head or token.
    others = others.sort("goodness", descending=True, maintain_order=True)
    site_bests = others.unique("site", keep="first")
    return len(site_bests.filter(pl.col("low") <= high, pl.col("high") >= low))


@styled
def plot(
    table: Table, files: Sequence[ResultFile] = (), metrics: Sequence[str] = ()
) -> Figure:
    """Draw a table of `run` or of `compare`.

    A table of `run` gets one panel per task: its curves against relative depth, the best layer of
    each store as a star, and baselines dashed. Each store of a CKA self-comparison gets a panel
    with its CKA with the last layer beside the scores of all tasks. Below stands the table itself,
    tasks by stores. A table of `compare` gets one panel per task with the differences and their
    intervals.

    Args:
        table: what `run` or `compare` returned.
        files: the results that `run` compared, as `read` returns them; not needed for `compare`.
        metrics: the metrics that `run` was called with.

    Raises:
        VitseeError: the table is one of `run` and there are no files.
    """
    if "store_a" in table.frame.columns:
        return draw_differences(table.frame)
    if not files:
        raise VitseeError(
            "best-layer draws the curves of the results that it compared: give them "
            "too, as plot(table, files=read(paths))"
        )
    files = disambiguate_labels(files)
    redundancy: list[LastLayerCka] = []
    for file in files:
        if file.has(PAIRS):
            redundancy += to_last(file.table.frame)
    # A table does not say whether it was made with `best_token`, but its tasks do.
    best_token = any(
        task.endswith(f"token = {BEST}") for task in table.frame["task"].unique()
    )
    return draw_best_layers(table, tasks(files, metrics, best_token), redundancy)


def headline(table: Table) -> list[Answer]:
    """Return per store the layers that are best at most tasks, or for a table of `compare` how
    many differences have an interval without 0."""
    answers = []
    if "store_a" in table.frame.columns:
        for (store,), rows in table.frame.group_by("store_a", maintain_order=True):
            apart = rows.filter((pl.col("low") > 0) | (pl.col("high") < 0))
            n_differences = plural(len(rows), "differences")
            text = f"{len(apart)} of {n_differences} have an interval without 0"
            answers.append((str(store), text))
        return answers
    best_rows = picked(table, baseline=None)
    # The three layers that are best at most tasks.
    for (store,), rows in best_rows.group_by("store", maintain_order=True):
        sites = Counter(rows["site"]).most_common()
        first, *others = [f"{site} {n}" for site, n in sites[:3]]
        text = f"best at {plural(len(rows), 'tasks')}: {first} times"
        answers.append((str(store), ", ".join([text, *others])))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    needs=None,
    reading=(
        "One panel per task: its score against relative depth, the best layer of each "
        "model as a star, baselines dashed. The best layer of many is chosen on the "
        "same images that are reported, so that its score is a little too high; the "
        "number of layers whose intervals overlap it says how far it stands out. "
        "Differences have intervals that allow for the choice."
    ),
    source="Walmer et al. 2023, Tables 1, 5; Kornblith et al. 2019",
    columns=COLUMNS,
    metrics=("*",),
    run=run,
    plot=plot,
    headline=headline,
    read_inputs=read,
)
