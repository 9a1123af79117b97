"""Tables about pairs of sites as pictures: heatmaps, or curves where each site has one partner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.heatmaps import MOST_LABELS, Panel, describe_scope
from vitsee_core.figures.plotting import GREY, colour, marker
from vitsee_core.figures.site_axes import SiteAxis
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitsee_core.tables.results import Table

MOST_NUMBERS = 16  # cells of a single row or column that have room for their numbers


def panels_of(table: Table, column: str = "value", about: str | None = None) -> list[Panel]:
    """Heatmaps: rows upwards, columns to the right, from input to output; one panel for each kind
    of sublayer where skips are compared with branches; numbers in the cells where models are
    compared by one site each. about: the title; by default tokens and number of images."""
    a, b = _cells(table, "a"), _cells(table, "b")
    partners: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, col in zip(a, b, strict=True):
        partners.setdefault(row, []).append(col)
    values = dict(zip(zip(a, b, strict=True), table[column].tolist(), strict=True))
    about = describe_scope(table) if about is None else about
    panels = []
    # Rows with the same partners are one panel.
    for cols in dict.fromkeys(map(tuple, partners.values())):
        rows = [row for row, others in partners.items() if tuple(others) == cols]
        panels.append(_panel(table, rows, cols, values, about))
    return panels


def _panel(
    table: Table,
    rows: Sequence[tuple[str, str]],
    cols: Sequence[tuple[str, str]],
    values: dict[Any, float],
    about: str,
) -> Panel:
    blocks = _blocks(table)
    branch = table.notes.get("pairs") == "branch"
    roles = ("skip", "branch") if branch else ("", "")
    title = about
    if branch:
        site = cols[0][1]
        part = site.removeprefix(f"{blocks.get(site, '')}.")
        title = f"{PARTS.get(part, part)}: {about}"
    return Panel(
        np.array([[values[row, col] for col in cols] for row in rows], np.float64),
        SiteAxis.of(rows, blocks, roles[0]),
        SiteAxis.of(cols, blocks, roles[1]),
        title,
        numbers=max(len(rows), len(cols)) == 1
        or (min(len(rows), len(cols)) == 1 and max(len(rows), len(cols)) <= MOST_NUMBERS)
        or len({store for store, _ in rows}) > 1,
    )


def _cells(table: Table, side: str) -> list[tuple[str, str]]:
    names = (table[f"{name}_{side}"].tolist() for name in ("store", "site"))
    return list(zip(*names, strict=True))


def one_to_one(table: Table) -> bool:
    """Whether, between two stores, each of several sites has one partner of its own."""
    if table.notes.get("pairs") == "branch":
        return False
    a, b = _cells(table, "a"), _cells(table, "b")
    of_a = {(cell, store) for cell, (store, _) in zip(a, b, strict=True)}
    of_b = {(store, cell) for (store, _), cell in zip(a, b, strict=True)}
    stores = {(one, other) for (one, _), (other, _) in zip(a, b, strict=True)}
    return len(of_a) == len(of_b) == len(table) > len(stores)


def _blocks(table: Table) -> dict[str, str]:
    """Site -> the path of its block, of those that lie in one."""
    found: dict[str, str] = {}
    for side in "ab":
        found |= zip(table[f"site_{side}"].tolist(), table[f"block_{side}"].tolist(), strict=True)
    return {site: block for site, block in found.items() if block}


def draw_curves(axes: Axes, table: Table) -> dict[str, Any]:
    """One curve per pair of stores, over the sites of the one that all are compared with, else over
    relative depth, with the 95 % interval as a band or the estimator's noise as bars; label ->
    handle for a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    blocks = _blocks(table)
    first = list(dict.fromkeys(_cells(table, "a")))
    places = {cell: k for k, cell in enumerate(first)}
    handles: list[Any] = []
    references = table.unique("store_a")
    order = list(dict.fromkeys([*references, *table["store_b"].tolist()]))
    pairs = [
        (a, b, rows) for a, of_a in table.groups("store_a") for b, rows in of_a.groups("store_b")
    ]
    for number, (reference, store, rows) in enumerate(pairs):
        i = number if len(references) > 1 else order.index(store)
        x = [places[cell] for cell in _cells(rows, "a")]
        text = f"against {shorten(store, 28)}"
        if rows["site_a"].tolist() != rows["site_b"].tolist():
            others = SiteAxis.of([(store, site) for site in rows["site_b"].tolist()], blocks)
            text = f"against {others.ticks(len(others)).label}"
        if len(references) > 1:
            x, text = rows["rel_depth_a"].tolist(), f"{shorten(reference, 28)} {text}"
        if np.isfinite(rows["low"]).any():
            axes.fill_between(x, rows["low"], rows["high"], color=colour(i), alpha=0.2, linewidth=0)
        elif np.isfinite(rows["std"]).any():
            axes.errorbar(x, rows["value"], rows["std"], color=colour(i), fmt="none", capsize=2)
        handles += axes.plot(x, rows["value"], color=colour(i), marker=marker(i), label=text)
        if "tau" in rows.columns and np.isfinite(rows["tau"]).any():
            axes.plot(x, rows["tau"], color=colour(i), linestyle=(0, (1, 1.5)))
            axes.plot(x, rows["null_mean"], color=colour(i), linestyle=(0, (4, 1.5)))
    if np.isfinite(table["low"]).any():
        handles.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="95 % interval over images"))
    elif np.isfinite(table["std"]).any():
        label = "std over minibatch repeats (the estimator's noise)"
        handles.append(Line2D([], [], color=GREY, marker="|", linestyle="none", label=label))
    if "tau" in table.columns and np.isfinite(table["tau"]).any():
        for dash, label in ((4, "mean with images permuted"), (1, "its 5 % threshold")):
            handles.append(Line2D([], [], color=GREY, linestyle=(0, (dash, 1.5)), label=label))
    if len(references) > 1:
        axes.set_xlabel("relative depth")
    else:
        ticks = SiteAxis.of(first, blocks).ticks(MOST_LABELS)
        ticks.put_on(axes.xaxis)
    return {handle.get_label(): handle for handle in handles}
