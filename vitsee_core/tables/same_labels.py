"""Disambiguates results in which one store label stands for several models or weights.

Labels are unique within a command but not between commands: the stores `a/vit.zarr` and
`b/vit.zarr` are both `vit`, and may be a trained and a random model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vitsee_core.tables.results import ResultFile, Table
from vitsee_core.types import pl

SIDES = ("", "_a", "_b")  # endings of columns; a comparison has those of a and b
STORE_COLUMNS = ("store", "model", "weights")


class LabelledModel(NamedTuple):
    """The store's label, the model and its weights in a row."""

    label: str
    model: str
    weights: str


def disambiguate_labels(files: Sequence[ResultFile]) -> list[ResultFile]:
    """Return the results with `vit (random 0)` for `vit` if that label has several weights.

    Rows that do not name their weights (tables of earlier versions) keep their label.
    """
    # Label -> the models that have it in any of the results.
    models_of: dict[str, set[LabelledModel]] = {}
    for file in files:
        for side in SIDES:
            for model in _labelled_models(file.table.frame, side):
                if model.weights:
                    models_of.setdefault(model.label, set()).add(model)
    new_labels = {}
    for label, models in models_of.items():
        if len(models) > 1:
            for model in models:
                new_labels[model] = f"{label} ({_distinction(model, models)})"
    if not new_labels:
        return list(files)
    return [replace(file, table=_relabel(file.table, new_labels)) for file in files]


def _labelled_models(rows: pl.DataFrame, side: str) -> list[LabelledModel]:
    """Return the distinct models of the rows on one side; none if no column names weights."""
    if not {f"store{side}", f"weights{side}"} <= {*rows.columns}:
        return []
    names = [f"{name}{side}" for name in STORE_COLUMNS]
    distinct = rows.select(name for name in names if name in rows.columns).unique()
    texts = distinct.select(_text_of(distinct, name) for name in names)
    return [LabelledModel(*cells) for cells in texts.rows()]


def _text_of(rows: pl.DataFrame, name: str) -> pl.Expr:
    """Return a column as text; "" in an empty cell, and everywhere if there is no such column."""
    if name in rows.columns:
        return pl.col(name).cast(pl.String).fill_null("").alias(name)
    return pl.lit("").alias(name)


def _distinction(model: LabelledModel, models: set[LabelledModel]) -> str:
    """Return the words that tell a model from the others: its weights, with its name if needed."""
    n_with_weights = sum(other.weights == model.weights for other in models)
    if n_with_weights == 1:
        return model.weights
    return f"{model.model}, {model.weights}"


def _relabel(table: Table, new_labels: dict[LabelledModel, str]) -> Table:
    """Return the table with its models' new labels, in rows and as keys of notes."""
    rows = table.frame
    note_labels = {}
    for side in SIDES:
        store = f"store{side}"
        for model in _labelled_models(rows, side):
            if model not in new_labels:
                continue
            note_labels[model.label] = new_labels[model]
            is_model = [
                _text_of(rows, f"{name}{side}") == cell
                for name, cell in zip(STORE_COLUMNS, model, strict=True)
            ]
            label = pl.when(*is_model).then(pl.lit(new_labels[model]))
            rows = rows.with_columns(
                label.otherwise(pl.col(store).cast(pl.String)).alias(store)
            )
    if not note_labels:
        return table
    # Notes about single stores have their labels as keys.
    notes = {}
    for key, note in table.notes.items():
        if isinstance(note, dict):
            note = {note_labels.get(name, name): entry for name, entry in note.items()}
        notes[key] = note
    return Table(rows, notes)
