"""Test images beside their labels, predictions and errors, as small pictures for a sidecar."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.analyses.dense_probe.pixels import labelled_pixels
from vitsee_core.images.embedded_pictures import encode
from vitsee_core.images.placement import place
from vitsee_core.masks.class_maps import IGNORED, ClassMap
from vitsee_core.models.provenance import Pictures
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_core.analyses.dense_probe.linear import Head
    from vitsee_core.analyses.dense_probe.scoring import HeadKey
    from vitsee_core.analyses.dense_probe.work import Part

log = logging.getLogger(__name__)

MOST_PIXELS = 320  # along a picture's longer side
WRONG, RIGHT, NOTHING = (204, 51, 17), (221, 221, 221), (255, 255, 255)


def show_images(
    part: Part, key: HeadKey, head: Head, n: int, data: str | None
) -> list[dict[str, Any]]:
    """The first n test images as the model saw them: name, site and pictures (`image` where it can
    be had, `label`, `prediction`, `error`), and the share of pixels that are right.

    Args:
        part: the test images.
        key: of the head.
        head: predicts.
        n: how many.
        data: where the data is now.
    """
    rows = np.flatnonzero(part.truth.mask)[:n]
    try:
        photos: list[Any] = list(Pictures(part.store, data)(rows))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        photos = [None] * len(rows)
    features = part.features[key.of]
    layout = features.layout
    assert layout is not None and layout.grid is not None
    transform = part.store.manifest.transform
    size = tuple(transform["input_size"][1:])
    found = []
    for row, photo in zip(rows.tolist(), photos, strict=True):
        class_map = part.truth.class_map(row)
        placement = place(transform, class_map.shape)
        pixels = labelled_pixels(class_map, placement, layout, size, "input")
        x = features.load(slice(row, row + 1), slice(0, len(features.tokens)))[0]
        prediction = head.predict(x.astype(np.float64).reshape(*layout.grid, -1), pixels)
        counted = pixels.labels != IGNORED
        right = prediction == pixels.labels
        judged = np.where(right[..., None], RIGHT, WRONG)
        judged = np.where(counted[..., None], judged, NOTHING).astype(np.uint8)
        one: dict[str, Any] = {
            "store": part.store.label,
            "image": str(part.store.samples.id[row]),
            "site": key.of,
            "right": float(right[counted].mean()) if counted.any() else None,
            "label": _picture(coloured(pixels.labels)),
            "prediction": _picture(coloured(prediction)),
            "error": _picture(judged),
        }
        if photo is not None:
            rgb = photo.transpose(1, 2, 0).repeat(3 // len(photo), axis=2)
            one["photo"] = _picture(rgb, smooth=True)
        found.append(one)
    return found


def coloured(labels: ClassMap) -> NDArray[np.uint8]:
    """(height, width, 3): the palette of Pascal VOC, whose colours follow from the bits of a class;
    white without a class."""
    numbers, bits = np.arange(IGNORED + 1)[:, None, None], np.arange(8)
    set_bits = numbers >> (3 * bits + np.arange(3)[:, None]) & 1
    palette = (set_bits << (7 - bits)).sum(-1).astype(np.uint8)
    palette[IGNORED] = NOTHING
    found: NDArray[np.uint8] = palette[labels]
    return found


def _picture(pixels: NDArray[np.uint8], *, smooth: bool = False) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail(
        (MOST_PIXELS, MOST_PIXELS),
        Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST,
    )
    return encode(np.asarray(image))
