"""Patch tokens of a site, or of several sites side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.features import SiteFeatures, check_alike, choose_features
from vitsee_core.types import Float32
from vitsee_stores.errors import SiteError, VitseeError

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store
    from vitsee_stores.layout import TokenLayout

_LAST = re.compile(r"last([1-9]\d*)")


def parse_concat(text: str) -> int:
    """How many of the last sites: 4 of `last4`. Raises VitseeError: another word."""
    if (found := _LAST.fullmatch(text)) is None:
        raise VitseeError(f"{text!r}; expected lastN, like last4")
    return int(found[1])


@dataclass(frozen=True)
class Patches:
    """The patch tokens that one probe reads: of a site, or of several with their channels side by
    side. The place in the model is that of the last one, see `tables.columns.Measured`."""

    sites: tuple[SiteSpec, ...]
    parts: tuple[SiteFeatures, ...]

    @classmethod
    def of(cls, store: Store, sites: Sequence[SiteSpec]) -> Patches:
        """The patch tokens of the sites with these names in a store.

        Raises:
            SiteError: no such site.
            MissingInput: a site is stored pooled only.
        """
        parts = [choose_features(store, site, "patches", partial=True) for site in sites]
        return cls(tuple(sites), tuple(parts))

    @property
    def name(self) -> str:
        return "+".join(site.name for site in self.sites)

    @property
    def block(self) -> str | None:
        return self.sites[-1].block

    @property
    def depth(self) -> int:
        return self.sites[-1].depth

    @property
    def rel_depth(self) -> float:
        return self.sites[-1].rel_depth

    @property
    def layout(self) -> TokenLayout:
        layout = self.parts[-1].layout
        assert layout is not None
        return layout

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        assert self.layout.grid is not None
        return self.layout.grid

    @cached_property
    def dim(self) -> int:
        return sum(part.dim for part in self.parts)

    @property
    def slab_bytes(self) -> int:
        """The bytes that a slab takes while it is read."""
        return sum(part.slab_bytes for part in self.parts)

    def of_slab(self, slab: Slab) -> Float32:
        """(images, cells, dim) of a slab's images that count.

        Raises:
            VitseeError: a number is not finite.
        """
        found = [part.of_slab(slab, slice(0, len(part.tokens))) for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=-1)

    def load(self, row: int) -> NDArray[Any]:
        """Read the (cells, dim) tokens of a row of the store, in the stored type."""
        rows = slice(row, row + 1)
        found = [part.load(rows, slice(0, len(part.tokens)))[0] for part in self.parts]
        return np.concatenate(found, axis=-1)

    def check_alike(self, others: Patches) -> None:
        """Refuse other tokens or channels in the test store: raises StoreMismatch."""
        for ours, theirs in zip(self.parts, others.parts, strict=True):
            check_alike(ours, theirs)


def probed(store: Store, sites: Sequence[SiteSpec], concat: int | None) -> list[Patches]:
    """Each site alone, or the last `concat` together.

    Raises:
        SiteError: there are fewer, or their grids differ.
        MissingInput: a site is stored pooled only.
    """
    if concat is None:
        return [Patches.of(store, [site]) for site in sites]
    if len(sites) < concat:
        raise SiteError(
            f"--concat last{concat}: {store.label} has {len(sites)} of the chosen sites with a "
            "grid; expected as many at least (see --sites)"
        )
    last = sites[-concat:]
    for site in last:
        if _place(site.layout) != _place(last[-1].layout):
            raise SiteError(
                f"--concat last{concat}: the grids of {site.name} and {last[-1].name} differ "
                f"({_place(site.layout)} and {_place(last[-1].layout)}); expected one grid, "
                "choose with --sites"
            )
    return [Patches.of(store, last)]


def _place(layout: TokenLayout | None) -> str:
    assert layout is not None
    return f"{layout.grid} every {layout.stride_px} px"
