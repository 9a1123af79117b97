"""Weights: what do the first filters and the position embeddings look like?

- `variance_share`, `component`: principal components of the D filters of the first layer, each a
  vector of channels x height x width weights (Dosovitskiy et al. 2021, Fig. 7 left, shows the first
  28 of ViT-L/32, and does not say whether the mean filter is subtracted). Here it is, so that the
  shares are shares of variance; components have norm 1, and a sign that makes the largest weight
  positive (the first of those equal to a millionth, so that rounding does not decide).
- `filter`: the filters themselves.
- `cosine`: of each patch's position embedding with all others (Fig. 7 centre, Fig. 9), on the grid
  of the model's input size; the parts of prefix tokens are left out. NaN: a vector of zeros.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.weights.weights_figure import (
    PANEL_METRICS,
    draw_weights,
    labels,
    named_by,
)
from vitsee_core.declaration import Analysis
from vitsee_core.figures.plotting import styled
from vitsee_core.models.weights import (
    FILTERS,
    POSITIONS,
    InputWeights,
    input_weights_of,
    stored_input_weights,
)
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.machine import plural
from vitsee_core.tables.headlines import Answer, number, picked
from vitsee_core.tables.results import Table
from vitsee_core.types import Float, pl
from vitsee_stores import Store
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitsee_core.models.loaded import LoadedModel
else:

    class LoadedModel:
        """Stands in the annotation of `run` for the class that importing would load torch for."""


log = logging.getLogger(__name__)


MOST_VARIANCE = 0.9
WHAT = ("components", "filters", "positions")
COLUMNS = (
    "store",
    "model",
    "weights",
    "site",
    "row",
    "col",
    "component",
    "filter",
    "channel",
    "other_row",
    "other_col",
    "metric",
    "value",
)
NEEDS_ARRAY = {"components": FILTERS, "filters": FILTERS, "positions": POSITIONS}
# More filters are left out unless they are asked for.
MAX_FILTERS = 128
# Rows of cosines: 32 x 32 patches with one another, half a GiB.
MAX_ROWS = 1 << 20
_TIED = 1e-6
GLANCED = 6  # components on a card of the report
_KINDS = {
    "learned": "learned",
    "fixed": "fixed, not learned",
    "sine-cosine": "the fixed sine-cosine table, not learned",
    "computed": "computed by a module, no table",
}


@analysis
def run(
    *sources: Store | LoadedModel,
    what: Sequence[str] = (),
    components: int = 28,
    query_stride: int | None = None,
) -> Table:
    """Return a table of a model's input weights: a row per component (its `variance_share`, and
    `variance_cumulative` with all before it), per weight of a component or of a filter, and per
    pair of patches (`cosine`).

    The columns are `COLUMNS`. `component`, `filter` and `channel` count from 0. In rows of weights
    `row` and `col` are pixels of the filter; in those of a cosine they are the query's patch, and
    `other_row` and `other_col` the other one. Filters that are all alike have components of NaN, a
    vector of zeros cosines of NaN.

    Args:
        sources: open stores, or models on the CPU. What a source lacks is said on stderr.
        what: some of `WHAT`; by default all that the model has, filters if they are few.
        components: the number of components whose weights are in the table.
        query_stride: take every n-th row and column of queries, centred on the grid; by default the
            smallest n that gives few enough rows.

    Raises:
        VitseeError: no source has what is asked for, a store has no weights, or two sources have
            one name.

    Examples:
        >>> import vitsee
        >>> table = vitsee.weights("vit.zarr", what="positions")
        >>> sorted(set(table["metric"])), len(table)
        (['cosine'], 4096)
    """
    from vitsee_stores import Store

    for name in what:
        if name not in WHAT:
            raise VitseeError(
                f"no {name!r} in weights; expected some of {', '.join(WHAT)}"
            )
    opened = []
    for source in sources:
        if isinstance(source, Store):
            opened.append(stored_input_weights(source))
        else:
            opened.append(input_weights_of(source))
    by_label = _by_distinct_label(opened)
    for name in what:
        array = NEEDS_ARRAY[name]
        if all(array in input_weights.absent for input_weights in opened):
            first = opened[0]
            raise VitseeError(
                f"{first.model} has no {name} to show: {first.absent[array]}"
            )
    blocks = []
    notes = {}
    for label, input_weights in by_label.items():
        prefix = f"{label}: " if len(by_label) > 1 else ""
        rows, notes[label] = _source_rows(
            input_weights, what, components, query_stride, prefix
        )
        blocks += rows
    columns = {
        name: np.concatenate([block[name] for block in blocks]) for name in COLUMNS
    }
    return Table(columns, {"sources": notes})


def _by_distinct_label(opened: Sequence[InputWeights]) -> dict[str, InputWeights]:
    """Return the label of each source -> its weights: a store's name, or a model's.

    Raises:
        VitseeError: two sources have one label.
    """
    models = [weights.model for weights in opened if not weights.store]
    by_label = {}
    labels = []
    for weights in opened:
        # The same model twice, with other weights: these go into the label.
        if not weights.store and models.count(weights.model) > 1:
            weights = replace(weights, store=f"{weights.model} ({weights.weights})")
        label = weights.store or weights.model
        labels.append(label)
        by_label[label] = weights
    if len(by_label) < len(labels):
        raise VitseeError(
            f"two of these have one name: {', '.join(labels)}; give stores others with "
            "NAME=STORE"
        )
    return by_label


def _source_rows(
    input_weights: InputWeights,
    what: Sequence[str],
    components: int,
    query_stride: int | None,
    prefix: str,
) -> tuple[list[dict[str, NDArray[Any]]], dict[str, Any]]:
    """Return one source's rows and notes; remarks that are logged begin with `prefix`."""
    notes: dict[str, Any] = {"sites": input_weights.sites, "absent": {}}
    for name, reason in input_weights.absent.items():
        if not what or name in {NEEDS_ARRAY[request] for request in what}:
            log.info("%s%s: n/a: %s", prefix, name, reason)
            notes["absent"][name] = reason
    # A block without rows: a source that lacks all still has its columns.
    blocks = [_filled_columns(input_weights, "", 0)]
    filters = input_weights.arrays.get(FILTERS)
    if filters is not None:
        if not what or "components" in what:
            blocks.append(_component_rows(input_weights, filters, components))
            notes["components"] = (
                f"of {len(filters)} filters, mean filter subtracted, norm 1"
            )
        if "filters" in what or (not what and len(filters) <= MAX_FILTERS):
            blocks.append(
                _weight_rows(input_weights, "filter", filters.astype(np.float64))
            )
        elif not what:
            log.info(
                "%s%d filters: more than are shown without --what filters",
                prefix,
                len(filters),
            )
    positions = input_weights.arrays.get(POSITIONS)
    if positions is not None and (not what or "positions" in what):
        step = query_stride
        if step is None:
            step = _query_step(positions.shape[:2])
        if step > 1:
            log.info(
                "%sposition embeddings: cosines of one row and column in %d with all",
                prefix,
                step,
            )
        blocks.append(_cosine_rows(input_weights, positions, step))
        notes["positions"] = {"kind": _KINDS[input_weights.kind], "every": step}
        log.info(
            "%sposition embeddings (%s): %s",
            prefix,
            input_weights.sites[POSITIONS],
            _KINDS[input_weights.kind],
        )
    return blocks, notes


def at_a_glance(table: Table) -> Table:
    """Return one panel of the first model: its first components, else filters or positions."""
    name = labels(table)[0]
    rows = table.frame.filter(name == named_by())
    drawn_metrics = [metric for metric in PANEL_METRICS if metric in rows["metric"]]
    first_metric = drawn_metrics[0] if drawn_metrics else ""
    sources = {
        n: about for n, about in table.notes.get("sources", {}).items() if n == name
    }
    rows = rows.filter(
        (pl.col("metric") == "variance_share")
        | (pl.col("component").fill_null(0) < GLANCED)
        & (pl.col("metric") == first_metric)
    )
    return replace(table, frame=rows, notes={**table.notes, "sources": sources})


@styled
def plot(table: Table, scale: str = "shared") -> Figure:
    """Draw components with their shares of variance, filters, and a grid of grids of cosines.

    Those that the table has stand side by side, one store or model below the other.

    Args:
        table: from `run`.
        scale: "shared": one scale for all tiles of a panel, grey a weight of 0; "tile": each over
            its own range, so that magnitudes are not comparable.
    """
    return draw_weights(table, scale)


def principal_components(filters: NDArray[Any]) -> tuple[Float, Float]:
    """Return the shares of variance, (components,), and the components, (components, ...).

    There are at most n - 1 of them. All are NaN if all filters are alike.

    Args:
        filters: (n, ...).
    """
    flat = filters.reshape(len(filters), -1).astype(np.float64)
    _, sizes, vectors = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    count = min(max(len(flat) - 1, 1), len(sizes))
    variances = sizes**2
    vectors = vectors[:count]
    total = variances.sum()
    # Rounding leaves a trace of variance among equal filters.
    if total <= (1e-12 * np.abs(flat).max()) ** 2 * flat.size:
        return np.full(count, np.nan), np.full((count, *filters.shape[1:]), np.nan)
    # The sign makes the largest weight positive; among weights that are equal but for rounding it
    # is the first one, so that the sign is the same on every machine.
    size = np.abs(vectors)
    largest = np.argmax(size >= size.max(1, keepdims=True) * (1 - _TIED), axis=1)
    signs = np.sign(vectors[np.arange(count), largest])
    vectors = vectors * signs[:, np.newaxis]
    return variances[:count] / total, vectors.reshape(count, *filters.shape[1:])


def cosines(positions: NDArray[Any], step: int = 1) -> tuple[NDArray[np.int64], Float]:
    """Return queries and the cosines of their position embeddings with those of all patches.

    Args:
        positions: (rows, cols, dim) position embeddings.
        step: take every n-th row and column of queries.

    Returns:
        (queries, 2) row and column of each query, and (queries, rows, cols) cosines, NaN with a
        vector of zeros.
    """
    rows, cols, dim = positions.shape
    flat = positions.reshape(-1, dim).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    directions = np.divide(flat, norms, out=np.full_like(flat, np.nan), where=norms > 0)
    # The first query is half the remainder from the border, so that queries lie in the middle.
    query_rows = np.arange((rows - 1) % step // 2, rows, step)
    query_cols = np.arange((cols - 1) % step // 2, cols, step)
    pairs = np.meshgrid(query_rows, query_cols, indexing="ij")
    queries = np.stack(pairs, -1).reshape(-1, 2)
    query_directions = directions[queries[:, 0] * cols + queries[:, 1]]
    # Rounding may put a cosine beyond its limits.
    values = np.clip(query_directions @ directions.T, -1, 1)
    return queries, values.reshape(-1, rows, cols)


def _query_step(grid: tuple[int, ...]) -> int:
    """Return the smallest step between queries that gives at most `MAX_ROWS` rows."""
    rows, cols = grid
    step = 1
    while step <= max(rows, cols):
        n_queries = math.ceil(rows / step) * math.ceil(cols / step)
        if n_queries * rows * cols <= MAX_ROWS:
            break
        step += 1
    return step


def _filled_columns(
    input_weights: InputWeights, site: str, n: int, **columns: Any
) -> dict[str, NDArray[Any]]:
    """Return column -> values of `n` rows; columns that are not given are empty."""
    names = {
        "store": input_weights.store or None,
        "model": input_weights.model,
        "weights": input_weights.weights,
        "site": site,
    }
    by_name = {}
    for name in COLUMNS:
        values = columns.get(name, names.get(name))
        # Objects, so that whole numbers beside empty cells stay whole in the CSV.
        column = np.empty(n, object)
        if name == "value":
            column = np.full(n, np.nan)
        if values is not None:
            column[:] = values
        by_name[name] = column
    return by_name


def _component_rows(
    input_weights: InputWeights, filters: NDArray[Any], count: int
) -> dict[str, NDArray[Any]]:
    """Return rows of the components' shares of variance, then the weights of the first ones."""
    shares, vectors = principal_components(filters)
    n = len(shares)
    values_by_metric = {
        "variance_share": shares,
        "variance_cumulative": np.cumsum(shares),
    }
    blocks = []
    for metric, values in values_by_metric.items():
        block = _filled_columns(
            input_weights,
            input_weights.sites[FILTERS],
            n,
            metric=metric,
            component=np.arange(n),
            value=values,
        )
        blocks.append(block)
    blocks.append(_weight_rows(input_weights, "component", vectors[:count]))
    return {name: np.concatenate([block[name] for block in blocks]) for name in COLUMNS}


def _weight_rows(
    input_weights: InputWeights, metric: str, values: Float
) -> dict[str, NDArray[Any]]:
    """Return a row per weight of values (filters or components, channels, height, width)."""
    index, channel, row, col = (axis.ravel() for axis in np.indices(values.shape))
    indices = {metric: index, "channel": channel, "row": row, "col": col}
    return _filled_columns(
        input_weights,
        input_weights.sites[FILTERS],
        values.size,
        metric=metric,
        value=values.ravel(),
        **indices,
    )


def _cosine_rows(
    input_weights: InputWeights, positions: NDArray[Any], step: int
) -> dict[str, NDArray[Any]]:
    """Return a row per query and patch with the cosine of their position embeddings."""
    queries, values = cosines(positions, step)
    query, row, col = (axis.ravel() for axis in np.indices(values.shape))
    return _filled_columns(
        input_weights,
        input_weights.sites[POSITIONS],
        values.size,
        metric="cosine",
        row=queries[query, 0],
        col=queries[query, 1],
        other_row=row,
        other_col=col,
        value=values.ravel(),
    )


def headline(table: Table) -> list[Answer]:
    """Return per store the number of components that hold most of the filters' variance."""
    answers = []
    cumulative = picked(table, metric="variance_cumulative")
    for (store,), rows in cumulative.group_by("store", maintain_order=True):
        values = np.sort(rows["value"].to_numpy())
        n = min(int((values < MOST_VARIANCE).sum()) + 1, len(values))
        share = number(float(values[n - 1]))
        count = plural(n, "principal components")
        text = f"{count} of the filters have {share} of their variance"
        answers.append((str(store), text))
    return answers


ANALYSIS = Analysis(
    module=__name__,
    needs=(),
    reading=(
        "What the weights alone show: principal components of the first layer's filters, and "
        "how each patch's position embedding resembles all others. Learnt embeddings show rows "
        "and columns; plausible filters look like waves and colours."
    ),
    source="Dosovitskiy et al. 2021, Figs. 7 left and centre, 9",
    columns=COLUMNS,
    metrics=("variance_share", "variance_cumulative", "component", "filter", "cosine"),
    run=run,
    plot=plot,
    headline=headline,
    at_a_glance=at_a_glance,
)
