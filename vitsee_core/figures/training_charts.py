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
    PanelGrid,
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
from vitsee_core.figures.training_values import (
    INTERVAL,
    RUNS,
    layer_words,
    layers_over_steps,
)
from vitsee_core.tables.results import Table
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import metric_words
from vitsee_core.types import Float, pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6  # pairs of metric and run that are drawn; the table has them all
MAX_TICKS = 9  # labels of layers in a map
MAX_NAMED = 8  # layers in a legend, above which a colour bar shows their depth
MAX_BANDS = 13  # layers, up to which bands are drawn
MIN_SPAN = 0.05  # the least range of y or colours, as a share of the values
GROWTH = (
    5.0  # ratio of later to earlier gaps between steps that makes the axis logarithmic
)
# The part of matplotlib's viridis that can be seen, on light paper and on dark.
SHADES = {"light": (0.0, 0.9), "dark": (0.2, 1.0)}
WORDS = {"step": "training step", "epoch": "epoch"}
PANEL_HEIGHT = 16.0  # ems
PANEL_WIDTH = 24.0  # ems that a panel needs to have another one beside it


@styled
def draw_over_training(table: Table, by: Sequence[str] = ()) -> Figure:
    """Return a figure over a training: curves and a map for each metric and model.

    The curves are the layers' values over the steps, in colours from input to output; the map has
    steps and layers as axes. Steps whose gaps grow are on a logarithmic axis, on which step 0
    stands at the left end. Sites behind the last block are dashed lines.

    Args:
        table: a table over a training, which has a `step_unit`.
        by: ("site",) takes the models for repetitions (seeds): one row of panels per metric, with
            the means over the models and the 95 % interval over them.

    Raises:
        VitseeError: several values of one layer at one step.
    """
    unit = table.step_unit
    rows = layers_over_steps(table, pooled="site" in by)
    parts = rows.partition_by("panel", "run", maintain_order=True)
    drawn_parts = parts[:MOST_PANELS]
    n_more = max(0, len(parts) - MOST_PANELS)
    # A map of a single layer would repeat its curve.
    has_maps = any(part["site"].n_unique() > 1 for part in drawn_parts)
    panels_per_part = 2 if has_maps else 1
    across = 2 if has_maps and room() >= 2 * PANEL_WIDTH else 1
    width = min(room() / across, 36.0)
    grid = PanelGrid(
        n=len(drawn_parts) * panels_per_part,
        width=width,
        widest=width,
        height=PANEL_HEIGHT,
        most=across,
    )
    figure, (box,) = stack(grid)
    panels = grid.axes(box)
    curve_panels = panels[::panels_per_part]
    shades = _shades(rows)
    several_runs = rows["run"].n_unique() > 1
    for i, part in enumerate(drawn_parts):
        title = part["panel"][0]
        if several_runs:
            title = f"{shorten(part['run'][0], 24)}: {title}"
        _draw_curves(curve_panels[i], part, shades, unit)
        curve_panels[i].set_title(title)
        if has_maps:
            _draw_map(panels[2 * i + 1], part, unit)
    if len({*shades.values()}) > MAX_NAMED:
        _add_depth_bars(curve_panels, shades)
    legend_below(figure, handles_of(panels))
    if n_more:
        note_below(
            figure, f"{n_more} more in the table: choose with --metric and --sites"
        )
    return figure


def is_log(steps: Sequence[int] | Float) -> bool:
    """Return whether steps are shown on a logarithmic axis.

    They are if the median gap between the later half of the steps is `GROWTH` times that of the
    earlier half or more.
    """
    gaps = np.diff(np.sort([step for step in steps if step > 0]))
    if len(gaps) < 2:
        return False
    early = gaps[: len(gaps) // 2]
    late = gaps[-(len(gaps) // 2) :]
    return float(np.median(late)) >= GROWTH * float(np.median(early))


def _shades(rows: pl.DataFrame) -> dict[str, Any]:
    """Return the colour of each site in and before the blocks, from input to output."""
    import matplotlib

    layers = rows.select("site", "rel_depth").unique().sort("rel_depth", "site")
    inner = [site for site in layers["site"] if site_kind(site) != "head"]
    low, high = SHADES[theme()]
    # Colours stand for depths: the parts of one block, at one depth, share theirs.
    depth_of = dict(layers.rows())
    depths = sorted({depth_of[site] for site in inner})
    positions = [low]
    if len(depths) > 1:
        positions = list(np.linspace(low, high, len(depths)))
    position_of = dict(zip(depths, positions, strict=False))
    viridis = matplotlib.colormaps["viridis"]
    return {site: viridis(position_of[depth_of[site]]) for site in inner}


def _draw_curves(
    axes: Axes, rows: pl.DataFrame, shades: dict[str, Any], unit: str
) -> None:
    """Draw the curves of all layers in a panel.

    Args:
        axes: the panel.
        rows: rows of one metric and run, as `layers_over_steps` returns them.
        shades: site -> its colour; sites that lack one lie behind the last block.
        unit: what the steps are.
    """
    sites = rows.partition_by("site", maintain_order=True, as_dict=True)
    names_layers = len({*shades.values()}) <= MAX_NAMED
    draws_bands = len(sites) <= MAX_BANDS
    for i, ((site,), site_rows) in enumerate(sites.items()):
        site_rows = site_rows.sort("step")
        steps = site_rows["step"].to_numpy()
        is_outside = site not in shades
        look: dict[str, Any] = {"color": shades.get(site), "linestyle": "-"}
        if is_outside:
            look = {"color": ink(), "linestyle": (0, (4, 1.5))}
        label = "_nolegend_"
        if names_layers or is_outside:
            label = layer_words(site, site_rows["block"][0])
        low = site_rows["low"].to_numpy()
        high = site_rows["high"].to_numpy()
        if draws_bands and np.isfinite(low).any():
            axes.fill_between(
                steps, low, high, color=look["color"], alpha=0.13, linewidth=0
            )
        axes.plot(
            steps,
            site_rows["value"].to_numpy(),
            label=label,
            marker="o" if names_layers else None,
            markersize=2,
            zorder=3 + i,  # later layers above earlier ones
            **look,
        )
    if rows["low"].is_finite().any():
        text = _band_words(rows)
        if draws_bands:
            # No fill_between: before matplotlib 3.11 a legend below subfigures refuses it.
            axes.fill([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {text}")
        else:
            axes.plot([], [], linestyle="none", label=f"{text}: not drawn of so many")
    step_axis(axes, rows["step"].unique().sort().to_numpy(), unit)
    _put_limits(axes)
    note_count(axes, rows)


def _put_limits(axes: Axes) -> None:
    """Let y start at 0, unless all values lie within a factor of two: they would be flat lines."""
    low = axes.dataLim.y0
    high = axes.dataLim.y1
    if not np.isfinite([low, high]).all():
        return
    narrow = high > low > high / 2
    if narrow:
        bottom, top = _widened(low, high)
    else:
        bottom = min(low, 0.0)
        top = max(high, 0.0)
    margin = 0.05 * (top - bottom or 1)
    lower_margin = margin if narrow or bottom < 0 else 0
    axes.set_ylim(bottom - lower_margin, top + margin)


def _widened(low: float, high: float) -> tuple[float, float]:
    """Widen a range to `MIN_SPAN` of its values, so that noise is not drawn as large changes."""
    min_span = MIN_SPAN * max(abs(low), abs(high))
    missing_half = max(min_span - (high - low), 0.0) / 2
    return low - missing_half, high + missing_half


def _band_words(rows: pl.DataFrame) -> str:
    """Return what the bands of a panel are, for the legend."""
    kinds = rows["band"].unique(maintain_order=True).to_list()
    words = {INTERVAL: "95 % interval", RUNS: "95 % interval over the runs"}
    return " or ".join(
        words.get(kind, f"least to largest of the {kind}") for kind in kinds
    )


def step_axis(axes: Axes, steps: Float, unit: str) -> None:
    """Make x an axis of steps, logarithmic if `is_log` says so, with step 0 at the left end.

    Args:
        axes: the panel.
        steps: all steps.
        unit: "step" or "epoch".
    """
    from matplotlib import ticker

    words = WORDS.get(unit, unit)
    formatter = ticker.EngFormatter(sep="")
    if is_log(steps):
        first = float(steps[steps > 0].min())
        last = float(steps.max())
        if steps.min() > 0:
            axes.set_xscale("log")
        else:
            # A logarithm has no 0: from 0 to the first step the axis is linear.
            axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        powers = [10.0**k for k in range(-1, 13)]
        ticks = [power for power in powers if first * 0.999 <= power <= last * 1.001]
        if len(ticks) < 2:
            ticks = [first, last]
        if steps.min() == 0:
            ticks = [0.0, *ticks]
        axes.set_xticks(ticks)
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        words = f"{words} (logarithmic)"
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlabel(words)


def _draw_map(axes: Axes, rows: pl.DataFrame, unit: str) -> None:
    """Draw a map of values: steps to the right, all equally wide, layers upwards to the output.

    Args:
        axes: the panel.
        rows: rows of one metric and run, as `layers_over_steps` returns them.
        unit: what the steps are.
    """
    import matplotlib
    from matplotlib.ticker import EngFormatter

    sites = rows["site"].unique(maintain_order=True).to_list()
    steps = rows["step"].unique().sort().to_list()
    row_of = {site: i for i, site in enumerate(sites)}
    column_of = {step: i for i, step in enumerate(steps)}
    values = np.full((len(sites), len(steps)), np.nan)  # (layers, steps)
    for site, step, value in rows.select("site", "step", "value").rows():
        values[row_of[site], column_of[step]] = np.nan if value is None else value
    if rows["metric"][0].startswith("cka"):
        low, high = data_limits([values])  # the colours of all similarities
    else:
        finite = values[np.isfinite(values)]
        low, high = _widened(float(finite.min()), float(finite.max()))
    colours = matplotlib.colormaps[COLOUR_MAP].with_extremes(bad=NO_VALUE)
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
    map_axes(axes)
    block_of = dict(rows.select("site", "block").unique().rows())
    names = [layer_words(site, block_of[site]).removeprefix("block ") for site in sites]
    labelled_rows = range(0, len(sites), -(-len(sites) // MAX_TICKS))
    axes.set_yticks([*labelled_rows], [shorten(names[i], 12) for i in labelled_rows])
    axes.set_ylabel("block" if any(name.isdigit() for name in names) else "layer")
    step_text = EngFormatter(sep="")
    labelled_steps = range(0, len(steps), -(-len(steps) // 6))  # six labels at most
    axes.set_xticks([*labelled_steps], [step_text(steps[i]) for i in labelled_steps])
    axes.set_xlabel(f"{WORDS.get(unit, unit)} (one column each)")
    if np.isnan(values).any():
        axes.plot([], [], "s", color=NO_VALUE, label="no value")
    colour_bar(axes, image, metric_words(rows["metric"][0]))


def _add_depth_bars(panels: Sequence[Axes], shades: dict[str, Any]) -> None:
    """Add to each panel of curves a colour bar of its layers' depths, from input to output."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    if len(shades) < 2:
        return
    colours = list(dict.fromkeys(shades.values()))
    for axes in panels:
        scale = ScalarMappable(Normalize(0, 1), ListedColormap(colours))
        colour_bar(axes, scale, "relative depth")
