"""How to read each panel, and what its numbers are, as the analyses that compute them say it."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass

from vitsee_core.report.captions import Caption, caption


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
        "The cosine of the chosen patch (outlined) with every patch, layer by layer: bright where "
        "features point the same way. A layer that knows objects lights up the object and little "
        "else, one that knows places lights up around the patch, one that is uniform everything. "
        "Cosines are not centred: compare maps on one scale with care, and shapes with each map on "
        "its own.",
    ),
    "attention": (
        "Attention",
        "attn-map",
        "What the chosen patch attends to in each block: the mean over heads, from the patch of a "
        "coarse grid that is nearest (dashed). Choose a head below to see what the class token "
        "attends to. Attention says where a token reads, not what it makes of it.",
    ),
    "pca": (
        "PCA colours",
        "pca",
        "The first three principal components of each layer's patches, over the shown images, as "
        "red, green and blue: like colours are like features, in a layer and, as layers are turned "
        "to one reference, roughly across layers and models. Where the three explain little of the "
        "variance, patches of one colour may still differ.",
    ),
    "norms": (
        "Norms",
        "norms",
        "How long each patch's features are. A few patches far above all others, often in even "
        "background, are outliers that hold global information in place of their patch.",
    ),
    "lens": (
        "Classifier",
        "lens",
        "What the model's own classifier says of each patch alone, as if the model ended there: "
        "the class with the largest logit, fainter where its share is small. A low share does not "
        "say that a layer knows nothing of the class, only that it does not write it in the "
        "classifier's terms.",
    ),
}


def panels() -> list[Panel]:
    """The views of the page, in the order of their buttons."""
    found = []
    for name, (button, command, reading) in _READINGS.items():
        module = importlib.import_module(f"vitsee_core.analyses.{command.replace('-', '_')}")
        text = (inspect.getdoc(module) or "").partition("\n\n")[2]
        found.append(Panel(name, button, reading, command, caption(module), definition_of(text)))
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
