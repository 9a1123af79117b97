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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import IncompleteStore, StoreMismatch
from vitsee_stores.folder import files_at
from vitsee_stores.generations import committed, read_generations
from vitsee_stores.store import Store
from vitsee_stores.url import Place, Url

if TYPE_CHECKING:
    from vitsee_stores.store import Store


def open_store(
    path: str | os.PathLike[str] | Url, *, allow_partial: bool = False, label: str | None = None
) -> Store:
    """Open the store at `path`.

    Args:
        path: its folder, or a URL (`s3://bucket/runs/b16.zarr`).
        allow_partial: also open an unfinished store; only its committed slabs are read. A
            generation that is being added to a complete store is not read before it is complete.
        label: its name in tables and figures; by default the folder's name without suffix.

    Raises:
        StoreError: missing, not a vitsee store, of another format version, or damaged.
        IncompleteStore: unfinished without `allow_partial`, or without any slab yet.
    """
    return _opened(path, allow_partial, label, None)


def _opened(
    path: str | os.PathLike[str] | Url, allow_partial: bool, label: str | None, last: int | None
) -> Store:
    """`open_store`, of at most `last` generations."""
    every = read_generations(files_at(path))
    found = [every[0], *(one for one in every[1:last] if one.published)]
    slabs = committed(found)
    if unfinished := [one for one in found if not one.complete]:
        one = unfinished[0]
        own = one.committed
        are = "slab is" if len(own) == 1 else "slabs are"
        done = f"{one.files} is incomplete: {own.sum()} of {len(own)} {are} committed"
        if not allow_partial:
            raise IncompleteStore(
                f"{done} (repeat the vitsee extract command to go on, or read those with "
                "--allow-partial)"
            )
        if not slabs.any():
            raise IncompleteStore(f"{done} (repeat the vitsee extract command to go on)")
    return Store(found, slabs, not unfinished, label)


def _address(store: Store) -> tuple[Any, ...]:
    """Pickle state of a store. Absolute: another process may have another working directory."""
    flags = None if store.complete else np.packbits(store.committed).tobytes()
    identity = store.manifest.store_id, store.generation
    return _at, (store.place.absolute(), store.label, *identity, flags)


@lru_cache(maxsize=16)
def _at(place: Place, label: str, store_id: str, generation: int, flags: bytes | None) -> Store:
    """Reopen a pickled store with the generations that it had; if unfinished, with the slabs that
    were committed when it was pickled. Raises StoreMismatch: another store is there now."""
    store = _opened(place, flags is not None, label, generation)
    if (store.manifest.store_id, store.generation) != (store_id, generation):
        raise StoreMismatch(f"{place} was replaced by another store during the work")
    if flags is None:
        return store
    then = np.unpackbits(np.frombuffer(flags, np.uint8), count=store.n_slabs).astype(bool)
    return Store(store.generations, then, False, label)


copyreg.pickle(Store, _address)


# ---------------- pairs of stores


def require_paired(a: Store, b: Store) -> NDArray[np.bool_]:
    """(images,) the rows that are valid in both stores.

    Raises:
        StoreMismatch: other images or another order: ids and labels differ, or the encoded bytes of
            an image that both could read.
    """
    names = f"{a.label} and {b.label}"
    if a.manifest.samples_fingerprint != b.manifest.samples_fingerprint:
        raise StoreMismatch(
            f"{names} do not pair: {_first_difference(a, b)} (extract both from the same --data "
            "with the same --images, --seed and --order)"
        )
    both = a.valid & b.valid
    differing = np.flatnonzero(both & (a.samples.hash != b.samples.hash))
    if differing.size:
        row = int(differing[0])
        raise StoreMismatch(
            f"{names} do not pair: row {row} ({a.samples.id[row]}) was read from other bytes, as "
            f"were {differing.size} of {int(both.sum())} images (extract both from the same --data)"
        )
    return both


def _first_difference(a: Store, b: Store) -> str:
    if a.n_images != b.n_images:
        return f"{a.n_images} images against {b.n_images}"
    for what in ("id", "label"):
        ours, theirs = getattr(a.samples, what), getattr(b.samples, what)
        rows = np.flatnonzero(ours != theirs)
        if rows.size:
            row = int(rows[0])
            return f"the {what} in row {row} is {ours[row]} against {theirs[row]}"
    return "their samples_fingerprints differ"
