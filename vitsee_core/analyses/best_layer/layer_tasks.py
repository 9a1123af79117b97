"""Tasks of result files: their rows about whole layers, put together by what they are scores of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.tables.columns import PARTS, SITE
from vitsee_core.tables.metrics import direction
from vitsee_core.tables.results import ResultFile, Table
from vitsee_stores.errors import VitseeError

SETTINGS = ("k", "shots", "class")
PENALTIES = ("l2", "l2_relative")  # of probe and of dense-probe
COLUMNS = (
    *(*SITE, "token", "row", "col", "head", "class"),
    *("task", "k", "shots", *PENALTIES, "ties", "file"),
    *("metric", "value", "std", "low", "high", "n_images", "n_layers", "n_overlap", "baseline"),
)
OPTIONAL = frozenset(
    (
        *("model", "weights", "block", "token", "row", "col", "head"),
        *(*SETTINGS, *PENALTIES, "ties", "std", "low", "high", "n_images", "n_overlap"),
    )
)
MEANS = ("each", "patches")  # tokens of rows about the mean over a site's tokens: probe, lens
BEST = "best"
NAMED = (*SETTINGS, "token", *PENALTIES)  # with the metric they make the task
TOLD_APART = ("metric", *SETTINGS, *PENALTIES)
# Rows about one token of a site that also has a row for the mean over tokens.
AVERAGED = pl.col("token").is_in(MEANS).any().over("store", "site")
ABOUT_PATCHES = pl.col("row").is_not_null() & AVERAGED
MADE = frozenset(("task", "ties", "n_layers", "n_overlap"))
PAIRS = ("store_a", "site_a", "depth_a", "store_b", "site_b", "depth_b", "metric", "value")


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
            where their site has a row for the mean over tokens (see `ABOUT_PATCHES`).

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
    parts: dict[str, list[pl.DataFrame]] = {}
    for file in files:
        if file.has(PAIRS):
            continue
        rows = _uniform(file)
        if not best_token:
            rows = rows.filter(~ABOUT_PATCHES)
        keys = _keys(rows)
        for key in keys.filter(~pl.col("of_all")).unique(maintain_order=True).rows(named=True):
            metric, settings = key["metric"], {name: key[name] for name in NAMED}
            if metric not in metrics and (metrics or settings["class"] is not None):
                continue
            if direction(metric) == "none":
                continue
            named = [f"{name} = {value}" for name, value in settings.items() if value is not None]
            task = ", ".join([f"{file.command} {metric}".strip(), *named])
            same = pl.all_horizontal(pl.col(name).eq_missing(key[name]) for name in TOLD_APART)
            same &= pl.col("of_all") | pl.col("token").eq_missing(key["token"])
            own = rows.filter(keys.select(same).to_series())
            taken = {store for part in parts.get(task, ()) for store in part["store"].unique()}
            if taken & {*own["store"].unique()}:
                task = f"{task} ({file.path})"
            parts.setdefault(task, []).append(own)
    if not parts:
        raise VitseeError(
            "no result has rows about whole layers: all are about parts of the images"
        )
    return {task: Table.concat(some).frame for task, some in parts.items()}


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
    probe = ("store", "site", "head", "token", "row", "col", "metric", *SETTINGS, "baseline")
    repeated = rows.select(probe).n_unique() < len(rows)
    penalties = [pl.col(name) if repeated else pl.lit(None).alias(name) for name in PENALTIES]
    keys = rows.select("metric", *SETTINGS, *penalties, _poolings(rows).alias("token"), "baseline")
    no_token = pl.col("token").is_null() & pl.col("token").is_not_null().any()
    of_all = no_token & pl.col("baseline").is_not_null()
    return keys.select("metric", *NAMED, of_all=of_all)


def _poolings(rows: pl.DataFrame) -> pl.Series:
    """(rows,) the word for what stands for an image (`cls`, `each`, `0,4`), null unless the file
    compares several or a site is measured by a token and without; `best` in all rows of
    `ABOUT_PATCHES`."""
    word = pl.coalesce(pl.col("token").cast(pl.String), pl.format("{},{}", "row", "col"))
    word = pl.when(ABOUT_PATCHES).then(pl.lit(BEST)).otherwise(word)
    words = rows.select(word.alias("token")).to_series()
    if words.drop_nulls().n_unique() > 1 or MEANS[0] in words:
        return words
    real = rows.with_columns(words).filter(pl.col("baseline").is_null())
    real = real.select("store", "site", "token")
    several = real.n_unique() > real.select("store", "site").n_unique()
    return words if several else pl.Series([None] * len(words), dtype=pl.String)


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
        kinds = {site: site_kind(site) for site in pairs["site"].unique(maintain_order=True)}
        kind = "out" if "out" in kinds.values() else next(iter(kinds.values()))
        pairs = pairs.filter(pl.col("site").is_in([site for site in kinds if kinds[site] == kind]))
        at = pairs["depth"].arg_max() or 0
        last, top = pairs["site"][at], max(pairs["depth"][at], 1)
        found = pairs.filter(other=last).unique("site", keep="last", maintain_order=True)
        place = {"store": pl.lit(store), "rel_depth": pl.col("depth") / top}
        layers = found.sort("depth", maintain_order=True).with_columns(**place)
        yield store, last, layers.select("store", "site", "rel_depth", *numbers)
