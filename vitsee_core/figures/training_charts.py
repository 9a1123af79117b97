"""Figures over a training: each layer's value against the step, beside a map of steps and layers;
and these values.

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
from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.columns import BASELINE
from vitsee_core.tables.headlines import Answer, number
from vitsee_core.tables.results import Table
from vitsee_core.tables.steps import numbers_in_name
from vitsee_core.tables.table_sites import block_part
from vitsee_core.tables.text import shorten
from vitsee_core.tables.words import PARTS, metric_words, site_words, token_words
from vitsee_core.types import Float, pl
from vitsee_stores.errors import VitseeError

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
# ems of a row of panels, and across one that has another beside it
BELOW = 16.0
BESIDE = 24.0


# Columns of parts of an image or a model, and their plural; a layer's value is that of the whole,
# or the mean over its parts.
WITHIN = {
    "head": "heads",
    "row": "cells",
    "col": "cells",
    "frequency": "frequencies",
    "class": "classes",
    "image": "images",
    "query": "queries",
    "video": "videos",
    "object": "objects",
    "segment": "segments",
    "component": "components",
    "channel": "channels",
    "concept": "concepts",
    "filter": "filters",
    "group": "groups",
}
# Columns that tell values of one layer apart: each of their values is a panel of its own.
SETTINGS = ("token", "type", "at", "part", "shots", "k", "l2", "l2_relative", "best")
# what a band is, beside the least and largest of parts
INTERVAL = "interval"
RUNS = "runs"


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
    shown = parts[:MOST_PANELS]
    n_more = max(0, len(parts) - MOST_PANELS)
    maps = any(own["site"].n_unique() > 1 for own in shown)
    across = 2 if maps and room() >= 2 * BESIDE else 1
    width = min(room() / across, 36.0)
    n = len(shown) * (2 if maps else 1)
    grid = PanelGrid(n, width=width, widest=width, height=BELOW, most=across)
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
        note_below(
            figure, f"{n_more} more in the table: choose with --metric and --sites"
        )
    return figure


def is_log(steps: Sequence[int] | Float) -> bool:
    """Whether steps are shown on a logarithmic axis: the gaps of their second half are `GROWS`
    times those of the first and more, by the medians."""
    gaps = np.diff(np.sort([step for step in steps if step > 0]))
    if len(gaps) < 2:
        return False
    early = gaps[: len(gaps) // 2]
    late = gaps[-(len(gaps) // 2) :]
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


def _draw_curves(
    axes: Axes, rows: pl.DataFrame, shades: dict[str, Any], unit: str
) -> None:
    sites = rows.partition_by("site", maintain_order=True, as_dict=True)
    named = len({*shades.values()}) <= MOST_NAMED
    bands = len(sites) <= MOST_BANDS
    for i, ((site,), own) in enumerate(sites.items()):
        own = own.sort("step")
        x = own["step"].to_numpy()
        y = own["value"].to_numpy()
        outside = site not in shades
        look: dict[str, Any] = {
            "color": ink() if outside else shades[site],
            "markersize": 2,
        }
        look |= {
            "linestyle": (0, (4, 1.5)) if outside else "-",
            "marker": "o" if named else None,
        }
        low = own["low"].to_numpy()
        high = own["high"].to_numpy()
        if bands and np.isfinite(low).any():
            axes.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
        text = layer_words(site, own["block"][0])
        axes.plot(
            x, y, label=text if named or outside else "_nolegend_", zorder=3 + i, **look
        )
    if rows["low"].is_finite().any():
        text = _band_words(rows)
        if bands:
            # No fill_between: before matplotlib 3.11 a legend below subfigures refuses it.
            axes.fill([], [], color=GREY, alpha=0.25, linewidth=0, label=f"band: {text}")
        else:
            axes.plot([], [], linestyle="none", label=f"{text}: not drawn of so many")
    step_axis(axes, rows["step"].unique().sort().to_numpy(), unit)
    _put_limits(axes)
    note_count(axes, rows)


def _put_limits(axes: Axes) -> None:
    """Limits of y: from 0, unless all values lie within a factor of two, whose changes would be
    flat lines."""
    low = axes.dataLim.y0
    high = axes.dataLim.y1
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
    return " or ".join(
        words.get(kind, f"least to largest of the {kind}") for kind in kinds
    )


def step_axis(axes: Axes, steps: Float, unit: str) -> None:
    """Make x an axis of steps, logarithmic where `is_log`, on which 0 has a place at the left."""
    from matplotlib import ticker

    words = WORDS.get(unit, unit)
    formatter = ticker.EngFormatter(sep="")
    if is_log(steps):
        first = float(steps[steps > 0].min())
        last = float(steps.max())
        if steps.min() > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        tens = [
            10.0**k for k in range(-1, 13) if first * 0.999 <= 10.0**k <= last * 1.001
        ]
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
    places = (
        {site: i for i, site in enumerate(sites)},
        {step: i for i, step in enumerate(steps)},
    )
    values = np.full((len(sites), len(steps)), np.nan)
    for site, step, value in rows.select("site", "step", "value").rows():
        values[places[0][site], places[1][step]] = np.nan if value is None else value
    finite = values[np.isfinite(values)]
    similar = rows["metric"][0].startswith("cka")
    span = (
        data_limits([values])
        if similar
        else _widened(*map(float, (finite.min(), finite.max())))
    )
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


# -------------------------------------------------------------------------- layers over the steps


def layers_over_steps(table: Table, *, pooled: bool = False) -> pl.DataFrame:
    """The value of each layer at every step.

    Args:
        table: over a training, see `Table.step_unit`; of one model or several.
        pooled: take the models for repetitions, such as seeds: values are the means over them, low
            and high the 95 % interval of Student's t (none of a single one).

    Returns:
        A frame with the columns panel (the metric and its settings in words), metric, run (the
        model, "" where they are pooled), site, block, rel_depth, step, value, low, high, n_images
        and band, which says what low and high are: `INTERVAL`, the table's own; `RUNS`; or, of a
        mean over parts, the word for these, of which low and high are the least and the largest.
        Metrics that are another one times a number are left out.

    Raises:
        VitseeError: several values of one layer at one step.
    """
    unit = table.step_unit
    rows = table.frame
    if BASELINE in rows.columns:
        rows = rows.filter(pl.col(BASELINE).is_null())
    if "site_a" in rows.columns:
        sides = ("site", "block", "rel_depth")
        rows = rows.with_columns(pl.col(f"{name}_a").alias(name) for name in sides)
        rows = rows.with_columns(pl.col("model_b").alias("model"))
        if rows.select((pl.col("store_a") == pl.col("store_b")).all()).item():
            rows = _with_the_last(rows)
        else:
            rows = rows.with_columns(_compared(rows, unit))
    rows = rows.with_columns(
        *(
            pl.lit(None, pl.Float64).alias(n)
            for n in ("low", "high")
            if n not in rows.columns
        ),
        *(
            pl.lit(None, pl.Int64).alias(n)
            for n in ("n_images",)
            if n not in rows.columns
        ),
    )
    varying = [n for n in SETTINGS if n in rows.columns and rows[n].n_unique() > 1]
    keys = ["metric", *(["compared"] if "compared" in rows.columns else []), *varying]
    rows, inside = _of_wholes(rows, keys)
    layer = [*keys, "model", "site", "block", "rel_depth", unit]
    if inside:
        parts = pl.len() > 1
        value = pl.col("value")
        rows = rows.group_by(layer, maintain_order=True).agg(
            value.mean(),
            low=pl.when(parts).then(value.min()).otherwise(pl.col("low").first()),
            high=pl.when(parts).then(value.max()).otherwise(pl.col("high").first()),
            n_images=pl.col("n_images").max(),
            band=pl.when(parts).then(pl.lit(inside)).otherwise(pl.lit(INTERVAL)),
        )
    elif (again := rows.select(layer).is_duplicated()).any():
        first = rows.filter(again).row(0, named=True)
        raise VitseeError(
            f"several values of {first['site']} at {unit} {first[unit]}, where a chart along "
            f"{unit}s has one per layer; expected rows that a layer has once (of cka: --pairs "
            "same-depth)"
        )
    else:
        rows = rows.with_columns(band=pl.lit(INTERVAL))
    rows = rows.with_columns(part=block_part(rows))
    if rows["part"].n_unique() > 1:
        keys.append("part")
    rows = rows.with_columns(panel=_words(rows, keys))
    order = {name: i for i, name in enumerate(rows["panel"].unique(maintain_order=True))}
    at = pl.col("panel").replace_strict(order, return_dtype=pl.Int64)
    rows = rows.sort(at, "rel_depth", unit, maintain_order=True)
    if pooled:
        rows = _pooled(rows, ["panel", "metric", "site", "block", "rel_depth", unit])
    texts = ("panel", "metric", "run", "site", "block", "band")
    found = rows.with_columns(
        run=pl.lit("") if pooled else pl.col("model"), step=pl.col(unit)
    )
    numbers = ("rel_depth", "step", "value", "low", "high", "n_images")
    found = found.select(*texts, *numbers)
    found = found.with_columns(pl.col(texts).cast(pl.String))
    return _without_copies(found.filter(pl.col("value").is_finite().any().over("panel")))


def _with_the_last(rows: pl.DataFrame) -> pl.DataFrame:
    """The comparisons of each layer with the last one, among those of a store with itself."""
    depth = rows["rel_depth_b"].max()
    last, block = rows.filter(rel_depth_b=depth).select("site_b", "block_b").row(-1)
    own = rows.filter((pl.col("site_b") == last) & (pl.col("site_a") != last))
    return own.with_columns(pl.lit(layer_words(last, block)).alias("compared"))


def layer_words(site: str, block: str | None) -> str:
    """`block 3`, whichever part of it."""
    return site_words(site, block or "").partition(",")[0]


def answers_over_training(table: Table) -> list[Answer]:
    """How the first metric of a table changes from the first step to the last, in the first and in
    the last block: a line per model."""
    unit = table.step_unit
    rows = layers_over_steps(table)
    rows = rows.filter(pl.col("panel") == rows["panel"][0], pl.col("value").is_finite())
    found = []
    for (run,), own in rows.partition_by(
        "run", maintain_order=True, as_dict=True
    ).items():
        said = []
        inner = own.filter(pl.col("block").is_not_null())
        layers = (inner if len(inner) else own).partition_by("site", maintain_order=True)
        for layer in dict.fromkeys((0, len(layers) - 1)):
            at = layers[layer].sort("step")
            words = layer_words(at["site"][0], at["block"][0])
            ends = [
                f"{number(at['value'][i])} at {unit} {at['step'][i]:,}" for i in (0, -1)
            ]
            said.append(f"{words} from {' to '.join(ends)}")
        found.append((str(run), f"{own['panel'][0]}: {', '.join(said)}"))
    return found


def _compared(rows: pl.DataFrame, unit: str) -> pl.Expr:
    """A column `compared`: the step that each row is compared with, by the first stores' labels."""
    steps = {
        label: numbers_in_name(label).get(unit)
        for label in rows["store_a"].cast(pl.String).unique(maintain_order=True)
    }
    of_each = rows.group_by("model_b").agg(pl.col("store_a").n_unique())["store_a"]
    if of_each.max() == 1:
        named = {
            label: label if n is None else f"{unit} {n}" for label, n in steps.items()
        }
        if (
            len({*named.values()}) > 1 and None not in steps.values()
        ):  # of each run its own last
            named = dict.fromkeys(named, f"the last {unit}")
        text = (
            pl.col("store_a")
            .cast(pl.String)
            .replace_strict(named, return_dtype=pl.String)
        )
        return text.alias("compared")
    return pl.lit(f"the {unit} before").alias("compared")


def _of_wholes(rows: pl.DataFrame, keys: Sequence[str]) -> tuple[pl.DataFrame, str]:
    """The rows about whole layers, where a metric has such; else all of its rows, and the word for
    what they are about, "" where no metric has parts alone."""
    inside = ""
    for name in (n for n in WITHIN if n in rows.columns):
        whole = pl.col(name).is_null()
        rows = rows.filter(whole | ~whole.any().over(keys))
        if rows[name].is_not_null().any():
            inside = inside or WITHIN[name]
    return rows, inside


def _words(rows: pl.DataFrame, keys: Sequence[str]) -> pl.Series:
    """The title of each row's panel."""
    known: dict[tuple[Any, ...], str] = {}
    for cells in rows.select(keys).unique(maintain_order=True).rows():
        texts = []
        for name, cell in zip(keys, cells, strict=True):
            if name == "metric":
                texts.append(metric_words(str(cell)))
            elif name == "compared":
                texts[-1] += f" with {cell}"
            elif name == "token":
                texts.append("all patches" if cell is None else token_words(str(cell)))
            elif name == "part":
                texts.append(PARTS.get(str(cell), str(cell)) or "block output")
            elif cell is not None:
                texts.append(f"{name} {cell}")
        known[cells] = ", ".join(texts)
    return pl.Series(
        "panel", [known[cells] for cells in rows.select(keys).rows()], pl.String
    )


def _pooled(rows: pl.DataFrame, layer: Sequence[str]) -> pl.DataFrame:
    """Means over the models, with intervals over them."""
    value = pl.col("value")
    rows = rows.group_by(layer, maintain_order=True).agg(
        value.mean(),
        sd=value.std(),
        n=value.is_finite().sum(),
        n_images=pl.col("n_images").max(),
    )
    half = [
        t_quantile(n - 1) * sd / np.sqrt(n) if n > 1 and sd is not None else None
        for n, sd in rows.select("n", "sd").rows()
    ]
    at = pl.Series("half", half, pl.Float64)
    return rows.with_columns(
        low=pl.col("value") - at, high=pl.col("value") + at, band=pl.lit(RUNS)
    )


def _without_copies(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows without panels whose values are those of an earlier one times a number."""
    kept: dict[str, pl.DataFrame] = {}
    for (name,), own in rows.partition_by(
        "panel", maintain_order=True, as_dict=True
    ).items():
        same = ("run", "site", "step")
        own = own.sort(*same)
        for other in kept.values():
            if own.select(same).equals(other.select(same)):
                a = own["value"].to_numpy()
                b = other["value"].to_numpy()
                ratio = float(np.nansum(a * b) / max(np.nansum(b * b), 1e-300))
                if ratio and np.allclose(a, ratio * b, rtol=1e-6, equal_nan=True):
                    break
        else:
            kept[name] = own
    return rows.filter(pl.col("panel").is_in(list(kept)))
