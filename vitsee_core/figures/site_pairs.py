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
from vitsee_core.types import pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitsee_core.tables.results import Table

MOST_NUMBERS = 16  # cells of a single row or column that have room for their numbers


def panels_of(table: Table, column: str = "value", about: str | None = None) -> list[Panel]:
    """Heatmaps: rows upwards, columns to the right, from input to output; one panel for each kind
    of sublayer where skips are compared with branches; numbers in the cells where models are
    compared by one site each. about: the title; by default tokens and number of images."""
    a, b = _cells(table.frame, "a"), _cells(table.frame, "b")
    partners: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, col in zip(a, b, strict=True):
        partners.setdefault(row, []).append(col)
    values = dict(zip(zip(a, b, strict=True), table[column], strict=True))
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
    blocks = _blocks(table.frame)
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


def _cells(rows: pl.DataFrame, side: str) -> list[tuple[str, str]]:
    return rows.select(f"store_{side}", f"site_{side}").rows()


def one_to_one(table: Table) -> bool:
    """Whether, between two stores, each of several sites has one partner of its own."""
    if table.notes.get("pairs") == "branch":
        return False
    of = table.frame.select("store_a", "site_a", "store_b", "site_b")
    n_a = of.select("store_a", "site_a", "store_b").n_unique()
    n_b = of.select("store_a", "store_b", "site_b").n_unique()
    return n_a == n_b == len(of) > of.select("store_a", "store_b").n_unique()


def _blocks(rows: pl.DataFrame) -> dict[str, str]:
    """Site -> the path of its block, of those that lie in one."""
    return {
        site: block
        for side in "ab"
        for site, block in rows.select(f"site_{side}", f"block_{side}").unique().rows()
        if block
    }


def draw_curves(axes: Axes, rows: pl.DataFrame) -> dict[str, Any]:
    """One curve per pair of stores, over the sites of the one that all are compared with, else over
    relative depth, with the 95 % interval as a band or the estimator's noise as bars; label ->
    handle for a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    blocks = _blocks(rows)
    first = list(dict.fromkeys(_cells(rows, "a")))
    places = {cell: k for k, cell in enumerate(first)}
    handles: list[Any] = []
    references = rows["store_a"].unique(maintain_order=True).to_list()
    order = list(dict.fromkeys([*references, *rows["store_b"]]))
    pairs = rows.partition_by("store_a", "store_b", maintain_order=True, as_dict=True)
    for number, ((reference, store), own) in enumerate(pairs.items()):
        i = number if len(references) > 1 else order.index(store)
        x: Any = [places[cell] for cell in _cells(own, "a")]
        text = f"against {shorten(store, 28)}"
        if own["site_a"].to_list() != own["site_b"].to_list():
            others = SiteAxis.of([(store, site) for site in own["site_b"]], blocks)
            text = f"against {others.ticks(len(others)).label}"
        if len(references) > 1:
            x, text = own["rel_depth_a"], f"{shorten(reference, 28)} {text}"
        if _has(own, "low"):
            axes.fill_between(x, own["low"], own["high"], color=colour(i), alpha=0.2, linewidth=0)
        elif _has(own, "std"):
            axes.errorbar(x, own["value"], own["std"], color=colour(i), fmt="none", capsize=2)
        handles += axes.plot(x, own["value"], color=colour(i), marker=marker(i), label=text)
        if _has(own, "tau"):
            axes.plot(x, own["tau"], color=colour(i), linestyle=(0, (1, 1.5)))
            axes.plot(x, own["null_mean"], color=colour(i), linestyle=(0, (4, 1.5)))
    if _has(rows, "low"):
        handles.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="95 % interval over images"))
    elif _has(rows, "std"):
        label = "std over minibatch repeats (the estimator's noise)"
        handles.append(Line2D([], [], color=GREY, marker="|", linestyle="none", label=label))
    if _has(rows, "tau"):
        for dash, label in ((4, "mean with images permuted"), (1, "its 5 % threshold")):
            handles.append(Line2D([], [], color=GREY, linestyle=(0, (dash, 1.5)), label=label))
    if len(references) > 1:
        axes.set_xlabel("relative depth")
    else:
        ticks = SiteAxis.of(first, blocks).ticks(MOST_LABELS)
        ticks.put_on(axes.xaxis)
    return {handle.get_label(): handle for handle in handles}


def _has(rows: pl.DataFrame, name: str) -> bool:
    return name in rows.columns and rows[name].is_finite().any()
