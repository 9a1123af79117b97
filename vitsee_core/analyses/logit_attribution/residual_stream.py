"""The residual stream that a store's classifier reads: its beginning and all branches added to it.

Blocks are followed back from the last one, and each sum is proven on the first images, since an
activation or a norm may follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitsee_core.models.weights import Classifier, HeadWeights
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

EXTRACT = "extract with --sites blocks --sites head --sites residual"
# How far a sum of branches may be from the stored output to be recognised as it, relative to its
# terms: exactly computed, and with rounded activations or forward passes. A sum that does not hold
# (an activation or a norm follows) is off by some ten percent.
EXACT = 1e-4
ROUNDED = {"float16": 0.01, "fp16": 0.02, "bf16": 0.05}
PROVEN_IMAGES = 8  # the first ones, on which sums are proven
# Images whose tokens are in float64 at a time: a slab of them would double in size.
IMAGES_AT_ONCE = 8


@dataclass(frozen=True)
class ResidualStream:
    """The tokens that the classifier reads, as a sum: base + all branches.

    Attributes:
        head: the classifier; `head.site` is the end of the stream.
        base: the embedding, or the beginning of the stage that the classifier reads (the tokens
            after a downsampling).
        branches: what each sublayer adds, layer scale included, in the model's order.
    """

    head: HeadWeights
    base: SiteSpec
    branches: tuple[SiteSpec, ...]

    @property
    def terms(self) -> tuple[SiteSpec, ...]:
        """Return all that is added up: the base, then the branches."""
        return (self.base, *self.branches)

    def freeze_norm(self, slab: Slab) -> FrozenNorm:
        """Return pooling and norm as they are for the slab's valid images, now a linear map."""
        head = self.head
        layout = slab.store.site(head.site).layout
        assert layout is not None
        if head.pooled_kind is not None:
            # The store has the class token or the mean as vectors: pooling is already done.
            scale = self._scale(slab.pooled(head.site, head.pooled_kind)[slab.valid])
            return FrozenNorm(scale[:, np.newaxis], head.pooled_kind)
        # The mean over patches, or over all tokens: weights of (images, tokens).
        first = 0 if head.pool == "mean-all" else layout.n_prefix
        mean_weights = np.zeros((int(slab.valid.sum()), layout.n_tokens))
        mean_weights[:, first:] = 1 / (layout.n_tokens - first)
        if head.norm_first:
            # Every token has its own scale.
            tokens = slab.acts(head.site)[slab.valid]
            for images in _image_groups(len(tokens)):
                mean_weights[images] *= self._scale(tokens[images])
            return FrozenNorm(mean_weights, None)
        # The norm follows the mean: one scale per image.
        pooled = FrozenNorm(mean_weights, None).pooled(slab, head.site)
        scale = self._scale(pooled)
        return FrozenNorm(mean_weights * scale[:, np.newaxis], None)

    def _scale(self, x: Float) -> Float:
        """Return 1 / s for vectors (..., dim): (...), what the norm multiplies each of them by."""
        if self.head.norm not in ("layer", "rms"):
            # A batch norm's scale is the same for all images: it is part of the weights.
            return np.ones(x.shape[:-1])
        x = np.asarray(x, np.float64)
        if self.head.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        return 1 / np.sqrt(np.square(x).mean(-1) + self.head.eps)


@dataclass(frozen=True)
class FrozenNorm:
    """Pooling and norm of some images with the norm's scale held fixed.

    Attributes:
        weights: (images, tokens) the weight of each token in what the classifier reads, the norm's
            scale included; (images, 1) if the store's pooled vectors are read.
        kind: "cls" or "mean" if pooled vectors are read, None if tokens are.
    """

    weights: Float
    kind: str | None

    @property
    def total(self) -> Float:
        """Return the weight of what all tokens share, such as a bias: (images,)."""
        return self.weights.sum(1)

    def pooled(self, slab: Slab, site: str) -> Float:
        """Return a site's tokens, weighted and added up: (images, dim)."""
        if self.kind is not None:
            vectors = slab.pooled(site, self.kind)[slab.valid]
            return self.weights * vectors.astype(np.float64)
        tokens = slab.acts(site)[slab.valid]
        pooled = np.empty((len(tokens), tokens.shape[-1]))
        for images in _image_groups(len(tokens)):
            # The sum over tokens t, in float64.
            pooled[images] = np.einsum(
                "nt,ntd->nd", self.weights[images], tokens[images].astype(np.float64)
            )
        return pooled


def _image_groups(n: int) -> Iterator[slice]:
    """Yield slices of `IMAGES_AT_ONCE` of n images."""
    for start in range(0, n, IMAGES_AT_ONCE):
        yield slice(start, start + IMAGES_AT_ONCE)


def tolerance_of(store: Store, stream: ResidualStream) -> float:
    """Return how far sums may be from what the store has, relative to their terms."""
    tolerances = [EXACT]
    precision = store.manifest.identity.get("precision")
    if precision in ROUNDED:
        tolerances.append(ROUNDED[precision])
    # Pooled vectors are stored in float32, whatever the dtype of tokens is.
    if stream.head.pooled_kind is None:
        dtypes = {store.site(site.name).dtype for site in stream.terms}
        tolerances += [ROUNDED[dtype] for dtype in dtypes if dtype in ROUNDED]
    return max(tolerances)


def residual_stream(store: Store, head: Classifier, rows: Rows) -> ResidualStream:
    """Return the stream, followed from the last block back to where it begins.

    Each sum of branches is proven on the first of the rows' images.

    Raises:
        NotOffered: the classifier is not linear over one block's tokens, or a block's output is not
            the sum of its branches.
        MissingInput: branches, or tokens of them, are not stored.
    """
    if not isinstance(head, HeadWeights):
        raise _nonlinear_pooling(store, "attention pooling")
    if head.pool == "max":
        raise _nonlinear_pooling(store, "their maximum")
    end = store.sites.get(head.site)
    if end is None or end.block is None or end.part != "out":
        raise NotOffered(
            f"{store.label}: its classifier reads {head.site}, which is no block's "
            "output: what the layers after the last block do is no branch"
        )
    # The sites of each block, in the model's order.
    blocks = [
        list(sites)
        for block, sites in groupby(store.sites.values(), lambda site: site.block)
        if block is not None
    ]
    last = next(i for i, sites in enumerate(blocks) if sites[0].block == end.block)
    branches: list[SiteSpec] = []
    sums: list[BlockSum] = []
    base = end
    output = end
    # From the last block back: the input of each block is the output of the one before, until it
    # is a site of no block (the embedding) or of no other site (a downsampling).
    for sites in reversed(blocks[: last + 1]):
        by_part = {site.part: site for site in sites}
        block_branches = [
            site for part, site in by_part.items() if part.rpartition(".")[2] == "branch"
        ]
        block_input = by_part.get("shortcut") or by_part.get("in")
        if not block_branches or block_input is None:
            raise _missing_branches(store, str(output.block))
        sums.append(BlockSum([block_input, *block_branches], output))
        branches = [*block_branches, *branches]
        base = block_input
        if block_input.alias_of is None:
            break
        base = store.sites[block_input.alias_of]
        output = base
        if base.block is None:
            break
    stream = ResidualStream(head, base, tuple(branches))
    if head.pooled_kind is None:
        for site in stream.terms:
            # Raises MissingInput for a site that is stored pooled only.
            store.acts(site.name)
    _prove_sums(store, stream, sums, rows)
    return stream


def _nonlinear_pooling(store: Store, pooling: str) -> NotOffered:
    """Return the error that the classifier pools tokens by this."""
    return NotOffered(
        f"{store.label}: its classifier reads tokens through {pooling}, which is not "
        "linear: logits are no sum over branches"
    )


class BlockSum(NamedTuple):
    """A block's output, and the input and branches whose sum it should be."""

    terms: list[SiteSpec]
    output: SiteSpec


def _missing_branches(store: Store, block: str) -> VitseeError:
    """Return the error that the branches of this block are not in the store."""
    has_sublayers = any(
        f"{name}.".startswith(f"{block}.") for name, _ in store.plan.sublayers
    )
    reason = None
    if not has_sublayers:
        # Extraction says why it left the branches of a block, or all branches, out.
        left_out = store.manifest.left_out
        block_reasons = (
            why for subject, why in left_out.items() if subject.startswith(block)
        )
        reason = next(block_reasons, None) or left_out.get("residual")
    if reason:
        return NotOffered(f"{store.label}: {block} has no known branch: {reason}")
    return MissingInput(f"{store.label} lacks the branches of {block}: {EXTRACT}")


def _sum_errors(
    stream: ResidualStream, sums: Sequence[BlockSum], slab: Slab
) -> list[float]:
    """Return how far each sum is from its output on the slab's images, relative to its terms."""
    frozen = stream.freeze_norm(slab)
    errors = []
    for terms, output in sums:
        pooled_terms = [frozen.pooled(slab, site.name) for site in terms]
        # Terms may cancel: the output alone would be too small a scale.
        scale = sum(np.abs(term).max() for term in pooled_terms) or 1.0
        difference = np.sum(pooled_terms, axis=0) - frozen.pooled(slab, output.name)
        errors.append(float(np.abs(difference).max() / scale))
    return errors


def _prove_sums(
    store: Store, stream: ResidualStream, sums: list[BlockSum], rows: Rows
) -> None:
    """Compare each sum with its output on the first images.

    Raises:
        NotOffered: a block's output is not the sum of its input and its branches.
    """
    usable = np.flatnonzero(rows.mask & store.valid)[:PROVEN_IMAGES]
    mask = np.zeros_like(rows.mask)
    mask[usable] = True
    slab_errors = each_slab(
        store, partial(_sum_errors, stream, sums), rows=Rows(mask, 0, "the first")
    )
    errors = np.max(list(slab_errors), axis=0)
    tolerance = tolerance_of(store, stream)
    for (terms, output), error in zip(sums, errors, strict=True):
        # Not `error > tolerance`: an error that is NaN has to be refused, too.
        if not error <= tolerance:
            reason = "an activation (as in ResNet v1) or a norm follows the sum"
            skips = store.manifest.model.get("ablate_skip", ())
            if skips:
                names = abbreviate(list(skips))
                reason = f"it was extracted without the skip connections {names}"
            raise NotOffered(
                f"{store.label}: {output.name} is not the sum of "
                f"{abbreviate([site.name for site in terms])} (off by {error:.2g} of "
                f"them): {reason}"
            )
