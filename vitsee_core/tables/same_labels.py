"""Disambiguates results in which one store label stands for several models or weights.

Labels are unique within a command but not between commands: the stores `a/vit.zarr` and
`b/vit.zarr` are both `vit`, and may be a trained and a random model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitsee_core.tables.results import ResultFile, Table
from vitsee_core.types import pl

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
    found = (pair for side in SIDES for pair in _pairs(table.frame, side) if pair[1][1])
    return list(dict.fromkeys(found))


def _pairs(rows: pl.DataFrame, side: str) -> list[tuple[str, Model]]:
    """(label, model) of the rows' stores, once each."""
    if not {f"store{side}", f"weights{side}"} <= {*rows.columns}:
        return []
    names = ("store", "model", "weights")
    once = rows.select(
        f"{n}{side}" for n in names if f"{n}{side}" in rows.columns
    ).unique()
    cells = once.select(_cell(once, name, side) for name in names)
    return [(label, (model, weights)) for label, model, weights in cells.rows()]


def _cell(rows: pl.DataFrame, name: str, side: str) -> pl.Expr:
    name = f"{name}{side}"
    cell = (
        pl.col(name).cast(pl.String).fill_null("") if name in rows.columns else pl.lit("")
    )
    return cell.alias(name)


def _told(model: Model, others: set[Model]) -> str:
    """The words that tell a model from others: its weights, with its name if needed."""
    alone = sum(model[1] == weights for _, weights in others) == 1
    return model[1] if alone else f"{model[0]}, {model[1]}"


def _renamed(table: Table, names: dict[tuple[str, Model], str]) -> Table:
    rows = table.frame
    told = {}
    for side in SIDES:
        for pair in _pairs(rows, side):
            if pair in names:
                label, model = pair
                told[label] = names[pair]
                cells = (
                    _cell(rows, name, side) for name in ("store", "model", "weights")
                )
                own = [
                    cell == text
                    for cell, text in zip(cells, (label, *model), strict=True)
                ]
                renamed = pl.when(*own).then(pl.lit(names[pair]))
                kept = pl.col(f"store{side}").cast(pl.String)
                rows = rows.with_columns(renamed.otherwise(kept).alias(f"store{side}"))
    if not told:
        return table
    notes = {
        key: {told.get(name, name): of for name, of in note.items()}
        if isinstance(note, dict)
        else note
        for key, note in table.notes.items()
    }
    return Table(rows, notes)
