"""Pictures of receptive fields: one field per site, and the radii against depth. From the columns
of `vitsee erf`'s table: store, site, rel_depth, row, col, metric, value, low, high, n_images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves, site_kind
from vitsee_core.plotting import GREY, new_figure, shorten
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

    from vitsee_core.results import Table


CURVES = {
    "radius50_px": "radius of 50 % of the mass (px)",
    "radius90_px": "radius of 90 % of the mass (px)",
    "offset_px": "offset from the image's middle (px)",
}
MOST_ACROSS, MOST_DOWN = 14, 6
SIDE = 0.92  # inches of a field's longer side
CURVE_HEIGHT = 3.1
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
        """(rows, cols) in pixels, up to the squares that are cut."""
        return self.cells.shape[0] * self.step, self.cells.shape[1] * self.step


@dataclass(frozen=True)
class Line:
    """The fields of one store and kind of site, by the block (or the site outside blocks)."""

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
    lines = _lines(table)
    metrics = [metric for metric in CURVES if metric in table.unique("metric")]
    widest = max((len(_shown(line)) for line in lines), default=0)
    width = max(SIDE * widest + 1.9, 3.9 * len(metrics), 4.4 if metrics else 3.0)
    heights = [SIDE * len(lines) + 0.75 if lines else 0, CURVE_HEIGHT if metrics else 0]
    figure = new_figure(width, sum(heights))
    parts = [height for height in heights if height]
    boxes = iter(figure.subfigures(len(parts), 1, height_ratios=parts, squeeze=False).ravel())
    if lines:
        _draw_lines(next(boxes), lines, widest)
    if metrics:
        box = next(boxes)
        panels = list(box.subplots(1, len(metrics), squeeze=False).ravel())
        curves = table.where(metric=metrics)
        for axes, metric in zip(panels, metrics, strict=True):
            rows = table.where(metric=metric)
            draw_depth_curves(axes, rows, ylabel=CURVES[metric], among=curves)
        add_curve_legend(box, panels)
    return figure


def _lines(table: Table) -> list[Line]:
    fields = table.where(metric="gradient")
    lines = []
    for store, rows in fields.groups("store"):
        radii = table.where(store=store, metric="radius50_px")
        known = dict(zip(radii["site"].tolist(), radii["value"].tolist(), strict=True))
        by_kind: dict[str, dict[str, Picture]] = {}
        for site, cells in rows.groups("site"):
            kind = site_kind(site)
            block = site.removesuffix(f".{kind}")
            picture = _picture(cells, float(known.get(site, np.nan)))
            by_kind.setdefault("out" if kind == "head" else kind, {})[block] = picture
        count = int(rows["n_images"][0])
        lines += [Line(store, kind, count, of) for kind, of in by_kind.items()][:MOST_DOWN]
    return lines


def _picture(rows: Table, radius: float) -> Picture:
    y, x = (rows[name].astype(np.int64) for name in ("row", "col"))
    steps = np.diff(np.unique(np.concatenate([y, x])))
    step = int(steps[0]) if len(steps) else 1
    cells = np.full((y.max() // step + 1, x.max() // step + 1), np.nan)
    cells[y // step, x // step] = rows["value"].astype(np.float64)
    return Picture(cells, step, radius)


def _shown(line: Line) -> list[str]:
    """The blocks that are drawn: all, or evenly spaced ones with the first and the last."""
    blocks = list(line.pictures)
    places = np.linspace(0, len(blocks) - 1, min(len(blocks), MOST_ACROSS)).round().astype(int)
    return [blocks[k] for k in places]


def _draw_lines(box: Figure | SubFigure, lines: list[Line], widest: int) -> None:
    grid = box.subplots(len(lines), widest, squeeze=False)
    image = None
    for line, panels in zip(lines, grid, strict=True):
        shown = _shown(line)
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        for axes, block in zip(panels, shown, strict=False):
            image = _draw(axes, line.pictures[block])
            axes.set_title(shorten(block, 15), fontsize=6.5, loc="center", pad=2)
        some = f", {len(shown)} of {len(line.pictures)}" if len(shown) < len(line.pictures) else ""
        panels[0].set_ylabel(f"{shorten(line.store, 16)}\n{shorten(line.kind, 14)}{some}")
    assert image is not None
    height = box.bbox.height / box.figure.dpi
    length = min(0.8 * height, 3.0)
    bar = box.colorbar(
        image, ax=grid, extend="min", shrink=length / height, aspect=length / 0.12, pad=0.015
    )
    bar.set_label("gradient / its largest (log)")
    bar.outline.set_linewidth(0.5)  # type: ignore[operator]
    counts = sorted({line.n_images for line in lines})
    images = " or ".join(map(str, counts))
    sizes = dict.fromkeys(p.size for line in lines for p in line.pictures.values())
    pixels = " or ".join(f"{h} x {w}" for h, w in sizes)
    box.suptitle(
        f"|d centre / d input|, mean over {images} images of {pixels} pixels; "
        "cross: centre of mass, circle: half of the mass",
        fontsize=8,
    )


def _draw(axes: Axes, picture: Picture) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Circle

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
    axes.set(xticks=[], yticks=[], xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    if not largest > 0:
        axes.text(width / 2, height / 2, "0", ha="center", va="center", color=GREY)
    else:
        y, x = _centre(picture)
        axes.plot(x, y, "+", color=MARK, markersize=4, markeredgewidth=0.7)
        if np.isfinite(picture.radius):
            circle = Circle((x, y), picture.radius, fill=False, edgecolor=MARK, linewidth=0.7)
            axes.add_patch(circle)
    return image


def _centre(picture: Picture) -> tuple[float, float]:
    """Centre of mass in pixels, of squares taken as whole."""
    cells = np.nan_to_num(picture.cells)
    places = [(np.arange(n) + 0.5) * picture.step - 0.5 for n in cells.shape]
    return (
        float(cells.sum(1) @ places[0] / cells.sum()),
        float(cells.sum(0) @ places[1] / cells.sum()),
    )
