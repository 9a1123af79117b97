"""Atomic creation and removal of stores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.chunks import checksum, chunk_name, encode
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.files import Pieces
from vitsee_stores.layout import arrays
from vitsee_stores.manifest import ATTRIBUTE, Manifest
from vitsee_stores.places import files_at
from vitsee_stores.url import Url
from vitsee_stores.zarr_metadata import documents


def remove_store(path: str | os.PathLike[str] | Url) -> None:
    """Remove a store, and leftovers of unfinished creations and removals beside it. An interrupted
    removal leaves nothing that reads as complete.

    Raises:
        StoreError: not a vitsee store (left untouched), or cannot be removed.
    """
    files = files_at(path)
    try:
        data = metadata.check_ours(files) if files.exists() else {}
        document = metadata.group_document({ATTRIBUTE: {**data, "complete": False}})
        files.remove_store(metadata.to_text(document))
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def contents(
    manifest: Manifest, once: Mapping[str, NDArray[Any]]
) -> tuple[list[tuple[str, Pieces]], Manifest]:
    """The files of an empty store (all metadata and the write-once arrays, the root's zarr.json
    last), and the manifest with these arrays' checksums."""
    specs = arrays(manifest.plan)
    written = {path for path, spec in specs.items() if spec.per == "once"}
    if set(once) != written:
        raise StoreError(f"arrays written once: {sorted(once)}, expected {sorted(written)}")
    files: list[tuple[str, Pieces]] = []
    checksums: dict[str, int] = {}
    for path, spec in specs.items():
        if spec.per == "once":
            values = np.asarray(once[path], spec.dtype)
            if values.shape != spec.shape:
                raise StoreError(f"{path} has shape {values.shape}, expected {spec.shape}")
            pieces = encode(values, spec)
            checksums[path] = checksum(bytes(pieces[-1]))
            files.append((chunk_name(spec, (0,) * values.ndim), pieces))
    manifest = dataclasses.replace(manifest, checksums=checksums)
    root = metadata.root_text(manifest, complete=False)
    for path, document in documents(specs).items():
        files.append((f"{path}/{metadata.ZARR_JSON}", [metadata.to_text(document)]))
    files.append((metadata.ZARR_JSON, [root]))
    return files, manifest
