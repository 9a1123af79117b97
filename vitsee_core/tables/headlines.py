"""One-line answers of a table, per store: building blocks of the analyses' `headline`.

An answer is (whose it is, what the table says): a store's name, or two, and text with the numbers
of one or two rows and their 95 % intervals, or simple statistics of several rows' values, which
then have none. Only what rows state is said: rows that are missing, because other metrics or tokens
were requested, give no answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitsee_core.runtime.machine import plural
from vitsee_core.tables.columns import PARTS
from vitsee_core.tables.metrics import depends_on_size, direction
from vitsee_core.tables.results import Table
from vitsee_core.types import pl

Answer = tuple[str, str]
LIMITS = ("low", "high")
FEW = (
    10  # observations; with fewer, an interval reflects their number more than the value
)
COUNTS = ("n_images", "n_queries", "n_videos", "n_pairs")
BOUND = "grid"  # a baseline that is no rival: what a grid of tokens can reach at all
SETTINGS = ("k", "shots", "token")  # of a score, which are named where they vary


def number(value: float) -> str:
    """Three digits: `0.712`, `15.6`, `1,024`."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "none"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def measured(rows: pl.DataFrame, i: int = 0) -> str:
    """A row's value with its 95 % interval, if it has one. With fewer than `FEW` observations their
    number replaces the interval; it is also shown beside an interval that is wider than the value
    itself, or for a metric that depends on it."""
    row = rows.row(i, named=True)
    value = row["value"]
    low = row.get("low")
    high = row.get("high")
    n, what = observations(rows[i])
    if n < FEW:
        return f"{number(value)} ({too_few(n, what)})"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(value)
    wide = f"; {n:g} {what}" if math.isfinite(n) and high - low > abs(value) else ""
    of_this = math.isfinite(n) and depends_on_size(str(row.get("metric")))
    size = f" at {n:,.0f} {what}" if of_this else ""
    return f"{number(value)} (95 %{size}: {number(low)} to {number(high)}{'' if size else wide})"


def observations(rows: pl.DataFrame) -> tuple[float, str]:
    """The largest number of observations behind any value of a table, and their kind (`images`);
    infinite if the table does not count them."""
    largest: tuple[float, str] = (math.inf, "images")
    for name in COUNTS:
        most: Any = rows[name].max() if name in rows.columns else None
        if isinstance(most, (int, float)) and most < largest[0]:
            largest = (most, name.removeprefix("n_"))
    return largest


def too_few(n: float, what: str) -> str:
    """`of 2 images: too few to conclude from`."""
    return f"of {plural(int(n), what)}: too few to conclude from"


_TOO_FEW = re.compile(r" \((of [\d,]+ \w+: too few to conclude from)\)")


def said_once(answers: Sequence[Answer]) -> tuple[list[Answer], str]:
    """The answers without the remark that too few images are behind them, and the remark, where all
    that they say of this is the same and each says it; else the answers with it once a line."""
    remarks = [list(dict.fromkeys(_TOO_FEW.findall(text))) for _, text in answers]
    if answers and all(len(some) == 1 and some == remarks[0] for some in remarks):
        return [(who, _TOO_FEW.sub("", text)) for who, text in answers], remarks[0][0]
    once = []
    for (who, text), some in zip(answers, remarks, strict=True):
        if len(some) == 1 and len(_TOO_FEW.findall(text)) > 1:
            text = f"{_TOO_FEW.sub('', text)} ({some[0]})"
        once.append((who, text))
    return once, ""


def picked(table: Table | pl.DataFrame, **wanted: Any) -> pl.DataFrame:
    """The rows with a finite value and these cells; None requires an empty cell, which a missing
    column has everywhere; a tuple allows several values."""
    rows = table.frame if isinstance(table, Table) else table
    if "value" not in rows.columns:
        return rows.clear()
    rules = [pl.col("value").is_finite()]
    for name, value in wanted.items():
        choices = value if isinstance(value, tuple) else (value,)
        cell = pl.col(name) if name in rows.columns else pl.lit(None)
        among = [choice for choice in choices if choice is not None]
        rule = cell.is_in(among) if among and name in rows.columns else pl.lit(False)
        rules.append(
            rule.fill_null(False) | (cell.is_null() if None in choices else False)
        )
    return rows.filter(*rules)


def by_store(
    table: Table | pl.DataFrame, **wanted: Any
) -> list[tuple[str, pl.DataFrame]]:
    """(store, its rows of `picked`, from input to output)."""
    rows = table.frame if isinstance(table, Table) else table
    if not {"store", "site", "rel_depth", "metric"} <= {*rows.columns}:
        return []
    stores = picked(rows, **wanted).partition_by("store", maintain_order=True)
    return [
        (own["store"][0], own.sort("rel_depth", maintain_order=True)) for own in stores
    ]


def extremes(rows: pl.DataFrame) -> tuple[int, int]:
    """The rows of the smallest and of the largest value."""
    return rows["value"].arg_min() or 0, rows["value"].arg_max() or 0


def first_and_last(rows: pl.DataFrame, unit: str = "") -> str:
    """`3.0 px at embed, 9.1 px (95 %: 8.8 to 9.4) at blocks.5.out`, of one store's rows."""
    ends = (0, len(rows) - 1) if len(rows) > 1 else (0,)
    unit = f" {unit}" if unit else ""
    return ", ".join(f"{measured(rows, i)}{unit} at {rows['site'][i]}" for i in ends)


def margin(rows: pl.DataFrame) -> str:
    """The largest half-width of the 95 % intervals of several rows, if all have one."""
    if (
        not {*LIMITS} <= {*rows.columns}
        or rows["low"].has_nulls()
        or rows["high"].has_nulls()
    ):
        return ""
    n, what = observations(rows)
    if n < FEW:
        return f" ({too_few(n, what)})"
    reach: Any = ((rows["high"] - rows["low"]) / 2).max() or 0.0
    if math.isfinite(reach):
        return f" (95 %: ± {number(reach)} at most)"
    return ""


# ------------------------------------------------------------------------------------ scores


def best_layers(table: Table, units: Mapping[str, str]) -> list[Answer]:
    """Each store's best layer by the first of these metrics that the table has, beside the best
    baseline there. units: metric -> what its value is a share or a mean of."""
    known = table["metric"] if "metric" in table.frame.columns else ()
    metric = next((m for m in units if m in known), None)
    if metric is None:
        return []
    whole = dict.fromkeys((*PARTS, "class"))
    sign = -1.0 if direction(metric) == "lower" else 1.0
    answers = []
    for store, rows in by_store(table, metric=metric, baseline=None, **whole):
        scores = sign * rows["value"]
        i = scores.arg_max() or 0
        site = rows["site"][i]
        equal = rows.filter(scores == scores[i])["site"].unique(maintain_order=True)
        alike = [name for name in equal if name != site]
        also = (
            f" (as {', '.join(alike[:2])}{', ...' if len(alike) > 2 else ''})"
            if alike
            else ""
        )
        text = f"best at {site}{also}: {measured(rows, i)} {units[metric]}"
        text += "".join(
            f", {n} {_plain(rows[n][i])}" for n in SETTINGS if _varies(rows, n)
        )
        others = picked(table, store=store, metric=metric, site=site, **whole)
        if "baseline" not in others.columns:
            others = others.clear().with_columns(baseline=pl.lit(None))
        named = others.filter(pl.col("baseline").is_not_null()).sort("rel_depth")
        rivals = [
            (sign * value, str(name), value)
            for name, value in named.select("baseline", "value").rows()
        ]
        bounds = [value for _, name, value in rivals if name == BOUND]
        if beaten := max((rival for rival in rivals if rival[1] != BOUND), default=None):
            text += f"; {beaten[1]} {number(beaten[2])}"
        if bounds:
            text += f"; the grid allows {number(bounds[0])}"
        answers.append((store, text))
    return answers


# ------------------------------------------------------------------------------------ pairs


def alike(table: Table, metric: str) -> list[Answer]:
    """How similar the sites of each pair of stores are.

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
    for (store_a, store_b), own in by_pair.items():
        key = frozenset((store_a, store_b))
        if key in answers:
            continue
        if store_a == store_b:
            if text := _within(own):
                answers[key] = (store_a, text)
        else:
            i = extremes(own)[1]
            text = f"{own['site_a'][i]} and {own['site_b'][i]}: {measured(own, i)}"
            text = text if len(own) == 1 else f"most alike are {text}"
            answers[key] = (f"{store_a} and {store_b}", text)
    return [*answers.values()]


def _within(rows: pl.DataFrame) -> str:
    sites = rows["site_a"].unique(maintain_order=True).to_list()
    n = len(sites)
    third = max(3, -(-len(sites) // 3))
    said = []
    if n < 2 or {*sites} != {*rows["site_b"]}:
        return ""
    place = {site: i for i, site in enumerate(sites)}
    rows = rows.with_columns(
        pl.col(f"site_{side}").cast(pl.String).replace_strict(place).alias(side)
        for side in "ab"
    )
    if n >= 2 * third:
        inner = rows.filter(pl.col("a") < pl.col("b"))
        for name, first, last in (("first", 0, third - 1), ("last", n - third, n - 1)):
            among = [pl.col(side).is_between(first, last) for side in "ab"]
            mean: Any = inner.filter(*among)["value"].mean()
            if mean is not None:
                said.append(f"{name} {third} layers {number(mean)}")
    ends = rows.filter(a=0, b=n - 1)
    if len(ends):
        said.append(f"first with last layer {measured(ends)}")
    return ", ".join(said)


# ------------------------------------------------------------------------------------ cells


def _varies(rows: pl.DataFrame, name: str) -> bool:
    return name in rows.columns and rows[name].drop_nulls().n_unique() > 1


def _plain(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:g}"
    return str(value)
