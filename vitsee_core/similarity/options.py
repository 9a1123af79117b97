"""Declare the options that all analyses of pairs of representations share.

`PRESETS` has the estimators of published figures by name; `choose_estimator` makes the estimator of
a run from a preset and the user's own sizes, which win.
"""

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
from vitsee_core.similarity.pairs import PAIR_BY as PAIR_BY_CHOICES
from vitsee_core.similarity.pairs import PAIRS as PAIRS_CHOICES
from vitsee_core.similarity.pairs import paired_rows
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Store

KINDS = ("exact", "minibatch", "biased")


@dataclass(frozen=True)
class Preset:
    """A published estimator and its source."""

    estimator: Estimator  # `examples` None: all images
    source: str  # paper or code, in words, for the result's notes
    sites: tuple[str, ...] = ()  # compared by default; () has no say
    order: str = ""  # required order of the images, as of `extract --order`; "" for any


PRESETS = {
    "raghu": Preset(
        Estimator("minibatch", batch=1024, examples=10240, repeats=20),
        "Raghu et al. 2021, appendix A: 10 batches of 1024 images without replacement, 20 times",
    ),
    "walmer": Preset(
        Estimator("minibatch", batch=1024, examples=None, repeats=1),
        "Walmer et al. 2023, D.1, their text: the last block, unbiased HSIC over shuffled batches, "
        "whose size they do not say: here all images once, in equal batches of at most 1024",
        sites=("blocks.-1.out",),
    ),
    "vit_analysis": Preset(
        Estimator("minibatch", batch=8, examples=None, repeats=1, rescale=True),
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
    """Return the estimator that a user's options ask for.

    Args:
        stores: that are compared.
        preset: a name of `PRESETS`, whose sizes are taken where the user gives none.
        kind: exact, minibatch or biased, the commands' `--estimator`; None leaves the choice to
            the preset, and without one to the number of images.
        batch: images in a minibatch.
        examples: images in a repeat.
        repeats: how often they are drawn.
        images: how many images count (`--images`); None for all.
        seed: of the draw of these images.
        pair_by: how the stores' images correspond, "image" or "id".

    Raises:
        VitseeError: an unknown word, sizes of batches for an estimator without batches, a preset
            beside another estimator, or one that needs its images in another order.
        StoreMismatch: the stores hold other images.
    """
    if kind not in (None, *KINDS):
        raise VitseeError(f"no estimator {kind!r}; expected {', '.join(KINDS)}")
    sizes = {"--batch": batch, "--examples": examples, "--repeats": repeats}
    size_options = [name for name, value in sizes.items() if value is not None]
    # All presets are minibatches, so beside one the sizes need no --estimator.
    takes_sizes = kind == "minibatch" or (kind is None and preset is not None)
    if size_options and not takes_sizes:
        instead = f", not to {kind}" if kind else ": give that too"
        raise VitseeError(f"{size_options[0]} belongs to --estimator minibatch{instead}")
    if preset is None:
        return Estimator(kind or "auto", batch, examples, repeats)
    if preset not in PRESETS:
        raise VitseeError(f"no preset {preset!r}; expected {', '.join(PRESETS)}")
    if kind not in (None, "minibatch"):
        raise VitseeError(
            f"--preset {preset} is an estimator, minibatches of the paper's sizes: --estimator "
            f"{kind} excludes it; leave one of them out"
        )
    published = PRESETS[preset]
    for store in stores:
        order = store.manifest.identity.get("order")
        if published.order and order != published.order:
            raise VitseeError(
                f"--preset {preset} takes the images in the {published.order}'s order, "
                f"{store.label} holds them {order}; extract it with --order {published.order}"
            )
    preset_batch = published.estimator.batch or 0
    preset_examples = published.estimator.examples
    if preset_examples is None:
        # As many images as all the stores can compare.
        distinct = list({store.manifest.store_id: store for store in stores}.values())
        rows, _ = paired_rows(distinct, choose_rows(stores[0], images, seed), pair_by)
        preset_examples = len(rows[distinct[0].manifest.store_id])
        # vit_analysis, whose batches are rescaled, has batches of exactly 8.
        if not published.estimator.rescale:
            # Equal batches: a short last one would be left out.
            n_batches = -(-preset_examples // preset_batch)
            preset_batch = preset_examples // n_batches
    return Estimator(
        "minibatch",
        batch=batch or preset_batch,
        examples=examples or preset_examples,
        repeats=repeats or published.estimator.repeats,
        rescale=published.estimator.rescale,
    )


SITES = sites_option("blocks")


def side(which: str, default: str = "as --sites") -> Option:
    """Return the option for the sites of one store or one side of the matrix.

    Args:
        which: names the side, for the help: "Sites of {which}."
        default: in words.
    """
    return Option(
        f"Sites of {which}.", metavar="GLOB", default=default, completes=SITE_WORDS
    )


SITES_A = side("the rows")
SITES_B = side("the columns")
TOKENS = tokens_option(FEATURE_TOKENS)
PAIRS = Option(
    "same-depth: the first store's sites with each other store's, by name or else one by one; "
    "branch: skip connections against the branches parallel to them, in one store.",
    choices=PAIRS_CHOICES,
)
PAIR_BY = Option(
    "image: the stores hold the same images in the same order; id: rows of the same id, whatever "
    "their bytes and order (clean against corrupted images of the same names).",
    choices=PAIR_BY_CHOICES,
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
    """Return the option `--preset` of an analysis that has these presets."""
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
