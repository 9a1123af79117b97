"""The figure of head types: counts over depth and an example of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.attention.head_geometry import TYPES, UNDEFINED
from vitsee_core.attention.head_maps import per_query
from vitsee_core.figures.head_tiles import cut_maps, mark_middle, stretched
from vitsee_core.plotting import COLOURS, GREY, integer_ticks, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitsee_core.results import Table

TINTS = dict(zip((*TYPES, UNDEFINED), (*COLOURS[:5], "#BDBDBD", "#EEEEEE"), strict=True))


def draw_types(table: Table) -> Figure:
    """One line of panels per store, from the table alone: heads of each type by block, those
    hatched that change type when some threshold moves by x 0.8 or x 1.25; and the aligned map of
    the clearest head of each type, corrected for coverage, over the range written below it,
    midlines in red. Call it inside a function decorated with `styled`."""
    labels = table.unique("store")
    figure = new_figure(11.5, 2.9 * len(labels) + 0.4)
    heights = [2.9] * len(labels) + [0.4]
    *lines, foot = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    foot.text(
        0.01,
        0.5,
        "Hatched: heads that change type when one of the thresholds moves by x 0.8 or x 1.25. "
        "Maps: attention by offset from the query, mean of the queries with a key there, the "
        "clearest head of each type.",
        fontsize=8,
        va="center",
    )
    for line, label in zip(lines, labels, strict=True):
        rows = table.where(store=label)
        examples = rows.where(metric="aligned")
        bars = line.add_gridspec(1, 1 + len(TYPES), width_ratios=[3.2, *[1] * len(TYPES)])
        _draw_counts(line.add_subplot(bars[0, 0]), rows, label)
        for i, kind in enumerate(TYPES):
            _draw_example(line.add_subplot(bars[0, i + 1]), examples.where(type=kind), kind)
    return figure


def _draw_counts(axes: Axes, rows: Table, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    steady = rows.where(metric="same_type_thresholds")
    depths = np.unique(steady["depth"])
    base = np.zeros(len(depths))
    for kind in (*TYPES, UNDEFINED):
        for sure in (True, False):
            of_kind = (steady["type"] == kind) & ((steady["value"] == 1) == sure)
            counts = np.array([(of_kind & (steady["depth"] == d)).sum() for d in depths])
            if not counts.any():
                continue
            hatch = "" if sure else "//////"
            axes.bar(
                depths, counts, 0.8, base, color=TINTS[kind], hatch=hatch, edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
            base += counts
    n = int(steady["n_images"].max())
    axes.set_title(f"{shorten(label, 24)} (n = {n})")
    axes.grid(False, axis="x")
    integer_ticks(axes, depths, 13)
    axes.set_xlabel("block")
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_example(axes: Axes, rows: Table, kind: str) -> None:
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(kind, color="black", fontsize=8.5)
    for spine in axes.spines.values():
        spine.set(visible=True, color=TINTS[kind], linewidth=3)
    axes.set_aspect("equal")
    if not len(rows):
        axes.text(0.5, 0.5, "no head", transform=axes.transAxes, ha="center", color=GREY)
        return
    ((_, head, site, values),) = cut_maps(rows)
    shown = per_query(values)
    axes.imshow(stretched(shown), origin="upper")
    mark_middle(axes, values.shape)
    detail = str(rows["detail"][0])
    text = f"{shorten(site, 16)} head {head}" + (f"\n{detail}" if detail else "")
    lowest, highest = np.nanmin(shown), np.nanmax(shown)
    axes.set_xlabel(f"{text}\n{lowest:.2g} to {highest:.2g}", fontsize=8)
