"""The page as text: images, descriptions and numbers of stores, script and style, in one file.

All that comes from stores is escaped by the template or written as JSON whose `<` is escaped; the
page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitsee_core.explore.colours import Scores
from vitsee_core.explore.contents import StoreContents
from vitsee_core.explore.guidance import panels
from vitsee_core.explore.pictures import describe_images, frames_at
from vitsee_core.patch_maps.photos import Shown, frames_of
from vitsee_core.runtime.machine import counted
from vitsee_core.tables.steps import UNITS, numbers_in_name
from vitsee_core.tables.text import visible
from vitsee_core.web import asset, csp_hash, json_for_html, script, template

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
    about: dict[str, Any] = {
        "images": describe_images(parts, frames, data),
        "models": [one.describe(frames) for one in contents],
        "steps": steps_of([one.shown.store.label for one in contents]),
        **({"times": _times(parts[0])} if parts[0].times > 1 else {}),
        "classes": _classes(contents),
        "labels": _labels(contents),
    }
    title = visible(title) or _names(contents)
    about["title"] = title
    blobs = {
        f"{kind}{k}": text
        for k, one in enumerate(contents)
        for kind, text in one.blobs(guide).items()
    }
    code = script("explore/assets/explore.js")
    style = asset("web/assets/base.css") + asset("explore/assets/explore.css")
    page: str = template("explore/assets/page.html").render(
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


def _times(shown: Shown) -> list[str]:
    """The sampled frames of each place in time; the images are those of each clip in a row."""
    return [frames_at(shown, time) for time in range(shown.times)]


def _names(contents: Sequence[StoreContents]) -> str:
    names = [visible(one.shown.store.label) for one in contents]
    more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    return ", ".join(names[:SHOWN_MODELS]) + more


def _about(contents: Sequence[StoreContents]) -> list[str]:
    first = contents[0].shown
    shown = counted(len(first.once), first.store.plan.examples)
    sites = sum(len(one.sites) for one in contents)
    errors = [own.error for one in contents for own in one.packed]
    worst, largest = max(errors, key=lambda e: e.p99), max(error.largest for error in errors)
    return [
        f"{shown} of {first.store.n_images:,}",
        counted(len(contents), "models"),
        counted(sites, "layers"),
        f"cosines within {worst.p99:.3f} (99 of 100; all: {largest:.2g})",
    ]


def _classes(contents: Sequence[StoreContents]) -> list[dict[str, str]]:
    """Class -> name for each store, for the classes that its classifier answers and that have
    one."""
    found = []
    for one in contents:
        names = one.shown.store.class_names or []
        found.append({str(k): visible(names[k]) for k in one.classes() if k < len(names)})
    return found


def _labels(contents: Sequence[StoreContents]) -> dict[str, str]:
    store, rows = contents[0].shown.store, contents[0].shown.rows
    names = store.class_names or []
    own = {int(label) for label in store.samples.label[rows]}
    return {str(k): visible(names[k]) if k < len(names) else f"class {k}" for k in own if k >= 0}
