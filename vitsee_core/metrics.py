"""Which way each metric is better, by its name."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["higher", "lower", "none"]

# Shares of right answers, and what scores agreement with labels, masks or points.
_HIGHER = re.compile(
    r"""
    top\d+(_class)? | accuracy | purity | nmi | ari | iou
    | segment_(purity|nmi|ari)
    | map(@\d+)?(_(easy|medium|hard|public|private))?
    | mp@\d+(_(easy|medium|hard))?
    | pck(_point|_image)?@.+
    | jf | j | f | [jf]_recall
    | lens_top1 | lens_agreement
    """,
    re.VERBOSE,
)
_LOWER = re.compile(r"lens_rank | [jf]_decay", re.VERBOSE)


def direction(metric: str) -> Direction:
    """Whether a higher or a lower value is better; "none" of what has no better side: distances,
    ratios, norms, spectra, similarities, and metrics that are not known."""
    if _HIGHER.fullmatch(metric):
        return "higher"
    return "lower" if _LOWER.fullmatch(metric) else "none"
