"""Test images beside their labels, predictions and errors, as small pictures for a sidecar."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.analyses.dense_probe.depth_errors import CLOSE
from vitsee_core.analyses.dense_probe.pixels import Labels, Pixels, has_label, labelled_pixels
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
    transform = part.store.manifest.transform
    size = tuple(transform["input_size"][1:])
    found = []
    for row, photo in zip(rows.tolist(), photos, strict=True):
        truth = part.truth.labels(row)
        placement = place(transform, truth.shape)
        pixels = labelled_pixels(truth, placement, features.layout, size, "input")
        x = features.load(slice(row, row + 1))[0].astype(np.float64)
        prediction = head.predict(x.reshape(*features.grid, -1), pixels)
        one: dict[str, Any] = {
            "store": part.store.label,
            "image": str(part.store.samples.id[row]),
            "site": key.of,
            **_judged(prediction, pixels),
        }
        if photo is not None:
            rgb = photo.transpose(1, 2, 0).repeat(3 // len(photo), axis=2)
            one["photo"] = _picture(rgb, smooth=True)
        found.append(one)
    return found


def _judged(prediction: Labels, pixels: Pixels) -> dict[str, Any]:
    """Pictures of label, prediction and error, and the share of pixels that are right: of the
    class, or of a depth within a quarter."""
    labels, counted = pixels.labels, has_label(pixels.labels)
    if not pixels.of_depth:
        right = prediction == labels
        off = np.where(right, 0.0, 1.0)
        drawn = [coloured(labels), coloured(prediction)]
    else:
        with np.errstate(invalid="ignore"):
            off = np.clip(np.abs(prediction - labels) / labels, 0, 1)
            right = np.maximum(prediction / labels, labels / prediction) < CLOSE
        top = float(np.nanmax(labels)) if counted.any() else 1.0
        drawn = [depth_colours(own, top) for own in (labels, prediction)]
    off = np.where(counted, off, 0.0)[..., None]
    error = (1 - off) * np.array(RIGHT) + off * np.array(WRONG)
    error = np.where(counted[..., None], error, NOTHING).astype(np.uint8)
    pictures = zip(("label", "prediction", "error"), [*drawn, error], strict=True)
    return {
        "right": float(right[counted].mean()) if counted.any() else None,
        **{name: _picture(own) for name, own in pictures},
    }


def depth_colours(depths: Labels, top: float) -> NDArray[np.uint8]:
    """(height, width, 3): from near (dark) to `top` metres (light); white without a depth."""
    from matplotlib import colormaps

    there = np.isfinite(depths)
    share = np.where(there, depths, 0) / top
    found: NDArray[np.uint8] = colormaps["viridis"](share, bytes=True)[..., :3].copy()
    found[~there] = NOTHING
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
