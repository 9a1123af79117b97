"""Each layer's value at every step of a training, from the tables of any analysis."""

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
from vitsee_core.tables.words import PARTS, metric_words, site_words, token_words
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

# Columns of parts of an image or a model, and their plural; a layer's value is that of the whole,
# or the mean over its parts.
WITHIN = {
    "head": "heads", "row": "cells", "col": "cells", "frequency": "frequencies",
    "class": "classes", "image": "images", "query": "queries", "video": "videos",
    "object": "objects", "segment": "segments", "component": "components", "channel": "channels",
    "concept": "concepts", "filter": "filters", "group": "groups",
}  # fmt: skip
# Columns that tell values of one layer apart: each of their values is a panel of its own.
SETTINGS = ("token", "type", "at", "part", "shots", "k", "l2", "l2_relative", "best")
INTERVAL, RUNS = "interval", "runs"  # what a band is, beside the least and largest of parts


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
    unit, rows = table.step_unit, table.frame
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
        *(pl.lit(None, pl.Float64).alias(n) for n in ("low", "high") if n not in rows.columns),
        *(pl.lit(None, pl.Int64).alias(n) for n in ("n_images",) if n not in rows.columns),
    )
    varying = [n for n in SETTINGS if n in rows.columns and rows[n].n_unique() > 1]
    keys = ["metric", *(["compared"] if "compared" in rows.columns else []), *varying]
    rows, inside = _of_wholes(rows, keys)
    layer = [*keys, "model", "site", "block", "rel_depth", unit]
    if inside:
        parts, value = pl.len() > 1, pl.col("value")
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
    found = rows.with_columns(run=pl.lit("") if pooled else pl.col("model"), step=pl.col(unit))
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
    unit, rows = table.step_unit, layers_over_steps(table)
    rows = rows.filter(pl.col("panel") == rows["panel"][0], pl.col("value").is_finite())
    found = []
    for (run,), own in rows.partition_by("run", maintain_order=True, as_dict=True).items():
        said = []
        inner = own.filter(pl.col("block").is_not_null())
        layers = (inner if len(inner) else own).partition_by("site", maintain_order=True)
        for layer in dict.fromkeys((0, len(layers) - 1)):
            at = layers[layer].sort("step")
            words = layer_words(at["site"][0], at["block"][0])
            ends = [f"{number(at['value'][i])} at {unit} {at['step'][i]:,}" for i in (0, -1)]
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
        named = {label: label if n is None else f"{unit} {n}" for label, n in steps.items()}
        if len({*named.values()}) > 1 and None not in steps.values():  # of each run its own last
            named = dict.fromkeys(named, f"the last {unit}")
        text = pl.col("store_a").cast(pl.String).replace_strict(named, return_dtype=pl.String)
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
    return pl.Series("panel", [known[cells] for cells in rows.select(keys).rows()], pl.String)


def _pooled(rows: pl.DataFrame, layer: Sequence[str]) -> pl.DataFrame:
    """Means over the models, with intervals over them."""
    value = pl.col("value")
    rows = rows.group_by(layer, maintain_order=True).agg(
        value.mean(), sd=value.std(), n=value.is_finite().sum(), n_images=pl.col("n_images").max()
    )
    half = [
        t_quantile(n - 1) * sd / np.sqrt(n) if n > 1 and sd is not None else None
        for n, sd in rows.select("n", "sd").rows()
    ]
    at = pl.Series("half", half, pl.Float64)
    return rows.with_columns(low=pl.col("value") - at, high=pl.col("value") + at, band=pl.lit(RUNS))


def _without_copies(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows without panels whose values are those of an earlier one times a number."""
    kept: dict[str, pl.DataFrame] = {}
    for (name,), own in rows.partition_by("panel", maintain_order=True, as_dict=True).items():
        same = ("run", "site", "step")
        own = own.sort(*same)
        for other in kept.values():
            if own.select(same).equals(other.select(same)):
                a, b = own["value"].to_numpy(), other["value"].to_numpy()
                ratio = float(np.nansum(a * b) / max(np.nansum(b * b), 1e-300))
                if ratio and np.allclose(a, ratio * b, rtol=1e-6, equal_nan=True):
                    break
        else:
            kept[name] = own
    return rows.filter(pl.col("panel").is_in(list(kept)))
