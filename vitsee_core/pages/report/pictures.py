"""The figures of a report, as addresses (data URLs) that hold the image in fewer bytes."""

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

PIXELS_PER_INCH = 110  # of a figure on the page
# Settings of lossless WebP. An effort of 50 takes twice the time for a sixth less bytes.
METHOD = 1
EFFORT = 20
STEP = 4  # between the values of a channel, of 255
MAX_TILE_ASPECT = 1.3  # of a tile's picture, height over width


@dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Attributes:
        pending_address: the address, or the future that will be it; "" if there is no figure.
        width: in CSS pixels; 0 if the image says its size.
        height: likewise.
        trouble: why there is no figure.
        digest: of the PNG.
    """

    pending_address: str | Future[str]
    width: int = 0
    height: int = 0
    trouble: str = ""
    digest: str = ""

    @property
    def address(self) -> str:
        """The data URL of the image; waits until that is packed."""
        if isinstance(self.pending_address, str):
            return self.pending_address
        return self.pending_address.result()


class Addresses:
    """The addresses of PNG images: those of an earlier page, and images that threads pack.

    Packing begins at once, so that it goes on while tables are read and further figures drawn.

    Args:
        earlier: digest -> address, of the earlier page.
        tables: their pictures will be needed.
    """

    def __init__(self, earlier: Mapping[str, str], tables: Iterable[Path]) -> None:
        self.earlier = earlier
        self._packed: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(max(1, n_cores() - 1))  # a core draws meanwhile
        for path in map(picture_beside, tables):
            if path is not None and path.suffix.lower() == ".png":
                with suppress(OSError):  # `picture` meets it again, and the page says it
                    self.address_of(path.read_bytes())

    def address_of(self, png: bytes) -> tuple[str | Future[str], str]:
        """Return the address of an image, or its future, and the digest."""
        digest = hashlib.sha256(png).hexdigest()
        if digest in self.earlier:
            return self.earlier[digest], digest
        if digest not in self._packed:
            self._packed[digest] = self._pool.submit(lambda: data_url(*pack_png(png)))
        return self._packed[digest], digest

    def close(self) -> None:
        """Cancel the packing of images that no thread has begun."""
        self._pool.shutdown(cancel_futures=True)


def picture(result: Result, addresses: Addresses) -> Picture:
    """Return the figure beside a table, else one that is drawn from it."""
    path = picture_beside(result.file.path)
    if path is not None and path.suffix.lower() == ".svg":
        return Picture(data_url(path.read_bytes(), "image/svg+xml"))
    try:
        if path is not None and _has_page_colours(result):
            png = path.read_bytes()
        else:
            png = figure_bytes(result.figure(), ".png", DPI)
    except Exception as error:  # a stranger's table may be anything: the page says so
        reason = f"no figure: {type(error).__name__}: {visible(str(error))[:300]}"
        return Picture("", trouble=reason)
    address, digest = addresses.address_of(png)
    width, height = _css_size(png)
    return Picture(address, width, height, digest=digest)


TILE = Medium(3.3, 3.0, 6.5, 6)  # a tile's width, from which on letters get smaller


def tile(result: Result, addresses: Addresses) -> Picture | None:
    """Return the figure that stands for an analysis, drawn for the width of a tile.

    It shows the rows that the analysis' `at_a_glance` chooses, or all. Its digest is that of the
    table, so that what an earlier page shows is not drawn again. None if it cannot be drawn, or
    would be too tall.
    """
    rows = result.file.table.frame
    stores = store_order(rows) if "store" in rows.columns else []
    key = hashlib.sha256(f"tile {result.file.digest} {stores}".encode()).hexdigest()
    earlier_address = addresses.earlier.get(key)
    if earlier_address:
        return Picture(earlier_address, digest=key)
    at_a_glance = result.analysis.at_a_glance
    table = result.file.table
    try:
        if at_a_glance is not None:
            with registry.blamed(result.analysis.module):
                table = at_a_glance(table)
        figure = result.figure(table, medium=TILE)
        png = figure_bytes(figure, ".png", DPI, quick=True)
    except Exception:  # the tile shows the card's figure instead
        return None
    width, height = _css_size(png)
    if height > MAX_TILE_ASPECT * width:
        return None
    address, _ = addresses.address_of(png)
    return Picture(address, digest=key)


def _css_size(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG in CSS pixels."""
    # Two big-endian integers at the beginning of the first chunk, IHDR.
    width = int.from_bytes(png[16:20], "big")
    height = int.from_bytes(png[20:24], "big")
    return round(width * PIXELS_PER_INCH / DPI), round(height * PIXELS_PER_INCH / DPI)


def _has_page_colours(result: Result) -> bool:
    """Return whether the stores' colours in a result's own figure are those of the whole report.

    A figure by rows of the image has no colours of stores.
    """
    rows = result.file.table.frame
    if not {"store", "rel_depth"} <= {*rows.columns} or "row" in rows.columns:
        return True
    stores = rows["store"].unique(maintain_order=True).to_list()
    return store_order(rows)[: len(stores)] == stores


def pack_png(png: bytes) -> tuple[bytes, str]:
    """Return an image in fewer bytes, and its media type.

    That is lossless WebP of colours in steps of `STEP`, smaller by two thirds for most figures: no
    channel of a pixel moves by more than half a step of 255, and white stays white. Every browser
    has shown the format since 2020. The PNG itself is returned if it is smaller, has transparent
    pixels or cannot be read, or Pillow was built without WebP.
    """
    from PIL import Image, UnidentifiedImageError, features

    if not features.check("webp"):
        return png, "image/png"
    levels = [min(round(value / STEP) * STEP, 255) for value in range(256)]
    webp = io.BytesIO()
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            if image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255):
                return png, "image/png"
            coarse = image.convert("RGB").point(levels * 3)
        coarse.save(webp, "WEBP", lossless=True, quality=EFFORT, method=METHOD)
    except (UnidentifiedImageError, OSError, ValueError):
        return png, "image/png"  # the browser shows what can be shown of it
    if webp.tell() < len(png):
        return webp.getvalue(), "image/webp"
    return png, "image/png"


def data_url(data: bytes, media_type: str) -> str:
    """Return an address that holds the data itself, in base64."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
