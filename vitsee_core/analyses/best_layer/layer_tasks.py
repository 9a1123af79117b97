"""Tasks of result files: their rows about whole layers, put together by what they are scores of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.best_layer.redundancy import PAIRS
from vitsee_core.tables.columns import PARTS, SITE, is_given
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import ResultFile, Table
from vitsee_stores.errors import VitseeError

SETTINGS = ("k", "shots", "class")  # with the metric they make the task
COLUMNS = (
    *(*SITE, "token", "row", "col", "head", "class"),
    *("task", "k", "shots", "l2", "ties", "file"),
    *("metric", "value", "std", "low", "high", "n_images", "n_layers", "n_overlap", "baseline"),
)
OPTIONAL = frozenset(
    (
        *("model", "weights", "block", "token", "row", "col", "head"),
        *(*SETTINGS, "l2", "ties", "std", "low", "high", "n_images", "n_overlap"),
    )
)
MEANS = ("each", "patches")  # tokens of rows about the mean over a site's tokens: probe, lens
BEST = "best"
MADE = frozenset(("task", "ties", "n_layers", "n_overlap"))


def known_metrics(files: Sequence[ResultFile]) -> list[str]:
    """The metrics of the files."""
    results = [file.table for file in files if not file.has(PAIRS)]
    return list(dict.fromkeys(metric for table in results for metric in table.unique("metric")))


def tasks(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), best_token: bool = False
) -> dict[str, Table]:
    """Task -> its rows in the files' order, with those of `COLUMNS` that stand in files.

    Where two files have the same task for the same store, the later one's is a task of its own.

    Args:
        files: result files; CKA's are passed over.
        metrics: as for `best_layer.run`.
        best_token: a task of its own for rows about single tokens, which are left out otherwise
            where their site has a row for the mean over tokens (see `about_patches`).

    Raises:
        VitseeError: none of the files has such a metric, the metric has no direction, or no rows
            are about whole layers.
    """
    known = known_metrics(files)
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
        if not best_token:
            table = table.take(~about_patches(table))
        columns = [table[name].tolist() for name in ("metric", *SETTINGS)]
        poolings, l2s = _poolings(table), _l2s(table)
        keys = list(zip(*columns, poolings, l2s, strict=True))
        # A baseline without a token is that of every token.
        of_all = [
            any(poolings) and not word and is_given(baseline)
            for word, baseline in zip(poolings, table["baseline"].tolist(), strict=True)
        ]
        for key in dict.fromkeys(k for k, every in zip(keys, of_all, strict=True) if not every):
            metric, settings = key[0], dict(zip((*SETTINGS, "token", "l2"), key[1:], strict=True))
            if metric not in metrics and (metrics or is_given(settings["class"])):
                continue
            if direction(metric) == "none":
                continue
            named = [f"{name} = {value}" for name, value in settings.items() if is_given(value)]
            task = ", ".join([f"{file.command} {metric}".strip(), *named])
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
    """A result's rows about whole layers, with all columns that a best row takes over."""
    given = file.table
    for name in PARTS:
        if name in given.columns:
            given = given.take(np.array([not is_given(v) for v in given[name].tolist()], bool))
    if "best" in given.columns:
        given = given.take(given["best"] != "image")
    n, columns = len(given), given.columns
    nothing = dict.fromkeys(COLUMNS, np.full(n, None, object))
    nothing["baseline"] = np.full(n, "", object)
    own = {**nothing, **columns, "file": np.full(n, str(file.path), object)}
    kept = {name: own[name] for name in COLUMNS if name not in MADE}
    return Table(kept, replicates=given.replicates)


def about_patches(table: Table) -> NDArray[np.bool_]:
    """(rows,) which are about one token of a site that also has a row for the mean over tokens."""
    sites = list(zip(table["store"].tolist(), table["site"].tolist(), strict=True))
    words = table["token"].tolist()
    averaged = {site for site, word in zip(sites, words, strict=True) if word in MEANS}
    cells = zip(sites, table["row"].tolist(), strict=True)
    return np.array([is_given(row) and site in averaged for site, row in cells], bool)


def _poolings(table: Table) -> list[str]:
    """What stands for an image in each row (`cls`, `each`, `0,4`), where the file compares several
    or a site is measured by a token and without; `best` for all rows of `about_patches`."""
    columns = [table[name].tolist() for name in ("token", "row", "col")]
    words = [
        str(token) if is_given(token) else f"{row},{col}" if is_given(row) else ""
        for token, row, col in zip(*columns, strict=True)
    ]
    words = [BEST if one else word for one, word in zip(about_patches(table), words, strict=True)]
    if len({*words} - {""}) > 1:
        return words
    real = [not is_given(baseline) for baseline in table["baseline"].tolist()]
    places = zip(table["store"].tolist(), table["site"].tolist(), strict=True)
    cells = {(*place, word) for place, word, own in zip(places, words, real, strict=True) if own}
    several = len({cell[:2] for cell in cells}) < len(cells)
    return words if several or MEANS[0] in words else [""] * len(words)


def _l2s(table: Table) -> list[str]:
    """Each row's l2, where the file reports the same probe at several of them; else ""."""
    names = ("store", "site", "head", "token", "row", "col", "metric", *SETTINGS, "baseline")
    cells = (map(str, table[name].tolist()) for name in names)
    repeated = len({*zip(*cells, strict=True)}) < len(table)
    l2s = table["l2"].tolist()
    return [str(value) if repeated and is_given(value) else "" for value in l2s]
