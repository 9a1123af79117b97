"""Tasks of result files: their rows about whole layers, grouped by metric and settings; and
differences between rows of results, with intervals over the images that they share.

Two layers tested on the same images are right and wrong together, so that the interval of their
difference is narrower than their own intervals suggest. From the replicates r_b (each row's value
without block b of the images, kept by --replicates) of rows x and y over the same m blocks:

    value = x - y,  d_b = r_b(x) - r_b(y),  std = sqrt((m - 1) / m sum_b (d_b - mean d)^2)
    low, high = value -+ q std

(the delete-a-block jackknife, as for the rows themselves; Efron and Tibshirani 1993, chapter 11).
The best of many rows was chosen on these images, and seems better than it is: with Student's
quantile for q, 70 % of the samples from 13 equally good layers would have some layer that is worse
than the best. So q is the quantile of `jackknife.largest_t`, which holds for all pairs of the rows
that the best was chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.statistics.jackknife import SIMULTANEOUS, largest_t, standard_error
from vitsee_core.tables.columns import PAIR, SITE, SUBSET_COLUMNS, VALUES
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.replicates import replicates_array
from vitsee_core.tables.results import ResultFile, Table, read_replicates
from vitsee_core.types import Float, pl
from vitsee_stores.errors import StoreMismatch, VitseeError

SETTINGS = ("k", "shots", "class")
PENALTIES = ("l2", "l2_relative")  # of probe and of dense-probe
COLUMNS = (
    *(*SITE, "token", "row", "col", "head", "class"),
    *("task", "k", "shots", *PENALTIES, "ties", "file"),
    *(
        "metric",
        "value",
        "std",
        "low",
        "high",
        "n_images",
        "n_layers",
        "n_overlap",
        "baseline",
    ),
)
OPTIONAL = frozenset(
    (
        *("model", "weights", "block", "token", "row", "col", "head"),
        *(*SETTINGS, *PENALTIES, "ties", "std", "low", "high", "n_images", "n_overlap"),
    )
)
# What stands as `token` in rows about the mean over a site's tokens: "each" in those of probe,
# "patches" in those of lens.
MEANS = ("each", "patches")
BEST = "best"
# The columns that make a task, together with the metric.
NAMED = (*SETTINGS, "token", *PENALTIES)
KEYS_BESIDE_TOKEN = ("metric", *SETTINGS, *PENALTIES)
ADDED_BY_RUN = frozenset(("task", "ties", "n_layers", "n_overlap"))
PAIRS = (
    "store_a",
    "site_a",
    "depth_a",
    "store_b",
    "site_b",
    "depth_b",
    "metric",
    "value",
)
TOKEN_AND_HEAD = ("token", "row", "col", "head")
PAIRED_COLUMNS = (
    *PAIR,
    *(f"{name}_a" for name in TOKEN_AND_HEAD),
    *(f"{name}_b" for name in TOKEN_AND_HEAD),
    *("task", "k", "shots", *PENALTIES, "class", *VALUES, "n_images", "n_blocks"),
)
METHOD = (
    "value: row a less row b; std: standard error of a delete-a-block jackknife over "
    f"the blocks of images that both rows share; {SIMULTANEOUS}"
)


def known_metrics(files: Sequence[ResultFile]) -> list[str]:
    """Return the names of the metrics in the files, without CKA comparisons."""
    columns = [file.table.frame["metric"] for file in files if not file.has(PAIRS)]
    return pl.concat(columns).unique(maintain_order=True).to_list()


def tasks(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), best_token: bool = False
) -> dict[str, pl.DataFrame]:
    """Return task -> its rows in the files' order, with those of `COLUMNS` that files contain.

    A task is named by its command, its metric and its settings, e.g. `knn top1, k = 20`. Where two
    files have the same task for the same store, the later file's rows are a task of their own, with
    the file's path behind the name.

    Args:
        files: result files; CKA comparisons among them are passed over.
        metrics: the metrics whose tasks are returned; empty for all that have a direction.
        best_token: keep the rows about single tokens, as a task of their own. Otherwise those
            whose site also has a row for the mean over tokens are left out.

    Raises:
        VitseeError: none of the files has such a metric, the metric has no direction, or no rows
            are about whole layers.
    """
    available = known_metrics(files)
    for metric in metrics:
        if metric not in available:
            raise VitseeError(
                f"no result has the metric {metric!r}; they have {', '.join(available)}"
            )
        if direction(metric) == "none":
            raise VitseeError(
                f"no layer is the best by {metric}: neither a higher nor a lower value "
                "is better"
            )
    if all(direction(metric) == "none" for metric in available):
        raise VitseeError(
            "no result has a metric of which one side is better (accuracies, purity, "
            f"iou, ...); they have {', '.join(available)}"
        )
    frames: dict[str, list[pl.DataFrame]] = {}  # task -> rows of each file
    for file in files:
        if file.has(PAIRS):
            continue
        rows = _rows_about_layers(file)
        if not best_token:
            rows = rows.filter(~about_patches())
        keys = _task_keys(rows)
        distinct_keys = keys.filter(~pl.col("all_tokens")).unique(maintain_order=True)
        for key in distinct_keys.rows(named=True):
            if not _is_requested(key, metrics):
                continue
            task = _task_name(file.command, key)
            # A baseline without a token joins the tasks of all tokens.
            in_task = pl.col("all_tokens") | pl.col("token").eq_missing(key["token"])
            for name in KEYS_BESIDE_TOKEN:
                in_task &= pl.col(name).eq_missing(key[name])
            task_rows = rows.filter(keys.select(in_task).to_series())
            earlier_stores: set[str] = set()
            for frame in frames.get(task, ()):
                earlier_stores.update(frame["store"].unique())
            # The same task twice, from two files: the file's name tells them apart.
            if earlier_stores & {*task_rows["store"].unique()}:
                task = f"{task} ({file.path})"
            frames.setdefault(task, []).append(task_rows)
    if not frames:
        raise VitseeError(
            "no result has rows about whole layers: all are about parts of the images"
        )
    return {task: Table.concat(task_frames).frame for task, task_frames in frames.items()}


def _is_requested(key: Mapping[str, Any], metrics: Sequence[str]) -> bool:
    """Return whether a task is compared.

    With metrics named it is one of theirs; without, it has a direction and is not about one class.
    """
    if direction(key["metric"]) == "none":
        return False
    if metrics:
        return key["metric"] in metrics
    return key["class"] is None


def _task_name(command: str, key: Mapping[str, Any]) -> str:
    """Return the task's name: command, metric and the settings that it has."""
    words = [f"{command} {key['metric']}".strip()]
    words += [f"{name} = {key[name]}" for name in NAMED if key[name] is not None]
    return ", ".join(words)


def about_patches() -> pl.Expr:
    """Return the condition that a row is about one token of a site for which the table also has a
    row about the mean over tokens."""
    has_mean = pl.col("token").is_in(MEANS).any().over("store", "site")
    return pl.col("row").is_not_null() & has_mean


def _rows_about_layers(file: ResultFile) -> pl.DataFrame:
    """Return a result's rows about whole layers, with all columns that a best row takes over."""
    rows = file.table.frame
    conditions = [
        pl.col(name).is_null() for name in SUBSET_COLUMNS if name in rows.columns
    ]
    if "best" in rows.columns:
        # `best = image` is the best head of each single image, which is not one layer's score.
        conditions.append(pl.col("best").ne_missing("image"))
    layer_rows = rows.filter(*conditions).with_columns(file=pl.lit(str(file.path)))
    names = [name for name in COLUMNS if name not in ADDED_BY_RUN]
    return Table.concat([layer_rows], names).frame


def _task_keys(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a frame with the key of each row's task: its metric and the columns of `NAMED`.

    `token` is the word of `_token_words`. The penalties are null unless the file reports the same
    probe at several of them. `all_tokens` is true for a baseline without a token in a file that
    compares tokens: it is the baseline of every token.
    """
    # Rows that all these columns do not tell apart are one probe at several penalties.
    probe = ("store", "site", *TOKEN_AND_HEAD, "metric", *SETTINGS, "baseline")
    has_several_penalties = rows.select(probe).n_unique() < len(rows)
    if has_several_penalties:
        penalties = [pl.col(name) for name in PENALTIES]
    else:
        penalties = [pl.lit(None).alias(name) for name in PENALTIES]
    keys = rows.select(
        "metric", *SETTINGS, *penalties, _token_words(rows).alias("token"), "baseline"
    )
    lacks_token = pl.col("token").is_null() & pl.col("token").is_not_null().any()
    all_tokens = lacks_token & pl.col("baseline").is_not_null()
    return keys.select("metric", *NAMED, all_tokens=all_tokens)


def _token_words(rows: pl.DataFrame) -> pl.Series:
    """Return for each row the token that stands for an image (`cls`, `each`, `0,4`).

    The rows of `about_patches` all have the word `best`. All words are null if tokens make no
    difference between tasks: the file has one token only, and no site both with and without it.
    """
    word = pl.coalesce(pl.col("token").cast(pl.String), pl.format("{},{}", "row", "col"))
    word = pl.when(about_patches()).then(pl.lit(BEST)).otherwise(word)
    words = rows.select(word.alias("token")).to_series()
    if words.drop_nulls().n_unique() > 1 or MEANS[0] in words:
        return words
    # A site both with and without the token, as its vector and the token alone.
    model_rows = rows.with_columns(words).filter(pl.col("baseline").is_null())
    vectors = model_rows.select("store", "site", "token")
    has_site_twice = vectors.n_unique() > vectors.select("store", "site").n_unique()
    if has_site_twice:
        return words
    return pl.Series([None] * len(words), dtype=pl.String)


class LastLayerCka(NamedTuple):
    """The CKA of a store's sites with its last site.

    Attributes:
        store: the store's label.
        last: name of the last site.
        rows: columns store, site, rel_depth and value, and low and high if the comparison has them.
    """

    store: str
    last: str
    rows: pl.DataFrame


def to_last(rows: pl.DataFrame) -> Iterator[LastLayerCka]:
    """Yield for each store of a CKA self-comparison the CKA of its sites with the last one.

    Only sites of one kind are compared: outputs of blocks if there are any, else the kind of the
    first site.
    """
    numbers = ["value"]
    if "low" in rows.columns:
        numbers += ["low", "high"]
    selves = rows.filter(pl.col("store_a") == pl.col("store_b"), metric="cka")
    for (store,), store_rows in selves.group_by(store="store_a", maintain_order=True):
        # A table may contain each pair once, in either order: add the pairs the other way round.
        forward = store_rows.select(
            *numbers, site="site_a", depth="depth_a", other="site_b"
        )
        backward = store_rows.select(
            *numbers, site="site_b", depth="depth_b", other="site_a"
        )
        pairs = pl.concat([forward, backward])
        sites = pairs["site"].unique(maintain_order=True)
        kinds = {site: site_kind(site) for site in sites}
        kind = "out" if "out" in kinds.values() else next(iter(kinds.values()))
        same_kind = [site for site in kinds if kinds[site] == kind]
        pairs = pairs.filter(pl.col("site").is_in(same_kind))
        # Depth counts from 0: in a store with one block relative depth is 0, not 0 / 0.
        deepest = pairs["depth"].arg_max() or 0
        last = pairs["site"][deepest]
        max_depth = max(pairs["depth"][deepest], 1)
        layers = pairs.filter(other=last).unique("site", keep="last", maintain_order=True)
        layers = layers.sort("depth", maintain_order=True).with_columns(
            store=pl.lit(store), rel_depth=pl.col("depth") / max_depth
        )
        columns = ["store", "site", "rel_depth", *numbers]
        yield LastLayerCka(store, last, layers.select(columns))


def with_replicates(files: Sequence[ResultFile]) -> list[ResultFile]:
    """Return the results with the replicates of each row as a column of their tables.

    Raises:
        VitseeError: a file has no replicates beside it, or its sidecar does not say over which
            blocks of images they are.
    """
    results = []
    for file in files:
        table = read_replicates(file)
        if not isinstance(table.notes.get("replicates"), dict):
            raise VitseeError(
                f"{file.path} does not say over which images its replicates are; "
                f"expected the sidecar {file.path.name}.json of knn, probe, retrieve or "
                "saliency beside it"
            )
        results.append(replace(file, table=table))
    return results


class ScoredRow(NamedTuple):
    """A row of a task's frame that has its replicates."""

    frame: pl.DataFrame
    row_index: int

    def cells(self) -> dict[str, Any]:
        """Return column -> the row's value."""
        return self.frame.row(self.row_index, named=True)

    def value(self) -> float:
        """Return the row's score, as the float64 that its column holds."""
        return float(self.frame["value"].to_numpy()[self.row_index])

    def replicates(self, n_blocks: int) -> Float:
        """Return (n_blocks,): the score without each of the first blocks of images."""
        replicates = replicates_array(self.frame)
        assert replicates is not None
        return replicates[self.row_index, :n_blocks]


def differences(
    a: ScoredRow,
    others: Sequence[ScoredRow],
    *,
    candidates: Sequence[pl.DataFrame],
    task: str,
    notes: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return a row for the difference of `a` to each other row, with simultaneous intervals.

    Args:
        a: the best row.
        others: the rows that it is compared with.
        candidates: frames with all rows that `a` and the others were chosen from.
        task: the name of the task.
        notes: file path -> the notes of its table.

    Raises:
        StoreMismatch: two rows are of other images, or of other blocks of them.
    """
    rows = [_difference(a, b, task, notes) for b in others]
    if not rows:
        return []
    n_blocks = min(row["n_blocks"] for row in rows)
    critical_t = np.nan
    if n_blocks > 1:
        replicates = [replicates_array(frame) for frame in candidates]
        chosen_from = [
            values[:, :n_blocks] for values in replicates if values is not None
        ]
        # The largest |t| over all pairs of candidates, whichever pair the choice would pick.
        critical_t = largest_t(np.concatenate(chosen_from))
    for row in rows:
        half = critical_t * row["std"]
        row["low"] = row["value"] - half
        row["high"] = row["value"] + half
    return rows


def _difference(
    a: ScoredRow, b: ScoredRow, task: str, notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row about a less b, still without its interval."""
    first = a.cells()
    second = b.cells()
    blocks = _blocks_record(notes[first["file"]], first["store"])
    other_blocks = _blocks_record(notes[second["file"]], second["store"])
    if blocks["digest"] != other_blocks["digest"]:
        raise StoreMismatch(
            f"{first['store']} ({first['file']}) and {second['store']} "
            f"({second['file']}) were not tested on the same images in the same order; "
            "extract and test them on the same data, with the same --images and --seed"
        )
    n_blocks = int(blocks["n_blocks"])
    # d_b = r_b(x) - r_b(y): both rows leave out the same block, so that what they share cancels.
    replicate_differences = a.replicates(n_blocks) - b.replicates(n_blocks)
    row: dict[str, Any] = {}
    for name in (*SITE, *TOKEN_AND_HEAD):
        row[f"{name}_a"] = first[name]
        row[f"{name}_b"] = second[name]
    for name in ("k", "shots", *PENALTIES, "class", "metric", "n_images"):
        row[name] = first[name]
    row["value"] = a.value() - b.value()
    row["std"] = float(standard_error(replicate_differences))
    row["task"] = task
    row["spread"] = "jackknife"
    row["n_blocks"] = n_blocks
    return row


def _blocks_record(notes: Mapping[str, Any], store: str) -> Mapping[str, Any]:
    """Return what the sidecar says of the blocks of a store's images: `digest` and `n_blocks`.

    Raises:
        VitseeError: it says nothing of them.
    """
    record = notes["replicates"].get(store)
    if not isinstance(record, dict) or not {"digest", "n_blocks"} <= {*record}:
        raise VitseeError(
            f"the sidecar does not say over which images {store} was tested"
        )
    return record
