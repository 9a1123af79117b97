"""Upper bound on a store's disk usage, known before anything is written."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import PurePosixPath

from vitsee_stores.layout import CHECKSUM_BYTES, ArraySpec, arrays
from vitsee_stores.manifest import Manifest
from vitsee_stores.metadata import root_document, to_text
from vitsee_stores.zarr_metadata import documents

ENTRY_BYTES = 128  # of a file in its folder's index, also under its temporary name
SEALED_BYTES = 32  # of an array's checksum in the manifest, beside the array's name


def max_disk_bytes(manifest: Manifest, block: int) -> int:
    """Upper bound on a store's disk usage, on a file system that allocates whole blocks of `block`
    bytes: every chunk with its padding, at the length of incompressible data, and all metadata; the
    manifest counts twice because it is rewritten at the end."""
    specs = arrays(manifest.plan)
    made = documents(specs)
    root = len(to_text(root_document(manifest, complete=False)))
    root += sum(SEALED_BYTES + len(path) for path, spec in specs.items() if spec.per == "once")
    n_files = Counter(str(PurePosixPath(path).parent) for path in made)  # starting with folders
    total = 2 * _blocks(root, block)
    for path, document in made.items():
        total += _blocks(len(to_text(document)), block)
        if path in specs:
            n_files[path] = math.prod(specs[path].grid)
            total += n_files[path] * _blocks(_longest(specs[path]), block)
    return total + sum(_blocks((2 + n) * ENTRY_BYTES, block) for n in n_files.values())


def _longest(spec: ArraySpec) -> int:
    """Upper bound on a chunk's file size: zstd and lz4 in Blosc add less than this to
    incompressible data (ZSTD_COMPRESSBOUND; BLOSC_MAX_OVERHEAD)."""
    added = 0 if spec.codec == "none" else spec.chunk_bytes // 256 + 64
    return spec.chunk_bytes + CHECKSUM_BYTES + added


def _blocks(n: int, block: int) -> int:
    return math.ceil(n / block) * block
