"""The photographs of a page, as addresses that carry them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from vitsee_core.explore.contents import within
from vitsee_core.patch_maps.photos import Photograph, Shown, aspect_of, photographs
from vitsee_core.patch_maps.views import Edges
from vitsee_core.tables.text import visible

LEAST_PIXELS, MOST_PIXELS = 320, 448  # along the longer side of a photograph
SMALL = 96  # pixels: smaller pictures are kept without loss
QUALITY = 82


def describe_images(
    parts: Sequence[Shown], frames: Sequence[Edges], data: str | None
) -> list[dict[str, Any]]:
    """Each image's id, label (-1 for none), aspect, and the address of its picture, "" where
    it cannot be had, with the edges it has on the frame. data: where the images are now."""
    first = parts[0]
    seen = max(max(part.view.input_size) for part in parts)
    photos = photographs(first, frames, data, min(max(seen, LEAST_PIXELS), MOST_PIXELS))
    found = []
    for row, frame in zip(first.rows, frames, strict=True):
        label = int(first.store.samples.label[row])
        about: dict[str, Any] = {
            "id": visible(str(first.store.samples.id[row])),
            "label": label,
            "aspect": round(aspect_of(first.view, row, frame), 4),
            "picture": "",
            "edges": [0, 0, 1, 1],
        }
        if row in photos:
            about |= {"picture": address(photos[row]), "edges": within(photos[row].edges, frame)}
        found.append(about)
    return found


def address(photo: Photograph) -> str:
    from PIL import Image

    image, buffer = Image.fromarray(photo.pixels).convert("RGB"), io.BytesIO()
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    image.save(buffer, kind, quality=QUALITY, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
