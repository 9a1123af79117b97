"""Figures of receptive fields: one field per site, and the radii against depth. From the columns of
`vitsee erf`'s table: store, site, rel_depth, row, col, metric, value, low, high, n_images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    Grid,
    bars_at_ends,
    evenly,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, site_words
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.tables.results import Table


CURVES = ("radius50_px", "radius90_px", "offset_px")
MOST_DOWN = 6
FLOOR = 1e-3  # of a field's largest value: the lower end of the scale
MARK = "#FF3B30"


@dataclass(frozen=True)
class Picture:
    """A field in squares of `step` pixels, and the radius that holds half of it (NaN: unknown)."""

    cells: Float
    step: int
    radius: float

    @property
    def size(self) -> tuple[int, int]:
        return self.cells.shape[0] * self.step, self.cells.shape[1] * self.step


@dataclass(frozen=True)
class Line:
    """The fields of one store and kind of site, by block (or by site outside blocks)."""

    store: str
    kind: str
    n_images: int
    pictures: dict[str, Picture]


def draw_fields(table: Table) -> Figure:
    """A line of fields for each kind of site, and curves of radii below. Call it inside a function
    decorated with `styled`.

    Each field is divided by its largest value; all share one logarithmic scale over three decades;
    a field that is 0 everywhere is white, with a 0. A cross marks the centre of mass, a circle the
    radius that holds half of it. Of many sites, evenly chosen blocks are shown; the curves show
    all.
    """
    rows = table.frame
    lines = _lines(rows)
    metrics = [metric for metric in CURVES if metric in rows["metric"]]
    grids = [small_maps(len(_shown(line)), 4) for line in lines]
    below = CurveGrid.of(max(len(metrics), 1), rows)
    figure, parts = stack(*grids, *([below] if metrics else []))
    for line, grid, part in zip(lines, grids, parts, strict=False):
        _draw_line(line, grid, part)
    if metrics:
        curves = rows.filter(pl.col("metric").is_in(metrics))
        panels = below.panels(parts[-1], of_metrics(rows, metrics))
        for axes, _, own in panels:
            draw_depth_curves(axes, own, among=curves)
        below.finish(panels)
        add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _lines(rows: pl.DataFrame) -> list[Line]:
    lines = []
    for of_store in rows.partition_by("store", maintain_order=True):
        store, fields = of_store["store"][0], of_store.filter(metric="gradient")
        if fields.is_empty():
            continue
        radii = dict(of_store.filter(metric="radius50_px").select("site", "value").iter_rows())
        by_kind: dict[str, dict[str, Picture]] = {}
        for cells in fields.partition_by("site", maintain_order=True):
            site = cells["site"][0]
            kind = site_kind(site)
            block = site.removesuffix(f".{kind}")
            picture = _picture(cells, radii.get(site))
            by_kind.setdefault("out" if kind == "head" else kind, {})[block] = picture
        count = fields["n_images"][0]
        lines += [Line(store, kind, count, of) for kind, of in by_kind.items()][:MOST_DOWN]
    return lines


def _picture(rows: pl.DataFrame, radius: float | None) -> Picture:
    y, x = (rows[name].to_numpy() for name in ("row", "col"))
    steps = np.diff(np.unique(np.concatenate([y, x])))
    step = int(steps[0]) if len(steps) else 1
    cells = np.full((y.max() // step + 1, x.max() // step + 1), np.nan)
    cells[y // step, x // step] = rows["value"].to_numpy()
    return Picture(cells, step, np.nan if radius is None else radius)


def _shown(line: Line) -> list[str]:
    return evenly(list(line.pictures), small_maps(99).across)


def _draw_line(line: Line, grid: Grid, part: Any) -> None:
    shown = _shown(line)
    panels = grid.axes(part)
    for axes, block in zip(panels, shown, strict=True):
        image = _draw(axes, line.pictures[block])
        map_title(axes, grid, site_words(block))
    kind, n = PARTS.get(line.kind, line.kind), len(line.pictures)
    some = f"; {len(shown)} of {n} blocks" if len(shown) < n else ""
    about = f"{shorten(line.store, 28)}{kind and ', '}{kind} (n = {line.n_images}{some})"
    name_part(part, f"{about}: gradient as a share of each map's largest")
    bars_at_ends(grid, panels, image, "")  # a label is longer than the bar


def _draw(axes: Axes, picture: Picture) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Circle
    from scipy.ndimage import center_of_mass

    height, width = picture.size
    largest = np.nanmax(picture.cells)
    relative: Any = picture.cells / largest if largest > 0 else np.full_like(picture.cells, np.nan)
    image = axes.imshow(
        np.clip(relative, FLOOR / 2, None),
        norm=LogNorm(FLOOR, 1),
        origin="upper",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    # A circle that reaches beyond the image is clipped.
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    map_axes(axes)
    if not largest > 0:
        axes.text(width / 2, height / 2, "0", ha="center", va="center", color=GREY)
    else:
        centre = center_of_mass(np.nan_to_num(picture.cells))  # squares count as whole
        y, x = ((at + 0.5) * picture.step - 0.5 for at in centre)
        axes.plot(x, y, "+", color=MARK, markersize=4, markeredgewidth=0.7)
        if np.isfinite(picture.radius):
            circle = Circle((x, y), picture.radius, fill=False, edgecolor=MARK, linewidth=0.7)
            axes.add_patch(circle)
    return image
