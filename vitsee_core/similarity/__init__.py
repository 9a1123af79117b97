"""Representation similarity: Gram matrices, HSIC and CKA, out of core."""

from vitsee_core.similarity.comparison import Estimator, GramOptions
from vitsee_core.similarity.estimate import hsic
from vitsee_core.similarity.hsic import (
    Hsic,
    Similarity,
    centred_alignment,
    stacked,
    summarise,
    weighted_sum,
)
from vitsee_core.similarity.representation import Representation, Shift, cosine, pearson, raw_gram

__all__ = [
    "Estimator",
    "GramOptions",
    "Hsic",
    "Representation",
    "Shift",
    "Similarity",
    "centred_alignment",
    "cosine",
    "hsic",
    "pearson",
    "raw_gram",
    "stacked",
    "summarise",
    "weighted_sum",
]
