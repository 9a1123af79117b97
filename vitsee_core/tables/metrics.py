"""Which direction of each metric is better, and which depend on the number of images, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from vitsee_stores.errors import VitseeError

Direction = Literal["higher", "lower", "none"]

# Accuracies, and scores of agreement with labels, masks or points.
_HIGHER_IS_BETTER = re.compile(
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
_SIZE_DEPENDENT = re.compile(
    r"""
    rankme | effective_rank | alpha | twonn
    | nc1 | nc2_norms | nc2_angles
    | procrustes | svcca | gulp | ridge_r2
    """,
    re.VERBOSE,
)
SIZE_NOTE = "the value at this number of images; that of more images may lie outside"
# Errors, ranks and losses.
_LOWER_IS_BETTER = re.compile(r"lens_rank | [jf]_decay | rmse | abs_rel | kl", re.VERBOSE)


def select_metrics(
    metrics: Sequence[str], choices: Iterable[str], analysis: str
) -> list[str]:
    """Return the requested metrics in the order of the analysis.

    Args:
        metrics: the requested ones.
        choices: all metrics of the analysis, in its order.
        analysis: its name, for messages.

    Raises:
        VitseeError: the analysis has no such metric.
    """
    choices = list(choices)
    for metric in metrics:
        if metric not in choices:
            raise VitseeError(
                f"no metric {metric!r}; metrics of {analysis}: {', '.join(choices)}"
            )
    return [metric for metric in choices if metric in metrics]


def depends_on_size(metric: str) -> bool:
    """Return whether a metric's interval refers to its value at this number of images only."""
    return _SIZE_DEPENDENT.fullmatch(metric) is not None


def direction(metric: str) -> Direction:
    """Return whether a higher or a lower value of a metric is better.

    "none" for metrics without a better side: distances, ratios, norms, spectra, similarities, and
    unknown ones.
    """
    if _HIGHER_IS_BETTER.fullmatch(metric):
        return "higher"
    if _LOWER_IS_BETTER.fullmatch(metric):
        return "lower"
    return "none"
