"""The page as text: images, descriptions and numbers of stores, script and style, in one file.

All that comes from stores is escaped by the template or written as JSON whose `<` is escaped; the
page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
FEWEST = 3  # steps of a training with a slider; two are seen better side by side


def render(
    contents: Sequence[StoreContents],
    guide: Scores | None,
    data: str | None,
    title: str,
    note: str,
    left_out: Mapping[str, str],
) -> str:
    """The page.

    Args:
        contents: of each store, of the same images.
        guide: whose PCA colours the others are turned to.
        data: where the images are now, for the photographs.
        title: of the page; by default the stores' names.
        note: a line below it.
        left_out: stores that take no part -> why.
    """
    parts = [one.shown for one in contents]
    frames = frames_of(parts)
    n_times = parts[0].times
    store = parts[0].store
    names = store.class_names or []
    labels = {*store.samples.label[parts[0].rows].tolist()}
    about: dict[str, Any] = {
        "images": describe_images(parts, frames, data),
        "models": [one.describe(frames) for one in contents],
        "steps": steps_of([one.shown.store.label for one in contents]),
        # The sampled frames of each place in time; the images are those of each clip in a row.
        **(
            {"times": [frames_at(parts[0], k) for k in range(n_times)]}
            if n_times > 1
            else {}
        ),
        # Names of the classes that each store's classifier answers, and of the images' labels.
        "classes": [
            {str(k): visible(own[k]) for k in one.classes() if k < len(own)}
            for one, own in ((one, one.shown.store.class_names or []) for one in contents)
        ],
        "labels": {
            str(k): visible(names[k]) if k < len(names) else f"class {k}"
            for k in labels
            if k >= 0
        },
    }
    title = visible(title) or _names(contents)
    about["title"] = title
    blobs = {
        f"{kind}{k}": text
        for k, one in enumerate(contents)
        for kind, text in one.blobs(guide).items()
    }
    code = script("pages/explore/assets/explore.js")
    style = asset("pages/html/assets/base.css") + asset(
        "pages/explore/assets/explore.css"
    )
    page: str = template("pages/explore/assets/page.html").render(
        title=title,
        generator=GENERATOR,
        about=_about(contents),
        note=visible(note),
        panels=panels(),
        steps=about["steps"],
        times=about.get("times"),
        cautions=[f"Left out: {label}: {why}" for label, why in left_out.items()],
        data=json_for_html(about),
        blobs=blobs,
        script=code,
        style=style,
        script_hash=csp_hash(code),
        style_hash=csp_hash(style),
    )
    return page


def steps_of(labels: Sequence[str]) -> dict[str, Any] | None:
    """The unit ("step" or "epoch") and the number of each store of one training: of `FEWEST` or
    more stores whose labels differ in these numbers alone, `vit-step0`, `vit-step1000`; else
    None."""
    for unit in UNITS:
        numbers = [numbers_in_name(label).get(unit) for label in labels]
        if None in numbers or len({*numbers}) < max(len(labels), FEWEST):
            continue
        if len({re.sub(r"\d+", "", label) for label in labels}) == 1:
            return {"unit": unit, "numbers": numbers}
    return None


def _names(contents: Sequence[StoreContents]) -> str:
    names = [visible(one.shown.store.label) for one in contents]
    more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    return ", ".join(names[:SHOWN_MODELS]) + more


def _about(contents: Sequence[StoreContents]) -> list[str]:
    first = contents[0].shown
    shown = plural(len(first.once), first.store.plan.examples)
    sites = sum(len(one.sites) for one in contents)
    errors = [own.error for one in contents for own in one.packed]
    worst = max(errors, key=lambda e: e.p99)
    largest = max(error.largest for error in errors)
    return [
        f"{shown} of {first.store.n_images:,}",
        plural(len(contents), "models"),
        plural(sites, "layers"),
        f"cosines within {worst.p99:.3f} (99 of 100; all: {largest:.2g})",
    ]


# along the longer side of a photograph
LEAST_PIXELS = 320
MOST_PIXELS = 448
SMALL = 96  # pixels: smaller pictures are kept without loss
QUALITY = 82


def describe_images(
    parts: Sequence[SheetImages], frames: Sequence[Edges], data: str | None
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
            about |= {
                "picture": address(photos[k]),
                "edges": within(photos[k].edges, frame),
            }
        found.append(about)
    return found


def _of_times(shown: SheetImages, data: str | None) -> dict[int, Photograph]:
    """The frames in the middle of each place in time, as the model saw them."""
    inputs = model_inputs(shown.store, shown.once, data)
    found = {}
    for k, row in enumerate(shown.rows):
        if row in inputs:
            time = k % shown.times
            n = len(inputs[row])
            middle = (2 * time + 1) * n // (2 * shown.times)
            found[k] = Photograph(inputs[row][middle], shown.view.input_edges(row))
    return found


def frames_at(shown: SheetImages, time: int) -> str:
    """The sampled frames of a place in time, as `2–3`."""
    clip = shown.store.plan.clip
    return Moment(time, shown.times).frames(shown.times if clip is None else clip.frames)


def address(photo: Photograph) -> str:
    from PIL import Image

    image = Image.fromarray(photo.pixels).convert("RGB")
    buffer = io.BytesIO()
    kind = "png" if max(image.size) <= SMALL else "jpeg"
    image.save(buffer, kind, quality=QUALITY, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Panel:
    """A view of the page. id: its name in the address; name: on its button; reading: how to read
    it here; analysis: the command that computes the same from whole stores; caption: of that;
    definition: paragraphs and lists of what it computes."""

    id: str
    name: str
    reading: str
    analysis: str
    caption: Caption
    definition: list[str | list[str]]


_READINGS = {
    "cosine": (
        "Similarity",
        "cosine-map",
        "The cosine of the chosen patch (outlined) with every patch, layer by layer: "
        "bright where features point the same way. A layer that knows objects lights up "
        "the object and little else, one that knows places lights up around the patch, "
        "one that is uniform everything. Cosines are not centred: compare maps on one "
        "scale with care, and shapes with each map on "
        "its own.",
    ),
    "attention": (
        "Attention",
        "attn-map",
        "What the chosen patch attends to in each block: the mean over heads, from the "
        "patch of a coarse grid that is nearest (dashed). Choose a head below to see "
        "what the class token "
        "attends to. Attention says where a token reads, not what it makes of it.",
    ),
    "pca": (
        "PCA colours",
        "pca",
        "The first three principal components of each layer's patches, over the shown "
        "images, as red, green and blue: like colours are like features, in a layer and, "
        "as layers are turned to one reference, roughly across layers and models. Where "
        "the three explain little of the "
        "variance, patches of one colour may still differ.",
    ),
    "norms": (
        "Norms",
        "norms",
        "How long each patch's features are. A few patches far above all others, often "
        "in even "
        "background, are outliers that hold global information in place of their patch.",
    ),
    "lens": (
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
    """The views of the page, in the order of their buttons."""
    found = []
    for name, (button, command, reading) in _READINGS.items():
        analysis = registry.load(command.replace("-", "_"))
        text = analysis.docstring.partition("\n\n")[2]
        found.append(
            Panel(name, button, reading, command, caption(analysis), definition_of(text))
        )
    return found


def definition_of(text: str) -> list[str | list[str]]:
    """The paragraphs of a docstring, and its lists as lists of their items."""
    found: list[str | list[str]] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        items = re.split(r"(?:^|\n)- ", block)
        if items[0].strip():
            found.append(_plain(items[0]))
        if items[1:]:
            found.append([_plain(item) for item in items[1:]])
    return found


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())
