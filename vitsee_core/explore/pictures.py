"""The photographs of a page, as addresses that carry them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from vitsee_core.explore.contents import within
from vitsee_core.figures.clip_strips import Moment
from vitsee_core.patch_maps.photos import Photograph, Shown, aspect_of, model_inputs, photographs
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
    most = min(max(seen, LEAST_PIXELS), MOST_PIXELS)
    if first.times > 1:
        photos = _of_times(first, data)
    else:
        read = photographs(first, frames, data, most)
        photos = {k: read[row] for k, row in enumerate(first.rows) if row in read}
    found = []
    for k, (row, frame) in enumerate(zip(first.rows, frames, strict=True)):
        label = int(first.store.samples.label[row])
        about: dict[str, Any] = {
            "id": visible(str(first.store.samples.id[row])),
            "label": label,
            "aspect": round(aspect_of(first.view, row, frame), 4),
            "picture": "",
            "edges": [0, 0, 1, 1],
        }
        if first.times > 1:
            about["id"] += f", frame {frames_at(first, k % first.times)}"
        if k in photos:
            about |= {"picture": address(photos[k]), "edges": within(photos[k].edges, frame)}
        found.append(about)
    return found


def _of_times(shown: Shown, data: str | None) -> dict[int, Photograph]:
    """The frames in the middle of each place in time, as the model saw them."""
    inputs = model_inputs(shown.store, shown.once, data)
    found = {}
    for k, row in enumerate(shown.rows):
        if row in inputs:
            time, n = k % shown.times, len(inputs[row])
            middle = (2 * time + 1) * n // (2 * shown.times)
            found[k] = Photograph(inputs[row][middle], shown.view.input_edges(row))
    return found


def frames_at(shown: Shown, time: int) -> str:
    """The sampled frames of a place in time, as `2–3`."""
    clip = shown.store.plan.clip
    return Moment(time, shown.times).frames(shown.times if clip is None else clip.frames)


def address(photo: Photograph) -> str:
    from PIL import Image

    image, buffer = Image.fromarray(photo.pixels).convert("RGB"), io.BytesIO()
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    image.save(buffer, kind, quality=QUALITY, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
