"""Settings of matching and scoring keypoints, and a paper's by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitsee_core.analyses.keypoints.spair import VARIATIONS
from vitsee_stores.errors import VitseeError

MATCHES = ("smooth", "token", "vit_analysis")
CANDIDATES = ("image", "canvas", "box")
THRESHOLDS = ("box", "image")
CLASS = "class"
GROUPS = (*VARIATIONS, CLASS)
ALPHAS = (0.1, 0.05, 0.01)
PRESETS = {
    "walmer": (
        "Walmer et al. 2023, appendix E: 20 pairs of each class, here drawn without replacement "
        "over the sorted pairs, their code's matches on the whole input, its black border included"
    )
}
WALMER_PAIRS = 20
MATCHED = {
    "smooth": "cosine of the features at input pixels, bilinear between the unit vectors of tokens "
    "and scaled to unit length again; the source at its place between pixels; measured in pixels "
    "of the original image",
    "token": "cosine of tokens; the nearest token at the source, its centre at the target; "
    "measured in pixels of the original image",
    "vit_analysis": "product of features at input pixels, bilinear between the unit vectors of "
    "tokens, not scaled again; the source at pixel (trunc x, round y); of equal pixels the first, "
    "which at the upper and left border is the border's; measured in pixels of the input",
}


@dataclass(frozen=True)
class Protocol:
    """Settings of matching and scoring.

    Attributes:
        match: one of `MATCHES`.
        candidates: positions of the target, one of `CANDIDATES`.
        threshold: whose longer side alpha is a fraction of, one of `THRESHOLDS`.
        alphas: descending.
        pairs_per_class: number of pairs drawn, None for all.
        by: some of `GROUPS`.
    """

    match: str
    candidates: str
    threshold: str
    alphas: tuple[float, ...]
    pairs_per_class: int | None
    by: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        sides = {"box": "the target object's box", "image": "the target image"}
        where = {
            "image": "where the target image lies on the input",
            "canvas": "the whole input",
            "box": "in the target object's box",
        }
        return {
            "match": f"{self.match}: {MATCHED[self.match]}",
            "candidates": f"{self.candidates}: {where[self.candidates]}",
            "found": f"nearer than alpha times the longer side of {sides[self.threshold]}",
            "pairs_per_class": self.pairs_per_class,
        }


def choose_protocol(
    preset: str | None = None,
    *,
    match: str | None = None,
    candidates: str | None = None,
    threshold: str | None = None,
    alphas: Sequence[float] = (),
    pairs_per_class: int | None = None,
    by: Sequence[str] = (),
) -> Protocol:
    """The user's choices, else the preset's (one of `PRESETS`), else the defaults: `smooth`,
    `image`, `box`, `ALPHAS`, all pairs. Raises VitseeError: an unknown word, or a number that is
    not positive."""
    if preset not in (None, *PRESETS):
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    theirs = preset == "walmer"
    chosen = Protocol(
        match or ("vit_analysis" if theirs else "smooth"),
        candidates or ("canvas" if theirs else "image"),
        threshold or "box",
        tuple(sorted({float(alpha) for alpha in alphas or ALPHAS}, reverse=True)),
        WALMER_PAIRS if theirs and pairs_per_class is None else pairs_per_class,
        tuple(dict.fromkeys(by)),
    )
    for what, words, known in (
        ("match", [chosen.match], MATCHES),
        ("set of candidates", [chosen.candidates], CANDIDATES),
        ("threshold", [chosen.threshold], THRESHOLDS),
        ("group", chosen.by, GROUPS),
    ):
        for word in words:
            if word not in known:
                raise VitseeError(f"no {what} {word!r}; expected {', '.join(known)}")
    for alpha in chosen.alphas:
        if not (alpha > 0 and math.isfinite(alpha)):
            raise VitseeError(f"alpha is {alpha:g}; expected a number above 0, e.g. 0.1")
    if chosen.pairs_per_class is not None and chosen.pairs_per_class < 1:
        raise VitseeError(f"--pairs-per-class is {chosen.pairs_per_class}; expected at least 1")
    return chosen
