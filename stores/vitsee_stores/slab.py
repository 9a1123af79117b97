"""One slab of a store in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.tokens import Tokens

if TYPE_CHECKING:
    from vitsee_stores.reader import Store


@dataclass(frozen=True)
class Slab:
    """Consecutive rows of a store, the unit of reading. Arrays are in memory, `rows` is where
    they stand in the store; sums are those of the whole slab `k`."""

    store: Store
    k: int
    rows: slice

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """(rows,) which rows hold an image."""
        return self.store.valid[self.rows]

    def acts(self, site: str, tokens: Tokens = "all") -> NDArray[Any]:
        """As `Store.acts`, of these rows."""
        return self.store.acts(site, tokens)[self.rows]

    def pooled(self, site: str, kind: str = "mean") -> NDArray[Any]:
        """As `Store.pooled`, of these rows."""
        return self.store.pooled(site, kind)[self.rows]

    def vectors(self, name: str) -> NDArray[Any]:
        """As `Store.vectors`, of these rows."""
        return self.store.vectors(name)[self.rows]

    def attention(self, name: str, group: str = "") -> NDArray[Any]:
        """As `Store.attention`, of these rows."""
        return self.store.attention(name, group)[self.rows]

    def attention_sums(self, name: str, group: str = "") -> NDArray[Any]:
        """As `Store.attention_sums`, of the whole slab: (blocks, heads, ...)."""
        return self.store.attention_sums(name, group)[self.k]

    def grams(self, site: str) -> NDArray[Any]:
        """As `Store.grams`, of these rows: (rows, rows)."""
        n = len(self)
        return self.store.grams(site)[self.k, :n, :n]

    def residual(self, sublayer: str) -> NDArray[Any]:
        """As `Store.residual`, of these rows."""
        return self.store.residual(sublayer)[self.rows]

    def inputs(self) -> NDArray[Any]:
        """As `Store.inputs`, of these rows."""
        return self.store.inputs()[self.rows]
