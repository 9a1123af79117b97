"""The figures of a report: as an address that carries the image, in fewer bytes than its file."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitsee_core.figures.panels import Medium
from vitsee_core.figures.plotting import DPI, figure_bytes, store_order
from vitsee_core.pages.report.materials import picture_beside
from vitsee_core.pages.report.redrawing import Result
from vitsee_core.runtime import registry
from vitsee_core.runtime.machine import n_cores
from vitsee_core.tables.text import visible

PIXELS_AN_INCH = 110  # of a figure on the page
# Of lossless WebP: how hard it is tried. An effort of 50 takes twice the time for a sixth less.
METHOD = 1
EFFORT = 20
STEP = 4
TALLEST = 1.3  # of a tile's picture, height over width


@dataclass(frozen=True)
class Picture:
    """A figure on the page. carried: its address, "" where there is none, or what will be it;
    width, height: in CSS pixels, 0 where the image has its own; trouble: why there is none; digest:
    of the PNG."""

    carried: str | Future[str]
    width: int = 0
    height: int = 0
    trouble: str = ""
    digest: str = ""

    @property
    def address(self) -> str:
        """Where the browser finds the image, once that is packed."""
        if isinstance(self.carried, str):
            return self.carried
        return self.carried.result()


class Addresses:
    """Addresses of PNG images: those of an earlier page, others packed by threads at once, while
    tables are read and further figures drawn."""

    def __init__(self, earlier: Mapping[str, str], tables: Iterable[Path]) -> None:
        """earlier: digest -> address. tables: whose pictures will be asked for."""
        self.earlier = earlier
        self._packed: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(max(1, n_cores() - 1))  # a core draws meanwhile
        for place in map(picture_beside, tables):
            if place is not None and place.suffix.lower() == ".png":
                with suppress(OSError):  # which the page says
                    self.of(place.read_bytes())

    def of(self, png: bytes) -> tuple[str | Future[str], str]:
        """The picture's address and digest."""
        digest = hashlib.sha256(png).hexdigest()
        if digest in self.earlier:
            return self.earlier[digest], digest
        if digest not in self._packed:
            self._packed[digest] = self._pool.submit(lambda: carried(*packed(png)))
        return self._packed[digest], digest

    def close(self) -> None:
        """Pack no more of them."""
        self._pool.shutdown(cancel_futures=True)


def picture(result: Result, addresses: Addresses) -> Picture:
    """The figure beside a table, else drawn from it."""
    place = picture_beside(result.file.path)
    if place is not None and place.suffix.lower() == ".svg":
        return Picture(carried(place.read_bytes(), "image/svg+xml"))
    if place is not None and not _coloured_alike(result):
        place = None
    try:
        png = place.read_bytes() if place else figure_bytes(result.figure(), ".png", DPI)
    except Exception as error:  # a stranger's table may be anything: the page says so
        reason = f"no figure: {type(error).__name__}: {visible(str(error))[:300]}"
        return Picture("", trouble=reason)
    address, digest = addresses.of(png)
    return Picture(address, *_size(png), digest=digest)


TILE = Medium(3.3, 3.0, 6.5, 6)  # a tile's width, from which on letters get smaller


def tile(result: Result, addresses: Addresses) -> Picture | None:
    """The figure that stands for an analysis, drawn for the width of a tile: of the rows that its
    `at_a_glance` chooses, where it has that. None: it cannot be drawn, or would be too tall. Its
    digest is that of the table, so that what an earlier page shows is not drawn again."""
    rows = result.file.table.frame
    stores = store_order(rows) if "store" in rows.columns else []
    key = hashlib.sha256(f"tile {result.file.digest} {stores}".encode()).hexdigest()
    if address := addresses.earlier.get(key):
        return Picture(address, digest=key)
    at_a_glance = result.analysis.at_a_glance
    chosen = result.file.table
    try:
        if at_a_glance is not None:
            with registry.blamed(result.analysis.module):
                chosen = at_a_glance(chosen)
        png = figure_bytes(result.figure(chosen, medium=TILE), ".png", DPI, quick=True)
    except Exception:
        return None  # its figure stands there
    width, height = _size(png)
    if height > TALLEST * width:
        return None
    return Picture(addresses.of(png)[0], digest=key)


def _size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG in CSS pixels."""
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    return round(width * PIXELS_AN_INCH / DPI), round(height * PIXELS_AN_INCH / DPI)


def _coloured_alike(result: Result) -> bool:
    """Whether its stores have the colours that they have in the other figures of the report."""
    rows = result.file.table.frame
    if not {"store", "rel_depth"} <= {*rows.columns} or "row" in rows.columns:
        return True
    stores = rows["store"].unique(maintain_order=True).to_list()
    return store_order(rows)[: len(stores)] == stores


def packed(png: bytes) -> tuple[bytes, str]:
    """A PNG as lossless WebP of colours in steps of `STEP`, where that is smaller, which it is by
    two thirds for most figures: no channel of a pixel moves by more than half a step of 255, white
    stays white, and every browser has shown the format since 2020.

    Returns:
        the image and its media type.
    """
    from PIL import Image, UnidentifiedImageError, features

    if not features.check("webp"):
        return png, "image/png"
    steps = [
        255 if value > 255 - STEP / 2 else round(value / STEP) * STEP
        for value in range(256)
    ]
    found = io.BytesIO()
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            if image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255):
                return png, "image/png"
            kept = image.convert("RGB").point(steps * 3)
        kept.save(found, "WEBP", lossless=True, quality=EFFORT, method=METHOD)
    except (UnidentifiedImageError, OSError, ValueError):
        return png, "image/png"  # as it is: the browser shows what can be shown of it
    smaller = found.tell() < len(png)
    if smaller:
        return (found.getvalue(), "image/webp")
    return (png, "image/png")


def carried(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
