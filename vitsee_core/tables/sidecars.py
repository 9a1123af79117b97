"""The file beside a table, `r.csv.json`: how the table was made, and the types of its columns."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import memory_bytes
from vitsee_core.runtime.registry import Guest, guests
from vitsee_core.runtime.versions import result_versions, worker_versions
from vitsee_core.tables.formats import plain_json
from vitsee_core.tables.weights_labels import distinct_weights
from vitsee_stores.weights_names import described_weights

if TYPE_CHECKING:
    import polars as pl

    from vitsee_stores import Store

PYTHON = "python"  # the key of a call in Python
# Of a folder that an option names, the times of so many files tell whether it changed.
MAX_FILES = 20_000
# The fields of `Execution` that a sidecar records.
EXECUTION_FIELDS = ("images", "seed", "jobs", "memory", "device")


def sidecar_bytes(
    frame: pl.DataFrame,
    notes: Mapping[str, Any],
    run_record: Mapping[str, Any],
    table_file: bytes,
) -> bytes:
    """Return the sidecar of a table, as JSON that ends with its own digest.

    Args:
        frame: the table.
        notes: facts about its numbers.
        run_record: how it was made, from `describe_run` or `describe_call`.
        table_file: the bytes of the table's file, whose hash tells whether it was edited since.
    """
    table_record = {
        "rows": len(frame),
        "columns": {column.name: column_kind(column) for column in frame.get_columns()},
        "sha256": hashlib.sha256(table_file).hexdigest(),
        "notes": notes,
    }
    sidecar = plain_json({**run_record, **table_record})
    text = json.dumps({**sidecar, "digest": digest_of(sidecar)}, indent=2)
    return f"{text}\n".encode()


def describe_run(
    stores: Iterable[Store],
    *,
    command: Sequence[str],
    parameters: Mapping[str, Any],
    guest: Guest | None = None,
) -> dict[str, Any]:
    """Return how a result was made, for its sidecar, with the versions and the time of now.

    Args:
        stores: recorded by their identity.
        command: the words of the command line.
        parameters: name -> value, after defaults, including seeds.
        guest: the package of the analysis, if it is a guest's.
    """
    now = datetime.datetime.now(datetime.UTC)
    opened = list(stores)
    weights = distinct_weights(opened)
    return {
        **(guest.sidecar_entry() if guest is not None else {}),
        "command": list(command),
        "parameters": {name: _to_json(value) for name, value in parameters.items()},
        "stores": [
            {**_describe_store(store), "weights": weights[store.label]}
            if store.label in weights
            else _describe_store(store)
            for store in opened
        ],
        "versions": result_versions(),
        "created": now.isoformat(timespec="seconds"),
    }


def _describe_store(store: Store) -> dict[str, Any]:
    """Return the identity, model and attributes of a store, for a sidecar."""
    model = store.manifest.model
    return {
        "label": store.label,
        "path": str(store.place.absolute()),
        "store_id": store.manifest.store_id,
        "generation": store.generation,
        "samples_fingerprint": store.manifest.samples_fingerprint,
        "model": model.get("name"),
        "weights": described_weights(store.manifest),
        "ablations": list(model.get("ablate_skip", ())),
        "interventions": list(model.get("interventions", ())),
        "complete": bool(store.complete),
        "attributes": _store_attributes(store),
    }


def describe_work(
    command: str,
    stores: Iterable[Store],
    parameters: Mapping[str, Any],
    *,
    leave_out: Path,
) -> dict[str, Any]:
    """Return everything that decides what a command computes.

    Two commands of equal descriptions compute the same, so that one goes on with the half-done work
    of the other: parameters, the files that they name, what the stores hold, versions, and this
    machine's memory.

    Args:
        command: its name.
        stores: in its order.
        parameters: name -> value, after defaults.
        leave_out: a folder whose files do not count.
    """
    plain = {name: _to_json(value) for name, value in parameters.items()}
    guest = guests().get(command.replace("-", "_"))
    modules = (guest.module,) if guest is not None else ()
    return {
        "command": [command, plain],
        # Any text among the parameters may name a file.
        "files": {
            text: _file_states(Path(text), leave_out) for text in _texts(plain) if text
        },
        "stores": [
            [
                store.label,
                store.manifest.store_id,
                store.revision,
                store.manifest.samples_fingerprint,
            ]
            for store in stores
        ],
        "versions": dict(worker_versions(modules)),
        "memory": memory_bytes(),
    }


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def _file_states(path: Path, leave_out: Path) -> list[Any]:
    """Return [name, size, time in ns] of a file, or of the files below a folder.

    They are `MAX_FILES` at most; empty if the path leads to nothing.
    """
    states: list[Any] = []
    try:
        if path.is_dir():
            below = (
                Path(folder, name) for folder, _, names in os.walk(path) for name in names
            )
            counted = (file for file in below if leave_out not in file.parents)
            files = sorted(itertools.islice(counted, MAX_FILES))
        else:
            files = [path] if path.is_file() else []
        for file in files:
            status = file.stat()
            states.append([str(file), status.st_size, status.st_mtime_ns])
    except (OSError, ValueError):  # ValueError: a text with a zero byte
        return ["cannot be read"]
    return states


def newest_ns(paths: Iterable[Path]) -> int:
    """Return the last time, in ns, at which one of these files and folders was changed.

    Files and folders below a folder count, too. 0 if no path leads to anything; now if one cannot
    be read.
    """
    newest = 0
    try:
        for path in paths:
            if not path.exists():
                continue
            newest = max(newest, path.stat().st_mtime_ns)
            for folder, folders, files in os.walk(path):
                for name in (*folders, *files):
                    newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime_ns)
    except (OSError, ValueError):
        return time.time_ns()
    return newest


def _store_attributes(store: Store) -> dict[str, Any]:
    """Return those of a store's attributes that are known.

    `params`, `resolution` (the shorter side of the input, in pixels), `images` (their number) and
    `data` (the last part of the data set's path or name).
    """
    model = store.manifest.model
    input_sides = (model.get("input_size") or (None,))[1:]  # behind the channels
    data_record = store.manifest.info.get("data") or {}
    data_path = str(data_record.get("data") or "").rstrip("/")
    attributes = {
        "params": model.get("n_params"),
        "resolution": min(input_sides, default=None),
        "images": len(store.samples),
        "data": data_path.rpartition("/")[2] or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def describe_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a result was made by a call in Python, for its sidecar.

    Args:
        name: of the analysis' module.
        arguments: name -> value, of its `run`, with defaults.
    """
    stores: list[Store] = []
    parameters: dict[str, Any] = {}
    for key, value in arguments.items():
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        values = value if is_sequence else (value,)
        # Stores, in one argument or in several, whatever it is called.
        if values and all(hasattr(entry, "manifest") for entry in values):
            stores += values
        elif isinstance(value, Execution):
            parameters |= {field: getattr(value, field) for field in EXECUTION_FIELDS}
        else:
            parameters[key] = value
    paths = ", ".join(repr(str(store.place)) for store in stores)
    command = ["vitsee", name.replace("_", "-")]
    guest = guests().get(name)
    record = describe_run(stores, command=command, parameters=parameters, guest=guest)
    return {PYTHON: f"vitsee.{name}({paths}, ...)", **record}


def _to_json(value: Any) -> Any:
    """Return a value that JSON can hold: dataclasses as objects, sets as lists, others as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return _to_json({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json(entry) for entry in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return str(value)


def digest_of(sidecar: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a sidecar, as JSON with sorted keys, without the digest in it."""
    sealed = {name: value for name, value in sidecar.items() if name != "digest"}
    text = json.dumps(sealed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def column_kind(column: pl.Series) -> str:
    """Return what a column holds: "text", "integer", "number", or "empty" for no value at all."""
    if column.dtype.is_integer():
        return "integer"
    if column.dtype.is_float():
        return "number"
    return "empty" if column.null_count() == len(column) else "text"
