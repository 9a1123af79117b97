"""Patches named by users: a cell of the grid, a pixel of the photograph, or its middle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.patch_maps.views import View
from vitsee_stores.errors import SiteError, VitseeError
from vitsee_stores.token_selection import TokenSelection, parse_cell

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Store

MIDDLE = "middle"
EXPECTED = (
    "ROW,COL of the token grid (3,5), X,Ypx of the original image (120,80px), or "
    f"{MIDDLE} of what the model saw"
)
_PIXEL = re.compile(r"([0-9]+) *, *([0-9]+) *px")


@dataclass(frozen=True)
class Spot:
    """A patch named by a user; without cell and pixel the middle."""

    text: str  # as given
    cell: tuple[int, int] | None = None  # (row, col) of the grid
    pixel: tuple[int, int] | None = None  # (x, y) of the original image

    @classmethod
    def parse(cls, text: str | tuple[int, int]) -> Spot:
        """Parse `ROW,COL` or (row, col), `X,Ypx`, or `middle`.

        Raises:
            VitseeError: none of them.
        """
        if isinstance(text, tuple):
            return cls(f"{text[0]},{text[1]}", cell=text)
        if (cell := parse_cell(text)) is not None:
            return cls(f"{cell[0]},{cell[1]}", cell=cell)
        if match := _PIXEL.fullmatch(text):
            x, y = int(match[1]), int(match[2])
            return cls(f"{x},{y}px", pixel=(x, y))
        if text != MIDDLE:
            raise VitseeError(f"no patch {text!r}; expected {EXPECTED}")
        return cls(text)

    def place(self, store: Store, site: SiteSpec, view: View, row: int) -> tuple[float, float]:
        """(y, x) on an image, as fractions of it; the middle of a cell.

        Raises:
            SiteError: the grid has no such cell.
            VitseeError: the image has no such pixel.
        """
        layout = store.site(site.name).layout
        assert layout is not None
        if self.cell is not None:
            (token,) = TokenSelection.parse(self.cell).require(
                layout, f"{store.label}: {site.name}"
            )
            y, x = view.centres(layout, row)[token - layout.n_prefix]
            return float(y), float(x)
        if self.pixel is not None:
            height, width = view.size(row)
            if self.pixel[0] >= width or self.pixel[1] >= height:
                name = str(store.samples.id[row])
                raise VitseeError(
                    f"{name!r} of {store.label} has {width} x {height} pixels, counted from 0: no "
                    f"pixel {self.text.removesuffix('px')}"
                )
            return (self.pixel[1] + 0.5) / height, (self.pixel[0] + 0.5) / width
        top, left, bottom, right = view.seen(row)
        return (top + bottom) / 2, (left + right) / 2

    def index(self, store: Store, site: SiteSpec, view: View, row: int) -> int:
        """The patch that contains it, counted row by row.

        Raises:
            SiteError, VitseeError: as `place`; or no patch of the image is there.
        """
        layout = store.site(site.name).layout
        assert layout is not None
        at = np.array([self.place(store, site, view, row)])
        cell = int(view.cells_at(layout, row, at)[0])
        if cell < 0 or not view.on_image(layout, np.array([row]))[0, cell]:
            name = str(store.samples.id[row])
            raise SiteError(
                f"{site.name} of {store.label} has no patch of {name!r} at {self.text}: it lies "
                "outside of what the model saw, or beside the image"
            )
        return cell
