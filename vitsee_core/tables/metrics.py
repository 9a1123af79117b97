"""Which direction of each metric is better, and which depend on the number of images, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from vitsee_stores.errors import VitseeError

Direction = Literal["higher", "lower", "none"]

# Accuracies, and scores of agreement with labels, masks or points.
_HIGHER = re.compile(
    r"""
    top\d+(_class)? | accuracy | purity | nmi | ari | iou
    | segment_(purity|nmi|ari)
    | map(@\d+)?(_(easy|medium|hard|public|private))?
    | mp@\d+(_(easy|medium|hard))?
    | pck(_point|_image)?@.+
    | jf | j | f | [jf]_recall
    | lens_top1 | lens_agreement | agreement
    | r2?(_normalised)?(_median|_mean)?
    | miou | pixel_accuracy | iou_class | boundary_iou | a1
    | stability
    """,
    re.VERBOSE,
)
# Estimates that depend on the number of images (docs/guide/intervals.md).
_OF_THIS_SIZE = re.compile(
    r"rankme|effective_rank|alpha|twonn|nc1|nc2_norms|nc2_angles|procrustes|svcca|gulp|ridge_r2"
)
OF_THIS_SIZE = "the value at this number of images; that of more images may lie outside"
_LOWER = re.compile(r"lens_rank | [jf]_decay | rmse | abs_rel | kl", re.VERBOSE)


def asked_for(metrics: Sequence[str], known: Iterable[str], analysis: str) -> list[str]:
    """The requested metrics of an analysis, in its own order. Raises VitseeError: an unknown
    one."""
    known = list(known)
    for metric in metrics:
        if metric not in known:
            raise VitseeError(
                f"no metric {metric!r}; metrics of {analysis}: {', '.join(known)}"
            )
    return [metric for metric in known if metric in metrics]


def depends_on_size(metric: str) -> bool:
    """Whether a metric's interval refers to its value at this number of images only."""
    return _OF_THIS_SIZE.fullmatch(metric) is not None


def direction(metric: str) -> Direction:
    """Whether a higher or a lower value is better; "none" for metrics without a better side:
    distances, ratios, norms, spectra, similarities, and unknown ones."""
    if _HIGHER.fullmatch(metric):
        return "higher"
    return "lower" if _LOWER.fullmatch(metric) else "none"
