"""Activation stores on disk: whole slabs in, whole slabs out.

    from vitsee_stores import open_store
    store = open_store("b16.zarr")

FORMAT.md beside this file is the format's text. Names are imported when first used, so importing
the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitsee_stores.creation import remove_store
    from vitsee_stores.errors import (
        IdentityMismatch,
        IncompleteStore,
        MissingInput,
        SiteError,
        StoreError,
        StoreMismatch,
        VitseeError,
    )
    from vitsee_stores.info import describe
    from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout
    from vitsee_stores.lazy import LazyArray
    from vitsee_stores.manifest import Manifest, Samples, new_manifest
    from vitsee_stores.opening import open_store
    from vitsee_stores.pairing import require_paired
    from vitsee_stores.store import Slab, Store
    from vitsee_stores.validation import validate
    from vitsee_stores.writer import StoreWriter

_HOME = {
    "creation": ("remove_store",),
    "errors": (
        "IdentityMismatch",
        "IncompleteStore",
        "MissingInput",
        "SiteError",
        "StoreError",
        "StoreMismatch",
        "VitseeError",
    ),
    "info": ("describe",),
    "layout": ("AttentionGroup", "SiteSpec", "StorePlan", "TokenLayout"),
    "manifest": ("Manifest", "Samples", "new_manifest"),
    "lazy": ("LazyArray",),
    "opening": ("open_store",),
    "pairing": ("require_paired",),
    "store": ("Slab", "Store"),
    "validation": ("validate",),
    "writer": ("StoreWriter",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AttentionGroup",
    "IdentityMismatch",
    "IncompleteStore",
    "LazyArray",
    "Manifest",
    "MissingInput",
    "Samples",
    "SiteError",
    "SiteSpec",
    "Slab",
    "Store",
    "StoreError",
    "StoreMismatch",
    "StorePlan",
    "StoreWriter",
    "TokenLayout",
    "VitseeError",
    "describe",
    "new_manifest",
    "open_store",
    "remove_store",
    "require_paired",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitsee_stores' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vitsee_stores.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
