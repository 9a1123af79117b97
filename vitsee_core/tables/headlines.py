"""One-line answers of a table, per store: building blocks of the analyses' `headline`.

An answer is (whose it is, what the table says): a store's name, or two, and text with the numbers
of one or two rows and their 95 % intervals, or simple statistics of several rows' values, which
then have none. Only what rows state is said: rows that are missing, because other metrics or tokens
were requested, give no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitsee_core.runtime.machine import counted
from vitsee_core.tables.columns import PARTS, is_given
from vitsee_core.tables.metrics import depends_on_size, direction
from vitsee_core.tables.results import Table

Answer = tuple[str, str]
LIMITS = ("low", "high")
FEW = 10  # observations; with fewer, an interval reflects their number more than the value
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


def measured(rows: Table, i: int = 0) -> str:
    """A row's value with its 95 % interval, if it has one. With fewer than `FEW` observations their
    number replaces the interval; it is also shown beside an interval that is wider than the value
    itself, or for a metric that depends on it."""
    value = float(rows["value"][i])
    low, high = (_float(rows.columns[n][i]) if n in rows.columns else math.nan for n in LIMITS)
    n, what = observations(rows.take(np.array([i])))
    if n < FEW:
        return f"{number(value)} ({too_few(n, what)})"
    if not (math.isfinite(low) and math.isfinite(high)):
        return number(value)
    wide = f"; {n:g} {what}" if math.isfinite(n) and high - low > abs(value) else ""
    of_this = math.isfinite(n) and depends_on_size(str(rows.cells("metric")[i]))
    size = f" at {n:,.0f} {what}" if of_this else ""
    return f"{number(value)} (95 %{size}: {number(low)} to {number(high)}{'' if size else wide})"


def observations(rows: Table) -> tuple[float, str]:
    """The largest number of observations behind any value of a table, and their kind (`images`);
    infinite if the table does not count them."""
    largest = (math.inf, "images")
    for name in COUNTS:
        counts = [_float(n) for n in rows.cells(name) if is_given(n)]
        if counts and max(counts) < largest[0]:
            largest = (max(counts), name.removeprefix("n_"))
    return largest


def too_few(n: float, what: str) -> str:
    """`of 2 images: too few to conclude from`."""
    return f"of {counted(int(n), what)}: too few to conclude from"


def picked(table: Table, **wanted: Any) -> Table:
    """The rows with a finite value and these cells; None requires an empty cell, which a missing
    column has everywhere; a tuple allows several values."""
    keep = np.isfinite([_float(v) for v in table.cells("value")])
    for name, value in wanted.items():
        choices = [c if is_given(c) else None for c in _several(value)]
        cells = table.cells(name)
        keep &= np.array([(c if is_given(c) else None) in choices for c in cells], bool)
    return table.take(keep)


def by_store(table: Table, **wanted: Any) -> list[tuple[str, Table]]:
    """(store, its rows of `picked`, from input to output)."""
    if not {"store", "site", "rel_depth", "metric"} <= table.columns.keys():
        return []
    stores = []
    for store, rows in picked(table, **wanted).groups("store"):
        depths = [_float(v) for v in rows["rel_depth"].tolist()]
        stores.append((str(store), rows.take(np.argsort(depths, kind="stable"))))
    return stores


def extremes(rows: Table) -> tuple[int, int]:
    """The rows of the smallest and of the largest value."""
    values = rows["value"].astype(float)
    return int(values.argmin()), int(values.argmax())


def first_and_last(rows: Table, unit: str = "") -> str:
    """`3.0 px at embed, 9.1 px (95 %: 8.8 to 9.4) at blocks.5.out`, of one store's rows."""
    ends = (0, len(rows) - 1) if len(rows) > 1 else (0,)
    unit = f" {unit}" if unit else ""
    return ", ".join(f"{measured(rows, i)}{unit} at {rows['site'][i]}" for i in ends)


def margin(rows: Table) -> str:
    """The largest half-width of the 95 % intervals of several rows, if all have one."""
    if not {*LIMITS} <= rows.columns.keys():
        return ""
    n, what = observations(rows)
    if n < FEW:
        return f" ({too_few(n, what)})"
    low, high = (np.array([_float(v) for v in rows[name].tolist()]) for name in LIMITS)
    reach = float(((high - low) / 2).max(initial=0.0))
    return f" (95 %: ± {number(reach)} at most)" if math.isfinite(reach) else ""


# ------------------------------------------------------------------------------------ scores


def best_layers(table: Table, units: Mapping[str, str]) -> list[Answer]:
    """Each store's best layer by the first of these metrics that the table has, beside the best
    baseline there. units: metric -> what its value is a share or a mean of."""
    metric = next((m for m in units if m in table.cells("metric")), None)
    if metric is None:
        return []
    whole = dict.fromkeys((*PARTS, "class"))
    sign = -1.0 if direction(metric) == "lower" else 1.0
    answers = []
    for store, rows in by_store(table, metric=metric, baseline=None, **whole):
        scores = sign * rows["value"].astype(float)
        i = int(scores.argmax())
        site = str(rows["site"][i])
        equal = dict.fromkeys(str(s) for s in rows["site"][scores == scores[i]].tolist())
        alike = [name for name in equal if name != site]
        also = f" (as {', '.join(alike[:2])}{', ...' if len(alike) > 2 else ''})" if alike else ""
        text = f"best at {site}{also}: {measured(rows, i)} {units[metric]}"
        text += "".join(f", {n} {_plain(rows[n][i])}" for n in SETTINGS if _varies(rows, n))
        rivals = [
            (sign * float(own["value"][at]), str(own["baseline"][at]), float(own["value"][at]))
            for name, own in by_store(table, metric=metric, site=site, **whole)
            for at in range(len(own))
            if name == store and is_given(own.cells("baseline")[at])
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
    if not {"store_a", "store_b", "site_a", "site_b", "metric"} <= table.columns.keys():
        return []
    answers: dict[frozenset[str], Answer] = {}
    rows = picked(table, metric=metric)
    for store_a, of_a in rows.groups("store_a"):
        for store_b, own in of_a.groups("store_b"):
            key = frozenset((str(store_a), str(store_b)))
            if key in answers or not len(own):
                continue
            if store_a == store_b:
                text = _within(own)
                if text:
                    answers[key] = (str(store_a), text)
            else:
                i = extremes(own)[1]
                one = len(own) == 1
                text = f"{own['site_a'][i]} and {own['site_b'][i]}: {measured(own, i)}"
                text = text if one else f"most alike are {text}"
                answers[key] = (f"{store_a} and {store_b}", text)
    return [*answers.values()]


def _within(rows: Table) -> str:
    sites = list(dict.fromkeys(map(str, rows["site_a"].tolist())))
    if len(sites) < 2 or {*sites} != {*map(str, rows["site_b"].tolist())}:
        return ""
    place = {site: i for i, site in enumerate(sites)}
    pairs = [
        (place[str(a)], place[str(b)], i)
        for i, (a, b) in enumerate(zip(rows["site_a"], rows["site_b"], strict=True))
    ]
    values = rows["value"].astype(float)
    n, third, said = len(sites), max(3, -(-len(sites) // 3)), []
    if n >= 2 * third:
        for name, chosen in (("first", range(third)), ("last", range(n - third, n))):
            inner = [values[i] for a, b, i in pairs if a < b and a in chosen and b in chosen]
            if inner:
                said.append(f"{name} {third} layers {number(float(np.mean(inner)))}")
    ends = next((i for a, b, i in pairs if (a, b) == (0, n - 1)), None)
    if ends is not None:
        said.append(f"first with last layer {measured(rows, ends)}")
    return ", ".join(said)


# ------------------------------------------------------------------------------------ cells


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _varies(rows: Table, name: str) -> bool:
    return len({v for v in rows.cells(name) if is_given(v)}) > 1


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else str(value)


def _float(value: Any) -> float:
    return math.nan if value is None or isinstance(value, str) else float(value)
