"""A store made at once or not at all, and removed the same way."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.chunks import checksum, encode, file_name
from vitsee_stores.disk import each, sync, sync_pool, write_new
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.layout import arrays
from vitsee_stores.manifest import Manifest
from vitsee_stores.owners import temporary_name

CREATING, REMOVING = ".creating", ".removing"


def remove_store(path: str | os.PathLike[str]) -> None:
    """Remove a store, and leftovers of unfinished creations and removals beside it.

    It is renamed first, so that a removal cut short leaves nothing that reads as a store.

    Raises:
        StoreError: what is there is no vitsee store (left untouched), or cannot be removed.
    """
    place = Path(os.path.realpath(path))
    try:
        if os.path.lexists(path):
            metadata.check_ours(path)
            os.rename(place, sibling(place, REMOVING))
        for leftover in siblings(place):
            shutil.rmtree(leftover)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def build(
    folder: Path, manifest: Manifest, once: Mapping[str, NDArray[Any]], *, durable: bool = True
) -> Manifest:
    """An empty store: all metadata, and the arrays that are written once; the manifest with their
    checksums. durable: on the disk before this returns."""
    specs = arrays(manifest.plan)
    written = {path for path, spec in specs.items() if spec.per == "once"}
    if set(once) != written:
        raise StoreError(f"arrays written once: {sorted(once)}, expected {sorted(written)}")
    groups = {str(parent) for path in specs for parent in PurePosixPath(path).parents}
    files: list[tuple[Path, Sequence[bytes | NDArray[np.uint8]]]] = []
    for group in groups - {"."}:
        files.append(
            (folder / group / metadata.ZARR_JSON, [metadata.to_text(metadata.group_document())])
        )
    checksums: dict[str, int] = {}
    for path, spec in specs.items():
        files.append(
            (folder / path / metadata.ZARR_JSON, [metadata.to_text(metadata.array_document(spec))])
        )
        if spec.per == "once":
            values = np.asarray(once[path], spec.dtype)
            if values.shape != spec.shape:
                raise StoreError(f"{path} has shape {values.shape}, expected {spec.shape}")
            pieces = encode(values, spec)
            checksums[path] = checksum(bytes(pieces[-1]))
            files.append((folder / path / file_name((0,) * values.ndim), pieces))
    manifest = dataclasses.replace(manifest, checksums=checksums)
    files.append((folder / metadata.ZARR_JSON, [metadata.root_text(manifest, complete=False)]))
    folders = sorted({file.parent for file, _ in files})
    for made in folders:
        made.mkdir(parents=made != folder, exist_ok=True)
    for file, buffers in files:
        write_new(str(file), buffers)
    if durable:
        each(sync_pool, sync, [*(file for file, _ in files), *folders])
    return manifest


def sibling(path: str | os.PathLike[str], kind: str) -> Path:
    """A new hidden name beside `path`."""
    place = Path(path).absolute()
    return Path(temporary_name(place.with_name(f".{place.name}"), kind))


def siblings(path: Path) -> Iterable[Path]:
    """What killed processes left beside `path`."""
    place = path.absolute()
    start = f".{place.name}."
    return [
        place.parent / name
        for name in metadata.list_names(place.parent)
        if name.startswith(start) and name.endswith((CREATING, REMOVING))
    ]
