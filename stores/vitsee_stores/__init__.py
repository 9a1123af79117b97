"""Activation stores on disk: whole slabs in, whole slabs out.

    from vitsee_stores import open_store
    store = open_store("b16.zarr")

FORMAT.md beside this file is the format's text. Five files to read first, in this order:

    plan.py      what a store is planned to hold: token layouts, sites, attention, the canvas
    layout.py    the arrays that follow from a plan: names, shapes, types, chunks
    manifest.py  what is recorded beside the arrays, and the identity that joining compares
    writer.py    a slab's way to the disk: chunks, checksums, commit marker
    store.py     what readers have: arrays that are read when sliced, slabs with their masks

and the rest, around them:

    untrusted metadata          schema (types and limits), metadata (zarr.json, markers)
    bytes of chunks             chunks (codecs), sealed (verified reading, damage of a slab)
    a new store                 creation, samples (ids, labels), leases (who makes a slab)
    reading                     generations (a store that grew), store_contents, lazy, selectors
                                (which sites, which tokens)
    folder or URL               url, files (what both offer), folder and disk, objects
    descriptions and errors     info, validation, weights_names, errors, notebook

Names are imported when first used, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitsee_stores.creation import remove_store as remove_store
    from vitsee_stores.errors import IdentityMismatch as IdentityMismatch
    from vitsee_stores.errors import IncompleteStore as IncompleteStore
    from vitsee_stores.errors import MissingInput as MissingInput
    from vitsee_stores.errors import SiteError as SiteError
    from vitsee_stores.errors import StoreError as StoreError
    from vitsee_stores.errors import StoreMismatch as StoreMismatch
    from vitsee_stores.errors import VitseeError as VitseeError
    from vitsee_stores.info import describe as describe
    from vitsee_stores.layout import AttentionGroup as AttentionGroup
    from vitsee_stores.layout import SiteSpec as SiteSpec
    from vitsee_stores.layout import StorePlan as StorePlan
    from vitsee_stores.layout import TokenLayout as TokenLayout
    from vitsee_stores.lazy import LazyArray as LazyArray
    from vitsee_stores.manifest import Manifest as Manifest
    from vitsee_stores.manifest import new_manifest as new_manifest
    from vitsee_stores.samples import Samples as Samples
    from vitsee_stores.store import Slab as Slab
    from vitsee_stores.store import Store as Store
    from vitsee_stores.store import open_store as open_store
    from vitsee_stores.store_contents import require_paired as require_paired
    from vitsee_stores.validation import validate as validate
    from vitsee_stores.writer import StoreWriter as StoreWriter

# module -> the names it defines. The imports above are the same list for type checkers.
_NAMES_BY_MODULE = {
    "creation": "remove_store",
    "errors": "IdentityMismatch IncompleteStore MissingInput SiteError StoreError "
    "StoreMismatch VitseeError",
    "info": "describe",
    "layout": "AttentionGroup SiteSpec StorePlan TokenLayout",
    "lazy": "LazyArray",
    "manifest": "Manifest new_manifest",
    "samples": "Samples",
    "store": "Slab Store open_store",
    "store_contents": "require_paired",
    "validation": "validate",
    "writer": "StoreWriter",
}
_MODULE_OF = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitsee_stores' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vitsee_stores.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # so that this function is not called again for the name
    return value


def __dir__() -> list[str]:
    """List the public names, those not yet imported too."""
    return sorted(_MODULE_OF)
