"""Removal of stores, the files of an empty store, and the largest size of a full one.

Each zarr.json is made by zarr in memory. Zarr is imported only here and by `Files.zarr_store`:
creating and validating stores need it, reading them does not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import metadata
from vitsee_stores.chunks import LZ4_LEVEL, ZSTD_LEVEL, checksum, chunk_name, encode
from vitsee_stores.errors import StoreError, reason
from vitsee_stores.files import Pieces
from vitsee_stores.folder import files_at
from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec, arrays
from vitsee_stores.manifest import ATTRIBUTE, Manifest
from vitsee_stores.metadata import root_document, to_text
from vitsee_stores.url import Url


def remove_store(path: str | os.PathLike[str] | Url) -> None:
    """Remove a store, and leftovers of unfinished creations and removals beside it.

    An interrupted removal leaves nothing that reads as complete. A path without a store is cleared
    of such leftovers alone.

    Raises:
        StoreError: it is not a vitsee store (which stays untouched), or cannot be removed.
    """
    files = files_at(path)
    try:
        data: dict[str, Any] = {}
        if files.exists():
            data = metadata.read_attribute(files)
        document = metadata.group_document({ATTRIBUTE: {**data, "complete": False}})
        files.remove_store(metadata.to_text(document))
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def contents(
    manifest: Manifest, once: Mapping[str, NDArray[Any]]
) -> tuple[list[tuple[str, Pieces]], Manifest]:
    """Return the files of a store without slabs.

    Args:
        manifest: manifest of the store.
        once: path -> values of every write-once array.

    Returns:
        (name, bytes) of all metadata files and write-once arrays, the root's zarr.json last;
        and the manifest with the checksums of these arrays.
    """
    specs = arrays(manifest.plan)
    written = {path for path, spec in specs.items() if spec.per == "once"}
    if set(once) != written:
        raise StoreError(
            f"arrays written once: {sorted(once)}, expected {sorted(written)}"
        )
    files: list[tuple[str, Pieces]] = []
    checksums: dict[str, int] = {}
    for path, spec in specs.items():
        if spec.per == "once":
            values = np.asarray(once[path], spec.dtype)
            if values.shape != spec.shape:
                raise StoreError(
                    f"{path} has shape {values.shape}, expected {spec.shape}"
                )
            pieces = encode(values, spec)
            # The last piece of an encoded chunk is its crc32c.
            checksums[path] = checksum(bytes(pieces[-1]))
            files.append((chunk_name(spec, (0,) * values.ndim), pieces))
    manifest = dataclasses.replace(manifest, checksums=checksums)
    root = metadata.root_text(manifest, complete=False)
    for path, document in documents(specs).items():
        files.append((f"{path}/{metadata.ZARR_JSON}", [metadata.to_text(document)]))
    files.append((metadata.ZARR_JSON, [root]))
    return files, manifest


# ---------------- Zarr's files

# Order of keys in the files, independent of the zarr version.
KEYS = (
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
    "storage_transformers",
)


def documents(specs: Mapping[str, ArraySpec]) -> dict[str, dict[str, Any]]:
    """Return the zarr.json of every group and array below the root, by path.

    All groups come first, then the arrays in their order.

    Raises:
        StoreError: zarr cannot make such an array.
    """
    groups = {str(parent) for path in specs for parent in PurePosixPath(path).parents}
    groups.discard(".")  # the root, which has the manifest
    by_path = {path: _group_document() for path in sorted(groups)}
    for path, spec in specs.items():
        try:
            by_path[path] = _array_document(
                spec.shape, spec.chunks, spec.dtype, spec.codec, spec.axes
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"zarr makes no array {path}: {error}") from None
    return by_path


@lru_cache
def _group_document() -> dict[str, Any]:
    """Return the zarr.json of a group, as zarr makes it in memory."""
    import zarr
    from zarr.storage import MemoryStore

    contents: dict[str, Any] = {}
    zarr.create_group(MemoryStore(contents))
    return _document(contents)


@lru_cache(maxsize=1024)  # a store has few distinct kinds of arrays
def _array_document(
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str,
    codec: str,
    axes: tuple[str, ...],
) -> dict[str, Any]:
    """Return the zarr.json of an array, as zarr makes it in memory."""
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec
    from zarr.storage import MemoryStore

    item = np.dtype(dtype).itemsize
    contents: dict[str, Any] = {}
    compressors: dict[str, list[Any]] = {
        "none": [],
        "zstd": [ZstdCodec(level=ZSTD_LEVEL, checksum=False)],
        "lz4": [
            BloscCodec(typesize=item, cname="lz4", clevel=LZ4_LEVEL, shuffle="shuffle")
        ],
    }
    zarr.create_array(
        MemoryStore(contents),
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=math.nan if dtype.startswith("float") else 0,
        serializer=BytesCodec(endian="little" if item > 1 else None),
        filters=None,
        compressors=[*compressors[codec], Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=axes,
    )
    return _document(contents)


def _document(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the zarr.json in a store in memory, its keys in the order of `KEYS`."""
    fields: dict[str, Any] = json.loads(contents["zarr.json"].to_bytes())
    ordered = {key: fields[key] for key in KEYS if key in fields}
    # Keys that only newer zarr versions write stand behind, in their order.
    return {**ordered, **fields}


# ---------------- how much of the disk

ENTRY_BYTES = 128  # of a file in its folder's index, also under its temporary name
SEALED_BYTES = 32  # of an array's checksum in the manifest, beside the array's name


def max_disk_bytes(manifest: Manifest, block: int) -> int:
    """Return an upper bound on the disk usage of a full store.

    It counts every chunk with its padding, at the length of incompressible data, and all
    metadata; the manifest twice, because it is rewritten at the end.

    Args:
        manifest: manifest of the store.
        block: bytes of a block of the file system, which allocates whole blocks.
    """
    specs = arrays(manifest.plan)
    metadata_files = documents(specs)
    root = len(to_text(root_document(manifest, complete=False)))
    root += sum(
        SEALED_BYTES + len(path) for path, spec in specs.items() if spec.per == "once"
    )
    # entries of each folder: its folders here, its chunks below
    n_entries = Counter(str(PurePosixPath(path).parent) for path in metadata_files)
    total = 2 * _round_up(root, block)
    for path, document in metadata_files.items():
        total += _round_up(len(to_text(document)), block)
        if path in specs:
            spec = specs[path]
            n_entries[path] = math.prod(spec.grid)
            max_chunk_bytes = spec.chunk_bytes + CHECKSUM_BYTES
            if spec.codec != "none":
                # zstd and lz4 in Blosc add less than this to incompressible data
                # (ZSTD_COMPRESSBOUND; BLOSC_MAX_OVERHEAD).
                max_chunk_bytes += spec.chunk_bytes // 256 + 64
            total += n_entries[path] * _round_up(max_chunk_bytes, block)
    for n in n_entries.values():
        total += _round_up((2 + n) * ENTRY_BYTES, block)
    return total


def _round_up(n: int, block: int) -> int:
    """Return the smallest multiple of `block` that is not below `n`."""
    return math.ceil(n / block) * block
