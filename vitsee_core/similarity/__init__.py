"""Representation similarity: Gram matrices, HSIC and CKA, out of core."""

from vitsee_core.similarity.estimate import hsic
from vitsee_core.similarity.features import Features, Representation
from vitsee_core.similarity.hsic import (
    Hsic,
    Similarity,
    centred_alignment,
    stacked,
    summarise,
    weighted_sum,
)
from vitsee_core.similarity.job import Estimator, GramOptions

__all__ = [
    "Estimator",
    "Features",
    "GramOptions",
    "Hsic",
    "Representation",
    "Similarity",
    "centred_alignment",
    "hsic",
    "stacked",
    "summarise",
    "weighted_sum",
]
