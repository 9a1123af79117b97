"""Figures of localisation, drawn from a table's columns alone.

They are maps of patches, mosaics of maps, and curves over depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitsee_core.analyses.localize.localisation import (
    OWN_METRICS,
    SITE_METRICS,
    every_nth,
    own_patch,
)
from vitsee_core.figures.curve_panels import CurveGrid, draw_depth_panels, of_metrics
from vitsee_core.figures.depth_curves import draw_depth_curves
from vitsee_core.figures.heatmaps import COLOUR_MAP, NO_VALUE, describe_scale
from vitsee_core.figures.panels import (
    PanelGrid,
    bars_at_ends,
    count,
    em,
    handles_of,
    legend_below,
    map_title,
    name_part,
    small,
    small_maps,
    stack,
)
from vitsee_core.figures.plotting import GREY
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import site_words, token_words
from vitsee_core.types import Float, pl
from vitsee_stores.selectors import parse_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


CURVES = ("own_top1", "own_margin", "peak_distance_px")
MAX_SINGLE = 8  # maps in a line; more become a mosaic
MAX_MOSAICS = 12
MAX_CELLS = 240  # along a side of a mosaic
OWN_COLOUR = "#00E5FF"  # of the frame of the own patch; not a colour of the map


class GridLines(NamedTuple):
    """The rows and the columns of a grid that tokens are in, ascending."""

    rows: list[int]
    cols: list[int]


@dataclass(frozen=True)
class TokenMaps:
    """The maps of one site.

    Attributes:
        store: label of the store.
        site: name of the site.
        rel_depth: relative depth, 0 to 1.
        tokens: names of the tokens.
        maps: (tokens, rows, cols).
    """

    store: str
    site: str
    rel_depth: float
    tokens: list[str]
    maps: Float

    @property
    def title(self) -> str:
        """Return store and site in words."""
        return f"{shorten(self.store, 22)}, {site_words(self.site)}"

    @property
    def is_complete(self) -> bool:
        """Return whether the tokens are all cells, or every s-th row and column of the grid."""
        return self.spacing > 0

    @property
    def spacing(self) -> int:
        """Return the number of cells from one token to the next.

        It is 1 if every cell of the grid is a token, 0 if tokens are not evenly spaced.
        """
        rows, cols = self.grid_lines()
        if len(self.cells()) < len(rows) * len(cols):
            return 0
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        n_rows, n_cols = self.maps.shape[1:]
        if not np.array_equal(rows, every_nth(n_rows, step)):
            return 0
        if not np.array_equal(cols, every_nth(n_cols, step)):
            return 0
        return step

    def cells(self) -> dict[int, tuple[int, int]]:
        """Return token index -> its (row, col), for the tokens on the grid."""
        cells = {}
        for k, name in enumerate(self.tokens):
            cell = parse_cell(name)
            if cell is not None:
                cells[k] = cell
        return cells

    def grid_lines(self) -> GridLines:
        """Return the rows and columns that the tokens are in, if they fill these.

        Else, all rows and columns of the grid.
        """
        cells = self.cells().values()
        rows = sorted({row for row, _ in cells})
        cols = sorted({col for _, col in cells})
        if len(rows) * len(cols) == len(cells) > 0:
            return GridLines(rows, cols)
        n_rows, n_cols = self.maps.shape[1:]
        return GridLines(list(range(n_rows)), list(range(n_cols)))


def derived_curves(panels: Sequence[TokenMaps]) -> pl.DataFrame | None:
    """Return the summaries by site that follow from maps of all, or of evenly spaced, tokens.

    None unless a store has several such sites.
    """
    complete = [panel for panel in panels if panel.is_complete]
    stores = [panel.store for panel in complete]
    # A curve needs two sites.
    if len(set(stores)) == len(stores):
        return None
    rows = []
    for panel in complete:
        cells = panel.cells()
        maps = panel.maps[list(cells)].reshape(len(cells), -1)  # (tokens, patches)
        n_cols = panel.maps.shape[2]
        own_patches = [row * n_cols + col for row, col in cells.values()]
        metrics = own_patch(maps, own_patches)  # (metrics, tokens)
        with_value = metrics[:, ~np.isnan(metrics[0])]
        if not with_value.size:
            continue
        n_patches = int((~np.isnan(maps)).any(0).sum())
        rank = with_value[OWN_METRICS.index("own_rank")]
        margin = with_value[OWN_METRICS.index("own_margin")]
        values = [
            ("own_top1", (rank == 1).mean(), ""),
            ("own_top1", 1 / n_patches, "chance"),
            ("own_margin", margin.mean(), ""),
        ]
        for metric, value, baseline in values:
            rows.append(
                {
                    "store": panel.store,
                    "site": panel.site,
                    "rel_depth": panel.rel_depth,
                    "metric": metric,
                    "value": float(value),
                    "baseline": baseline,
                }
            )
    return Table.from_rows(rows).frame if rows else None


def draw_curves(table: Table) -> Figure:
    """Draw one panel per metric: its mean over tokens against relative depth, a curve per store.

    Call it inside a function decorated with `styled`.
    """
    rows = table.frame
    metrics = [metric for metric in SITE_METRICS if metric in rows["metric"]]
    preferred = [metric for metric in metrics if metric in CURVES]
    return draw_depth_panels(rows, preferred or metrics, _draw_zero)


def _draw_zero(axes: Axes, rows: Any, metric: str) -> None:
    """Draw a thin line at 0."""
    axes.axhline(0, color=GREY, linewidth=0.6)


def draw_curve_panels(box: Any, rows: pl.DataFrame, metrics: Sequence[str]) -> list[Axes]:
    """Draw a panel per metric into a box of a larger figure, and return the panels."""
    grid = CurveGrid.of(len(metrics), rows)
    panels = grid.panels(box, of_metrics(rows, metrics))
    for axes, metric, metric_rows in panels:
        draw_depth_curves(axes, metric_rows, among=rows)
        _draw_zero(axes, metric_rows, metric)
    grid.finish(panels)
    return [axes for axes, _, _ in panels]


def _maps_of_table(table: Table) -> list[TokenMaps]:
    """Return the maps of each store and site of a table, in its order."""
    panels = []
    for rows in table.frame.partition_by("store", "site", maintain_order=True):
        store, site, depth = rows.select("store", "site", "rel_depth").row(0)
        tokens = rows["token"].unique(maintain_order=True).to_list()
        index_of_token = {token: k for k, token in enumerate(tokens)}
        names = rows["token"].cast(pl.String)
        token_indices = names.replace_strict(index_of_token, return_dtype=pl.Int64)
        row = rows["row"].to_numpy()
        col = rows["col"].to_numpy()
        # Rows of the table may be in any order: each value goes to its token and cell.
        maps = np.full((len(tokens), row.max() + 1, col.max() + 1), np.nan)
        maps[token_indices.to_numpy(), row, col] = rows["value"]
        panels.append(TokenMaps(store, site, depth, tokens, maps))
    return panels


def draw_maps(table: Table) -> Figure:
    """Draw a line of maps for each site, or, of many tokens, mosaics and curves.

    Call it inside a function decorated with `styled`.
    """
    panels = _maps_of_table(table)
    if max(len(panel.tokens) for panel in panels) <= MAX_SINGLE:
        return _draw_single_maps(panels, table)
    return _draw_mosaics(panels, table)


def _draw_single_maps(panels: Sequence[TokenMaps], table: Table) -> Figure:
    """Draw a line of maps for each store and site, a map for each token.

    Args:
        panels: the maps of each store and site.
        table: says what the values are.
    """
    grids = [small_maps(len(panel.tokens), 3) for panel in panels]
    figure, boxes = stack(*grids)
    top = _colour_limit([panel.maps for panel in panels])
    lines = []
    for panel, grid, box in zip(panels, grids, boxes, strict=True):
        cells = panel.cells()
        line = grid.axes(box)
        for k, axes in enumerate(line):
            image = draw_map(axes, panel.maps[k], top)
            own_cells = [cells[k]] if k in cells else []
            _frame_cells(axes, own_cells, 1.4)
            axes.set(xticks=[], yticks=[])
            map_title(axes, grid, token_words(panel.tokens[k]))
        name_part(box, f"{shorten(panel.store, 28)}, {site_words(panel.site)}")
        lines.append((grid, line))
    _add_colour_bars_and_legend(figure, image, lines, panels, table)
    return figure


def _draw_mosaics(panels: Sequence[TokenMaps], table: Table) -> Figure:
    """Draw a mosaic per site, of evenly spaced sites if a store has many, and curves over all.

    Args:
        panels: the maps of each store and site.
        table: says what the values are.
    """
    curves = derived_curves(panels)
    stores = dict.fromkeys(panel.store for panel in panels)
    drawn: list[TokenMaps] = []
    for store in stores:
        store_panels = [panel for panel in panels if panel.store == store]
        n = min(len(store_panels), max(1, MAX_MOSAICS // len(stores)))
        # Counted from the last one, which is always drawn.
        from_last = np.linspace(0, len(store_panels) - 1, n).round().astype(int)
        drawn += [store_panels[-1 - k] for k in from_last[::-1]]
    mosaic_grid = PanelGrid(len(drawn), width=17, widest=22, height=18)
    grids: list[PanelGrid | CurveGrid] = [mosaic_grid]
    if curves is not None:
        grids.append(CurveGrid.of(2, curves))
    figure, boxes = stack(*grids)
    top = _colour_limit([panel.maps for panel in drawn])
    mosaics = mosaic_grid.axes(boxes[0])
    # Inches of a mosaic, without the room for its labels.
    side = mosaic_grid.size[0] / mosaic_grid.across - em(3)
    for axes, panel in zip(mosaics, drawn, strict=True):
        image = _draw_mosaic(axes, panel, top, side)
    text = "each map: similarity with all patches, in its token's place"
    if len(drawn) < len(panels):
        text = f"{len(drawn)} of {len(panels)} sites; {text}"
    curve_panels: list[Axes] = []
    if curves is not None:
        curve_panels = draw_curve_panels(boxes[1], curves, CURVES[:2])
    _add_colour_bars_and_legend(
        figure,
        image,
        [(mosaic_grid, mosaics)],
        drawn,
        table,
        text=text,
        curves=curve_panels,
    )
    return figure


def _draw_mosaic(axes: Axes, panel: TokenMaps, top: float, side: float) -> AxesImage:
    """Draw the maps of a site's tokens, each at its token's position, with gaps between them.

    Tokens that are not on the grid (the class token) have a line of their own above. Of many tokens
    only every so many are drawn, so that maps are legible.

    Args:
        axes: where to draw.
        panel: the maps.
        top: the end of the colour scale.
        side: of the mosaic, in inches.
    """
    n_rows, n_cols = panel.maps.shape[1:]
    cells = panel.cells()
    lines = panel.grid_lines()
    # In cells of maps, each with a gap.
    longest_side = max(len(lines.rows), len(lines.cols)) * (max(n_rows, n_cols) + 1)
    step = math.ceil(longest_side / MAX_CELLS)
    off_grid = [k for k in range(len(panel.tokens)) if k not in cells]
    n_lines_above = 1 if off_grid else 0
    n_down = math.ceil(len(lines.rows) / step) + n_lines_above
    n_across = max(math.ceil(len(lines.cols) / step), len(off_grid))
    # A map and a gap of one cell each, without the last gap; what no map covers is masked.
    shape = (n_down * (n_rows + 1) - 1, n_across * (n_cols + 1) - 1)
    mosaic = np.ma.array(np.zeros(shape), mask=np.ones(shape, bool))
    for i, k in enumerate(off_grid):
        x = i * (n_cols + 1)
        mosaic[:n_rows, x : x + n_cols] = panel.maps[k]
        axes.text(
            x + n_cols + 0.5,
            (n_rows - 1) / 2,
            token_words(panel.tokens[k]),
            va="center",
            fontsize=small(),
        )
    index_of_row = {row: i for i, row in enumerate(lines.rows)}
    index_of_col = {col: j for j, col in enumerate(lines.cols)}
    own_cells = []
    for k, (row, col) in cells.items():
        i = index_of_row[row]
        j = index_of_col[col]
        if i % step == 0 and j % step == 0:
            y = (i // step + n_lines_above) * (n_rows + 1)
            x = j // step * (n_cols + 1)
            mosaic[y : y + n_rows, x : x + n_cols] = panel.maps[k]
            own_cells.append((y + row, x + col))
    image = draw_map(axes, mosaic, top)
    _frame_cells(axes, own_cells, min(1.4, 25 * side / max(mosaic.shape)))
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    # Tokens may have been thinned before, by the analysis.
    step *= max(1, panel.spacing)
    title = panel.title
    if step > 1:
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        title += f", every {ordinal} token"
    axes.set_title(title)
    return image


def _colour_limit(maps: Sequence[Float]) -> float:
    """Return the end of the colour scale, which starts at 0: the largest value."""
    values = np.concatenate([m[~np.isnan(m)] for m in maps])
    if len(values) and values.max() > 0:
        return float(values.max())
    return 1.0


def draw_map(
    axes: Axes, values: Any, scale: float | Normalize, colours: str = COLOUR_MAP
) -> AxesImage:
    """Draw a map, its first row at the top as in the image.

    Args:
        axes: where to draw.
        values: (rows, cols); NaN gets the colour for no value, masked cells are white.
        scale: of the colours, or the end of a scale that starts at 0.
        colours: name of a colour map.
    """
    import matplotlib
    from matplotlib.colors import Normalize

    missing = np.isnan(np.ma.filled(values, 0))
    shades = matplotlib.colormaps[colours].with_extremes(bad=(1, 1, 1, 0))
    norm = scale if isinstance(scale, Normalize) else Normalize(0, scale)
    image = axes.imshow(values, cmap=shades, norm=norm, origin="upper")
    if missing.any():
        from matplotlib.colors import ListedColormap

        # A second image on top: a colour map has a single colour for what is bad.
        mask = np.ma.masked_equal(missing.astype(float), 0)
        axes.imshow(mask, cmap=ListedColormap([NO_VALUE]), origin="upper")
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.5, color=GREY)
    return image


def _frame_cells(axes: Axes, cells: Sequence[tuple[int, int]], width: float) -> None:
    """Draw a frame around each of these cells.

    Args:
        axes: a map or a mosaic.
        cells: (row, col) of each.
        width: width of the lines, in points.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    frames = [Rectangle((col - 0.5, row - 0.5), 1, 1) for row, col in cells]
    axes.add_collection(
        PatchCollection(
            frames, facecolor="none", edgecolor=OWN_COLOUR, linewidth=width, clip_on=False
        )
    )


def _add_colour_bars_and_legend(
    figure: Figure,
    image: AxesImage,
    grids: Sequence[tuple[PanelGrid, Sequence[Axes]]],
    panels: Sequence[TokenMaps],
    table: Table,
    *,
    text: str = "",
    curves: Sequence[Axes] = (),
) -> None:
    """Add colour bars, and a legend of frames, grey cells and curves.

    Args:
        figure: of the maps.
        image: one of the maps; all have its colours.
        grids: each grid of maps and its panels.
        panels: the maps.
        table: of the values, which says what they are.
        text: a remark below.
        curves: panels of curves.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    # The scale starts at 0: an arrow says that there are values below, beyond rounding.
    values = np.concatenate([panel.maps.ravel() for panel in panels])
    extend = "min" if (values < -1e-9).any() else "neither"
    for grid, maps in grids:
        bars_at_ends(grid, maps, image, describe_scale(table), extend=extend)
    handles: dict[str, Any] = handles_of(curves)
    if any(panel.cells() for panel in panels):
        handles["the token's own patch"] = Patch(facecolor="none", edgecolor=OWN_COLOUR)
    if np.isnan(values).any():
        handles["no value: constant"] = Patch(facecolor=NO_VALUE)
    remark = f"n\u00a0=\u00a0{count(table.frame)}"
    if text:
        remark = f"{text}; {remark}"
    handles[remark] = Line2D([], [], linestyle="none")
    legend_below(figure, handles)
