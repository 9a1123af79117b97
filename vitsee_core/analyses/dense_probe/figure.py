"""The figure of dense probes, and the small pictures of test images that it shows.

The pictures are a table's notes: a photo beside its label, prediction and error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_core.analyses.dense_probe.heads import Head, HeadKey
from vitsee_core.analyses.dense_probe.metrics import (
    CLOSE,
    METRICS,
)
from vitsee_core.analyses.dense_probe.pixels import (
    Labels,
    Pixels,
    has_label,
    labelled_pixels,
)
from vitsee_core.analyses.dense_probe.split_images import SplitImages
from vitsee_core.figures.curve_panels import CurveGrid, of_metrics
from vitsee_core.figures.depth_curves import add_curve_legend, draw_depth_curves
from vitsee_core.figures.panels import (
    PanelGrid,
    em,
    grow,
    map_axes,
    map_title,
    note_below,
    stack,
)
from vitsee_core.figures.plotting import styled
from vitsee_core.images.embedded_pictures import decode, encode
from vitsee_core.images.placement import place
from vitsee_core.models.provenance import Pictures
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import site_words
from vitsee_core.truth.masks.png_maps import IGNORED, ClassMap
from vitsee_core.types import pl
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

# Columns that all rows of one probe share.
PROBE_COLUMNS = ("store", "site", "metric", "baseline")
# Settings of which a table may report several values, in the columns' order.
VARIED = ("l2_relative", "k")
PICTURES = ("photo", "label", "prediction", "error")
PICTURE_WIDTH = 9.0  # ems
LETTER_WIDTH = 0.56  # ems that a letter of the caption takes
MAX_PIXELS = 320  # along a picture's longer side
# RGB of a pixel whose prediction is wrong or right, and of one that does not count.
WRONG = (204, 51, 17)
RIGHT = (221, 221, 221)
NO_LABEL = (255, 255, 255)


@styled
def plot(table: Table) -> Figure:
    """Draw a panel per metric against relative depth.

    The 95 % interval is a band, baselines are dashed. Below, if they were asked for, are
    test images beside label, prediction and error.
    """
    rows = table.frame.filter(pl.col("metric").is_in(METRICS))
    metrics = [metric for metric in METRICS if metric in rows["metric"]]
    examples: Sequence[Mapping[str, Any]] = table.notes.get("shown", ())
    curve_grid = CurveGrid.of(len(metrics), rows)
    picture_grids = [
        PanelGrid(len(PICTURES), PICTURE_WIDTH, PICTURE_WIDTH + 2.2, PICTURE_WIDTH)
        for _ in examples
    ]
    figure, subfigures = stack(curve_grid, *picture_grids)
    panels = curve_grid.panels(subfigures[0], of_metrics(rows, metrics))
    for axes, _, panel_rows in panels:
        draw_depth_curves(axes, panel_rows, by=_varied_settings(rows), among=rows)
        axes.set_ylim(bottom=0)
    curve_grid.finish(panels)
    add_curve_legend(figure, [axes for axes, *_ in panels])
    for subfigure, grid, example in zip(
        subfigures[1:], picture_grids, examples, strict=True
    ):
        _draw_example(subfigure, grid, example)
    caption = _caption(table.notes, float(figure.get_figwidth()) / em())
    if caption:
        note_below(figure, caption)
        grow(figure, em(1.3 * caption.count("\n")))
    return figure


def _draw_example(subfigure: Any, grid: PanelGrid, example: Mapping[str, Any]) -> None:
    """Draw the pictures of one test image side by side."""
    right = example.get("right")
    titles = {
        "photo": str(example["image"]),
        "label": "label",
        "prediction": site_words(str(example["site"])),
        "error": "no pixel counts" if right is None else f"{right:.0%} right",
    }
    for axes, kind in zip(grid.axes(subfigure), PICTURES, strict=True):
        if kind in example:
            picture = decode(example[kind])
            axes.imshow(picture, interpolation="nearest", origin="upper")
        map_axes(axes)
        map_title(axes, grid, titles[kind])


def _varied_settings(rows: pl.DataFrame) -> list[str]:
    """Return the columns, among l2_relative and k, in which several rows of one probe
    differ."""
    probe_columns = [name for name in PROBE_COLUMNS if name in rows.columns]
    settings = [name for name in rows.columns if name in VARIED]
    n_values = rows.group_by(probe_columns).agg(pl.col(settings).drop_nulls().n_unique())
    return [name for name in settings if (n_values[name] > 1).any()]


def _caption(notes: Mapping[str, Any], width: float) -> str:
    """Return the text below the figure; "" for none.

    It names the protocol and the points in which the run differs from it. width: in ems.
    """
    lines = []
    protocol = notes.get("protocol")
    if protocol:
        unlike = "; ".join(protocol["differences"])
        n_letters = int(width / LETTER_WIDTH)
        lines += wrap(f"after {protocol['preset']}, but: {unlike}", n_letters)
    if notes.get("shown"):
        colours = "classes; red: wrong pixels; white: pixels without a class"
        if "pixels with a depth" in notes.get("truth", {}):
            colours = (
                "depth, lighter is farther; red: off by the depth itself; white: no depth"
            )
        lines.append(f"colours: {colours}")
    return "\n".join(lines)


def picture_examples(
    images: SplitImages, key: HeadKey, head: Head, n: int, data: str | None
) -> list[dict[str, Any]]:
    """Return pictures of the first n test images, as the model saw them.

    Args:
        images: the test images.
        key: which head predicts.
        head: the head.
        n: number of images.
        data: where the data is now; None for where it was.

    Returns:
        For each image its store, name and site, the pictures `photo` (where it can be
        had), `label`, `prediction` and `error`, and in `right` the share of pixels that
        are right.
    """
    rows = np.flatnonzero(images.truth.mask)[:n]
    try:
        photos: list[Any] = list(Pictures(images.store, data)(rows))
    except VitseeError as error:
        log.warning("the figure will lack the pictures: %s", error)
        photos = [None] * len(rows)
    patches = images.features[key.probed]
    transform = images.store.manifest.transform
    size = tuple(transform["input_size"][1:])
    examples = []
    for row, photo in zip(rows.tolist(), photos, strict=True):
        labels = images.truth.labels(row)
        placement = place(transform, labels.shape)
        pixels = labelled_pixels(labels, placement, patches.layout, size, "input")
        tokens = patches.load(row).astype(np.float64).reshape(*patches.grid, -1)
        prediction = head.predict(tokens, pixels)
        example: dict[str, Any] = {
            "store": images.store.label,
            "image": str(images.store.samples.id[row]),
            "site": key.probed,
            **_compare(prediction, pixels),
        }
        if photo is not None:
            # (channels, height, width) of 1 or 3 channels
            rgb = photo.transpose(1, 2, 0).repeat(3 // len(photo), axis=2)
            example["photo"] = _encode_small(rgb, Image.Resampling.BICUBIC)
        examples.append(example)
    return examples


def _compare(prediction: Labels, pixels: Pixels) -> dict[str, Any]:
    """Return pictures of label, prediction and error, and the share of pixels that are
    right.

    A pixel is right if its class is, or if its depth is within a quarter.
    """
    labels = pixels.labels
    counts = has_label(labels)
    if pixels.is_depth:
        with np.errstate(invalid="ignore"):
            # Relative error, 1 and more the same red.
            error = np.clip(np.abs(prediction - labels) / labels, 0, 1)
            is_right = np.maximum(prediction / labels, labels / prediction) < CLOSE
        top = float(np.nanmax(labels)) if counts.any() else 1.0
        label_rgb = depth_colours(labels, top)
        prediction_rgb = depth_colours(prediction, top)
    else:
        is_right = prediction == labels
        error = np.where(is_right, 0.0, 1.0)
        label_rgb = class_colours(labels)
        prediction_rgb = class_colours(prediction)
    error = np.where(counts, error, 0.0)[..., None]
    error_rgb = (1 - error) * np.array(RIGHT) + error * np.array(WRONG)
    error_rgb = np.where(counts[..., None], error_rgb, NO_LABEL).astype(np.uint8)
    nearest = Image.Resampling.NEAREST  # keeps the colours of classes
    return {
        "right": float(is_right[counts].mean()) if counts.any() else None,
        "label": _encode_small(label_rgb, nearest),
        "prediction": _encode_small(prediction_rgb, nearest),
        "error": _encode_small(error_rgb, nearest),
    }


def depth_colours(depths: Labels, top: float) -> NDArray[np.uint8]:
    """Return the colours (height, width, 3) of depths, from near (dark) to `top` metres
    (light)."""
    from matplotlib import colormaps

    is_known = np.isfinite(depths)
    relative = np.where(is_known, depths, 0) / top
    rgba = colormaps["viridis"](relative, bytes=True)
    rgb: NDArray[np.uint8] = rgba[..., :3].copy()
    rgb[~is_known] = NO_LABEL
    return rgb


def class_colours(labels: ClassMap) -> NDArray[np.uint8]:
    """Return the colours (height, width, 3) of classes in the palette of Pascal VOC.

    They follow from the bits of a class: bits 0, 3, 6, ... are the highest bits of red,
    bits 1, 4, 7, ... those of green, bits 2, 5, 8, ... those of blue. Pixels without a
    class are white.
    """
    numbers = np.arange(IGNORED + 1)[:, None, None]
    bits = np.arange(8)
    channels = np.arange(3)[:, None]
    set_bits = numbers >> (3 * bits + channels) & 1  # (classes, channels, bits)
    palette = (set_bits << (7 - bits)).sum(-1).astype(np.uint8)
    palette[IGNORED] = NO_LABEL
    return palette[labels]


def _encode_small(pixels: NDArray[np.uint8], resampling: Image.Resampling) -> str:
    """Return a picture as text, with at most `MAX_PIXELS` along its longer side."""
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_PIXELS, MAX_PIXELS), resampling)
    return encode(np.asarray(image))
