"""The figures of a report: as an address that carries the image, in fewer bytes than its file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from vitsee_core.plotting import DPI, figure_bytes
from vitsee_core.redrawing import Result
from vitsee_core.report.materials import picture_of
from vitsee_core.text import visible

PIXELS_AN_INCH = 110  # of a figure on the page
# Of lossless WebP: how hard it is tried. Slower settings gain some percent more.
METHOD, EFFORT = 2, 50
STEP = 4


@dataclass(frozen=True)
class Picture:
    """A figure on the page. address: "" where there is none; width, height: in CSS pixels, 0 where
    the image has its own; trouble: why there is none."""

    address: str
    width: int = 0
    height: int = 0
    trouble: str = ""


def picture(result: Result) -> Picture:
    """The figure beside a table, else drawn from it."""
    place = picture_of(result)
    if place is not None and place.suffix.lower() == ".svg":
        return Picture(carried(place.read_bytes(), "image/svg+xml"))
    try:
        png = place.read_bytes() if place else figure_bytes(result.figure(), ".png", DPI)
    except Exception as error:  # a stranger's table may be anything: the page says so
        reason = f"no figure: {type(error).__name__}: {visible(str(error))[:300]}"
        return Picture("", trouble=reason)
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    size = (round(width * PIXELS_AN_INCH / DPI), round(height * PIXELS_AN_INCH / DPI))
    return Picture(carried(*packed(png)), *size)


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
    steps = [255 if value > 255 - STEP / 2 else round(value / STEP) * STEP for value in range(256)]
    found = io.BytesIO()
    try:
        with Image.open(io.BytesIO(png)) as image:
            if image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255):
                return png, "image/png"
            kept = image.convert("RGB").point(steps * 3)
        kept.save(found, "WEBP", lossless=True, quality=EFFORT, method=METHOD)
    except (UnidentifiedImageError, OSError, ValueError):
        return png, "image/png"  # as it is: the browser shows what can be shown of it
    smaller = found.tell() < len(png)
    return (found.getvalue(), "image/webp") if smaller else (png, "image/png")


def carried(data: bytes, kind: str) -> str:
    """An address that is the data itself."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
