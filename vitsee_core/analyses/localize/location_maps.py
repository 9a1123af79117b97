"""Figures of localisation, from a table's columns alone: curves over depth, maps of patches, and
mosaics of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from vitsee_core.figures.token_maps import value_ticks
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import METRICS, site_words, token_words
from vitsee_core.types import Float, pl
from vitsee_stores.selectors import parse_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


CURVES = ("own_top1", "own_margin", "peak_distance_px")


@dataclass(frozen=True)
class TokenMaps:
    """The maps of one site."""

    store: str
    site: str
    rel_depth: float
    tokens: list[str]  # their names
    maps: Float  # (tokens, rows, cols)

    @property
    def title(self) -> str:
        return f"{shorten(self.store, 22)}, {site_words(self.site)}"

    @property
    def complete(self) -> bool:
        """Whether every cell of the grid is among the tokens, or those of every s-th row and
        column (see `every_nth`)."""
        return self.apart > 0

    @property
    def apart(self) -> int:
        """The step in cells from one token to the next: 1 for every cell of the grid, 0 for tokens
        as chosen."""
        rows, cols = (np.array(of) for of in self.lattice())
        if len(self.placed()) < len(rows) * len(cols):
            return 0
        step = int(np.diff(rows)[0]) if len(rows) > 1 else 1
        grid = zip((rows, cols), self.maps.shape[1:], strict=True)
        if all(np.array_equal(of, every_nth(n, step)) for of, n in grid):
            return step
        return 0

    def placed(self) -> dict[int, tuple[int, int]]:
        """The indices and places of the tokens on the grid."""
        cells = enumerate(map(parse_cell, self.tokens))
        return {k: cell for k, cell in cells if cell is not None}

    def lattice(self) -> tuple[list[int], list[int]]:
        """The rows and the columns that its tokens are in: all, unless they are every s-th."""
        places = [*self.placed().values()]
        rows, cols = (sorted({place[axis] for place in places}) for axis in (0, 1))
        if len(rows) * len(cols) == len(places) > 0:
            return rows, cols
        n_rows, n_cols = self.maps.shape[1:]
        return list(range(n_rows)), list(range(n_cols))


def derived_curves(panels: Sequence[TokenMaps]) -> pl.DataFrame | None:
    """The summaries computed from maps of all tokens, or of evenly spaced ones; None unless a store
    has several sites."""
    complete = [panel for panel in panels if panel.complete]
    stores = [panel.store for panel in complete]
    if len(set(stores)) == len(stores):
        return None
    rows = []
    for panel in complete:
        places = panel.placed()
        maps = panel.maps[list(places)].reshape(len(places), -1)
        own = [row * panel.maps.shape[2] + col for row, col in places.values()]
        metrics = own_patch(maps, own)
        known = metrics[:, ~np.isnan(metrics[0])]
        if not known.size:
            continue
        n_patches = int((~np.isnan(maps)).any(0).sum())
        rank, margin = (
            known[OWN_METRICS.index(name)] for name in ("own_rank", "own_margin")
        )
        where = {"store": panel.store, "site": panel.site, "rel_depth": panel.rel_depth}
        for metric, value, baseline in (
            ("own_top1", (rank == 1).mean(), ""),
            ("own_top1", 1 / n_patches, "chance"),
            ("own_margin", margin.mean(), ""),
        ):
            rows.append(
                where | {"metric": metric, "value": float(value), "baseline": baseline}
            )
    return Table.from_rows(rows).frame if rows else None


def draw_curves(table: Table) -> Figure:
    """One panel per metric: its mean over tokens against relative depth, one curve per store. Call
    it inside a function decorated with `styled`."""
    rows = table.frame
    there = [metric for metric in SITE_METRICS if metric in rows["metric"]]
    return draw_depth_panels(rows, [m for m in there if m in CURVES] or there, _draw_zero)


def _draw_zero(axes: Axes, rows: Any, metric: str) -> None:
    axes.axhline(0, color=GREY, linewidth=0.6)


def draw_curve_panels(box: Any, rows: pl.DataFrame, metrics: Sequence[str]) -> list[Axes]:
    """Draw these metrics like `draw_curves`, into a part of a larger figure, and return the
    panels."""
    grid = CurveGrid.of(len(metrics), rows)
    panels = grid.panels(box, of_metrics(rows, metrics))
    for axes, metric, own in panels:
        draw_depth_curves(axes, own, among=rows)
        _draw_zero(axes, own, metric)
    grid.finish(panels)
    return [axes for axes, *_ in panels]


MOST_SINGLE = 8  # maps in a line; more become a mosaic
MOST_MOSAICS = 12
SUMMARY = ("own_cka", "own_rank", "own_margin")
MOST_CELLS = 240  # along a side of a mosaic
OWN = "#00E5FF"  # not a colour of the map


def _panels(table: Table) -> list[TokenMaps]:
    panels = []
    for rows in table.frame.partition_by("store", "site", maintain_order=True):
        store, site, depth = rows.select("store", "site", "rel_depth").row(0)
        tokens = rows["token"].unique(maintain_order=True).to_list()
        number = {token: k for k, token in enumerate(tokens)}
        index, row, col = (
            rows["token"]
            .cast(pl.String)
            .replace_strict(number, return_dtype=pl.Int64)
            .to_numpy(),
            *(rows[name].to_numpy() for name in ("row", "col")),
        )
        maps = np.full((len(tokens), row.max() + 1, col.max() + 1), np.nan)
        maps[index, row, col] = rows["value"]
        panels.append(TokenMaps(store, site, depth, tokens, maps))
    return panels


def draw_maps(table: Table) -> Figure:
    """A line of maps for each site, or mosaics and curves. Call it inside a function decorated with
    `styled`."""
    panels = _panels(table)
    if max(len(panel.tokens) for panel in panels) <= MOST_SINGLE:
        return _draw_lines(panels, table)
    return _draw_mosaics(panels, table)


def _draw_lines(panels: Sequence[TokenMaps], table: Table) -> Figure:
    grids = [small_maps(len(panel.tokens), 3) for panel in panels]
    figure, parts = stack(*grids)
    top = _top([panel.maps for panel in panels])
    every = []
    for panel, grid, part in zip(panels, grids, parts, strict=True):
        places = panel.placed()
        line = grid.axes(part)
        for k, axes in enumerate(line):
            image = _show(axes, panel.maps[k], top)
            _mark(axes, [places[k]] if k in places else [], 1.4)
            axes.set(xticks=[], yticks=[])
            map_title(axes, grid, token_words(panel.tokens[k]))
        _name(part, panel)
        every.append((grid, line))
    _finish(figure, image, every, panels, table)
    return figure


def _name(part: Any, panel: TokenMaps) -> None:
    text = f"{shorten(panel.store, 28)}, {site_words(panel.site)}"
    name_part(part, text)


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
    maps = PanelGrid(len(shown), width=17, widest=22, height=18)
    grids: list[PanelGrid | CurveGrid] = [maps]
    if curves is not None:
        grids.append(CurveGrid.of(2, curves))
    figure, parts = stack(*grids)
    top = _top([panel.maps for panel in shown])
    every = maps.axes(parts[0])
    side = maps.size[0] / maps.across - em(3)
    for axes, panel in zip(every, shown, strict=True):
        image = _draw_mosaic(axes, panel, top, side)
    text = "each map: similarity with all patches, in its token's place"
    if len(shown) < len(panels):
        text = f"{len(shown)} of {len(panels)} sites; {text}"
    below = [] if curves is None else draw_curve_panels(parts[1], curves, CURVES[:2])
    _finish(figure, image, [(maps, every)], shown, table, text, below)
    return figure


def _step(panel: TokenMaps) -> int:
    """Draw one of this many tokens along a side, so that the maps are legible."""
    longest = int(max(panel.maps.shape[1:]))
    most = max(map(len, panel.lattice()))
    return math.ceil(most * (longest + 1) / MOST_CELLS)


def _draw_mosaic(axes: Axes, panel: TokenMaps, top: float, side: float) -> AxesImage:
    """The maps of the tokens, each in its token's place, with gaps; the class token's in a line of
    its own above. side: inches."""
    step, (rows, cols) = _step(panel), panel.maps.shape[1:]
    places = panel.placed()
    order = [{place: k for k, place in enumerate(of)} for of in panel.lattice()]
    n_lines, n_across = map(len, order)
    others = [k for k in range(len(panel.tokens)) if k not in places]
    lines = -(-n_lines // step) + bool(others)
    across = max(-(-n_across // step), len(others))
    shape = (lines * (rows + 1) - 1, across * (cols + 1) - 1)
    whole = np.ma.array(np.zeros(shape), mask=np.ones(shape, bool))
    marks = []
    for i, k in enumerate(others):
        whole[:rows, i * (cols + 1) : i * (cols + 1) + cols] = panel.maps[k]
        x = (i + 1) * (cols + 1) - 0.5
        axes.text(
            x, (rows - 1) / 2, token_words(panel.tokens[k]), va="center", fontsize=small()
        )
    for k, (row, col) in places.items():
        i = order[0][row]
        j = order[1][col]
        if i % step == 0 and j % step == 0:
            y = (i // step + bool(others)) * (rows + 1)
            x = j // step * (cols + 1)
            whole[y : y + rows, x : x + cols] = panel.maps[k]
            marks.append((y + row, x + col))
    image = _show(axes, whole, top)
    _mark(axes, marks, min(1.4, 25 * side / max(whole.shape)))
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    step *= max(1, panel.apart)
    ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
    skipped = f", every {ordinal} token" if step > 1 else ""
    axes.set_title(f"{panel.title}{skipped}")
    return image


def _top(maps: Sequence[Float]) -> float:
    """The end of the colour scale, which starts at 0: the largest value."""
    values = np.concatenate([m[~np.isnan(m)] for m in maps])
    if len(values) and values.max() > 0:
        return float(values.max())
    return 1.0


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
        PatchCollection(
            frames, facecolor="none", edgecolor=OWN, linewidth=width, clip_on=False
        )
    )


def _finish(
    figure: Figure,
    image: AxesImage,
    grids: Sequence[tuple[PanelGrid, Sequence[Axes]]],
    panels: Sequence[TokenMaps],
    table: Table,
    text: str = "",
    curves: Sequence[Axes] = (),
) -> None:
    """The colour bars, and a legend of frames, grey cells and curves."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    values = np.concatenate([panel.maps.ravel() for panel in panels])
    extend = "min" if (values < -1e-9).any() else "neither"
    for grid, every in grids:
        bars_at_ends(grid, every, image, describe_scale(table), extend=extend)
    handles: dict[str, Any] = handles_of(curves)
    if any(panel.placed() for panel in panels):
        handles["the token's own patch"] = Patch(facecolor="none", edgecolor=OWN)
    if np.isnan(values).any():
        handles["no value: constant"] = Patch(facecolor=NO_VALUE)
    words = "; ".join(
        part for part in (text, f"n\u00a0=\u00a0{count(table.frame)}") if part
    )
    legend_below(figure, handles | {words: Line2D([], [], linestyle="none")})


def draw_token_summary(table: Table) -> Figure:
    """Maps of the metrics, each token in its place: a line and a scale for each store and metric, a
    map for each site. Call it inside a function decorated with `styled`."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Patch

    drawn = [metric for metric in SUMMARY if metric in table["metric"]]
    frame = table.frame.filter(pl.col("metric").is_in(drawn)) if drawn else table.frame
    lines = frame.partition_by("store", "metric", maintain_order=True)
    grids = [small_maps(rows["site"].n_unique(), 2) for rows in lines]
    figure, parts = stack(*grids)
    for grid, part, rows in zip(grids, parts, lines, strict=True):
        store = rows["store"][0]
        metric = rows["metric"][0]
        alike = frame.filter(metric=metric)
        reach: Any = alike["value"].abs().max() or 1.0
        most_tokens: Any = alike.group_by("store", "site").len()["len"].max()
        scale = {
            "own_cka": Normalize(0, reach),
            # From first to last of a token's patches, so that ranks are comparable between figures.
            "own_rank": LogNorm(1, max(2, most_tokens, reach)),
            "own_rank_relative": Normalize(0, 1),
            "own_margin": Normalize(-reach, reach),
            "peak_distance_px": Normalize(0, reach),
        }[metric]
        colours = {"own_margin": "RdBu_r"}.get(metric, COLOUR_MAP)
        colours += "_r" if metric.startswith("own_rank") else ""
        every = grid.axes(part)
        sites = rows.partition_by("site", maintain_order=True)
        for axes, own in zip(every, sites, strict=True):
            row, col = (own[name].to_numpy() for name in ("row", "col"))
            lattice = [np.unique(of) for of in (row, col)]
            if math.prod(map(len, lattice)) == len(
                own
            ):  # all tokens, or of every s-th row, column
                row, col = (
                    np.searchsorted(*of) for of in zip(lattice, (row, col), strict=True)
                )
            cells = np.full((row.max() + 1, col.max() + 1), np.nan)
            cells[row, col] = own["value"]
            image = _show(axes, cells, scale, colours)
            axes.set(xticks=[], yticks=[])
            map_title(axes, grid, site_words(own["site"][0]))
        name_part(part, f"{shorten(store, 20)}: {METRICS[metric]} (n = {count(rows)})")
        bars_at_ends(grid, every, image, "")
        if isinstance(scale, LogNorm):
            for axes in every:
                for bar in axes.child_axes:
                    value_ticks(bar.yaxis, scale)
    if frame["value"].has_nulls():
        patch = Patch(facecolor=NO_VALUE)
        legend_below(figure, {"no value: constant, or a single patch": patch})
    return figure
