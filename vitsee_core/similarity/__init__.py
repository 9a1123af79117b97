"""Representation similarity: Gram matrices, HSIC and CKA, out of core.

    representation     some tokens of a site as one matrix, images by features
        |  products    strips of features -> Gram matrices, tile by tile; `cache` keeps them on the
        |              disk as `gram_file` writes them
        |  whole_tiles one tile of every matrix at a time, on the host or a GPU
    hsic_sums          sums over pairs of images -> HSIC and CKA with their intervals
        |  estimators  of all images with a jackknife, or the mean over minibatches
    estimate           the call: which images, which estimator
    on_the_fly         the same of many small matrices that are never stored, from `stacks`

`comparison` is what these hand to each other, `pairs` chooses sites and rows, and `options` are the
options of the analyses. Read `representation`, `hsic_sums` and `estimate` first.
"""

from vitsee_core.similarity.comparison import Estimator, GramOptions
from vitsee_core.similarity.estimate import hsic
from vitsee_core.similarity.hsic_sums import (
    Hsic,
    Similarity,
    centred_alignment,
    stacked,
    summarise,
    weighted_sum,
)
from vitsee_core.similarity.representation import (
    Representation,
    Shift,
    cosine,
    pearson,
    raw_gram,
)

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
