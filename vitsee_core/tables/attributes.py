"""Attributes of models as columns of a table: from sidecars, or from a user's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitsee_core.tables.columns import is_given
from vitsee_core.tables.groups import SIGN, groups_of, split_label
from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError

GROUP = "group"
KEYS = ("store", "model")  # a file of attributes needs one of these columns


def with_attribute(
    table: Table, name: str, sidecars: Sequence[Mapping[str, Any]], own: Table | None = None
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
    columns = {name, f"n_{name}"} & {*(own.columns if own is not None else ())}
    if name in table.columns and not columns:
        return table
    if "store" not in table.columns:
        raise VitseeError(
            f"this result compares pairs, which have no {name}; expected one with a value per store"
        )
    if name == GROUP and not columns and len(groups_of(table.unique("store"))) > 1:
        groups = [split_label(str(store))[0] for store in table["store"].tolist()]
        return replace(table, columns={**table.columns, name: np.array(groups, object)})
    known: dict[str, Any] = {}
    if own is not None and columns:
        (column,) = sorted(columns)[:1]
        keys = [key for key in KEYS if key in own.columns]
        if not keys:
            raise VitseeError(
                f"the attributes have the columns {', '.join(own.columns)}; expected {name} beside "
                f"{' or '.join(KEYS)}"
            )
        for key in reversed(keys):  # a store's own row precedes its model's
            known |= zip(map(str, own[key].tolist()), own[column].tolist(), strict=True)
    else:
        known = {label: cells[name] for label, cells in _recorded(sidecars) if name in cells}
    models = table.columns.get("model", table["store"]).tolist()
    cells = [
        next((known[key] for key in (s, m, m.partition(".")[0]) if key in known), None)
        for s, m in zip(map(str, table["store"].tolist()), map(str, models), strict=True)
    ]
    lack = dict.fromkeys(
        s for s, c in zip(table["store"].tolist(), cells, strict=True) if not is_given(c)
    )
    if lack:
        recorded = dict.fromkeys(key for _, own_cells in _recorded(sidecars) for key in own_cells)
        raise VitseeError(
            f"{name} is not known of {', '.join(map(str, lack))}; expected a column of the table, "
            f"{'one of ' + ', '.join(recorded) + ', ' if recorded else ''}or a column {name} "
            f"beside {' or '.join(KEYS)} in --attributes FILE"
        )
    return replace(table, columns={**table.columns, name: np.array(cells)})


def in_groups(
    table: Table, name: str, sidecars: Sequence[Mapping[str, Any]], own: Table | None = None
) -> Table:
    """The table with each store labelled `GROUP/NAME` by an attribute, as `with_attribute` finds
    it; so are the notes of single stores. Raises VitseeError: see there."""
    found = with_attribute(table, name, sidecars, own)
    pairs = zip(found["store"].tolist(), found[name].tolist(), strict=True)
    labels = {
        str(store): f"{str(cell).replace(SIGN, ' ')}{SIGN}{split_label(str(store))[1]}"
        for store, cell in pairs
    }
    stores = np.array([labels[str(store)] for store in table["store"].tolist()], object)
    notes, of_stores = table.notes, table.notes.get("stores")
    if isinstance(of_stores, dict):
        notes = notes | {"stores": {labels.get(key, key): v for key, v in of_stores.items()}}
    return replace(table, columns={**table.columns, "store": stores}, notes=notes)


def _recorded(sidecars: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, attributes) of every store of the results, and of the results they were derived
    from."""
    for sidecar in sidecars:
        stores, made_of = sidecar.get("stores"), sidecar.get("results")
        for entry in stores if isinstance(stores, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("attributes"), dict):
                label = str(entry.get("label"))
                yield label, entry["attributes"]
                yield f"{label} ({entry.get('weights')})", entry["attributes"]  # as `tell_apart`
        for entry in made_of if isinstance(made_of, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("made_by"), dict):
                yield from _recorded([entry["made_by"]])
