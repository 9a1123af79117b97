"""Settings of matching and scoring keypoints: choices of the user, presets of papers, defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from vitsee_core.analyses.keypoints.spair import VARIATIONS
from vitsee_core.runtime.options import Option
from vitsee_stores.errors import VitseeError

MATCHES = ("smooth", "token", "vit_analysis")
CANDIDATES = ("image", "canvas", "box")
THRESHOLDS = ("box", "image")
CLASS = "class"  # a group of `--by-group`, and a column
GROUP = "group"  # the column of all other groups
RANDOM = "random"  # baseline: a search among random features
GROUPS = (*VARIATIONS, CLASS)
ALPHAS = (0.1, 0.05, 0.01)
PRESETS = {
    "walmer": (
        "Walmer et al. 2023, appendix E: 20 pairs of each class, here drawn without "
        "replacement over the sorted pairs, their code's matches on the whole input, its "
        "black border included"
    )
}
WALMER_PAIRS = 20  # of each class

MATCH_DESCRIPTIONS = {
    "smooth": (
        "cosine of the features at input pixels, bilinear between the unit vectors of "
        "tokens and scaled to unit length again; the source at its place between pixels; "
        "measured in pixels of the original image"
    ),
    "token": (
        "cosine of tokens; the nearest token at the source, its centre at the target; "
        "measured in pixels of the original image"
    ),
    "vit_analysis": (
        "product of features at input pixels, bilinear between the unit vectors of "
        "tokens, not scaled again; the source at pixel (trunc x, round y); of equal "
        "pixels the first, which at the upper and left border is the border's; measured "
        "in pixels of the input"
    ),
}
CANDIDATE_DESCRIPTIONS = {
    "image": "where the target image lies on the input",
    "canvas": "the whole input",
    "box": "in the target object's box",
}
THRESHOLD_DESCRIPTIONS = {"box": "the target object's box", "image": "the target image"}


@dataclass(frozen=True)
class ProtocolOptions:
    """The user's choices; None and () stand for the preset's, else for the default.

    Attributes:
        alphas: thresholds, as shares of the longer side.
        match: one of `MATCHES`.
        alpha_of: one of `THRESHOLDS`.
        candidates: one of `CANDIDATES`.
        by_group: some of `GROUPS`.
        pairs_per_class: number of pairs drawn of each class.
        preset: one of `PRESETS`.
    """

    alphas: Annotated[
        Sequence[float],
        Option(
            "Found is what is nearer than A times the longer side.",
            "--alpha",
            metavar="A",
            above=0,
            default=" ".join(f"{alpha:g}" for alpha in ALPHAS),
        ),
    ] = ()
    match: Annotated[
        str | None,
        Option(
            "smooth: features at pixels, between tokens; token: of tokens; "
            "vit_analysis: those of the released code, which lie on the token grid.",
            choices=MATCHES,
            default="smooth",
        ),
    ] = None
    alpha_of: Annotated[
        str | None,
        Option(
            "Whose longer side that is: the target object's box, or the target image.",
            choices=THRESHOLDS,
            default="box",
        ),
    ] = None
    candidates: Annotated[
        str | None,
        Option(
            "Where the target may lie: on the image, anywhere on the input (canvas), in "
            "the object's box.",
            choices=CANDIDATES,
            default="image",
        ),
    ] = None
    by_group: Annotated[
        Sequence[str],
        Option("Add the rows of each group of pairs.", choices=GROUPS, default="none"),
    ] = ()
    pairs_per_class: Annotated[
        int | None,
        Option("Draw N pairs of each class, with the seed.", least=1, default="all"),
    ] = None
    preset: Annotated[
        str | None,
        Option(
            "walmer: 20 pairs a class, vit_analysis, canvas. Options given beside it win.",
            choices=tuple(PRESETS),
            default="none",
        ),
    ] = None


@dataclass(frozen=True)
class Protocol:
    """Settings of matching and scoring, all of them chosen.

    Attributes:
        match: one of `MATCHES`.
        candidates: positions of the target, one of `CANDIDATES`.
        alpha_of: whose longer side alpha is a fraction of, one of `THRESHOLDS`.
        alphas: descending.
        pairs_per_class: number of pairs drawn, None for all.
        by_group: some of `GROUPS`.
    """

    match: str
    candidates: str
    alpha_of: str
    alphas: tuple[float, ...]
    pairs_per_class: int | None
    by_group: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the settings in words, for the table's notes."""
        side = THRESHOLD_DESCRIPTIONS[self.alpha_of]
        return {
            "match": f"{self.match}: {MATCH_DESCRIPTIONS[self.match]}",
            "candidates": f"{self.candidates}: {CANDIDATE_DESCRIPTIONS[self.candidates]}",
            "found": f"nearer than alpha times the longer side of {side}",
            "pairs_per_class": self.pairs_per_class,
        }


def choose_protocol(options: ProtocolOptions) -> Protocol:
    """Return the user's choices, else the preset's, else the defaults.

    The defaults are `smooth`, `image`, `box`, `ALPHAS` and all pairs.

    Raises:
        VitseeError: an unknown word, or a number that is not positive.
    """
    preset = options.preset
    if preset is not None and preset not in PRESETS:
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    # The preset fills in only what the user left open.
    match = options.match
    candidates = options.candidates
    pairs_per_class = options.pairs_per_class
    if preset == "walmer":
        match = match or "vit_analysis"
        candidates = candidates or "canvas"
        if pairs_per_class is None:
            pairs_per_class = WALMER_PAIRS
    protocol = Protocol(
        match=match or "smooth",
        candidates=candidates or "image",
        alpha_of=options.alpha_of or "box",
        alphas=tuple(
            sorted({float(alpha) for alpha in options.alphas or ALPHAS}, reverse=True)
        ),
        pairs_per_class=pairs_per_class,
        by_group=tuple(
            dict.fromkeys(options.by_group)
        ),  # each group once, in the user's order
    )
    _require_word("match", protocol.match, MATCHES)
    _require_word("set of candidates", protocol.candidates, CANDIDATES)
    _require_word("alpha-of", protocol.alpha_of, THRESHOLDS)
    for group in protocol.by_group:
        _require_word("group", group, GROUPS)
    for alpha in protocol.alphas:
        if not (alpha > 0 and math.isfinite(alpha)):
            raise VitseeError(f"alpha is {alpha:g}; expected a number above 0, e.g. 0.1")
    if pairs_per_class is not None and pairs_per_class < 1:
        raise VitseeError(f"--pairs-per-class is {pairs_per_class}; expected at least 1")
    return protocol


def _require_word(subject: str, word: str, words: Sequence[str]) -> None:
    """Raise VitseeError if callers from Python gave a word that no option has."""
    if word not in words:
        raise VitseeError(f"no {subject} {word!r}; expected {', '.join(words)}")
