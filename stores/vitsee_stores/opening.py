"""Whole slabs out: a store as lazy arrays, and slab by slab.

    >>> from vitsee_stores import open_store
    >>> store = open_store("b16.zarr")
    >>> store.n_images, store.manifest.model["name"]
    (10000, 'vit_base_patch16_224')
    >>> [site.name for site in store.select(["blocks"])][-1]
    'blocks.11.out'
    >>> store.layout("blocks.-1.out")
    TokenLayout(prefix=('cls',), grid=(14, 14), rows=0, stride_px=(16.0, 16.0))
    >>> store.acts("blocks.3.out", tokens="patches")
    <LazyArray float16 (10000, 14, 14, 768)>
    >>> corner = store.acts("blocks.3.out", tokens=(0, 0))[:]      # one token of all images
    >>> first = store.acts("blocks.3.out")[:256]                   # every token of 256 images
    >>> nines = store.pooled("norm", "cls")[store.samples.label == 9]   # each slab is read once
    >>> store.attention("distance_px")[:].mean(0)                  # (blocks, heads)
    >>> sums = 0
    >>> for slab in store.slabs():                                 # each byte is read once
    ...     sums += slab.acts("blocks.3.out", "patches")[slab.valid].sum(0, dtype="f8")

Rows of unreadable images have `valid` False and contain NaN: exclude them.

A store pickles as its address: unpickling opens it there again, once per process.
"""

from __future__ import annotations

import copyreg
import os
from functools import lru_cache
from typing import Any

import numpy as np

from vitsee_stores import metadata
from vitsee_stores.errors import IncompleteStore, StoreMismatch
from vitsee_stores.places import files_at
from vitsee_stores.store import Store
from vitsee_stores.url import Place, Url


def open_store(
    path: str | os.PathLike[str] | Url, *, allow_partial: bool = False, label: str | None = None
) -> Store:
    """Open the store at `path`.

    Args:
        path: its folder, or a URL (`s3://bucket/runs/b16.zarr`).
        allow_partial: also open an unfinished store; only its committed slabs are read.
        label: its name in tables and figures; by default the folder's name without suffix.

    Raises:
        StoreError: missing, not a vitsee store, of another format version, or damaged.
        IncompleteStore: unfinished without `allow_partial`, or without any slab yet.
    """
    files = files_at(path)
    manifest, complete = metadata.read_root(files)
    n_slabs = manifest.plan.n_slabs
    names = metadata.list_names(files, "commits")
    complete = complete and len(metadata.numbers(names, n_slabs)) == n_slabs
    committed = np.full(n_slabs, complete)
    if not complete:
        committed[list(metadata.read_markers(files, manifest))] = True
        slabs = "slab is" if n_slabs == 1 else "slabs are"
        done = f"{files} is incomplete: {committed.sum()} of {n_slabs} {slabs} committed"
        if not allow_partial:
            raise IncompleteStore(
                f"{done} (repeat the vitsee extract command to go on, or read those with "
                "--allow-partial)"
            )
        if not committed.any():
            raise IncompleteStore(f"{done} (repeat the vitsee extract command to go on)")
    return Store(files, manifest, committed, complete, label)


def _address(store: Store) -> tuple[Any, ...]:
    """Pickle state of a store. Absolute: another process may have another working directory."""
    committed = None if store.complete else np.packbits(store.committed).tobytes()
    return _at, (store.place.absolute(), store.label, store.manifest.store_id, committed)


@lru_cache(maxsize=16)
def _at(place: Place, label: str, store_id: str, committed: bytes | None) -> Store:
    """Reopen a pickled store; if unfinished, with the slabs that were committed when it was
    pickled. Raises StoreMismatch: another store is there now."""
    store = open_store(place, allow_partial=committed is not None, label=label)
    if store.manifest.store_id != store_id:
        raise StoreMismatch(f"{place} was replaced by another store during the work")
    if committed is None:
        return store
    then = np.unpackbits(np.frombuffer(committed, np.uint8), count=store.n_slabs).astype(bool)
    return Store(store.files, store.manifest, then, False, label)


copyreg.pickle(Store, _address)
