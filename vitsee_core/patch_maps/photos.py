"""The photographs that maps are drawn beside: the originals, cut to what the models saw of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.recompute import find_rows
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.images.transform import to_mode
from vitsee_core.models.provenance import Pictures, source_of
from vitsee_core.patch_maps.views import Edges, View, union
from vitsee_core.runtime.execution import Execution
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from PIL import Image

    from vitsee_stores import SiteSpec, Store

log = logging.getLogger(__name__)

SHOWN = 4  # images, where none is named
MOST_PIXELS = 640  # along a photograph's longer side in a sidecar


@dataclass(frozen=True)
class Shown:
    """One store's part of a sheet of maps. rows: (images,) those shown, the same images in every
    store. sites: those mapped."""

    store: Store
    view: View
    rows: list[int]
    sites: Sequence[SiteSpec]


def shown_rows(
    store: Store, names: Sequence[str], first: Shown | None, execution: Execution
) -> list[int]:
    """The rows of the images to show.

    Args:
        store: where.
        names: ids or row numbers; the first `SHOWN` of the chosen images by default.
        first: what another store shows: the images of these ids, whatever `names` are.
        execution: which images are chosen.

    Raises:
        VitseeError: the store has no such image.
    """
    if first is not None:
        names = [str(name) for name in first.store.samples.id[first.rows]]
    elif not names:
        return np.flatnonzero(execution.rows(store).mask & store.valid).tolist()[:SHOWN]
    return list(dict.fromkeys(find_rows(store, list(dict.fromkeys(names))).tolist()))


def describe_sheet(parts: Sequence[Shown], data: str | None) -> dict[str, Any]:
    """The notes that a sheet of maps needs beside its table.

    `images`: name -> `frame` (the part of the image that is drawn, what any of the models saw of
    it), `aspect` (the frame's height over its width), `picture` and the `edges` it lies at;
    `grids`: store -> site -> `shape` and, by image, the `edges` of the grid. All edges are top,
    left, bottom, right as shares of an image.
    """
    first = parts[0]
    names = [str(name) for name in first.store.samples.id[first.rows]]
    frames = frames_of(parts)
    photos = photographs(first, frames, data)
    images = {}
    for name, row, frame in zip(names, first.rows, frames, strict=True):
        images[name] = {"frame": list(frame), "aspect": aspect_of(first.view, row, frame)}
        if photo := photos.get(row):
            images[name] |= {"picture": encode(photo.pixels), "edges": list(photo.edges)}
    grids: dict[str, dict[str, Any]] = {}
    for part in parts:
        own = grids[part.store.label] = {}
        for site in part.sites:
            layout = part.store.site(site.name).layout
            assert layout is not None and layout.grid is not None
            edges = [list(part.view.grid_edges(layout, row)) for row in part.rows]
            places = dict(zip(names, edges, strict=True))
            own[site.name] = {"shape": list(layout.grid), "edges": places}
    return {"images": images, "grids": grids}


def frames_of(parts: Sequence[Shown]) -> list[Edges]:
    """The part of each image that is drawn: what any of the models saw of it."""
    n = len(parts[0].rows)
    return [union([part.view.seen(part.rows[k]) for part in parts]) for k in range(n)]


def aspect_of(view: View, row: int, frame: Edges) -> float:
    """The frame's height over its width, in pixels of the image."""
    height, width = view.size(row)
    top, left, bottom, right = frame
    return (bottom - top) * height / ((right - left) * width)


@dataclass(frozen=True)
class Photograph:
    """pixels: (height, width, 3), or without the last axis. edges: where they lie on the image."""

    pixels: NDArray[np.uint8]
    edges: Edges


def photographs(
    part: Shown, frames: Sequence[Edges], data: str | None, most_pixels: int = MOST_PIXELS
) -> Mapping[int, Photograph]:
    """Row -> picture; without those that cannot be read any more, which is logged.

    Args:
        part: whose images.
        frames: of each image the part to show.
        data: where the images are now, by default where extract read them.
        most_pixels: along the longer side of a picture.
    """
    store, view = part.store, part.view
    try:
        if view.sizes is None:
            raise VitseeError("the originals have no known place on the model's input")
        source = source_of(store, data)
        places = {name: k for k, name in enumerate(source.ids)}
        found = {}
        for row, frame in zip(part.rows, frames, strict=True):
            name = str(store.samples.id[row])
            if name not in places:
                raise VitseeError(f"{source.name} no longer has the image {name!r}")
            image, value = source.read(places[name])
            if value != store.samples.hash[row]:
                raise VitseeError(f"{name!r} in {source.name} is another picture now")
            found[row] = _cut(image, frame, most_pixels)
        return found
    except VitseeError as error:
        log.debug("%s: %s", store.label, error)
        inputs = model_inputs(store, part.rows, data)
        return {row: Photograph(own, view.input_edges(row)) for row, own in inputs.items()}


def _cut(image: Image.Image, frame: Edges, most_pixels: int) -> Photograph:
    """The part of an original within a frame, in whole pixels."""
    height, width = image.height, image.width
    top, bottom = math.floor(frame[0] * height), math.ceil(frame[2] * height)
    left, right = math.floor(frame[1] * width), math.ceil(frame[3] * width)
    part = to_mode(image, "RGB").crop((left, top, right, bottom))
    part.thumbnail((most_pixels, most_pixels))
    edges = (top / height, left / width, bottom / height, right / width)
    return Photograph(np.asarray(part), edges)


def model_inputs(
    store: Store, rows: Sequence[int], data: str | None
) -> dict[int, NDArray[np.uint8]]:
    """Row -> (height, width, 3), or without the last axis: the pixels that the model saw; empty
    where these cannot be had any more, which is logged. data: where the images are now."""
    try:
        pixels = Pictures(store, data)(np.array(rows, np.int64))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    last = [one[0] if len(one) == 1 else one.transpose(1, 2, 0) for one in pixels]
    return dict(zip(rows, last, strict=True))
