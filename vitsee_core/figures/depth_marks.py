"""Further columns of a table beside its depth curves, in the curves' colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitsee_core.figures.curve_looks import by_curve, curve_looks
from vitsee_core.figures.plotting import GREY

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

DOTS = {"marker": ".", "markersize": 3, "linestyle": "none", "alpha": 0.6}
DOTTED = {"linestyle": (0, (1, 2)), "linewidth": 1}


def draw_marks(
    axes: Axes,
    rows: pl.DataFrame,
    among: pl.DataFrame,
    column: str,
    look: dict[str, Any],
    label: str = "",
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
    looks = curve_looks(among)
    for curve, own in by_curve(rows).items():
        if curve[-1] != "head":
            axes.plot(own["rel_depth"], own[column], color=looks[curve]["color"], **look)
