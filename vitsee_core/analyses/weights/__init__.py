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
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.weights.weights_figure import draw_weights, labels, named_by
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
    *(
        "store",
        "model",
        "weights",
        "site",
        "row",
        "col",
        "component",
        "filter",
        "channel",
    ),
    *("other_row", "other_col", "metric", "value"),
)
NEEDS_ARRAY = {"components": FILTERS, "filters": FILTERS, "positions": POSITIONS}
MOST_FILTERS = 128  # shown unless they were asked for
MOST_ROWS = 1 << 20  # 32 x 32 patches with one another; half a GiB
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
    every: int | None = None,
) -> Table:
    """One row per component (`variance_share`, and `variance_cumulative` of it and all before), a
    weight of a component or of a filter, or a pair of patches (`cosine`).

    Columns: `COLUMNS`. `component`, `filter`, `channel` count from 0. In rows of weights `row`,
    `col` are pixels of the filter; of a cosine the query's patch, `other_row`, `other_col` the
    other one. NaN: filters that are all alike have no components, zeros no direction.

    Args:
        sources: open stores, or models on the CPU. One that lacks what others have is named.
        what: some of `WHAT`; by default what the model has, filters up to `MOST_FILTERS`.
        components: how many have their weights in the table.
        every: cosines of every n-th row and column of queries, centred on the grid; by default the
            smallest n that gives at most `MOST_ROWS` rows.

    Raises:
        VitseeError: no source has what was asked for, a store has no weights, or two sources have
            one name.
    """
    from vitsee_stores import Store

    for name in what:
        if name not in WHAT:
            raise VitseeError(
                f"no {name!r} in weights; expected some of {', '.join(WHAT)}"
            )
    owns = [
        stored_input_weights(x) if isinstance(x, Store) else input_weights_of(x)
        for x in sources
    ]
    models = [own.model for own in owns if not own.store]
    owns = [
        replace(own, store=f"{own.model} ({own.weights})")
        if not own.store and models.count(own.model) > 1
        else own
        for own in owns
    ]
    by_label = {own.store or own.model: own for own in owns}
    if len(by_label) < len(owns):
        named = ", ".join(own.store or own.model for own in owns)
        raise VitseeError(
            f"two of these have one name: {named}; give stores others with NAME=STORE"
        )
    for name in what:
        lacking = [own for own in owns if NEEDS_ARRAY[name] in own.absent]
        if len(lacking) == len(owns):
            own = lacking[0]
            raise VitseeError(
                f"{own.model} has no {name} to show: {own.absent[NEEDS_ARRAY[name]]}"
            )
    parts = []
    notes = {}
    for label, own in by_label.items():
        prefix = f"{label}: " if len(owns) > 1 else ""
        rows, notes[label] = _of(own, what, components, every, prefix)
        parts += rows
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    return Table(columns, {"sources": notes})


def _of(
    own: InputWeights,
    what: Sequence[str],
    components: int,
    every: int | None,
    prefix: str,
) -> tuple[list[dict[str, NDArray[Any]]], dict[str, Any]]:
    """One source's rows and notes; remarks begin with `prefix`."""
    notes: dict[str, Any] = {"sites": own.sites, "absent": {}}
    for name, reason in own.absent.items():
        if not what or name in {NEEDS_ARRAY[asked] for asked in what}:
            log.info("%s%s: n/a: %s", prefix, name, reason)
            notes["absent"][name] = reason
    parts = [_rows(own, "", 0)]
    if (filters := own.arrays.get(FILTERS)) is not None:
        if not what or "components" in what:
            parts.append(_component_rows(own, filters, components))
            notes["components"] = (
                f"of {len(filters)} filters, mean filter subtracted, norm 1"
            )
        if "filters" in what or (not what and len(filters) <= MOST_FILTERS):
            parts.append(_weight_rows(own, "filter", filters.astype(np.float64)))
        elif not what:
            log.info(
                "%s%d filters: more than are shown without --what filters",
                prefix,
                len(filters),
            )
    if (positions := own.arrays.get(POSITIONS)) is not None and (
        not what or "positions" in what
    ):
        step = every if every is not None else _step(positions.shape[:2])
        if step > 1:
            log.info(
                "%sposition embeddings: cosines of one row and column in %d with all",
                prefix,
                step,
            )
        parts.append(_cosine_rows(own, positions, step))
        notes["positions"] = {"kind": _KINDS[own.kind], "every": step}
        log.info(
            "%sposition embeddings (%s): %s",
            prefix,
            own.sites[POSITIONS],
            _KINDS[own.kind],
        )
    return parts, notes


def at_a_glance(table: Table) -> Table:
    """One panel of the first model: its first components, else filters or positions."""
    name = labels(table)[0]
    rows = table.frame.filter(name == named_by())
    panels = ("component", "filter", "cosine")
    shown = next((metric for metric in panels if metric in rows["metric"]), "")
    sources = {
        n: about for n, about in table.notes.get("sources", {}).items() if n == name
    }
    rows = rows.filter(
        (pl.col("metric") == "variance_share")
        | (pl.col("component").fill_null(0) < GLANCED) & (pl.col("metric") == shown)
    )
    return replace(table, frame=rows, notes={**table.notes, "sources": sources})


@styled
def plot(table: Table, scale: str = "shared") -> Figure:
    """Components with their shares of variance, filters, and a grid of grids of cosines, as far as
    the table has them, side by side; one store or model below the other.

    Args:
        table: from `run`.
        scale: "shared": one scale for all tiles of a panel, grey a weight of 0; "tile": each over
            its own range, so that magnitudes are not comparable.
    """
    return draw_weights(table, scale)


def principal_components(filters: NDArray[Any]) -> tuple[Float, Float]:
    """Shares of variance (components,) and components (components, ...) of filters (n, ...), at
    most n - 1 of them; NaN where all filters are alike."""
    flat = filters.reshape(len(filters), -1).astype(np.float64)
    _, sizes, vectors = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    count = min(max(len(flat) - 1, 1), len(sizes))
    variances = sizes**2
    vectors = vectors[:count]
    total = variances.sum()
    # Rounding leaves a trace of variance among equal filters.
    if total <= (1e-12 * np.abs(flat).max()) ** 2 * flat.size:
        return np.full(count, np.nan), np.full((count, *filters.shape[1:]), np.nan)
    size = np.abs(vectors)
    largest = np.argmax(size >= size.max(1, keepdims=True) * (1 - _TIED), axis=1)
    signs = np.sign(vectors[np.arange(count), largest])
    vectors = vectors * signs[:, np.newaxis]
    return variances[:count] / total, vectors.reshape(count, *filters.shape[1:])


def cosines(positions: NDArray[Any], step: int = 1) -> tuple[NDArray[np.int64], Float]:
    """Queries (queries, 2), their row and column, and cosines (queries, rows, cols) of positions
    (rows, cols, dim); NaN with a vector of zeros."""
    rows, cols, dim = positions.shape
    flat = positions.reshape(-1, dim).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    directions = np.divide(flat, norms, out=np.full_like(flat, np.nan), where=norms > 0)
    down, across = (np.arange((n - 1) % step // 2, n, step) for n in (rows, cols))
    queries = np.stack(np.meshgrid(down, across, indexing="ij"), -1).reshape(-1, 2)
    of_queries = directions[queries[:, 0] * cols + queries[:, 1]]
    values = np.clip(of_queries @ directions.T, -1, 1)
    return queries, values.reshape(-1, rows, cols)


def _step(grid: tuple[int, ...]) -> int:
    rows, cols = grid
    return next(
        step
        for step in range(1, rows + cols)
        if -(-rows // step) * -(-cols // step) * rows * cols <= MOST_ROWS
        or step > max(rows, cols)
    )


def _rows(
    own: InputWeights, site: str, n: int, **columns: Any
) -> dict[str, NDArray[Any]]:
    """`n` rows with these columns; the others are empty."""
    names = {
        "store": own.store or None,
        "model": own.model,
        "weights": own.weights,
        "site": site,
    }
    by_name = {}
    for name in COLUMNS:
        given = columns.get(name, names.get(name))
        number = name == "value"
        empty = np.nan if number else None
        # Whole numbers beside empty cells stay whole in the CSV.
        column = np.empty(n, np.float64 if number else object)
        column[:] = empty if given is None else given
        by_name[name] = column
    return by_name


def _component_rows(
    own: InputWeights, filters: NDArray[Any], count: int
) -> dict[str, NDArray[Any]]:
    shares, vectors = principal_components(filters)
    n = len(shares)
    parts = [
        _rows(
            own,
            own.sites[FILTERS],
            n,
            metric=metric,
            component=np.arange(n),
            value=values,
        )
        for metric, values in (
            ("variance_share", shares),
            ("variance_cumulative", np.cumsum(shares)),
        )
    ]
    parts.append(_weight_rows(own, "component", vectors[:count]))
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def _weight_rows(
    own: InputWeights, metric: str, values: Float
) -> dict[str, NDArray[Any]]:
    index, channel, row, col = (axis.ravel() for axis in np.indices(values.shape))
    of = {metric: index, "channel": channel, "row": row, "col": col}
    return _rows(
        own, own.sites[FILTERS], values.size, metric=metric, value=values.ravel(), **of
    )


def _cosine_rows(
    own: InputWeights, positions: NDArray[Any], step: int
) -> dict[str, NDArray[Any]]:
    queries, values = cosines(positions, step)
    query, row, col = (axis.ravel() for axis in np.indices(values.shape))
    return _rows(
        *(own, own.sites[POSITIONS], values.size),
        metric="cosine",
        row=queries[query, 0],
        col=queries[query, 1],
        other_row=row,
        other_col=col,
        value=values.ravel(),
    )


def headline(table: Table) -> list[Answer]:
    """The number of components that hold most of the variance of the first layer's filters."""
    answers = []
    cumulative = picked(table, metric="variance_cumulative")
    for (store,), rows in cumulative.group_by("store", maintain_order=True):
        values = np.sort(rows["value"].to_numpy())
        n = min(int((values < MOST_VARIANCE).sum()) + 1, len(values))
        share = number(float(values[n - 1]))
        what = plural(n, "principal components")
        answers.append(
            (str(store), f"{what} of the filters have {share} of their variance")
        )
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
