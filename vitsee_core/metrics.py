"""Which way each metric is better, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from vitsee_stores.errors import VitseeError

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


def asked_for(metrics: Sequence[str], known: Iterable[str], analysis: str) -> list[str]:
    """The metrics of an analysis that were asked for, in its own order.

    Raises:
        VitseeError: one that it does not know.
    """
    known = list(known)
    for metric in metrics:
        if metric not in known:
            raise VitseeError(f"no metric {metric!r}; metrics of {analysis}: {', '.join(known)}")
    return [metric for metric in known if metric in metrics]


def direction(metric: str) -> Direction:
    """Whether a higher or a lower value is better; "none" of what has no better side: distances,
    ratios, norms, spectra, similarities, and metrics that are not known."""
    if _HIGHER.fullmatch(metric):
        return "higher"
    return "lower" if _LOWER.fullmatch(metric) else "none"
