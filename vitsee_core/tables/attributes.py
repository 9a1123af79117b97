"""Attributes of models as columns of a table: from sidecars, or from a user's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitsee_core.tables.columns import column_of, is_given
from vitsee_core.tables.groups import SIGN, groups_of, split_label
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

GROUP = "group"
KEYS = ("store", "model")  # a file of attributes needs one of these columns


def with_attribute(
    table: Table,
    name: str,
    sidecars: Sequence[Mapping[str, Any]],
    own: Table | None = None,
) -> Table:
    """The table with a column `name`: from the file of attributes, from the table itself, or from
    sidecars.

    Args:
        table: with the columns store and model.
        name: `params`, `resolution`, `images`, `data`, `group` (of labels GROUP/NAME), or a column.
        sidecars: of the results that the rows come from.
        own: attributes with a column of `KEYS`; a model's row also applies to its pretrained tags.

    Raises:
        VitseeError: no such attribute, or a store that has none.
    """
    rows = table.frame
    columns = {name, f"n_{name}"} & {*(own.frame.columns if own is not None else ())}
    if name in rows.columns and not columns:
        return table
    if "store" not in rows.columns:
        raise VitseeError(
            f"this result compares pairs, which have no {name}; expected one with a value per store"
        )
    stores = rows["store"].unique(maintain_order=True).to_list()
    if name == GROUP and not columns and len(groups_of(stores)) > 1:
        return _with(
            table, name, "store", {store: split_label(store)[0] for store in stores}
        )
    known: dict[str, Any] = {}
    if own is not None and columns:
        (column,) = sorted(columns)[:1]
        keys = [key for key in KEYS if key in own.frame.columns]
        if not keys:
            raise VitseeError(
                f"the attributes have the columns {', '.join(own.frame.columns)}; expected {name} "
                f"beside {' or '.join(KEYS)}"
            )
        for key in reversed(keys):  # a store's own row precedes its model's
            known |= dict(
                own.frame.select(pl.col(key).cast(pl.String), column).iter_rows()
            )
    else:
        known = {
            label: cells[name] for label, cells in _recorded(sidecars) if name in cells
        }
    model = "model" if "model" in rows.columns else "store"
    found: dict[Any, Any] = {}
    for store, of_model in (
        rows.select("store", pl.col(model).alias("of")).unique().rows()
    ):
        named = (store, of_model or "", (of_model or "").partition(".")[0])
        found[store, of_model] = next((known[key] for key in named if key in known), None)
    if lack := {store for (store, _), cell in found.items() if not is_given(cell)}:
        recorded = dict.fromkeys(
            key for _, own_cells in _recorded(sidecars) for key in own_cells
        )
        raise VitseeError(
            f"{name} is not known of {', '.join(s for s in stores if s in lack)}; expected a "
            f"column of the table, {'one of ' + ', '.join(recorded) + ', ' if recorded else ''}or "
            f"a column {name} beside {' or '.join(KEYS)} in --attributes FILE"
        )
    pairs = [
        found[pair] for pair in rows.select("store", pl.col(model).alias("of")).rows()
    ]
    return table.with_frame(rows.with_columns(column_of(name, pairs)))


def _with(table: Table, name: str, by: str, values: Mapping[str, Any]) -> Table:
    column = pl.col(by).cast(pl.String).replace_strict(values)
    return table.with_frame(table.frame.with_columns(column.alias(name)))


def in_groups(
    table: Table,
    name: str,
    sidecars: Sequence[Mapping[str, Any]],
    own: Table | None = None,
) -> Table:
    """The table with each store labelled `GROUP/NAME` by an attribute, as `with_attribute` finds
    it; so are the notes of single stores. Raises VitseeError: see there."""
    found = (
        with_attribute(table, name, sidecars, own).frame.select("store", name).unique()
    )
    labels = {
        store: f"{str(cell).replace(SIGN, ' ')}{SIGN}{split_label(store)[1]}"
        for store, cell in found.rows()
    }
    notes = table.notes
    of_stores = table.notes.get("stores")
    if isinstance(of_stores, dict):
        notes = notes | {
            "stores": {labels.get(key, key): v for key, v in of_stores.items()}
        }
    return replace(_with(table, "store", "store", labels), notes=notes)


def _recorded(
    sidecars: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, attributes) of every store of the results, and of the results they were derived
    from."""
    for sidecar in sidecars:
        stores = sidecar.get("stores")
        made_of = sidecar.get("results")
        for entry in stores if isinstance(stores, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("attributes"), dict):
                label = str(entry.get("label"))
                yield label, entry["attributes"]
                yield (
                    f"{label} ({entry.get('weights')})",
                    entry["attributes"],
                )  # as `tell_apart`
        for entry in made_of if isinstance(made_of, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("made_by"), dict):
                yield from _recorded([entry["made_by"]])
