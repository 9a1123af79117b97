"""The photographs that maps are drawn beside: the originals, cut to what the models saw of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.attention.recompute import find_rows
from vitsee_core.figures.patch_maps.views import Edges, View, union
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.images.transform import to_mode
from vitsee_core.models.provenance import Pictures, source_of
from vitsee_core.runtime.execution import Execution
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from PIL import Image

    from vitsee_stores import SiteSpec, Store
    from vitsee_stores.layout import TokenLayout

log = logging.getLogger(__name__)

SHOWN = 4  # images, where none is named
MOST_PIXELS = 640  # along a photograph's longer side in a sidecar
FRAME_PIXELS = 160  # the same of a frame of a clip
MOST_FRAMES = 13  # of a clip that are shown


@dataclass(frozen=True)
class SheetImages:
    """One store's part of a sheet of maps. rows: (images,) those shown, the same images in every
    store. sites: those mapped. times: of a page that shows the places in time of clips one by one,
    how many there are: each row stands for so many in a row; 1 for everything else."""

    store: Store
    view: View
    rows: list[int]
    sites: Sequence[SiteSpec]
    times: int = 1

    @property
    def once(self) -> list[int]:
        """The rows, each once."""
        return self.rows[:: self.times]


def shown_rows(
    store: Store, names: Sequence[str], first: SheetImages | None, execution: Execution
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


def describe_sheet(
    parts: Sequence[SheetImages], data: str | None, times: Sequence[float] = ()
) -> dict[str, Any]:
    """The notes that a sheet of maps needs beside its table.

    `images`: name -> `frame` (the part of the image that is drawn, what any of the models saw of
    it), `aspect` (the frame's height over its width), `picture` and the `edges` it lies at;
    `grids`: store -> site -> `shape` and, by image, the `edges` of the grid. All edges are top,
    left, bottom, right as shares of an image. Of clips see `describe_clips`, too.
    """
    first = parts[0]
    names = [str(name) for name in first.store.samples.id[first.rows]]
    frames = frames_of(parts)
    if first.store.plan.clip is not None:
        layouts = [
            part.store.site(site.name).layout for part in parts for site in part.sites
        ]
        clips = describe_clips(first.store, first.rows, layouts, data, times)
        for name, row, frame in zip(names, first.rows, frames, strict=True):
            about = {"frame": list(frame), "aspect": aspect_of(first.view, row, frame)}
            clips["images"][name] |= about | {"edges": list(first.view.input_edges(row))}
        return {**clips, "grids": _grids(parts, names)}
    photos = photographs(first, frames, data)
    images = {}
    for name, row, frame in zip(names, first.rows, frames, strict=True):
        images[name] = {"frame": list(frame), "aspect": aspect_of(first.view, row, frame)}
        if photo := photos.get(row):
            images[name] |= {"picture": encode(photo.pixels), "edges": list(photo.edges)}
    return {"images": images, "grids": _grids(parts, names)}


def _grids(
    parts: Sequence[SheetImages], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    grids: dict[str, dict[str, Any]] = {}
    for part in parts:
        own = grids[part.store.label] = {}
        for site in part.sites:
            layout = part.store.site(site.name).layout
            assert layout is not None and layout.grid is not None
            edges = [list(part.view.grid_edges(layout, row)) for row in part.rows]
            places = dict(zip(names, edges, strict=True))
            own[site.name] = {"shape": list(layout.body), "edges": places}
    return grids


def describe_clips(
    store: Store,
    rows: Sequence[int],
    layouts: Sequence[TokenLayout | None],
    data: str | None,
    times: Sequence[float] = (),
) -> dict[str, Any]:
    """The notes that strips of clips need beside their table: `clip` and `images`.

    `clip`: how many `frames` were sampled and in which `time`; `shown`: places in time of the
    coarsest of the grids, `of` them. `images`: clip -> `pictures`, sampled frame -> PNG in base64,
    those in the middle of the places shown, as the model saw them (none where they cannot be had
    any more, which is logged); `seconds` between sampled frames, where the store knows them.

    Args:
        store: of clips.
        rows: of it.
        layouts: of all that is drawn.
        data: where the clips are now, by default where extract read them.
        times: shares of the sampled frames whose places are shown in any case.
    """
    clip = store.plan.clip
    assert clip is not None
    of = min(layout.frames for layout in layouts if layout is not None and layout.frames)
    kept = {min(int(share * of), of - 1) for share in times}
    shown = evenly_with(range(of), MOST_FRAMES, kept)
    frames = {(2 * cell + 1) * clip.frames // (2 * of) for cell in shown}
    inputs = model_inputs(store, rows, data)
    seconds = store.array("seconds") if store.has("seconds") else None
    images: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = images[str(store.samples.id[row])] = {}
        if row in inputs:
            pictures = {str(k): encode(_small(inputs[row][k])) for k in sorted(frames)}
            own["pictures"] = pictures
        if seconds is not None and np.isfinite(step := float(seconds[row])):
            own["seconds"] = step
    return {"clip": {**frames_seen(store), "shown": shown, "of": of}, "images": images}


def frames_seen(store: Store) -> dict[str, Any]:
    """The number of `frames` that a store of clips samples, and in which `time`: for the notes of
    tables with a column `frame`; nothing of images."""
    clip = store.plan.clip
    if clip is None:
        return {}
    return {"frames": clip.frames, "time": clip.time}


def evenly_with(items: Sequence[int], most: int, kept: Collection[int]) -> list[int]:
    """At most so many of the items, evenly spaced with the first and the last, and those that must
    be kept in place of their nearest ones."""
    places = np.linspace(0, len(items) - 1, min(len(items), most)).round().astype(int)
    chosen = [items[k] for k in places]
    for item in sorted(kept):
        if item in items and item not in chosen:
            free = [k for k, other in enumerate(chosen) if other not in kept]
            if free:
                chosen[min(free, key=lambda k: abs(chosen[k] - item))] = item
    return sorted(chosen)


def _small(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame with at most `FRAME_PIXELS` along its longer side."""
    from PIL import Image

    if max(pixels.shape[:2]) <= FRAME_PIXELS:
        return pixels
    image = Image.fromarray(pixels)
    image.thumbnail((FRAME_PIXELS, FRAME_PIXELS))
    return np.asarray(image)


def frames_of(parts: Sequence[SheetImages]) -> list[Edges]:
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
    part: SheetImages,
    frames: Sequence[Edges],
    data: str | None,
    most_pixels: int = MOST_PIXELS,
) -> Mapping[int, Photograph]:
    """Row -> picture; without those that cannot be read any more, which is logged.

    Args:
        part: whose images.
        frames: of each image the part to show.
        data: where the images are now, by default where extract read them.
        most_pixels: along the longer side of a picture.
    """
    store = part.store
    view = part.view
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
        return {
            row: Photograph(own, view.input_edges(row)) for row, own in inputs.items()
        }


def _cut(image: Image.Image, frame: Edges, most_pixels: int) -> Photograph:
    """The part of an original within a frame, in whole pixels."""
    height = image.height
    width = image.width
    top = math.floor(frame[0] * height)
    bottom = math.ceil(frame[2] * height)
    left = math.floor(frame[1] * width)
    right = math.ceil(frame[3] * width)
    part = to_mode(image, "RGB").crop((left, top, right, bottom))
    part.thumbnail((most_pixels, most_pixels))
    edges = (top / height, left / width, bottom / height, right / width)
    return Photograph(np.asarray(part), edges)


def model_inputs(
    store: Store, rows: Sequence[int], data: str | None
) -> dict[int, NDArray[np.uint8]]:
    """Row -> (height, width, 3), or without the last axis, of clips (frames, height, width, 3): the
    pixels that the model saw; empty where these cannot be had any more, which is logged. data:
    where the images are now."""
    try:
        pixels = Pictures(store, data)(np.array(rows, np.int64))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    return dict(zip(rows, map(_channels_last, pixels), strict=True))


def clip_frames(
    store: Store, wanted: Collection[tuple[int, int]], data: str | None
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """(row, sampled frame) -> the frame's pixels as `model_inputs` gives them, of many clips: one
    of them is in memory at a time."""
    pictures = Pictures(store, data)
    found: dict[tuple[int, int], NDArray[np.uint8]] = {}
    try:
        for row in sorted({row for row, _ in wanted}):
            pixels = _channels_last(pictures(np.array([row]))[0])
            found |= {(row, k): pixels[k].copy() for other, k in wanted if other == row}
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    return found


def _channels_last(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixels with channels behind rows and columns, or without the one channel."""
    if pixels.shape[-3] == 1:
        return pixels[..., 0, :, :]
    return np.moveaxis(pixels, -3, -1)
