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

SHOWN = 4  # images that are shown where none is named
MAX_PIXELS = 640  # along a photograph's longer side in a sidecar
FRAME_PIXELS = 160  # along the longer side of a clip's frame in a sidecar
MAX_FRAMES = 13  # frames of a clip that are shown


@dataclass(frozen=True)
class SheetImages:
    """The images that a sheet of maps shows, in one store.

    Attributes:
        store: the store.
        view: how its model saw the images.
        rows: the images' rows, in the same order in every store.
        sites: the sites that are mapped.
        times: number of times of each clip on a page that shows them one by one: each row is
            repeated so often. 1 for images, and for everything else.
    """

    store: Store
    view: View
    rows: list[int]
    sites: Sequence[SiteSpec]
    times: int = 1

    @property
    def unique_rows(self) -> list[int]:
        """The rows without repetitions for the times of a clip."""
        return self.rows[:: self.times]


def shown_rows(
    store: Store, names: Sequence[str], first: SheetImages | None, execution: Execution
) -> list[int]:
    """Return the rows of the images to show.

    Args:
        store: an open store.
        names: ids or row numbers; by default the first `SHOWN` of the chosen images.
        first: what another store shows; if given, the same images are shown, whatever `names` are.
        execution: says which images are chosen.

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
    """Return the notes that a sheet of maps needs beside its table.

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
    """Return store -> site -> `shape` of its grid, and its `edges` on each image."""
    grids: dict[str, dict[str, Any]] = {}
    for part in parts:
        store_grids: dict[str, Any] = {}
        grids[part.store.label] = store_grids
        for site in part.sites:
            layout = part.store.site(site.name).layout
            assert layout is not None and layout.grid is not None
            edges = [list(part.view.grid_edges(layout, row)) for row in part.rows]
            edges_of_image = dict(zip(names, edges, strict=True))
            store_grids[site.name] = {"shape": list(layout.body), "edges": edges_of_image}
    return grids


def describe_clips(
    store: Store,
    rows: Sequence[int],
    layouts: Sequence[TokenLayout | None],
    data: str | None,
    times: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the notes that strips of clips need beside their table: `clip` and `images`.

    `clip`: how many `frames` were sampled and in which `time`; `shown`: places in time of the
    coarsest of the grids, `of` them. `images`: clip -> `pictures`, sampled frame -> PNG in base64,
    those in the middle of the places shown, as the model saw them (none where they cannot be had
    any more, which is logged); `seconds` between sampled frames, where the store knows them.

    Args:
        store: a store of clips.
        rows: the clips' rows.
        layouts: tokens of all sites that are drawn.
        data: where the clips are now, by default where extract read them.
        times: times that are shown in any case, as shares of the sampled frames.
    """
    clip = store.plan.clip
    assert clip is not None
    # Spans of time of the coarsest grid: all grids have a cell at each.
    n_spans = min(
        layout.frames for layout in layouts if layout is not None and layout.frames
    )
    required = {min(int(share * n_spans), n_spans - 1) for share in times}
    shown = evenly_with(range(n_spans), MAX_FRAMES, required)
    # The sampled frame in the middle of each span, (2 k + 1) / (2 n_spans) of the time.
    frames = {(2 * span + 1) * clip.frames // (2 * n_spans) for span in shown}
    inputs = model_inputs(store, rows, data)
    seconds = store.array("seconds") if store.has("seconds") else None
    images: dict[str, dict[str, Any]] = {}
    for row in rows:
        clip_notes: dict[str, Any] = {}
        images[str(store.samples.id[row])] = clip_notes
        if row in inputs:
            pictures = {str(k): encode(_small(inputs[row][k])) for k in sorted(frames)}
            clip_notes["pictures"] = pictures
        if seconds is not None:
            step = float(seconds[row])
            if np.isfinite(step):
                clip_notes["seconds"] = step
    time_notes = {**frames_seen(store), "shown": shown, "of": n_spans}
    return {"clip": time_notes, "images": images}


def frames_seen(store: Store) -> dict[str, Any]:
    """Return the number of `frames` that a store of clips samples, and their order, `time`.

    For the notes of tables with a column `frame`; empty for a store of images.
    """
    clip = store.plan.clip
    if clip is None:
        return {}
    return {"frames": clip.frames, "time": clip.time}


def evenly_with(items: Sequence[int], limit: int, required: Collection[int]) -> list[int]:
    """Return evenly spaced items, the required ones among them.

    Each required item takes the place of the nearest one that is not required.

    Args:
        items: numbers in order.
        limit: largest number of items that are returned.
        required: items that must be among them.
    """
    n = min(len(items), limit)
    indices = np.linspace(0, len(items) - 1, n).round().astype(int)
    chosen = [items[k] for k in indices]
    for item in sorted(required):
        if item in items and item not in chosen:
            free = [k for k, other in enumerate(chosen) if other not in required]
            if free:
                chosen[min(free, key=lambda k: abs(chosen[k] - item))] = item
    return sorted(chosen)


def _small(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a frame with at most `FRAME_PIXELS` along its longer side."""
    from PIL import Image

    if max(pixels.shape[:2]) <= FRAME_PIXELS:
        return pixels
    image = Image.fromarray(pixels)
    image.thumbnail((FRAME_PIXELS, FRAME_PIXELS))
    return np.asarray(image)


def frames_of(sheets: Sequence[SheetImages]) -> list[Edges]:
    """Return the part of each image that is drawn: what any of the models saw of it."""
    frames = []
    for k in range(len(sheets[0].rows)):
        frames.append(union([sheet.view.seen(sheet.rows[k]) for sheet in sheets]))
    return frames


def aspect_of(view: View, row: int, frame: Edges) -> float:
    """Return the height over the width of a part of an image, in pixels of the image.

    Args:
        view: how a store's model saw its images.
        row: the image's row.
        frame: edges of the part, as shares of the image.
    """
    height, width = view.size(row)
    top, left, bottom, right = frame
    return (bottom - top) * height / ((right - left) * width)


@dataclass(frozen=True)
class Photograph:
    """A picture of an image, or of a part of it.

    Attributes:
        pixels: (height, width, 3), or (height, width) in grey.
        edges: edges of the picture, as shares of the image.
    """

    pixels: NDArray[np.uint8]
    edges: Edges


def photographs(
    sheet: SheetImages,
    frames: Sequence[Edges],
    data: str | None,
    max_pixels: int = MAX_PIXELS,
) -> Mapping[int, Photograph]:
    """Return row -> picture of the images.

    The pictures are the originals; if any of them cannot be read any more, or is another one now,
    they are the model's inputs, and none at all if these cannot be had either, which is logged.

    Args:
        sheet: the images.
        frames: edges of the part of each image to show.
        data: where the images are now, by default where extract read them.
        max_pixels: largest number of pixels along the longer side of a picture.
    """
    store = sheet.store
    view = sheet.view
    try:
        if view.sizes is None:
            raise VitseeError("the originals have no known place on the model's input")
        source = source_of(store, data)
        index_of = {name: k for k, name in enumerate(source.ids)}
        pictures = {}
        for row, frame in zip(sheet.rows, frames, strict=True):
            name = str(store.samples.id[row])
            if name not in index_of:
                raise VitseeError(f"{source.name} no longer has the image {name!r}")
            image, content_hash = source.read(index_of[name])
            if content_hash != store.samples.hash[row]:
                raise VitseeError(f"{name!r} in {source.name} is another picture now")
            pictures[row] = _cut(image, frame, max_pixels)
        return pictures
    except VitseeError as error:
        log.debug("%s: %s", store.label, error)
        inputs = model_inputs(store, sheet.rows, data)
        return {
            row: Photograph(pixels, view.input_edges(row))
            for row, pixels in inputs.items()
        }


def _cut(image: Image.Image, frame: Edges, max_pixels: int) -> Photograph:
    """Return the part of an original within a frame, widened to whole pixels."""
    height = image.height
    width = image.width
    top = math.floor(frame[0] * height)
    bottom = math.ceil(frame[2] * height)
    left = math.floor(frame[1] * width)
    right = math.ceil(frame[3] * width)
    picture = to_mode(image, "RGB").crop((left, top, right, bottom))
    picture.thumbnail((max_pixels, max_pixels))
    edges = (top / height, left / width, bottom / height, right / width)
    return Photograph(np.asarray(picture), edges)


def model_inputs(
    store: Store, rows: Sequence[int], data: str | None
) -> dict[int, NDArray[np.uint8]]:
    """Return the pixels that the model saw; empty if they cannot be had, which is logged.

    Args:
        store: an open store.
        rows: rows of the images.
        data: where the images are now, by default where extract read them.

    Returns:
        Row -> (height, width, 3), in grey without the last axis; of clips (frames, height, ...).
    """
    try:
        pixels = Pictures(store, data)(np.array(rows, np.int64))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    return dict(zip(rows, map(_channels_last, pixels), strict=True))


def clip_frames(
    store: Store, keys: Collection[tuple[int, int]], data: str | None
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """Return single frames of many clips, of which one is in memory at a time.

    Args:
        store: a store of clips.
        keys: (row, sampled frame) of each frame.
        data: where the clips are now, by default where extract read them.

    Returns:
        (row, sampled frame) -> pixels, as `model_inputs` gives them; empty if they cannot be had,
        which is logged.
    """
    pictures = Pictures(store, data)
    frames: dict[tuple[int, int], NDArray[np.uint8]] = {}
    try:
        for row in sorted({row for row, _ in keys}):
            pixels = _channels_last(pictures(np.array([row]))[0])
            for key_row, k in keys:
                if key_row == row:
                    # A copy: a view would keep the whole clip in memory.
                    frames[row, k] = pixels[k].copy()
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        return {}
    return frames


def _channels_last(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pixels (..., channels, height, width) as (..., height, width, channels).

    A single channel is left out.
    """
    if pixels.shape[-3] == 1:
        return pixels[..., 0, :, :]
    return np.moveaxis(pixels, -3, -1)
