"""Types of arrays by their values (shapes stand in docstrings), and polars, for tables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Float", "Float32", "Integers", "Mask", "pl"]

Float = NDArray[np.float64]
Float32 = NDArray[np.float32]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


class _LazyModule:
    """A module that is imported when one of its attributes is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute, and keep it, so that this is called once per name."""
        attribute = getattr(importlib.import_module(self._name), name)
        setattr(self, name, attribute)
        return attribute


if not TYPE_CHECKING:
    # Importing polars takes as long as all of `vitsee --help`, and 20 MB: not before a table is
    # made or read.
    pl = _LazyModule("polars")
