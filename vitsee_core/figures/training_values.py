"""The value of each layer at every step of a training, from any table with a column of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitsee_core.statistics.moments import t_quantile
from vitsee_core.tables.columns import BASELINE
from vitsee_core.tables.headlines import Answer, number
from vitsee_core.tables.results import Table
from vitsee_core.tables.steps import numbers_in_name
from vitsee_core.tables.table_sites import block_part
from vitsee_core.tables.words import BLOCK_PARTS, metric_words, site_words, token_words
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

# Columns that say of which part of an image or a model a row is, and the parts' plural. A layer's
# value is that of the whole, or the mean over its parts.
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
# Values of the column `band`: what `low` and `high` are, where not the range over parts.
INTERVAL = "interval"
RUNS = "runs"


def layers_over_steps(table: Table, *, pooled: bool = False) -> pl.DataFrame:
    """Return the value of each layer at every step.

    Args:
        table: a table over a training, which has a `step_unit`, of one model or several.
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
    rows = _complete_columns(table.frame, unit)
    # The columns that tell panels apart.
    keys = ["metric"]
    if "compared" in rows.columns:
        keys.append("compared")
    keys += [n for n in SETTINGS if n in rows.columns and rows[n].n_unique() > 1]
    rows, inside = _whole_layers(rows, keys)
    layer = [*keys, "model", "site", "block", "rel_depth", unit]
    if inside:
        # Means over the parts, with the range over them where there are several.
        has_parts = pl.len() > 1
        value = pl.col("value")
        low = pl.when(has_parts).then(value.min()).otherwise(pl.col("low").first())
        high = pl.when(has_parts).then(value.max()).otherwise(pl.col("high").first())
        rows = rows.group_by(layer, maintain_order=True).agg(
            value.mean(),
            low=low,
            high=high,
            n_images=pl.col("n_images").max(),
            band=pl.when(has_parts).then(pl.lit(inside)).otherwise(pl.lit(INTERVAL)),
        )
    else:
        is_repeated = rows.select(layer).is_duplicated()
        if is_repeated.any():
            first = rows.filter(is_repeated).row(0, named=True)
            raise VitseeError(
                f"several values of {first['site']} at {unit} {first[unit]}, where a "
                f"chart along {unit}s has one per layer; expected rows that a layer has "
                "once (of cka: --pairs same-depth)"
            )
        rows = rows.with_columns(band=pl.lit(INTERVAL))
    rows = rows.with_columns(part=block_part(rows))
    if rows["part"].n_unique() > 1:
        keys.append("part")
    rows = rows.with_columns(panel=_panel_titles(rows, keys))
    order = {name: i for i, name in enumerate(rows["panel"].unique(maintain_order=True))}
    panel_number = pl.col("panel").replace_strict(order, return_dtype=pl.Int64)
    rows = rows.sort(panel_number, "rel_depth", unit, maintain_order=True)
    run = pl.col("model")
    if pooled:
        rows = _pool_models(rows, ["panel", "metric", "site", "block", "rel_depth", unit])
        run = pl.lit("")
    rows = rows.with_columns(run=run, step=pl.col(unit))
    texts = ("panel", "metric", "run", "site", "block", "band")
    numbers = ("rel_depth", "step", "value", "low", "high", "n_images")
    rows = rows.select(*texts, *numbers).with_columns(pl.col(texts).cast(pl.String))
    rows = rows.filter(pl.col("value").is_finite().any().over("panel"))
    return _without_copies(rows)


def _complete_columns(rows: pl.DataFrame, unit: str) -> pl.DataFrame:
    """Return the rows about models, with the columns site, block, rel_depth, low, high, n_images.

    In a comparison of two sites these are of the first one, and a column `compared` says with what
    it is compared.
    """
    if BASELINE in rows.columns:
        rows = rows.filter(pl.col(BASELINE).is_null())
    if "site_a" in rows.columns:
        first_side = []
        for name in ("site", "block", "rel_depth"):
            first_side.append(pl.col(f"{name}_a").alias(name))
        rows = rows.with_columns(*first_side, pl.col("model_b").alias("model"))
        if rows.select((pl.col("store_a") == pl.col("store_b")).all()).item():
            rows = _compare_with_last(rows)
        else:
            rows = rows.with_columns(_compared_step(rows, unit))
    if "low" not in rows.columns:
        rows = rows.with_columns(low=pl.lit(None, pl.Float64))
    if "high" not in rows.columns:
        rows = rows.with_columns(high=pl.lit(None, pl.Float64))
    if "n_images" not in rows.columns:
        rows = rows.with_columns(n_images=pl.lit(None, pl.Int64))
    return rows


def _compare_with_last(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the comparisons of each layer with the last one, of stores with themselves."""
    depth = rows["rel_depth_b"].max()
    last, block = rows.filter(rel_depth_b=depth).select("site_b", "block_b").row(-1)
    rows = rows.filter((pl.col("site_b") == last) & (pl.col("site_a") != last))
    return rows.with_columns(pl.lit(layer_words(last, block)).alias("compared"))


def layer_words(site: str, block: str | None) -> str:
    """Return the layer of a site in words, without its part: `block 3` for `blocks.3.attn`."""
    return site_words(site, block or "").partition(",")[0]


def answers_over_training(table: Table) -> list[Answer]:
    """Return how a table's first metric changes from the first step to the last, a line per model.

    A line is about the first and the last block.
    """
    unit = table.step_unit
    rows = layers_over_steps(table)
    rows = rows.filter(pl.col("panel") == rows["panel"][0], pl.col("value").is_finite())
    runs = rows.partition_by("run", maintain_order=True, as_dict=True)
    answers = []
    for (run,), run_rows in runs.items():
        inner = run_rows.filter(pl.col("block").is_not_null())
        if not len(inner):
            inner = run_rows
        layers = inner.partition_by("site", maintain_order=True)
        changes = [_change_words(layers[0], unit)]
        if len(layers) > 1:
            changes.append(_change_words(layers[-1], unit))
        answers.append((str(run), f"{run_rows['panel'][0]}: {', '.join(changes)}"))
    return answers


def _change_words(rows: pl.DataFrame, unit: str) -> str:
    """Return how a layer changes: `block 0 from 0.1 at step 0 to 0.7 at step 1,000`."""
    rows = rows.sort("step")
    values = rows["value"]
    steps = rows["step"]
    first = f"{number(values[0])} at {unit} {steps[0]:,}"
    last = f"{number(values[-1])} at {unit} {steps[-1]:,}"
    return f"{layer_words(rows['site'][0], rows['block'][0])} from {first} to {last}"


def _compared_step(rows: pl.DataFrame, unit: str) -> pl.Expr:
    """Return a column `compared`: the step that each row compares with, in words.

    It is read from the labels of the first stores.
    """
    labels = rows["store_a"].cast(pl.String).unique(maintain_order=True)
    steps = {label: numbers_in_name(label).get(unit) for label in labels}
    n_references = rows.group_by("model_b").agg(pl.col("store_a").n_unique())["store_a"]
    if n_references.max() != 1:  # consecutive steps are compared
        return pl.lit(f"the {unit} before").alias("compared")
    words = {}
    for label, step in steps.items():
        words[label] = label if step is None else f"{unit} {step}"
    # Several runs, each compared with the last step of its own.
    if len({*words.values()}) > 1 and None not in steps.values():
        words = dict.fromkeys(words, f"the last {unit}")
    references = pl.col("store_a").cast(pl.String)
    return references.replace_strict(words, return_dtype=pl.String).alias("compared")


def _whole_layers(rows: pl.DataFrame, keys: Sequence[str]) -> tuple[pl.DataFrame, str]:
    """Return the rows about whole layers; of a metric that has none, the rows about parts.

    Args:
        rows: a table's rows.
        keys: the columns that tell panels apart.

    Returns:
        The rows, and the plural of the parts ("heads"), "" where all rows are about whole layers.
    """
    inside = ""
    for name in WITHIN:
        if name not in rows.columns:
            continue
        is_whole = pl.col(name).is_null()
        rows = rows.filter(is_whole | ~is_whole.any().over(keys))
        if rows[name].is_not_null().any():
            inside = inside or WITHIN[name]
    return rows, inside


def _panel_titles(rows: pl.DataFrame, keys: Sequence[str]) -> pl.Series:
    """Return the title of each row's panel, as a column `panel`."""
    titles: dict[tuple[Any, ...], str] = {}
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
                texts.append(BLOCK_PARTS.get(str(cell), str(cell)) or "block output")
            elif cell is not None:
                texts.append(f"{name} {cell}")
        titles[cells] = ", ".join(texts)
    row_titles = [titles[cells] for cells in rows.select(keys).rows()]
    return pl.Series("panel", row_titles, pl.String)


def _pool_models(rows: pl.DataFrame, layer: Sequence[str]) -> pl.DataFrame:
    """Return means over the models, with the 95 % interval of Student's t over them.

    Args:
        rows: a row per model, layer and step.
        layer: the columns that tell layers and steps apart.
    """
    value = pl.col("value")
    rows = rows.group_by(layer, maintain_order=True).agg(
        value.mean(),
        sd=value.std(),
        n=value.is_finite().sum(),
        n_images=pl.col("n_images").max(),
    )
    half_widths: list[float | None] = []
    for n, sd in rows.select("n", "sd").rows():
        if n > 1 and sd is not None:
            half_widths.append(t_quantile(n - 1) * sd / np.sqrt(n))
        else:
            half_widths.append(None)
    half = pl.Series("half", half_widths, pl.Float64)
    return rows.with_columns(low=value - half, high=value + half, band=pl.lit(RUNS))


def _without_copies(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows without panels whose values are those of an earlier one times a number.

    Such metrics (a distance in pixels and in patches) would give the same picture twice.
    """
    panels = rows.partition_by("panel", maintain_order=True, as_dict=True)
    distinct: dict[str, pl.DataFrame] = {}
    for (name,), panel in panels.items():
        panel = panel.sort("run", "site", "step")
        if not any(_are_proportional(panel, other) for other in distinct.values()):
            distinct[name] = panel
    return rows.filter(pl.col("panel").is_in(list(distinct)))


def _are_proportional(panel: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Return whether two panels have the same layers and steps, and proportional values."""
    keys = ("run", "site", "step")
    if not panel.select(keys).equals(other.select(keys)):
        return False
    a = panel["value"].to_numpy()
    b = other["value"].to_numpy()
    # The least-squares factor of b; 1e-300 keeps all zeros from dividing by 0.
    ratio = float(np.nansum(a * b) / max(np.nansum(b * b), 1e-300))
    return bool(ratio) and np.allclose(a, ratio * b, rtol=1e-6, equal_nan=True)
