"""Further columns of a table beside its depth curves, in the curves' colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import curve_looks, site_kind
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.results import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = {"marker": ".", "markersize": 3, "linestyle": "none", "alpha": 0.6}
DOTTED = {"linestyle": (0, (1, 2)), "linewidth": 1}


def draw_marks(
    axes: Axes, rows: Table, among: Table, column: str, look: dict[str, Any], label: str = ""
) -> None:
    """Draw a column against depth for each curve that `draw_depth_curves` has drawn.

    Args:
        axes: the panel.
        rows: what was drawn.
        among: as there.
        column: of the rows.
        look: `DOTS` or `DOTTED`.
        label: of what they are, in the legend.
    """
    if label:
        axes.plot([], [], color=GREY, label=label, **look)
    for (store, kind), drawn in curve_looks(among).items():
        if kind == "head":
            continue
        own = rows.where(store=store)
        kinds = [site_kind(site) for site in own["site"].tolist()]
        own = own.take(np.array([one == kind for one in kinds], bool))
        own = own.take(np.argsort(own["rel_depth"], kind="stable"))
        x, y = own["rel_depth"].astype(float), own[column].astype(float)
        axes.plot(x, y, color=drawn["color"], **look)
