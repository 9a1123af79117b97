"""The zarr.json of a store's groups and arrays, made by zarr in memory.

Zarr is imported only here and by `Files.zarr_store`: creating and validating stores need it,
reading them does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from vitsee_stores.chunks import LZ4_LEVEL, ZSTD_LEVEL
from vitsee_stores.errors import StoreError
from vitsee_stores.layout import ArraySpec

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
    """The zarr.json of every group and array below the root, by path: all groups, then the arrays
    in their order.

    Raises:
        StoreError: zarr cannot make such an array.
    """
    groups = {str(parent) for path in specs for parent in PurePosixPath(path).parents} - {"."}
    made = {path: _group() for path in sorted(groups)}
    for path, spec in specs.items():
        try:
            made[path] = _array(spec.shape, spec.chunks, spec.dtype, spec.codec, spec.axes)
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"zarr makes no array {path}: {error}") from None
    return made


@lru_cache
def _group() -> dict[str, Any]:
    import zarr
    from zarr.storage import MemoryStore

    held: dict[str, Any] = {}
    zarr.create_group(MemoryStore(held))
    return _document(held)


@lru_cache(maxsize=1024)  # a store has few distinct kinds of arrays
def _array(
    shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, codec: str, axes: tuple[str, ...]
) -> dict[str, Any]:
    import zarr
    from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec
    from zarr.storage import MemoryStore

    item, held = np.dtype(dtype).itemsize, dict[str, Any]()
    compressors: dict[str, list[Any]] = {
        "none": [],
        "zstd": [ZstdCodec(level=ZSTD_LEVEL, checksum=False)],
        "lz4": [BloscCodec(typesize=item, cname="lz4", clevel=LZ4_LEVEL, shuffle="shuffle")],
    }
    zarr.create_array(
        MemoryStore(held),
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
    return _document(held)


def _document(held: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(held["zarr.json"].to_bytes())
    order = {key: place for place, key in enumerate(KEYS)}
    return {key: fields[key] for key in sorted(fields, key=lambda key: order.get(key, len(KEYS)))}
