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
from vitsee_stores.manifest import described_weights

if TYPE_CHECKING:
    import polars as pl

    from vitsee_stores import Store

PYTHON = "python"  # the key of a call in Python
MOST_FILES = (
    20_000  # of a folder that an option names, whose times tell whether it changed
)
OF_EXECUTION = ("images", "seed", "jobs", "memory", "device")


def sidecar_bytes(
    frame: pl.DataFrame,
    notes: Mapping[str, Any],
    given: Mapping[str, Any],
    written: bytes,
) -> bytes:
    """The sidecar of a table whose file is `written`. given: see `describe_run`."""
    own = {
        "rows": len(frame),
        "columns": {column.name: kind_of(column) for column in frame.get_columns()},
        "sha256": hashlib.sha256(written).hexdigest(),
        "notes": notes,
    }
    sidecar = plain_json({**given, **own})
    return (
        json.dumps({**sidecar, "digest": digest_of(sidecar)}, indent=2) + "\n"
    ).encode()


def describe_run(
    stores: Iterable[Store],
    *,
    command: Sequence[str],
    parameters: Mapping[str, Any],
    guest: Guest | None = None,
) -> dict[str, Any]:
    """How a result was made, for its sidecar: command line, parameters after defaults (including
    seeds), stores by identity, versions, time; the package of a guest's analysis."""
    return {
        **(guest.sidecar_entry() if guest is not None else {}),
        "command": list(command),
        "parameters": {name: _plain(value) for name, value in parameters.items()},
        "stores": [
            {
                "label": store.label,
                "path": str(store.place.absolute()),
                "store_id": store.manifest.store_id,
                "generation": store.generation,
                "samples_fingerprint": store.manifest.samples_fingerprint,
                "model": store.manifest.model.get("name"),
                "weights": described_weights(store.manifest),
                "ablations": list(store.manifest.model.get("ablate_skip", ())),
                "interventions": list(store.manifest.model.get("interventions", ())),
                "complete": bool(store.complete),
                "attributes": attributes_of(store),
            }
            for store in stores
        ],
        "versions": result_versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_work(
    command: str,
    stores: Iterable[Store],
    parameters: Mapping[str, Any],
    *,
    leave_out: Path,
) -> dict[str, Any]:
    """Everything that decides what a command computes, to tell whether half of its work belongs to
    it: parameters, the files that they name, what the stores hold, versions, this machine's memory.

    Args:
        command: its name.
        stores: in its order.
        parameters: after defaults.
        leave_out: a folder that is not among the files.
    """
    plain = {name: _plain(value) for name, value in parameters.items()}
    guest = guests().get(command.replace("-", "_"))
    modules = (guest.module,) if guest is not None else ()
    return {
        "command": [command, plain],
        "files": {name: _files(Path(name), leave_out) for name in _texts(plain) if name},
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
    """Every text in plain values, as each may name a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for own in value.values() if isinstance(value, dict) else value:
            yield from _texts(own)


def _files(path: Path, leave_out: Path) -> list[Any]:
    """Name, size and time of a file, or of those below a folder, `MOST_FILES` at most; empty if
    there is none."""
    try:
        if not path.is_dir():
            named = [path] if path.is_file() else []
        else:
            below = (Path(at, n) for at, _, names in os.walk(path) for n in names)
            there = (file for file in below if leave_out not in file.parents)
            named = sorted(itertools.islice(there, MOST_FILES))
        status = [(file, file.stat()) for file in named]
    except (OSError, ValueError):
        return ["cannot be read"]
    return [[str(file), own.st_size, own.st_mtime_ns] for file, own in status]


def newest_ns(paths: Iterable[Path]) -> int:
    """The last time at which one of these files, or a file or folder below these folders, was
    changed, in ns; 0 where there is none. What cannot be read is as if it were changed now."""
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


def attributes_of(store: Store) -> dict[str, Any]:
    """A store's attributes in sidecars: `params`, `resolution` (the shorter side of the input in
    pixels), `images` and `data` (the data set's last name), if known."""
    model = store.manifest.model
    info = store.manifest.info
    size = model.get("input_size") or (None,)
    data = str((info.get("data") or {}).get("data") or "").rstrip("/").rpartition("/")[2]
    attributes = {
        **{"params": model.get("n_params"), "resolution": min(size[1:], default=None)},
        **{"images": len(store.samples), "data": data or None},
    }
    return {name: value for name, value in attributes.items() if value is not None}


def describe_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Like `describe_run`, for an analysis called in Python. name: of the analysis' module.
    arguments: of its `run`, with defaults."""
    stores: list[Store] = []
    parameters: dict[str, Any] = {}
    for key, value in arguments.items():
        values = (
            value
            if isinstance(value, Sequence) and not isinstance(value, str)
            else (value,)
        )
        if values and all(hasattr(one, "manifest") for one in values):
            stores += values
        elif isinstance(value, Execution):
            parameters |= {field: getattr(value, field) for field in OF_EXECUTION}
        else:
            parameters[key] = value
    places = ", ".join(repr(str(store.place)) for store in stores)
    command = ["vitsee", name.replace("_", "-")]
    guest = guests().get(name)
    made = describe_run(stores, command=command, parameters=parameters, guest=guest)
    return {PYTHON: f"vitsee.{name}({places}, ...)", **made}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return str(value)


def digest_of(sidecar: Mapping[str, Any]) -> str:
    """SHA-256 of a sidecar without its own digest, as JSON with sorted keys."""
    sealed = {name: value for name, value in sidecar.items() if name != "digest"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def kind_of(column: pl.Series) -> str:
    """The type of a column: "text", "integer" or "number" (empty cells allowed), or "empty"."""
    if column.dtype.is_integer():
        return "integer"
    if column.dtype.is_float():
        return "number"
    return "empty" if column.null_count() == len(column) else "text"
