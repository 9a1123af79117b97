"""One-line answers of a table, per store: building blocks of the analyses' `headline`.

An answer is a store's name, or two, and a text: the values of one or two rows with their 95 %
intervals, or simple statistics of several rows' values, which have no interval. Rows that are
missing, because other metrics or tokens were requested, give no answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitsee_core.runtime.machine import plural
from vitsee_core.tables.columns import SUBSET_COLUMNS
from vitsee_core.tables.metrics import depends_on_size, direction
from vitsee_core.tables.results import Table
from vitsee_core.types import pl

Answer = tuple[str, str]  # name of a store or two, text
LIMITS = ("low", "high")
# Observations: with fewer, an interval says more about their number than about the value.
FEW = 10
COUNTS = (
    "n_images",
    "n_queries",
    "n_videos",
    "n_pairs",
)  # columns of numbers of observations
BOUND = (
    "grid"  # the baseline that is not a rival: the best that a grid of tokens can reach
)
SETTINGS = ("k", "shots", "token")  # columns of a score's settings, named where they vary


def number(value: float) -> str:
    """Return a number with three digits: `0.712`, `15.6`, `1,024`; "none" if it is not finite."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "none"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def measured(rows: pl.DataFrame, i: int = 0) -> str:
    """Return the value of the i-th row with its 95 % interval, if it has one.

    With fewer than `FEW` observations their number replaces the interval. It also stands beside an
    interval that is wider than the value itself, and before one of a metric that depends on it.
    """
    row = rows.row(i, named=True)
    value = row["value"]
    low = row.get("low")
    high = row.get("high")
    n, unit = observations(rows[i])
    if n < FEW:
        return f"{number(value)} ({too_few(n, unit)})"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(value)
    interval = f"{number(low)} to {number(high)}"
    if math.isfinite(n) and depends_on_size(str(row.get("metric"))):
        return f"{number(value)} (95 % at {n:,.0f} {unit}: {interval})"
    if math.isfinite(n) and high - low > abs(value):
        return f"{number(value)} (95 %: {interval}; {n:g} {unit})"
    return f"{number(value)} (95 %: {interval})"


def observations(rows: pl.DataFrame) -> tuple[float, str]:
    """Return the number of observations behind a table's values, and their plural (`images`).

    The largest number in each column of counts, and of these the smallest: 5 queries of 1,000
    images are 5 observations. Infinite if the table does not count them.
    """
    fewest: tuple[float, str] = (math.inf, "images")
    for name in COUNTS:
        if name not in rows.columns:
            continue
        largest: Any = rows[name].max()
        if isinstance(largest, (int, float)) and largest < fewest[0]:
            fewest = (largest, name.removeprefix("n_"))
    return fewest


def too_few(n: float, unit: str) -> str:
    """Return the remark on few observations: `of 2 images: too few to conclude from`."""
    return f"of {plural(int(n), unit)}: too few to conclude from"


_TOO_FEW = re.compile(r" \((of [\d,]+ \w+: too few to conclude from)\)")


def said_once(answers: Sequence[Answer]) -> tuple[list[Answer], str]:
    """Move the remark that too few images are behind answers to where it is needed once.

    Returns:
        The answers without the remark, and the remark, if all answers have the same one; else the
        answers with their remark once, at the end of the line, and "".
    """
    remarks_of = [list(dict.fromkeys(_TOO_FEW.findall(text))) for _, text in answers]
    if answers and all(
        len(remarks) == 1 and remarks == remarks_of[0] for remarks in remarks_of
    ):
        bare = [(store, _TOO_FEW.sub("", text)) for store, text in answers]
        return bare, remarks_of[0][0]
    shortened = []
    for (store, text), remarks in zip(answers, remarks_of, strict=True):
        if len(remarks) == 1 and len(_TOO_FEW.findall(text)) > 1:
            text = f"{_TOO_FEW.sub('', text)} ({remarks[0]})"
        shortened.append((store, text))
    return shortened, ""


def picked(table: Table | pl.DataFrame, **cells: Any) -> pl.DataFrame:
    """Return the rows with a finite value and these cells.

    Args:
        table: a table or its rows.
        cells: column -> value that a row must have there. A tuple allows several values; None
            requires an empty cell, which a missing column has everywhere.
    """
    rows = table.frame if isinstance(table, Table) else table
    if "value" not in rows.columns:
        return rows.clear()
    rules = [pl.col("value").is_finite()]
    for name, value in cells.items():
        allowed = value if isinstance(value, tuple) else (value,)
        values = [cell for cell in allowed if cell is not None]
        rule = pl.lit(False)
        if name in rows.columns:
            if values:
                rule = pl.col(name).is_in(values).fill_null(False)
            if None in allowed:
                rule = rule | pl.col(name).is_null()
        elif None in allowed:
            rule = pl.lit(True)
        rules.append(rule)
    return rows.filter(*rules)


def by_store(table: Table | pl.DataFrame, **cells: Any) -> list[tuple[str, pl.DataFrame]]:
    """Return each store with its rows that `picked` finds, from input to output.

    Args:
        table: a table or its rows; none are returned if it has no layers of stores.
        cells: column -> value, as `picked` takes them.
    """
    rows = table.frame if isinstance(table, Table) else table
    if not {"store", "site", "rel_depth", "metric"} <= {*rows.columns}:
        return []
    parts = picked(rows, **cells).partition_by("store", maintain_order=True)
    return [
        (part["store"][0], part.sort("rel_depth", maintain_order=True)) for part in parts
    ]


def extremes(rows: pl.DataFrame) -> tuple[int, int]:
    """Return the indices of the smallest and of the largest value."""
    return rows["value"].arg_min() or 0, rows["value"].arg_max() or 0


def first_and_last(rows: pl.DataFrame, unit: str = "") -> str:
    """Return the values of one store's first and last row.

    For example `3.0 px at embed, 9.1 px (95 %: 8.8 to 9.4) at blocks.5.out`.
    """
    ends = (0, len(rows) - 1) if len(rows) > 1 else (0,)
    unit = f" {unit}" if unit else ""
    return ", ".join(f"{measured(rows, i)}{unit} at {rows['site'][i]}" for i in ends)


def margin(rows: pl.DataFrame) -> str:
    """Return the largest half-width of several rows' 95 % intervals in words.

    "" if a row has no interval.
    """
    if not {*LIMITS} <= {*rows.columns}:
        return ""
    if rows["low"].has_nulls() or rows["high"].has_nulls():
        return ""
    n, unit = observations(rows)
    if n < FEW:
        return f" ({too_few(n, unit)})"
    half_width: Any = ((rows["high"] - rows["low"]) / 2).max() or 0.0
    if math.isfinite(half_width):
        return f" (95 %: ± {number(half_width)} at most)"
    return ""


# ------------------------------------------------------------------------------------ scores


def best_layers(table: Table, units: Mapping[str, str]) -> list[Answer]:
    """Return each store's best layer, beside the best baseline there.

    Args:
        table: a table of scores.
        units: metric -> what its value is a share or a mean of; the first metric that the table
            has decides.
    """
    metrics = table["metric"] if "metric" in table.frame.columns else ()
    metric = next((m for m in units if m in metrics), None)
    if metric is None:
        return []
    # Rows about all images, not about one group, query or class.
    all_images = dict.fromkeys((*SUBSET_COLUMNS, "class"))
    sign = -1.0 if direction(metric) == "lower" else 1.0
    answers = []
    for store, rows in by_store(table, metric=metric, baseline=None, **all_images):
        scores = sign * rows["value"]
        i = scores.arg_max() or 0
        site = rows["site"][i]
        text = f"best at {site}"
        tied = rows.filter(scores == scores[i])["site"].unique(maintain_order=True)
        tied_others = [name for name in tied if name != site]
        if tied_others:
            more = ", ..." if len(tied_others) > 2 else ""
            text += f" (as {', '.join(tied_others[:2])}{more})"
        text += f": {measured(rows, i)} {units[metric]}"
        for setting in SETTINGS:
            if _varies(rows, setting):
                text += f", {setting} {_setting_text(rows[setting][i])}"
        site_rows = picked(table, store=store, metric=metric, site=site, **all_images)
        text += _baseline_words(site_rows, sign)
        answers.append((store, text))
    return answers


def _baseline_words(rows: pl.DataFrame, sign: float) -> str:
    """Return the best baseline at a site, and the best that its grid allows; "" without any.

    Args:
        rows: the rows of one store, metric and site.
        sign: -1 for metrics of which lower values are better.
    """
    if "baseline" not in rows.columns:
        return ""
    baselines = rows.filter(pl.col("baseline").is_not_null()).sort("rel_depth")
    rivals = []
    bounds = []
    for name, value in baselines.select("baseline", "value").rows():
        if name == BOUND:
            bounds.append(value)
        else:
            rivals.append((sign * value, str(name), value))
    text = ""
    if rivals:
        _, name, value = max(rivals)
        text += f"; {name} {number(value)}"
    if bounds:
        text += f"; the grid allows {number(bounds[0])}"
    return text


# ------------------------------------------------------------------------------------ pairs


def alike(table: Table, metric: str) -> list[Answer]:
    """Return how similar the sites of each pair of stores are.

    Within one store, the mean of the pairs in the first and in the last third of its layers (three
    layers at least), and its first layer with its last. Between two stores the most similar pair;
    if each has one site, that pair.
    """
    pairs = ("store_a", "store_b")
    if not {*pairs, "site_a", "site_b", "metric"} <= {*table.frame.columns}:
        return []
    answers: dict[frozenset[str], Answer] = {}
    by_pair = picked(table, metric=metric).partition_by(
        *pairs, maintain_order=True, as_dict=True
    )
    for (store_a, store_b), rows in by_pair.items():
        key = frozenset((store_a, store_b))
        if key in answers:  # the same pair the other way round
            continue
        if store_a == store_b:
            text = _similarity_within(rows)
            if text:
                answers[key] = (store_a, text)
        else:
            i = extremes(rows)[1]
            text = f"{rows['site_a'][i]} and {rows['site_b'][i]}: {measured(rows, i)}"
            if len(rows) > 1:
                text = f"most alike are {text}"
            answers[key] = (f"{store_a} and {store_b}", text)
    return [*answers.values()]


def _similarity_within(rows: pl.DataFrame) -> str:
    """Return how similar the layers of one store are, from its full matrix; "" without it."""
    sites = rows["site_a"].unique(maintain_order=True).to_list()
    n = len(sites)
    if n < 2 or {*sites} != {*rows["site_b"]}:
        return ""
    index = {site: i for i, site in enumerate(sites)}
    rows = rows.with_columns(
        a=pl.col("site_a").cast(pl.String).replace_strict(index),
        b=pl.col("site_b").cast(pl.String).replace_strict(index),
    )
    texts = []
    third = max(3, -(-n // 3))
    if n >= 2 * third:  # thirds that do not overlap
        # Above the diagonal: each pair once, and no site with itself.
        pairs = rows.filter(pl.col("a") < pl.col("b"))
        in_first = pairs.filter(pl.col("b") < third)  # a < b
        in_last = pairs.filter(pl.col("a") >= n - third)
        for name, part in (("first", in_first), ("last", in_last)):
            mean: Any = part["value"].mean()
            if mean is not None:
                texts.append(f"{name} {third} layers {number(mean)}")
    ends = rows.filter(a=0, b=n - 1)
    if len(ends):
        texts.append(f"first with last layer {measured(ends)}")
    return ", ".join(texts)


# ------------------------------------------------------------------------------------ cells


def _varies(rows: pl.DataFrame, name: str) -> bool:
    """Return whether a column has several values."""
    return name in rows.columns and rows[name].drop_nulls().n_unique() > 1


def _setting_text(value: Any) -> str:
    """Return a setting as text: `20`, `0.5`, `cls`."""
    if isinstance(value, (int, float)):
        return f"{value:g}"
    return str(value)
