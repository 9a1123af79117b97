"""Options of the analyses that compare representations."""

from __future__ import annotations

from vitsee_core.kernels.backend import PRECISIONS
from vitsee_core.runtime.options import (
    FEATURE_TOKENS,
    SITE_WORDS,
    Option,
    sites_option,
    tokens_option,
)
from vitsee_core.similarity import batches
from vitsee_core.similarity.estimate import MOST_EXACT
from vitsee_core.similarity.pairing import PAIR_BY as WAYS
from vitsee_core.similarity.pairs import PAIRS as CHOICES
from vitsee_core.similarity.presets import KINDS

SITES = sites_option("blocks")


def side(which: str, default: str = "as --sites") -> Option:
    """Sites of one store or side; default: in words."""
    return Option(f"Sites of {which}.", metavar="GLOB", default=default, completes=SITE_WORDS)


SITES_A, SITES_B = side("the rows"), side("the columns")
TOKENS = tokens_option(FEATURE_TOKENS)
PAIRS = Option(
    "same-depth: the first store's sites with each other store's, by name or else one by one; "
    "branch: skip connections against the branches parallel to them, in one store.",
    choices=CHOICES,
)
PAIR_BY = Option(
    "image: the stores hold the same images in the same order; id: rows of the same id, whatever "
    "their bytes and order (clean against corrupted images of the same names).",
    choices=WAYS,
)

ESTIMATOR = Option(
    "exact: unbiased HSIC over all images; minibatch: its mean over batches; biased: the original "
    "CKA, inflated for few images.",
    choices=KINDS,
    default=f"exact for up to {MOST_EXACT} images, else minibatch",
)
BATCH = Option(
    "Of the minibatch estimator: images in a minibatch.", least=4, default=str(batches.BATCH)
)
EXAMPLES = Option(
    "Of the minibatch estimator: images in a repeat, drawn without replacement.",
    least=4,
    default=str(batches.EXAMPLES),
)
REPEATS = Option(
    "Of the minibatch estimator: how often they are drawn.", least=1, default=str(batches.REPEATS)
)


def preset(*names: str) -> Option:
    """One of these presets of estimators."""
    return Option(
        "The estimator of a paper or its code; sizes of minibatches given beside it win.",
        choices=names,
        default="none",
    )


CACHE = Option("Keep Gram matrices in DIR.", metavar="DIR", default="STORE.grams beside each store")
NO_CACHE = Option("Keep no Gram matrices.  [default: keep them for later comparisons]")
PRECISION = Option(
    "Of the products that Gram matrices are made of. fp32: CKA within 1e-7 of double precision. "
    "bf16: up to twice as fast where the processor multiplies bfloat16; moves CKA by 4e-6 at 512 "
    "images, less at more.",
    choices=PRECISIONS,
)
