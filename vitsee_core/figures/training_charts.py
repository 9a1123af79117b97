"""Figures over a training: each layer's value against the step, beside a map of steps and layers.

Any table with a column of steps is drawn so, whichever analysis made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitsee_core.figures.curve_looks import site_kind
from vitsee_core.figures.heatmaps import COLOUR_MAP, NO_VALUE, data_limits
from vitsee_core.figures.panels import (
    Grid,
    colour_bar,
    handles_of,
    legend_below,
    map_axes,
    note_below,
    note_count,
    room,
    stack,
)
from vitsee_core.figures.plotting import GREY, ink, styled, theme
from vitsee_core.figures.training_layers import INTERVAL, RUNS, layer_words, layers_over_steps
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6  # of metrics, and of runs; the table has them all
MOST_TICKS = 9  # of layers
MOST_NAMED = 8  # layers in a legend, from which on a colour bar shows their depth
MOST_BANDS = 13  # layers with bands
LEAST = 0.05  # of the values: the span of a range of y or colours
GROWS = 5.0  # later gaps between steps over earlier ones, from which on the axis is logarithmic
# Of matplotlib's viridis, on light paper and on dark: its ends would vanish.
SHADES = {"light": (0.0, 0.9), "dark": (0.2, 1.0)}
WORDS = {"step": "training step", "epoch": "epoch"}
BELOW, BESIDE = 16.0, 24.0  # ems of a row of panels, and across one that has another beside it


@styled
def draw_over_training(table: Table, by: Sequence[str] = ()) -> Figure:
    """A row of two panels for each metric and model: curves of the layers over the steps, in the
    colours of a sequential map from input to output, and a map of steps x layers.

    Steps whose gaps grow are on a logarithmic axis, on which step 0 stands at the left end. Sites
    outside the blocks, behind the last one, are dashed lines.

    Args:
        table: over a training, see `Table.step_unit`.
        by: ("site",) takes the models for repetitions (seeds): one row per metric, of the means
            over the models with the 95 % interval over them.

    Raises:
        VitseeError: see `layers_over_steps`; or no value at all.
    """
    unit = table.step_unit
    rows = layers_over_steps(table, pooled="site" in by)
    parts = rows.partition_by("panel", "run", maintain_order=True)
    shown, n_more = parts[:MOST_PANELS], max(0, len(parts) - MOST_PANELS)
    maps = any(own["site"].n_unique() > 1 for own in shown)
    across = 2 if maps and room() >= 2 * BESIDE else 1
    width = min(room() / across, 36.0)
    n = len(shown) * (2 if maps else 1)
    grid = Grid(n, width=width, widest=width, height=BELOW, most=across)
    figure, (box,) = stack(grid)
    every = grid.axes(box)
    shades = _shades(rows)
    several = rows["run"].n_unique() > 1
    for i, own in enumerate(shown):
        axes = every[(2 if maps else 1) * i]
        run = shorten(own["run"][0], 24)
        title = f"{run}: {own['panel'][0]}" if several else own["panel"][0]
        _draw_curves(axes, own, shades, unit)
        axes.set_title(title)
        if maps:
            _draw_map(every[2 * i + 1], own, unit)
    if len({*shades.values()}) > MOST_NAMED:
        _add_depth_bars(every[:: 2 if maps else 1], shades)
    legend_below(figure, handles_of(every))
    if n_more:
        note_below(figure, f"{n_more} more in the table: choose with --metric and --sites")
    return figure


def is_log(steps: Sequence[int] | Float) -> bool:
    """Whether steps are shown on a logarithmic axis: the gaps of their second half are `GROWS`
    times those of the first and more, by the medians."""
    gaps = np.diff(np.sort([step for step in steps if step > 0]))
    if len(gaps) < 2:
        return False
    early, late = gaps[: len(gaps) // 2], gaps[-(len(gaps) // 2) :]
    return float(np.median(late)) >= GROWS * float(np.median(early))


def _shades(rows: pl.DataFrame) -> dict[str, Any]:
    """Site -> its colour, from input to output, of those in and before the blocks."""
    import matplotlib

    layers = rows.select("site", "rel_depth").unique().sort("rel_depth", "site")
    inner = [site for site in layers["site"] if site_kind(site) != "head"]
    low, high = SHADES[theme()]
    # Sites of one place in their blocks, of several parts, have one colour.
    depths = dict(layers.rows())
    places = sorted({depths[site] for site in inner})
    at = np.linspace(low, high, len(places)) if len(places) > 1 else [low]
    of = dict(zip(places, at, strict=True))
    return {site: matplotlib.colormaps["viridis"](of[depths[site]]) for site in inner}


def _draw_curves(axes: Axes, rows: pl.DataFrame, shades: dict[str, Any], unit: str) -> None:
    sites = rows.partition_by("site", maintain_order=True, as_dict=True)
    named = len({*shades.values()}) <= MOST_NAMED
    bands = len(sites) <= MOST_BANDS
    for number, ((site,), own) in enumerate(sites.items()):
        own = own.sort("step")
        x, y = own["step"].to_numpy(), own["value"].to_numpy()
        outside = site not in shades
        look: dict[str, Any] = {"color": ink() if outside else shades[site], "markersize": 2}
        look |= {"linestyle": (0, (4, 1.5)) if outside else "-", "marker": "o" if named else None}
        low, high = own["low"].to_numpy(), own["high"].to_numpy()
        if bands and np.isfinite(low).any():
            axes.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
        text = layer_words(site, own["block"][0])
        axes.plot(x, y, label=text if named or outside else "_nolegend_", zorder=3 + number, **look)
    if rows["low"].is_finite().any():
        text = _band_words(rows)
        if bands:
            axes.fill_between([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {text}")
        else:
            axes.plot([], [], linestyle="none", label=f"{text}: not drawn of so many")
    step_axis(axes, rows["step"].unique().sort().to_numpy(), unit)
    _put_limits(axes)
    note_count(axes, rows)


def _put_limits(axes: Axes) -> None:
    """Limits of y: from 0, unless all values lie within a factor of two, whose changes would be
    flat lines."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if not np.isfinite([low, high]).all():
        return
    narrow = high > low > high / 2
    least, most = _widened(low, high) if narrow else (min(low, 0.0), max(high, 0.0))
    margin = 0.05 * (most - least or 1)
    axes.set_ylim(least - (margin if narrow or least < 0 else 0), most + margin)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is at least `LEAST` of its values wide: noise is not drawn as large changes."""
    lacks = max(LEAST * max(abs(low), abs(high)) - (high - low), 0.0) / 2
    return low - lacks, high + lacks


def _band_words(rows: pl.DataFrame) -> str:
    kinds = rows["band"].unique(maintain_order=True).to_list()
    words = {INTERVAL: "95 % interval", RUNS: "95 % interval over the runs"}
    return " or ".join(words.get(kind, f"least to largest of the {kind}") for kind in kinds)


def step_axis(axes: Axes, steps: Float, unit: str) -> None:
    """Make x an axis of steps, logarithmic where `is_log`, on which 0 has a place at the left."""
    from matplotlib import ticker

    words = WORDS.get(unit, unit)
    formatter = ticker.EngFormatter(sep="")
    if is_log(steps):
        first, last = float(steps[steps > 0].min()), float(steps.max())
        if steps.min() > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        tens = [10.0**k for k in range(-1, 13) if first * 0.999 <= 10.0**k <= last * 1.001]
        ticks = tens if len(tens) > 1 else [first, last]
        axes.set_xticks([*([0.0] if steps.min() == 0 else []), *ticks])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        words = f"{words} (logarithmic)"
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlabel(words)


def _draw_map(axes: Axes, rows: pl.DataFrame, unit: str) -> None:
    """Steps to the right, layers upwards from input to output; every step is as wide as another."""
    import matplotlib
    from matplotlib.ticker import EngFormatter

    sites = rows["site"].unique(maintain_order=True).to_list()
    steps = rows["step"].unique().sort().to_list()
    places = ({site: i for i, site in enumerate(sites)}, {step: i for i, step in enumerate(steps)})
    values = np.full((len(sites), len(steps)), np.nan)
    for site, step, value in rows.select("site", "step", "value").rows():
        values[places[0][site], places[1][step]] = np.nan if value is None else value
    finite = values[np.isfinite(values)]
    similar = rows["metric"][0].startswith("cka")
    span = data_limits([values]) if similar else _widened(*map(float, (finite.min(), finite.max())))
    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=NO_VALUE)
    image = axes.imshow(values, cmap=colours, vmin=span[0], vmax=span[1], aspect="auto")
    map_axes(axes)
    blocks = dict(rows.select("site", "block").unique().rows())
    names = [layer_words(site, blocks[site]).removeprefix("block ") for site in sites]
    shown = range(0, len(sites), -(-len(sites) // MOST_TICKS))
    axes.set_yticks([*shown], [shorten(names[i], 12) for i in shown])
    axes.set_ylabel("block" if any(name.isdigit() for name in names) else "layer")
    words = EngFormatter(sep="")
    some = range(0, len(steps), -(-len(steps) // 6))
    axes.set_xticks([*some], [words(steps[i]) for i in some])
    axes.set_xlabel(f"{WORDS.get(unit, unit)} (one column each)")
    if np.isnan(values).any():
        axes.plot([], [], "s", color=NO_VALUE, label="no value")
    colour_bar(axes, image, metric_words(rows["metric"][0]))


def _add_depth_bars(every: Sequence[Axes], shades: dict[str, Any]) -> None:
    """Add to each panel of curves a colour bar of its layers, from input to output."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    if len(shades) < 2:
        return
    colours = list(dict.fromkeys(shades.values()))
    for axes in every:
        of = ScalarMappable(Normalize(0, 1), ListedColormap(colours))
        colour_bar(axes, of, "relative depth")
