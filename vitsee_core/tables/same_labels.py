"""Disambiguates results in which one store label stands for several models or weights.

Labels are unique within a command but not between commands: the stores `a/vit.zarr` and
`b/vit.zarr` are both `vit`, and may be a trained and a random model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitsee_core.tables.columns import is_given
from vitsee_core.tables.results import ResultFile, Table

SIDES = ("", "_a", "_b")
Model = tuple[str, str]  # its name and that of its weights


def tell_apart(files: Sequence[ResultFile]) -> list[ResultFile]:
    """The results with `vit (random 0)` for `vit` if that label has several weights. Rows that do
    not name their weights (tables of earlier versions) keep their label."""
    known: dict[str, set[Model]] = {}
    for file in files:
        for label, model in _models(file.table):
            known.setdefault(label, set()).add(model)
    names = {
        (label, model): f"{label} ({_told(model, models)})"
        for label, models in known.items()
        if len(models) > 1
        for model in models
    }
    if not names:
        return list(files)
    return [replace(file, table=_renamed(file.table, names)) for file in files]


def _models(table: Table) -> list[tuple[str, Model]]:
    """(label, model) of every row that names its weights, once each."""
    models: dict[tuple[str, Model], None] = {}
    for side in SIDES:
        models |= dict.fromkeys(pair for pair in _pairs(table, side).values() if pair[1][1])
    return [*models]


def _pairs(table: Table, side: str) -> dict[tuple[Any, ...], tuple[str, Model]]:
    """Cells of label, model and weights -> (label, model), for each such row once."""
    cells = _cells(table, side)
    if not cells:
        return {}
    pairs = {}
    for row in dict.fromkeys(zip(*cells, strict=True)):
        label, model, weights = (str(cell) if is_given(cell) else "" for cell in row)
        pairs[row] = (label, (model, weights))
    return pairs


def _cells(table: Table, side: str) -> list[list[Any]]:
    columns = [table.columns.get(f"{name}{side}") for name in ("store", "model", "weights")]
    if columns[0] is None or columns[2] is None:
        return []
    return [[""] * len(table) if of is None else of.tolist() for of in columns]


def _told(model: Model, others: set[Model]) -> str:
    """What distinguishes a model from others: its weights, with its name if needed."""
    alone = sum(model[1] == weights for _, weights in others) == 1
    return model[1] if alone else f"{model[0]}, {model[1]}"


def _renamed(table: Table, names: dict[tuple[str, Model], str]) -> Table:
    columns = dict(table.columns)
    told: dict[str, str] = {}
    for side in SIDES:
        pairs = _pairs(table, side)
        if any(pair in names for pair in pairs.values()):
            new = {row: names.get(pair, pair[0]) for row, pair in pairs.items()}
            labels = [new[row] for row in zip(*_cells(table, side), strict=True)]
            columns[f"store{side}"] = np.array(labels, object)
            told |= {pair[0]: names[pair] for pair in pairs.values() if pair in names}
    notes = {
        key: {told.get(name, name): of for name, of in note.items()}
        if isinstance(note, dict)
        else note
        for key, note in table.notes.items()
    }
    return Table(columns, notes, table.replicates) if told else table
