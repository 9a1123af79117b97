"""Options of the analyses that compare representations, and the estimators of published figures by
name, with defaults that a user's options override."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsee_core.kernels.backend import PRECISIONS
from vitsee_core.runtime.options import (
    FEATURE_TOKENS,
    SITE_WORDS,
    Option,
    sites_option,
    tokens_option,
)
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity import Estimator, estimators
from vitsee_core.similarity.estimate import MOST_EXACT
from vitsee_core.similarity.pairs import PAIR_BY as WAYS
from vitsee_core.similarity.pairs import PAIRS as CHOICES
from vitsee_core.similarity.pairs import paired_rows
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

KINDS = ("exact", "minibatch", "biased")


@dataclass(frozen=True)
class Preset:
    """A published estimator and its source."""

    estimator: Estimator  # without `examples`, all images
    source: str  # in words
    sites: tuple[str, ...] = ()  # compared by default; () for anything
    order: str = ""  # required order of the images, "" for any


PRESETS = {
    "raghu": Preset(
        Estimator("minibatch", 1024, 10240, 20),
        "Raghu et al. 2021, appendix A: 10 batches of 1024 images without replacement, 20 times",
    ),
    "walmer": Preset(
        Estimator("minibatch", 1024, None, 1),
        "Walmer et al. 2023, D.1, their text: the last block, unbiased HSIC over shuffled batches, "
        "whose size they do not say: here all images once, in equal batches of at most 1024",
        sites=("blocks.-1.out",),
    ),
    "vit_analysis": Preset(
        Estimator("minibatch", 8, None, 1, rescale=True),
        "the code of Walmer et al. 2023: batches of 8 in the data's order, Gram matrices rescaled "
        "batch by batch",
        order="dataset",
    ),
}


def choose_estimator(
    stores: Sequence[Store],
    preset: str | None = None,
    kind: str | None = None,
    *,
    batch: int | None = None,
    examples: int | None = None,
    repeats: int | None = None,
    images: int | None = None,
    seed: int = 0,
    pair_by: str = "image",
) -> Estimator:
    """The estimator given by user options, with sizes from a preset where none are given.

    Args: as of the commands' options; `kind` is their `--estimator`.

    Raises:
        VitseeError: an unknown word, sizes of batches for an estimator without batches, a preset
            beside another estimator, or one that needs its images in another order.
        StoreMismatch: the stores hold other images.
    """
    if kind not in (None, *KINDS):
        raise VitseeError(f"no estimator {kind!r}; expected {', '.join(KINDS)}")
    sizes = {"--batch": batch, "--examples": examples, "--repeats": repeats}
    given = [name for name, value in sizes.items() if value is not None]
    if given and kind != "minibatch" and (preset is None or kind is not None):
        instead = f", not to {kind}" if kind else ": give that too"
        raise VitseeError(f"{given[0]} belongs to --estimator minibatch{instead}")
    if preset is None:
        return Estimator(kind or "auto", batch, examples, repeats)
    if preset not in PRESETS:
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    if kind not in (None, "minibatch"):
        raise VitseeError(
            f"--preset {preset} is an estimator, minibatches of the paper's sizes: --estimator "
            f"{kind} excludes it; leave one of them out"
        )
    theirs = PRESETS[preset]
    for store in stores:
        order = store.manifest.identity.get("order")
        if theirs.order and order != theirs.order:
            raise VitseeError(
                f"--preset {preset} takes the images in the {theirs.order}'s order, {store.label} "
                f"holds them {order}; extract it with --order {theirs.order}"
            )
    size = theirs.estimator.batch or 0
    number = theirs.estimator.examples
    if number is None:
        # As many images as all the stores can compare.
        distinct = list({store.manifest.store_id: store for store in stores}.values())
        rows, _ = paired_rows(distinct, choose_rows(stores[0], images, seed), pair_by)
        number = len(rows[distinct[0].manifest.store_id])
        if not theirs.estimator.rescale:
            # Equal batches: a short last one would be left out.
            size = number // -(-number // size)
    return Estimator(
        "minibatch",
        batch or size,
        examples or number,
        repeats or theirs.estimator.repeats,
        theirs.estimator.rescale,
    )


SITES = sites_option("blocks")


def side(which: str, default: str = "as --sites") -> Option:
    """Sites of one store or side; default: in words."""
    return Option(
        f"Sites of {which}.", metavar="GLOB", default=default, completes=SITE_WORDS
    )


SITES_A = side("the rows")
SITES_B = side("the columns")
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
    "Of the minibatch estimator: images in a minibatch.",
    least=4,
    default=str(estimators.BATCH),
)
EXAMPLES = Option(
    "Of the minibatch estimator: images in a repeat, drawn without replacement.",
    least=4,
    default=str(estimators.EXAMPLES),
)
REPEATS = Option(
    "Of the minibatch estimator: how often they are drawn.",
    least=1,
    default=str(estimators.REPEATS),
)


def preset(*names: str) -> Option:
    """One of these presets of estimators."""
    return Option(
        "The estimator of a paper or its code; sizes of minibatches given beside it win.",
        choices=names,
        default="none",
    )


CACHE = Option(
    "Keep Gram matrices in DIR.", metavar="DIR", default="STORE.grams beside each store"
)
NO_CACHE = Option("Keep no Gram matrices.  [default: keep them for later comparisons]")
PRECISION = Option(
    "Of the products that Gram matrices are made of. fp32: CKA within 1e-7 of double precision. "
    "bf16: up to twice as fast where the processor multiplies bfloat16; moves CKA by 4e-6 at 512 "
    "images, less at more.",
    choices=PRECISIONS,
)
