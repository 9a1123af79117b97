"""Tokens of a site as feature matrices of their own, read together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import SiteError
from vitsee_stores.lazy import LazyArray
from vitsee_stores.token_selection import describe_layout

if TYPE_CHECKING:
    from vitsee_stores import Store

Cells = NDArray[np.int64]


class GridTokens:
    """Each chosen token of a site's grid, images by channels: an `stacks.Stack`."""

    def __init__(self, store: Store, site: str, cells: Cells) -> None:
        """Of these cells of the grid, counted row by row.

        Raises:
            MissingInput: the store does not hold the site, or pooled only.
            SiteError: the site has no grid.
        """
        self.store, self.site, self.cells = store, site, cells
        self.array = store.acts(site, "patches")

    @property
    def n_matrices(self) -> int:
        """Number of tokens."""
        return len(self.cells)

    @property
    def n_features(self) -> int:
        """Channels of a token."""
        return self.array.shape[-1]

    def part(self, wanted: slice) -> GridTokens:
        """Some of the tokens."""
        return GridTokens(self.store, self.site, self.cells[wanted])

    def read(self, rows: slice) -> NDArray[Any]:
        """(rows, tokens, channels) of consecutive rows of the store."""
        n_cols = self.array.shape[2]
        first, last = int(self.cells.min()) // n_cols, int(self.cells.max()) // n_cols
        values = self.array[rows, first : last + 1]
        flat = values.reshape(len(values), -1, self.n_features)
        places = self.cells - first * n_cols
        if np.array_equal(places, np.arange(flat.shape[1])):
            return flat
        chosen: NDArray[Any] = flat[:, places]
        return chosen


class ClassToken:
    """A site's class token, images by channels, in the float32 of the pooled vectors: a stack of
    one."""

    n_matrices = 1

    def __init__(self, store: Store, site: str) -> None:
        """Of this site.

        Raises:
            MissingInput: the store does not hold the site.
            SiteError: the site has no class token.
        """
        layout = store.layout(site)
        if layout is None or layout.cls is None:
            has = "no tokens" if layout is None else describe_layout(layout)
            raise SiteError(
                f"{store.label}: {site} has no class token: it has {has}; leave --tokens cls out"
            )
        self.store = store
        self.array: LazyArray = store.pooled(site, "cls")

    @property
    def n_features(self) -> int:
        """Its channels."""
        return self.array.shape[-1]

    def part(self, wanted: slice) -> ClassToken:
        """Itself."""
        return self

    def read(self, rows: slice) -> NDArray[Any]:
        """(rows, 1, channels) of consecutive rows of the store."""
        return self.array[rows][:, np.newaxis]
