"""Pictures of localisation: maps of patches by token, mosaics of them. From a table's columns
alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.heatmaps import COLOUR_MAP, NO_VALUE, describe_scale
from vitsee_core.figures.location_curves import (
    CURVES,
    METRICS,
    TokenMaps,
    derived_curves,
    draw_curve_panels,
)
from vitsee_core.figures.token_maps import value_ticks
from vitsee_core.plotting import GREY, new_figure, shorten
from vitsee_core.types import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from vitsee_core.results import Table


MOST_SINGLE = 8  # maps in a line; more become a mosaic
MOST_MOSAICS = 12
MOST_CELLS = 240  # along a side of a mosaic
OWN = "#00E5FF"  # not a colour of the map


def _panels(table: Table) -> list[TokenMaps]:
    panels = []
    for store, of_store in table.groups("store"):
        for site, rows in of_store.groups("site"):
            tokens = rows.unique("token")
            number = {token: k for k, token in enumerate(tokens)}
            row, col = (rows[name].astype(int) for name in ("row", "col"))
            maps = np.full((len(tokens), row.max() + 1, col.max() + 1), np.nan)
            maps[[number[token] for token in rows["token"].tolist()], row, col] = rows["value"]
            panels.append(TokenMaps(store, site, float(rows["rel_depth"][0]), tokens, maps))
    return panels


def draw_maps(table: Table) -> Figure:
    """A line of maps for each site, or mosaics and curves. Call it inside a function decorated with
    `styled`."""
    panels = _panels(table)
    if max(len(panel.tokens) for panel in panels) <= MOST_SINGLE:
        return _draw_lines(panels, table)
    return _draw_mosaics(panels, table)


def _draw_lines(panels: Sequence[TokenMaps], table: Table) -> Figure:
    across = max(len(panel.tokens) for panel in panels)
    figure = new_figure(1.45 * across + 1.5, 1.6 * len(panels) + 0.7)
    figure.set_layout_engine("compressed")
    grid = figure.subplots(len(panels), across, squeeze=False)
    top = _top([panel.maps for panel in panels])
    for panel, line in zip(panels, grid, strict=True):
        places = panel.placed()
        for k, axes in enumerate(line):
            if k >= len(panel.tokens):
                axes.set_axis_off()
                continue
            image = _show(axes, panel.maps[k], top)
            _mark(axes, [places[k]] if k in places else [], 1.4)
            rows, cols = panel.maps[k].shape
            axes.set_xticks(sorted({0, cols - 1}))
            axes.set_yticks(sorted({0, rows - 1}))
            axes.set_title(f"token {panel.tokens[k]}" if k in places else panel.tokens[k])
        line[0].set_ylabel(f"{shorten(panel.store, 20)}\n{shorten(panel.site, 20)}")
    _finish(figure, image, list(grid.ravel()), panels, table)
    return figure


def _draw_mosaics(panels: Sequence[TokenMaps], table: Table) -> Figure:
    """One mosaic per site, of evenly chosen sites where a store has many; the curves show all
    sites."""
    curves = derived_curves(panels)
    stores = dict.fromkeys(panel.store for panel in panels)
    shown = []
    for store in stores:
        own = [panel for panel in panels if panel.store == store]
        n = min(len(own), max(1, MOST_MOSAICS // len(stores)))
        # Counted from the last one, which is always shown.
        back = np.linspace(0, len(own) - 1, n).round().astype(int)
        shown += [own[-1 - k] for k in back[::-1]]
    across = min(3, len(shown))
    lines = -(-len(shown) // across)
    side = max(_side(panel) for panel in shown)
    figure = new_figure(max(5.0, across * (side + 0.25) + 1.3), lines * (side + 0.55) + 0.6)
    if curves is not None:
        figure.set_size_inches(max(8.0, figure.get_figwidth()), figure.get_figheight() + 3.2)
        heights = [figure.get_figheight() - 3.2, 3.2]
        above, below = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_curve_panels(below, curves, CURVES[:2])
    else:
        above = figure.subfigures(1, 1)
    top = _top([panel.maps for panel in shown])
    all_axes = list(above.subplots(lines, across, squeeze=False).ravel())
    free = iter(all_axes)
    for panel in shown:
        image = _draw_mosaic(next(free), panel, top)
    for axes in free:
        axes.set_axis_off()
    text = "each small map stands in its token's place"
    if len(shown) < len(panels):
        text = f"{len(shown)} of {len(panels)} sites; {text}"
    _finish(above, image, all_axes, shown, table, text)
    return figure


def _step(panel: TokenMaps) -> int:
    """Draw one of how many tokens along a side, so that the maps are legible."""
    longest = int(max(panel.maps.shape[1:]))
    return math.ceil(longest * (longest + 1) / MOST_CELLS)


def _side(panel: TokenMaps) -> float:
    """Inches of a mosaic: 7 dots per patch, within bounds."""
    cells = max(-(-n // _step(panel)) * (n + 1) for n in panel.maps.shape[1:])
    return float(np.clip(cells * 7 / 200, 2.6, 5.6))


def _draw_mosaic(axes: Axes, panel: TokenMaps, top: float) -> AxesImage:
    """The maps of the tokens, each in its token's place, with a gap between them; the class
    token's in a line of its own above."""
    step, (rows, cols) = _step(panel), panel.maps.shape[1:]
    places = panel.placed()
    others = [k for k in range(len(panel.tokens)) if k not in places]
    lines, across = -(-rows // step) + bool(others), max(-(-cols // step), len(others))
    shape = (lines * (rows + 1) - 1, across * (cols + 1) - 1)
    whole = np.ma.array(np.zeros(shape), mask=np.ones(shape, bool))
    marks = []
    for i, k in enumerate(others):
        whole[:rows, i * (cols + 1) : i * (cols + 1) + cols] = panel.maps[k]
        x = (i + 1) * (cols + 1) - 0.5
        axes.text(x, (rows - 1) / 2, panel.tokens[k], va="center", fontsize=8)
    for k, (row, col) in places.items():
        if row % step == 0 and col % step == 0:
            y, x = (row // step + bool(others)) * (rows + 1), col // step * (cols + 1)
            whole[y : y + rows, x : x + cols] = panel.maps[k]
            marks.append((y + row, x + col))
    image = _show(axes, whole, top)
    _mark(axes, marks, min(1.4, 25 * _side(panel) / max(whole.shape)))
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    skipped = f", every {_ordinal(step)} token" if step > 1 else ""
    axes.set_title(f"{panel.title}{skipped}")
    return image


def _ordinal(n: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(n, f"{n}th")


def _top(maps: Sequence[Float]) -> float:
    """The end of the colour scale, which starts at 0: the largest value."""
    values = np.concatenate([m[~np.isnan(m)] for m in maps])
    return float(values.max()) if len(values) and values.max() > 0 else 1.0


def _show(
    axes: Axes, values: Any, scale: float | Normalize, colours: str = COLOUR_MAP
) -> AxesImage:
    """A map, first row at the top as in the image; NaN in the colour for no value, masked cells
    white. scale: of the colours, or the end of a scale that starts at 0."""
    import matplotlib
    from matplotlib.colors import Normalize

    missing = np.isnan(np.ma.filled(values, 0))
    shades = matplotlib.colormaps[colours].with_extremes(bad=(1, 1, 1, 0))
    norm = scale if isinstance(scale, Normalize) else Normalize(0, scale)
    image = axes.imshow(values, cmap=shades, norm=norm, origin="upper")
    if missing.any():
        from matplotlib.colors import ListedColormap

        mask = np.ma.masked_equal(missing.astype(float), 0)
        axes.imshow(mask, cmap=ListedColormap([NO_VALUE]), origin="upper")
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    return image


def _mark(axes: Axes, places: Sequence[tuple[int, int]], width: float) -> None:
    """A frame around these cells."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    frames = [Rectangle((col - 0.5, row - 0.5), 1, 1) for row, col in places]
    axes.add_collection(
        PatchCollection(frames, facecolor="none", edgecolor=OWN, linewidth=width, clip_on=False)
    )


def _finish(
    figure: Any,
    image: AxesImage,
    axes: list[Axes],
    panels: Sequence[TokenMaps],
    table: Table,
    text: str = "",
) -> None:
    """The colour bar, and a legend of frames and grey cells."""
    from matplotlib.patches import Patch

    values = np.concatenate([panel.maps.ravel() for panel in panels])
    extend = "min" if (values < -1e-9).any() else "neither"
    height = figure.bbox.height / figure.dpi
    length = min(0.85 * height, 4.0)
    shape = {"shrink": length / height, "aspect": length / 0.14, "pad": 0.02}
    bar = figure.colorbar(image, ax=axes, extend=extend, **shape)
    bar.set_label(f"{describe_scale(table)} with a patch")
    bar.outline.set_linewidth(0.5)
    handles = []
    if any(panel.placed() for panel in panels):
        handles.append(Patch(facecolor="none", edgecolor=OWN, label="the token's own patch"))
    if np.isnan(values).any():
        handles.append(Patch(facecolor=NO_VALUE, label="no value: constant"))
    _legend(figure, handles, "; ".join(part for part in (text, _count(table)) if part))


def _count(table: Table) -> str:
    low, high = table["n_images"].min(), table["n_images"].max()
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def _legend(figure: Any, handles: list[Any], text: str) -> None:
    """A legend line below everything; columns as wide as their text."""
    from matplotlib.lines import Line2D

    words = Line2D([], [], linestyle="none", label=text)
    figure.legend(
        handles=[*handles, words], loc="outside lower left", ncols=len(handles) + 1,
        columnspacing=1.2,
    )  # fmt: skip


def _most_tokens(rows: Table) -> int:
    return max(len(of_site) for _, own in rows.groups("store") for _, of_site in own.groups("site"))


def draw_token_summary(table: Table) -> Figure:
    """Maps of the metrics, each token in its place: a line for each site, a column and a scale for
    each metric. Call it inside a function decorated with `styled`."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Patch

    metrics = ("own_cka", "own_rank", "own_margin")
    places = list(dict.fromkeys(zip(table["store"].tolist(), table["site"].tolist(), strict=True)))
    figure = new_figure(2.6 * len(metrics) + 0.6, 1.9 * len(places) + 0.6)
    grid = figure.subplots(len(places), len(metrics), squeeze=False)
    for column, metric in enumerate(metrics):
        of_metric = table.where(metric=metric)
        values = of_metric["value"][~np.isnan(of_metric["value"])]
        reach = float(abs(values).max()) if len(values) and values.any() else 1.0
        scale = {
            "own_cka": Normalize(0, reach),
            # From first to last of a token's patches, so that ranks are comparable between figures.
            "own_rank": LogNorm(1, max(2, _most_tokens(of_metric))),
            "own_margin": Normalize(-reach, reach),
        }[metric]
        colours = {"own_margin": "RdBu_r", "own_rank": f"{COLOUR_MAP}_r"}.get(metric, COLOUR_MAP)
        for line, (store, site) in enumerate(places):
            rows = of_metric.where(store=store, site=site)
            row, col = (rows[name].astype(int) for name in ("row", "col"))
            cells = np.full((row.max() + 1, col.max() + 1), np.nan)
            cells[row, col] = rows["value"]
            axes = grid[line, column]
            image = _show(axes, cells, scale, colours)
            axes.set_xticks(sorted({0, cells.shape[1] - 1}))
            axes.set_yticks(sorted({0, cells.shape[0] - 1}))
            if column == 0:
                axes.set_ylabel(f"{shorten(store, 20)}\n{shorten(site, 20)}")
        bar = figure.colorbar(image, ax=list(grid[:, column]), location="top", aspect=18)
        bar.set_label(METRICS[metric], fontsize=7.5)
        if isinstance(scale, LogNorm):
            value_ticks(bar.ax.xaxis, scale)
    handles = []
    if np.isnan(table.where(metric=metrics[1])["value"]).any():
        handles.append(Patch(facecolor=NO_VALUE, label="no value: constant, or a single patch"))
    _legend(figure, handles, _count(table))
    return figure
