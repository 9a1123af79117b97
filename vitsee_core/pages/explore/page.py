"""Renders the page: images, descriptions and numbers of stores, script and style, in one file.

All that comes from stores is escaped by the template or written as JSON whose `<` is escaped; the
page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitsee_core.figures.clip_strips import Moment
from vitsee_core.figures.patch_maps.photos import (
    Photograph,
    SheetImages,
    aspect_of,
    frames_of,
    model_inputs,
    photographs,
)
from vitsee_core.figures.patch_maps.views import Edges
from vitsee_core.pages.explore.contents import Scores, StoreContents, within
from vitsee_core.pages.html import asset, csp_hash, json_for_html, script, template
from vitsee_core.pages.report.captions import Caption, caption
from vitsee_core.runtime import registry
from vitsee_core.runtime.machine import plural
from vitsee_core.tables.steps import UNITS, numbers_in_name
from vitsee_core.tables.text import visible

GENERATOR = "vitsee explore"
SHOWN_MODELS = 4  # in a title
MIN_STEPS = 3  # of a training with a slider; two are seen better side by side


def render(
    contents: Sequence[StoreContents],
    *,
    guide: Scores | None,
    data: str | None,
    title: str,
    note: str,
    left_out: Mapping[str, str],
) -> str:
    """Return the page as text.

    Args:
        contents: of each store, of the same images.
        guide: the scores to which all PCA colours are turned.
        data: where the images are now, for the photographs.
        title: of the page; by default the stores' names.
        note: a line below it.
        left_out: stores that take no part -> why.
    """
    title = visible(title) or _store_names(contents)
    description = _describe_page(contents, title, data)
    blobs = {}
    for number, store_contents in enumerate(contents):
        for kind, text in store_contents.blobs(guide).items():
            blobs[f"{kind}{number}"] = text
    code = script("pages/explore/assets/explore.js")
    base_style = asset("pages/html/assets/base.css")
    style = base_style + asset("pages/explore/assets/explore.css")
    page: str = template("pages/explore/assets/page.html").render(
        title=title,
        generator=GENERATOR,
        about=_summary(contents),
        note=visible(note),
        panels=panels(),
        steps=description["steps"],
        times=description.get("times"),
        cautions=[f"Left out: {label}: {reason}" for label, reason in left_out.items()],
        data=json_for_html(description),
        blobs=blobs,
        script=code,
        style=style,
        script_hash=csp_hash(code),
        style_hash=csp_hash(style),
    )
    return page


def _describe_page(
    contents: Sequence[StoreContents], title: str, data: str | None
) -> dict[str, Any]:
    """Return the JSON that the page's script reads; the order of its keys is fixed."""
    sheets = [store_contents.shown for store_contents in contents]
    first = sheets[0]
    frames = frames_of(sheets)
    description: dict[str, Any] = {
        "images": describe_images(sheets, frames, data),
        "models": [store_contents.describe(frames) for store_contents in contents],
        "steps": steps_of([sheet.store.label for sheet in sheets]),
    }
    if first.times > 1:
        # The sampled frames of each time; the images are the times of each clip in a row.
        description["times"] = [frames_at(first, time) for time in range(first.times)]
    # Names of the classes that each store's classifier answers, and of the images' labels.
    description["classes"] = [_answered_classes(each_store) for each_store in contents]
    labels = {*first.store.samples.label[first.rows].tolist()}
    names = first.store.class_names or []
    description["labels"] = {}
    for label in labels:
        if label >= 0:  # -1: none
            name = visible(names[label]) if label < len(names) else f"class {label}"
            description["labels"][str(label)] = name
    description["title"] = title
    return description


def _answered_classes(contents: StoreContents) -> dict[str, str]:
    """Return number -> name of the classes that a store's classifier answers."""
    names = contents.shown.store.class_names or []
    return {str(k): visible(names[k]) for k in contents.classes() if k < len(names)}


def steps_of(labels: Sequence[str]) -> dict[str, Any] | None:
    """Return the unit ("step" or "epoch") and the number of each store of one training.

    These are `MIN_STEPS` or more stores whose labels differ in their numbers alone, `vit-step0`,
    `vit-step1000`; of others it is None.
    """
    for unit in UNITS:
        numbers = [numbers_in_name(label).get(unit) for label in labels]
        if None in numbers or len({*numbers}) < max(len(labels), MIN_STEPS):
            continue
        if len({re.sub(r"\d+", "", label) for label in labels}) == 1:
            return {"unit": unit, "numbers": numbers}
    return None


def _store_names(contents: Sequence[StoreContents]) -> str:
    """Return the stores' names as a title."""
    names = [visible(store_contents.shown.store.label) for store_contents in contents]
    title = ", ".join(names[:SHOWN_MODELS])
    if len(names) > SHOWN_MODELS:
        title += f" and {len(names) - SHOWN_MODELS} more"
    return title


def _summary(contents: Sequence[StoreContents]) -> list[str]:
    """Return what the page shows, in short texts, and the error of its cosines."""
    first = contents[0].shown
    images = plural(len(first.unique_rows), first.store.plan.examples)
    n_sites = sum(len(store_contents.sites) for store_contents in contents)
    errors = []
    for store_contents in contents:
        errors += [tokens.error for tokens in store_contents.packed]
    p99 = max(error.p99 for error in errors)
    largest = max(error.largest for error in errors)
    return [
        f"{images} of {first.store.n_images:,}",
        plural(len(contents), "models"),
        plural(n_sites, "layers"),
        f"cosines within {p99:.3f} (99 of 100; all: {largest:.2g})",
    ]


# Along the longer side of a photograph: that of the models' inputs, within these bounds.
MIN_PIXELS = 320
MAX_PIXELS = 448
MAX_LOSSLESS_PIXELS = 96  # smaller pictures are PNG: in JPEG their pixels would blur
QUALITY = 82  # of JPEG


def describe_images(
    sheets: Sequence[SheetImages], frames: Sequence[Edges], data: str | None
) -> list[dict[str, Any]]:
    """Return each image's id, label (-1 for none), aspect, picture and the picture's edges.

    The picture is an address, "" if it cannot be had; its edges are shares of the frame.

    Args:
        sheets: the images in each store.
        frames: the edges of each image's frame on the page.
        data: where the images are now.
    """
    first = sheets[0]
    input_pixels = max(max(sheet.view.input_size) for sheet in sheets)
    max_pixels = min(max(input_pixels, MIN_PIXELS), MAX_PIXELS)
    photos: dict[int, Photograph] = {}
    if first.times > 1:
        photos = _middle_frames(first, data)
    else:
        photo_of_row = photographs(first, frames, data, max_pixels)
        for k, row in enumerate(first.rows):
            if row in photo_of_row:
                photos[k] = photo_of_row[row]
    descriptions = []
    for k, (row, frame) in enumerate(zip(first.rows, frames, strict=True)):
        image_id = visible(str(first.store.samples.id[row]))
        if first.times > 1:
            image_id += f", frame {frames_at(first, k % first.times)}"
        has_picture = k in photos
        descriptions.append(
            {
                "id": image_id,
                "label": int(first.store.samples.label[row]),
                "aspect": round(aspect_of(first.view, row, frame), 4),
                "picture": address(photos[k]) if has_picture else "",
                "edges": within(photos[k].edges, frame) if has_picture else [0, 0, 1, 1],
            }
        )
    return descriptions


def _middle_frames(shown: SheetImages, data: str | None) -> dict[int, Photograph]:
    """Return index of the image -> the sampled frame in the middle of its time in the clip.

    The frames are as the model saw them.
    """
    inputs = model_inputs(shown.store, shown.unique_rows, data)
    photos = {}
    for k, row in enumerate(shown.rows):
        if row in inputs:
            frames = inputs[row]
            middle = Moment(k % shown.times, shown.times).at(len(frames))
            photos[k] = Photograph(frames[middle], shown.view.input_edges(row))
    return photos


def frames_at(shown: SheetImages, time: int) -> str:
    """Return the sampled frames of one of the times of a clip, as `2–3`."""
    clip = shown.store.plan.clip
    return Moment(time, shown.times).frames(shown.times if clip is None else clip.frames)


def address(photo: Photograph) -> str:
    """Return a data URL of a photograph."""
    from PIL import Image

    image = Image.fromarray(photo.pixels).convert("RGB")
    buffer = io.BytesIO()
    image_format = "png" if max(image.size) <= MAX_LOSSLESS_PIXELS else "jpeg"
    image.save(buffer, image_format, quality=QUALITY, optimize=True)
    text = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{image_format};base64,{text}"


@dataclass(frozen=True)
class Panel:
    """A view of the page.

    Attributes:
        id: its name in the address.
        name: on its button.
        reading: how to read it on this page.
        analysis: the command that computes the same from whole stores.
        caption: of that command's figure.
        definition: paragraphs, and lists of items, about what it computes.
    """

    id: str
    name: str
    reading: str
    analysis: str
    caption: Caption
    definition: list[str | list[str]]


class _PanelText(NamedTuple):
    """The button, the command and the reading of a view."""

    button: str
    command: str
    reading: str


_READINGS = {
    "cosine": _PanelText(
        "Similarity",
        "cosine-map",
        "The cosine of the chosen patch (outlined) with every patch, layer by layer: "
        "bright where features point the same way. A layer that knows objects lights up "
        "the object and little else, one that knows places lights up around the patch, "
        "one that is uniform everything. Cosines are not centred: compare maps on one "
        "scale with care, and shapes with each map on "
        "its own.",
    ),
    "attention": _PanelText(
        "Attention",
        "attn-map",
        "What the chosen patch attends to in each block: the mean over heads, from the "
        "patch of a coarse grid that is nearest (dashed). Choose a head below to see "
        "what the class token "
        "attends to. Attention says where a token reads, not what it makes of it.",
    ),
    "pca": _PanelText(
        "PCA colours",
        "pca",
        "The first three principal components of each layer's patches, over the shown "
        "images, as red, green and blue: like colours are like features, in a layer and, "
        "as layers are turned to one reference, roughly across layers and models. Where "
        "the three explain little of the "
        "variance, patches of one colour may still differ.",
    ),
    "norms": _PanelText(
        "Norms",
        "norms",
        "How long each patch's features are. A few patches far above all others, often "
        "in even "
        "background, are outliers that hold global information in place of their patch.",
    ),
    "lens": _PanelText(
        "Classifier",
        "lens",
        "What the model's own classifier says of each patch alone, as if the model ended "
        "there: the class with the largest logit, fainter where its share is small. A "
        "low share does not say that a layer knows nothing of the class, only that it "
        "does not write it in the "
        "classifier's terms.",
    ),
}


def panels() -> list[Panel]:
    """Return the views of the page, in the order of their buttons."""
    views = []
    for name, text in _READINGS.items():
        analysis = registry.load(text.command.replace("-", "_"))
        definition = analysis.docstring.partition("\n\n")[2]  # behind title and question
        views.append(
            Panel(
                id=name,
                name=text.button,
                reading=text.reading,
                analysis=text.command,
                caption=caption(analysis),
                definition=definition_of(definition),
            )
        )
    return views


def definition_of(text: str) -> list[str | list[str]]:
    """Return the paragraphs of a docstring, and its lists as lists of their items."""
    blocks: list[str | list[str]] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        paragraph, *items = re.split(r"(?:^|\n)- ", block)
        if paragraph.strip():
            blocks.append(_one_line(paragraph))
        if items:
            blocks.append([_one_line(item) for item in items])
    return blocks


def _one_line(text: str) -> str:
    """Return a text on one line, without the backticks of names."""
    return " ".join(text.replace("`", "").split())
