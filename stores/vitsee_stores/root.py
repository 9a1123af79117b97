"""A store's metadata on disk: Zarr's zarr.json files, the manifest among them, and the markers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitsee_stores.chunks import codecs, decode, encode, file_name
from vitsee_stores.disk import reason
from vitsee_stores.errors import StoreError
from vitsee_stores.layout import COMMIT_BYTES, ArraySpec, arrays
from vitsee_stores.manifest import ATTRIBUTE, Manifest
from vitsee_stores.plan import StorePlan

ZARR_JSON = "zarr.json"


def to_text(document: Mapping[str, Any]) -> bytes:
    """A JSON document as it stands on disk."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def group_document(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The zarr.json of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def root_document(manifest: Manifest, complete: bool) -> dict[str, Any]:
    """The zarr.json of the root group."""
    return group_document({ATTRIBUTE: {**manifest.to_json(), "complete": complete}})


def array_document(spec: ArraySpec) -> dict[str, Any]:
    """The zarr.json of an array, as zarr would write it."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN" if spec.dtype.startswith("float") else 0,
        "codecs": codecs(spec),
        "attributes": {},
        "dimension_names": list(spec.axes),
        "storage_transformers": [],
    }


def read_root(path: str | os.PathLike[str]) -> tuple[Manifest, bool]:
    """The manifest, and whether the store says that it is complete.

    Raises:
        StoreError: missing, no store, of another format version, or damaged.
    """
    data = check_ours(path)
    try:
        return Manifest.from_json(data), data.get("complete") is True
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from None


def check_ours(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The vitsee attribute of the Zarr group at `path`, of any format version.

    Raises:
        StoreError: missing, no store, or damaged.
    """
    path = Path(path)
    try:
        document = json.loads((path / ZARR_JSON).read_bytes())
    except FileNotFoundError:
        if not path.exists():
            raise StoreError(
                f"no store at {path}: nothing is there (run: vitsee extract MODEL --data DATA "
                f"-o {path})"
            ) from None
        raise StoreError(
            f"{path} is no vitsee store: the folder has no {ZARR_JSON} (a store is what vitsee "
            "extract writes)"
        ) from None
    except NotADirectoryError:
        raise StoreError(
            f"{path} is no vitsee store but a file (a store is a folder that vitsee extract writes)"
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {reason(error)}") from None
    except ValueError:
        raise StoreError(
            f"{path} is damaged: its {ZARR_JSON} is no JSON (copy the store anew, or extract it "
            "again)"
        ) from None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    data = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(data, dict):
        raise StoreError(
            f"{path} is no vitsee store: its {ZARR_JSON} has no '{ATTRIBUTE}' attribute (a store "
            "is what vitsee extract writes)"
        )
    return data


def encode_marker(provenance: Mapping[str, Any], spec: ArraySpec) -> bytes:
    """A slab's commit marker as its chunk's bytes: JSON padded with spaces.

    What does not fit is dropped, longest first, and named under "dropped".
    """
    kept = dict(provenance)
    text = json.dumps(kept, allow_nan=False).encode()
    dropped: list[str] = []
    while len(text) > COMMIT_BYTES:
        longest = max((k for k in kept if k != "dropped"), key=lambda k: len(json.dumps(kept[k])))
        dropped.append(longest)
        del kept[longest]
        kept["dropped"] = dropped
        text = json.dumps(kept, allow_nan=False).encode()
    block = np.frombuffer(text.ljust(COMMIT_BYTES), np.uint8).reshape(spec.chunks)
    return b"".join(bytes(piece) for piece in encode(block, spec))


def read_marker(path: str | os.PathLike[str], slab: int, spec: ArraySpec) -> dict[str, Any] | None:
    """The provenance in a slab's commit marker; None where the slab is not committed."""
    try:
        data = Path(path, spec.path, file_name((slab, 0))).read_bytes()
        marker = json.loads(decode(data, spec).tobytes())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def read_markers(path: str | os.PathLike[str], plan: StorePlan) -> list[dict[str, Any] | None]:
    """Every slab's provenance, None where it is not committed."""
    spec = arrays(plan)["commits"]
    present = list_names(Path(path, spec.path))
    return [
        read_marker(path, slab, spec) if file_name((slab, 0)) in present else None
        for slab in range(plan.n_slabs)
    ]


def list_names(folder: str | os.PathLike[str]) -> set[str]:
    """Names in a folder; none where there is no folder."""
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
