"""Attributes of models as columns of a table: from sidecars, or from a user's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitsee_core.tables.columns import build_column, has_value
from vitsee_core.tables.groups import GROUP_SEPARATOR, groups_of, split_label
from vitsee_core.tables.results import Table
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

GROUP = "group"
KEY_COLUMNS = ("store", "model")  # a file of attributes needs one of these columns


def with_attribute(
    table: Table,
    name: str,
    sidecars: Sequence[Mapping[str, Any]],
    attributes_file: Table | None = None,
) -> Table:
    """Return the table with a column `name` that holds an attribute of each row's store.

    The value comes from the file of attributes if that has such a column, else from the table
    itself, else from the sidecars.

    Args:
        table: with the columns store and model.
        name: `params`, `resolution`, `images`, `data`, `group` (of labels GROUP/NAME), or a column.
        sidecars: of the results that the rows come from.
        attributes_file: a table with a column of `KEY_COLUMNS`; a model's row also applies to its
            pretrained tags.

    Raises:
        VitseeError: no such attribute, or a store that has none.
    """
    rows = table.frame
    file_columns = [] if attributes_file is None else attributes_file.frame.columns
    # A file may have the column under its own name or as a count.
    value_columns = sorted({name, f"n_{name}"}.intersection(file_columns))
    if name in rows.columns and not value_columns:
        return table
    if "store" not in rows.columns:
        raise VitseeError(
            f"this result compares pairs, which have no {name}; expected one with a "
            "value per store"
        )
    stores = rows["store"].unique(maintain_order=True).to_list()
    if name == GROUP and not value_columns and len(groups_of(stores)) > 1:
        groups = {store: split_label(store)[0] for store in stores}
        return _replace_stores(table, name, groups)
    if attributes_file is not None and value_columns:
        values = _values_in_file(attributes_file.frame, name, value_columns[0])
    else:
        values = {
            label: attributes[name]
            for label, attributes in _recorded_attributes(sidecars)
            if name in attributes
        }
    row_keys = rows.select(key for key in KEY_COLUMNS if key in rows.columns)
    return _add_values(table, name, row_keys, values, sidecars)


def _values_in_file(frame: pl.DataFrame, name: str, column: str) -> dict[str, Any]:
    """Return store or model -> its cell of a column of the user's file of attributes.

    Raises:
        VitseeError: no column names stores or models, or one has several values.
    """
    keys = [key for key in KEY_COLUMNS if key in frame.columns]
    if not keys:
        raise VitseeError(
            f"the attributes have the columns {', '.join(frame.columns)}; expected {name} "
            f"beside {' or '.join(KEY_COLUMNS)}"
        )
    values: dict[str, Any] = {}
    # Models first, so that a store's own row replaces that of its model.
    for key in reversed(keys):
        cells = frame.select(pl.col(key).cast(pl.String), column).unique(
            maintain_order=True
        )
        is_repeated = cells[key].is_duplicated() & cells[key].is_not_null()
        # Of a file of stores, several may be of one model: their own rows count.
        if key == keys[0] and is_repeated.any():
            label = cells.filter(is_repeated)[key][0]
            several = cells.filter(pl.col(key) == label)[column].to_list()
            raise VitseeError(
                f"the attributes have several values of {column} for {key} {label}: "
                f"{', '.join(map(str, several))}; expected one row"
            )
        values |= dict(cells.iter_rows())
    return values


def _add_values(
    table: Table,
    name: str,
    row_keys: pl.DataFrame,
    values: Mapping[str, Any],
    sidecars: Sequence[Mapping[str, Any]],
) -> Table:
    """Return the table with each row's value: that of its store, its model, or the model's family.

    Args:
        table: as in `with_attribute`.
        name: of the new column.
        row_keys: each row's store and model, (rows, 2); the store alone, (rows, 1), if no column
            names models.
        values: store or model -> value.
        sidecars: name the attributes that a message offers.

    Raises:
        VitseeError: a store without a value.
    """
    value_of: dict[tuple[Any, ...], Any] = {}
    for key in row_keys.unique().rows():
        store = key[0]
        model = key[-1] or ""
        architecture = model.partition(".")[0]  # without the pretrained tag
        names = (store, model, architecture)
        value_of[key] = next((values[n] for n in names if n in values), None)
    lacking = {key[0] for key, value in value_of.items() if not has_value(value)}
    if lacking:
        stores = row_keys["store"].unique(maintain_order=True)
        recorded: dict[str, None] = {}
        for _, attributes in _recorded_attributes(sidecars):
            recorded.update(dict.fromkeys(attributes))
        one_of = f"one of {', '.join(recorded)}, " if recorded else ""
        raise VitseeError(
            f"{name} is not known of {', '.join(s for s in stores if s in lacking)}; "
            f"expected a column of the table, {one_of}or a column {name} beside "
            f"{' or '.join(KEY_COLUMNS)} in --attributes FILE"
        )
    cells = [value_of[key] for key in row_keys.rows()]
    return table.with_frame(table.frame.with_columns(build_column(name, cells)))


def _replace_stores(table: Table, name: str, values: Mapping[str, Any]) -> Table:
    """Return the table with a column `name` of the values of the rows' stores."""
    column = pl.col("store").cast(pl.String).replace_strict(values)
    return table.with_frame(table.frame.with_columns(column.alias(name)))


def label_groups(
    table: Table,
    name: str,
    sidecars: Sequence[Mapping[str, Any]],
    attributes_file: Table | None = None,
) -> Table:
    """Return the table with each store labelled `GROUP/NAME` by an attribute.

    The labels in notes about single stores change with them. Arguments and errors are those of
    `with_attribute`.
    """
    attributed = with_attribute(table, name, sidecars, attributes_file)
    labels = {}
    for store, value in attributed.frame.select("store", name).unique().rows():
        group = str(value).replace(GROUP_SEPARATOR, " ")
        labels[store] = f"{group}{GROUP_SEPARATOR}{split_label(store)[1]}"
    notes = table.notes
    store_notes = notes.get("stores")
    if isinstance(store_notes, dict):
        relabelled = {labels.get(key, key): note for key, note in store_notes.items()}
        notes = notes | {"stores": relabelled}
    return replace(_replace_stores(table, "store", labels), notes=notes)


def _recorded_attributes(
    sidecars: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, attributes) of every store that the sidecars name.

    A sidecar of a result that was derived from others contains theirs.
    """
    for sidecar in sidecars:
        for entry in _entries(sidecar, "stores", "attributes"):
            label = str(entry.get("label"))
            yield label, entry["attributes"]
            # The label that `disambiguate_labels` gives.
            yield f"{label} ({entry.get('weights')})", entry["attributes"]
        for entry in _entries(sidecar, "results", "made_by"):
            yield from _recorded_attributes([entry["made_by"]])


def _entries(sidecar: Mapping[str, Any], name: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of a sidecar's list which have a mapping under a key.

    Sidecars may be a stranger's: what has another form is passed over.
    """
    entries = sidecar.get(name)
    if isinstance(entries, list):
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get(key), dict):
                yield entry
