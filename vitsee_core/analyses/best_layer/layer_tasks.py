"""Tasks of result files (their rows about whole layers, put together by what they are scores of),
and differences between rows of results, with intervals over the images that they share.

Two layers tested on the same images are right and wrong together, so that the interval of their
difference is narrower than their own intervals suggest. From the replicates r_b (each row's value
without block b of the images, kept by --replicates) of rows x and y over the same m blocks:

    value = x - y,  d_b = r_b(x) - r_b(y),  std = sqrt((m - 1) / m sum_b (d_b - mean d)^2)
    low, high = value -+ q std

(the delete-a-block jackknife, as for the rows themselves; Efron and Tibshirani 1993, chapter 11).
The best of many rows was chosen on these images, and seems better than it is: with Student's
quantile for q, of 13 layers that are equally good some is found worse than the best in 70 % of the
samples. So q is that of `jackknife.largest_t`, for all pairs of the rows it was chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.statistics.jackknife import SIMULTANEOUS, largest_t, standard_error
from vitsee_core.tables.columns import PAIR, PARTS, SITE, VALUES
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.replicates import array_of
from vitsee_core.tables.results import ResultFile, Table, read_replicates
from vitsee_core.types import pl
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
MEANS = (
    "each",
    "patches",
)  # tokens of rows about the mean over a site's tokens: probe, lens
BEST = "best"
NAMED = (*SETTINGS, "token", *PENALTIES)  # with the metric they make the task
TOLD_APART = ("metric", *SETTINGS, *PENALTIES)
MADE = frozenset(("task", "ties", "n_layers", "n_overlap"))
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
PLACE = ("token", "row", "col", "head")
PAIRED_COLUMNS = (
    *PAIR,
    *(f"{name}_{side}" for side in "ab" for name in PLACE),
    *("task", "k", "shots", *PENALTIES, "class", *VALUES, "n_images", "n_blocks"),
)
METHOD = (
    "value: row a less row b; std: standard error of a delete-a-block jackknife over the blocks of "
    f"images that both rows share; {SIMULTANEOUS}"
)


def known_metrics(files: Sequence[ResultFile]) -> list[str]:
    """The metrics of the files."""
    results = [file.table.frame["metric"] for file in files if not file.has(PAIRS)]
    return pl.concat(results).unique(maintain_order=True).to_list()


def tasks(
    files: Sequence[ResultFile], metrics: Sequence[str] = (), best_token: bool = False
) -> dict[str, pl.DataFrame]:
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
            raise VitseeError(
                f"no result has the metric {metric!r}; they have {', '.join(known)}"
            )
        if direction(metric) == "none":
            raise VitseeError(
                f"no layer is the best by {metric}: neither a higher nor a lower value is better"
            )
    if not any(direction(metric) != "none" for metric in known):
        raise VitseeError(
            "no result has a metric of which one side is better (accuracies, purity, iou, ...); "
            f"they have {', '.join(known)}"
        )
    parts: dict[str, list[pl.DataFrame]] = {}
    for file in files:
        if file.has(PAIRS):
            continue
        rows = _uniform(file)
        if not best_token:
            rows = rows.filter(~about_patches())
        keys = _keys(rows)
        for key in (
            keys.filter(~pl.col("of_all")).unique(maintain_order=True).rows(named=True)
        ):
            metric = key["metric"]
            settings = {name: key[name] for name in NAMED}
            if metric not in metrics and (metrics or settings["class"] is not None):
                continue
            if direction(metric) == "none":
                continue
            named = [
                f"{name} = {value}"
                for name, value in settings.items()
                if value is not None
            ]
            task = ", ".join([f"{file.command} {metric}".strip(), *named])
            same = pl.all_horizontal(
                pl.col(name).eq_missing(key[name]) for name in TOLD_APART
            )
            same &= pl.col("of_all") | pl.col("token").eq_missing(key["token"])
            own = rows.filter(keys.select(same).to_series())
            taken = {
                store for part in parts.get(task, ()) for store in part["store"].unique()
            }
            if taken & {*own["store"].unique()}:
                task = f"{task} ({file.path})"
            parts.setdefault(task, []).append(own)
    if not parts:
        raise VitseeError(
            "no result has rows about whole layers: all are about parts of the images"
        )
    return {task: Table.concat(some).frame for task, some in parts.items()}


def about_patches() -> pl.Expr:
    """Which rows are about one token of a site that also has a row for the mean over tokens."""
    averaged = pl.col("token").is_in(MEANS).any().over("store", "site")
    return pl.col("row").is_not_null() & averaged


def _uniform(file: ResultFile) -> pl.DataFrame:
    """A result's rows about whole layers, with all columns that a best row takes over."""
    rows = file.table.frame
    whole = [pl.col(name).is_null() for name in PARTS if name in rows.columns]
    if "best" in rows.columns:
        whole.append(pl.col("best").ne_missing("image"))
    own = rows.filter(*whole).with_columns(file=pl.lit(str(file.path)))
    return Table.concat([own], [name for name in COLUMNS if name not in MADE]).frame


def _keys(rows: pl.DataFrame) -> pl.DataFrame:
    """A frame of each row's task: its metric and `NAMED`, in which `token` is its pooling and a
    penalty stands where the file reports the same probe at several; and `of_all`, whether it is a
    baseline without a token, which is that of every token."""
    probe = (
        "store",
        "site",
        "head",
        "token",
        "row",
        "col",
        "metric",
        *SETTINGS,
        "baseline",
    )
    repeated = rows.select(probe).n_unique() < len(rows)
    penalties = [
        pl.col(name) if repeated else pl.lit(None).alias(name) for name in PENALTIES
    ]
    keys = rows.select(
        "metric", *SETTINGS, *penalties, _poolings(rows).alias("token"), "baseline"
    )
    no_token = pl.col("token").is_null() & pl.col("token").is_not_null().any()
    of_all = no_token & pl.col("baseline").is_not_null()
    return keys.select("metric", *NAMED, of_all=of_all)


def _poolings(rows: pl.DataFrame) -> pl.Series:
    """(rows,) the word for what stands for an image (`cls`, `each`, `0,4`), null unless the file
    compares several or a site is measured by a token and without; `best` in all rows of
    `about_patches`."""
    word = pl.coalesce(pl.col("token").cast(pl.String), pl.format("{},{}", "row", "col"))
    word = pl.when(about_patches()).then(pl.lit(BEST)).otherwise(word)
    words = rows.select(word.alias("token")).to_series()
    if words.drop_nulls().n_unique() > 1 or MEANS[0] in words:
        return words
    real = rows.with_columns(words).filter(pl.col("baseline").is_null())
    real = real.select("store", "site", "token")
    several = real.n_unique() > real.select("store", "site").n_unique()
    if several:
        return words
    return pl.Series([None] * len(words), dtype=pl.String)


def to_last(rows: pl.DataFrame) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """(store, last site, rows) of a CKA self-comparison: each site's CKA with the last one of its
    kind, as columns store, site, rel_depth, value (and low, high)."""
    numbers = [name for name in ("value", "low", "high") if name in rows.columns]
    selves = rows.filter(pl.col("store_a") == pl.col("store_b"), metric="cka")
    for (store,), own in selves.group_by(store="store_a", maintain_order=True):
        # Comparisons may contain each pair once, in either order.
        pairs = pl.concat(
            own.select(*numbers, site=f"site_{x}", depth=f"depth_{x}", other=f"site_{y}")
            for x, y in ("ab", "ba")
        )
        kinds = {
            site: site_kind(site) for site in pairs["site"].unique(maintain_order=True)
        }
        kind = "out" if "out" in kinds.values() else next(iter(kinds.values()))
        pairs = pairs.filter(
            pl.col("site").is_in([site for site in kinds if kinds[site] == kind])
        )
        at = pairs["depth"].arg_max() or 0
        last = pairs["site"][at]
        top = max(pairs["depth"][at], 1)
        found = pairs.filter(other=last).unique("site", keep="last", maintain_order=True)
        place = {"store": pl.lit(store), "rel_depth": pl.col("depth") / top}
        layers = found.sort("depth", maintain_order=True).with_columns(**place)
        yield store, last, layers.select("store", "site", "rel_depth", *numbers)


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
            row["low"], row["high"] = (
                row["value"] + sign * reach * row["std"] for sign in (-1, 1)
            )
    return rows


def _difference(
    a: tuple[pl.DataFrame, int],
    b: tuple[pl.DataFrame, int],
    task: str,
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    (of_a, i), (of_b, j) = a, b
    first = of_a.row(i, named=True)
    second = of_b.row(j, named=True)
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
        raise VitseeError(
            f"the sidecar does not say over which images {store} was tested"
        )
    return found
