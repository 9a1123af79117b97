"""The figure of receptive fields: lines of fields by kind of site, and curves of radii below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    evenly,
    map_axes,
    map_title,
    name_part,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import GREY, styled
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import BLOCK_PARTS, site_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

CURVES = ("radius50_px", "radius90_px", "offset_px")
MAX_LINES = 6  # lines of fields of a store
MIN_SHARE = 1e-3  # lower end of the colours, as a share of a field's largest value
MARK = "#FF3B30"


@dataclass(frozen=True)
class FieldPicture:
    """The field of one site.

    Attributes:
        cells: (rows, cols) mean gradient of each square.
        step: pixels along a square's side.
        radius: pixels within which half of the field lies, NaN if unknown.
    """

    cells: Float
    step: int
    radius: float

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels; the last squares count as whole."""
        return self.cells.shape[0] * self.step, self.cells.shape[1] * self.step

    def centre_of_mass(self) -> tuple[float, float]:
        """Return (y, x) in pixels from the centre of the first pixel."""
        weights = np.nan_to_num(self.cells)
        row = np.average(np.arange(weights.shape[0]), weights=weights.sum(1))
        col = np.average(np.arange(weights.shape[1]), weights=weights.sum(0))
        # The middle of square k lies at (k + 1/2) step, half a pixel less from a pixel's centre.
        return (row + 0.5) * self.step - 0.5, (col + 0.5) * self.step - 0.5


@dataclass(frozen=True)
class FieldLine:
    """The fields of one store and kind of site.

    Attributes:
        store: the store's label.
        kind: kind of site, as `site_kind` names it.
        n_images: number of images that fields are means over.
        pictures: block -> its field; a site outside blocks stands for itself.
    """

    store: str
    kind: str
    n_images: int
    pictures: dict[str, FieldPicture]

    def shown_blocks(self) -> list[str]:
        """Return the blocks to draw: all, or evenly chosen ones if they do not fit a line."""
        return evenly(list(self.pictures), small_maps(99).across)


@styled
def plot(table: Table) -> Figure:
    """Draw a line of fields for each kind of site, and curves of radii below.

    Each field is divided by its largest value; all share one logarithmic scale over three decades;
    a field that is 0 everywhere is white, with a 0. A cross marks the centre of mass, a circle the
    radius that holds half of it. Of many sites, evenly chosen blocks are shown; the curves show
    all.
    """
    rows = table.frame
    lines = _lines_of_fields(rows)
    metrics = [metric for metric in CURVES if metric in rows["metric"]]
    field_grids = [small_maps(len(line.shown_blocks()), 4) for line in lines]
    curve_grid = CurveGrid.of(max(len(metrics), 1), rows)
    if metrics:
        figure, boxes = stack(*field_grids, curve_grid)
    else:
        figure, boxes = stack(*field_grids)
    # Not strict: the curves' box, if there are curves, is one more.
    for line, grid, box in zip(lines, field_grids, boxes, strict=False):
        _draw_line(line, grid, box)
    if metrics:
        curves = rows.filter(pl.col("metric").is_in(metrics))
        panels = curve_grid.panels(boxes[-1], of_metrics(rows, metrics))
        for axes, _, metric_rows in panels:
            draw_depth_curves(axes, metric_rows, among=curves)
        curve_grid.finish(panels)
        add_curve_legend(figure, [axes for axes, *_ in panels])
    return figure


def _lines_of_fields(rows: pl.DataFrame) -> list[FieldLine]:
    """Return the lines of fields, store by store, at most `MAX_LINES` of a store.

    rows: of all metrics; without `gradient` there are no lines.
    """
    lines = []
    for store_rows in rows.partition_by("store", maintain_order=True):
        fields = store_rows.filter(metric="gradient")
        if fields.is_empty():
            continue
        radius_rows = store_rows.filter(metric="radius50_px")
        radii = dict(radius_rows.select("site", "value").iter_rows())
        pictures_by_kind: dict[str, dict[str, FieldPicture]] = {}
        for cells in fields.partition_by("site", maintain_order=True):
            site = cells["site"][0]
            kind = site_kind(site)
            block = site.removesuffix(f".{kind}")
            if kind == "head":  # one or two sites: at the end of the blocks' outputs
                kind = "out"
            pictures = pictures_by_kind.setdefault(kind, {})
            pictures[block] = _read_picture(cells, radii.get(site))
        store_lines = [
            FieldLine(store_rows["store"][0], kind, fields["n_images"][0], pictures)
            for kind, pictures in pictures_by_kind.items()
        ]
        lines += store_lines[:MAX_LINES]
    return lines


def _read_picture(rows: pl.DataFrame, radius: float | None) -> FieldPicture:
    """Return the field of one site, from its rows of `gradient` and its `radius50_px`."""
    # First pixels of the squares; the step is how far they lie apart.
    y = rows["row"].to_numpy()
    x = rows["col"].to_numpy()
    steps = np.diff(np.unique(np.concatenate([y, x])))
    step = int(steps[0]) if len(steps) else 1
    cells = np.full((y.max() // step + 1, x.max() // step + 1), np.nan)
    cells[y // step, x // step] = rows["value"].to_numpy()
    return FieldPicture(cells, step, np.nan if radius is None else radius)


def _draw_line(line: FieldLine, grid: PanelGrid, box: Any) -> None:
    """Draw the fields of one line into its part of the figure.

    Args:
        line: the fields.
        grid: a panel for each of its shown blocks.
        box: the part of the figure.
    """
    blocks = line.shown_blocks()
    panels = grid.axes(box)
    for axes, block in zip(panels, blocks, strict=True):
        image = _draw_field(axes, line.pictures[block])
        map_title(axes, grid, site_words(block))
    title = shorten(line.store, 28)
    kind = BLOCK_PARTS.get(line.kind, line.kind)
    if kind:
        title += f", {kind}"
    counts = f"n = {line.n_images}"
    if len(blocks) < len(line.pictures):
        counts += f"; {len(blocks)} of {len(line.pictures)} blocks"
    name_part(box, f"{title} ({counts}): gradient as a share of each map's largest")
    bars_at_ends(grid, panels, image, "")  # a label is longer than the bar


def _draw_field(axes: Axes, picture: FieldPicture) -> AxesImage:
    """Draw one field with its centre of mass and the circle that holds half; return the image."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Circle

    height, width = picture.size
    largest = np.nanmax(picture.cells)
    shares: Any = np.full_like(picture.cells, np.nan)
    if largest > 0:
        shares = picture.cells / largest
    # 0 has no logarithm: it gets the colour below the scale, unlike NaN, which stays white.
    image = axes.imshow(
        np.clip(shares, MIN_SHARE / 2, None),
        norm=LogNorm(MIN_SHARE, 1),
        origin="upper",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    # A circle that reaches beyond the image is clipped.
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    map_axes(axes)
    if not largest > 0:
        axes.text(width / 2, height / 2, "0", ha="center", va="center", color=GREY)
        return image
    y, x = picture.centre_of_mass()
    axes.plot(x, y, "+", color=MARK, markersize=4, markeredgewidth=0.7)
    if np.isfinite(picture.radius):
        circle = Circle((x, y), picture.radius, fill=False, edgecolor=MARK, linewidth=0.7)
        axes.add_patch(circle)
    return image
