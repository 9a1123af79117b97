"""The residual stream that a store's classifier reads, as the sum of where it begins and of all
branches that are added to it; and its tokens pooled as the classifier pools them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.models.head_weights import Classifier, HeadWeights
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError
from vitsee_stores.manifest import few

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store

EXTRACT = "extract with --sites blocks --sites head --sites residual"
# Of the terms of a sum, how far it may be from the stored one to be recognised as it; sums that do
# not hold (an activation or a norm follows) are off by some ten percent. Of activations in float16,
# and of forward passes in these precisions.
EXACT, ROUNDED = 1e-4, {"float16": 0.01, "fp16": 0.02, "bf16": 0.05}
PROVEN_IMAGES = 8
IMAGES_AT_ONCE = 8  # whose tokens are in float64 at a time


@dataclass(frozen=True)
class ResidualStream:
    """What the classifier reads: base + the sum of all branches, `head.site`'s tokens.

    base: the embedding, or where the stage begins that the classifier reads (the tokens after a
    downsampling). branches: what each sublayer adds, layer scale included, in the model's order.
    """

    head: HeadWeights
    base: SiteSpec
    branches: tuple[SiteSpec, ...]

    @property
    def terms(self) -> tuple[SiteSpec, ...]:
        """All that is added up."""
        return (self.base, *self.branches)

    def frozen(self, slab: Slab) -> FrozenNorm:
        """The classifier's norm with its scale as it is for the slab's images that count."""
        head = self.head
        layout = slab.store.site(head.site).layout
        assert layout is not None
        if head.pooled_kind is None:
            first = 0 if head.pool == "mean-all" else layout.n_prefix
            weights = np.zeros((int(slab.valid.sum()), layout.n_tokens))
            weights[:, first:] = 1 / (layout.n_tokens - first)
            if head.norm_first:
                tokens = slab.acts(head.site)[slab.valid]
                for at in _pieces(len(tokens)):
                    weights[at] *= self._scale(tokens[at])
                return FrozenNorm(weights, None)
            frozen = FrozenNorm(weights, None)
            scale = self._scale(frozen.pooled(slab, head.site))
            return FrozenNorm(weights * scale[:, np.newaxis], None)
        scale = self._scale(slab.pooled(head.site, head.pooled_kind)[slab.valid])
        return FrozenNorm(scale[:, np.newaxis], head.pooled_kind)

    def _scale(self, x: Float) -> Float:
        """(...) what the norm multiplies vectors (..., dim) by."""
        if self.head.norm not in ("layer", "rms"):
            return np.ones(x.shape[:-1])
        x = np.asarray(x, np.float64)
        if self.head.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        return 1 / np.sqrt(np.square(x).mean(-1) + self.head.eps)


@dataclass(frozen=True)
class FrozenNorm:
    """weights: (images, tokens) of each token in what the classifier reads, the scale of the norm
    included; of `pooled` vectors ("cls", "mean"), (images, 1)."""

    weights: Float
    kind: str | None

    @property
    def total(self) -> Float:
        """(images,) the weight of what every token has, such as a bias."""
        return self.weights.sum(1)

    def pooled(self, slab: Slab, site: str) -> Float:
        """(images, dim) a site's tokens, weighted and added up."""
        if self.kind is not None:
            return self.weights * slab.pooled(site, self.kind)[slab.valid].astype(np.float64)
        tokens = slab.acts(site)[slab.valid]
        found = np.empty((len(tokens), tokens.shape[-1]))
        for at in _pieces(len(tokens)):
            found[at] = np.einsum("nt,ntd->nd", self.weights[at], tokens[at].astype(np.float64))
        return found


def _pieces(n: int) -> Iterator[slice]:
    return (slice(i, i + IMAGES_AT_ONCE) for i in range(0, n, IMAGES_AT_ONCE))


def tolerance_of(store: Store, stream: ResidualStream) -> float:
    """How far sums may be from what the store has, relative to their terms."""
    own = [ROUNDED[p] for p in (store.manifest.identity.get("precision"),) if p in ROUNDED]
    if stream.head.pooled_kind is None:  # else vectors, which are in float32
        kinds = {store.site(site.name).dtype for site in stream.terms}
        own += [ROUNDED[kind] for kind in kinds if kind in ROUNDED]
    return max([EXACT, *own])


def residual_stream(store: Store, head: Classifier, rows: Rows) -> ResidualStream:
    """The stream, from the last block back to where it begins; that each sum holds is tried on the
    first images.

    Raises:
        NotOffered: the classifier is not linear over one block's tokens, or a block's output is not
            the sum of its branches.
        MissingInput: branches, or tokens of them, are not stored.
    """
    if not isinstance(head, HeadWeights) or head.pool == "max":
        raise NotOffered(
            f"{store.label}: its classifier reads tokens through "
            f"{'their maximum' if isinstance(head, HeadWeights) else 'attention pooling'}, which "
            "is not linear: logits are no sum over branches"
        )
    end = store.sites.get(head.site)
    if end is None or end.block is None or end.part != "out":
        raise NotOffered(
            f"{store.label}: its classifier reads {head.site}, which is no block's output: what "
            "the layers after the last block do is no branch"
        )
    blocks = [
        list(own)
        for block, own in groupby(store.sites.values(), lambda site: site.block)
        if block is not None
    ]
    at = next(i for i, own in enumerate(blocks) if own[0].block == end.block)
    branches: list[SiteSpec] = []
    sums: list[tuple[list[SiteSpec], SiteSpec]] = []
    base, total = end, end
    for i in range(at, -1, -1):
        parts = {site.part: site for site in blocks[i]}
        own = [site for part, site in parts.items() if part.rpartition(".")[2] == "branch"]
        start = parts.get("shortcut") or parts.get("in")
        if not own or start is None:
            raise _missing(store, str(total.block))
        sums.append(([start, *own], total))
        branches[:0] = own
        base = start
        before = None if start.alias_of is None else store.sites[start.alias_of]
        if before is None:
            break
        base = total = before
        if before.block is None:
            break
    stream = ResidualStream(head, base, tuple(branches))
    for site in stream.terms:
        if head.pooled_kind is None:
            store.acts(site.name)
    _prove(store, stream, sums, rows)
    return stream


def _missing(store: Store, block: str) -> VitseeError:
    """The error that the branches of this block are not in the store."""
    known = any(f"{name}.".startswith(f"{block}.") for name, _ in store.plan.sublayers)
    left = store.manifest.left_out
    reasons = (why for what, why in left.items() if what.startswith(block))
    reason = None if known else next(reasons, None) or left.get("residual")
    if reason:
        return NotOffered(f"{store.label}: {block} has no known branch: {reason}")
    return MissingInput(f"{store.label} lacks the branches of {block}: {EXTRACT}")


def _errors(
    stream: ResidualStream, sums: Sequence[tuple[list[SiteSpec], SiteSpec]], slab: Slab
) -> list[float]:
    """How far each sum is from its total on some images, relative to its terms."""
    frozen = stream.frozen(slab)
    errors = []
    for terms, total in sums:
        found = [frozen.pooled(slab, site.name) for site in terms]
        size = sum(np.abs(term).max() for term in found) or 1.0
        gap = np.abs(np.sum(found, axis=0) - frozen.pooled(slab, total.name)).max()
        errors.append(float(gap / size))
    return errors


def _prove(
    store: Store, stream: ResidualStream, sums: list[tuple[list[SiteSpec], SiteSpec]], rows: Rows
) -> None:
    """Raises NotOffered: a block's output is not the sum of its branches and what came in."""
    usable = np.flatnonzero(rows.mask & store.valid)[:PROVEN_IMAGES]
    mask = np.zeros_like(rows.mask)
    mask[usable] = True
    found = each_slab(store, partial(_errors, stream, sums), rows=Rows(mask, 0, "the first"))
    errors = np.max(list(found), axis=0)
    most = tolerance_of(store, stream)
    for (terms, total), error in zip(sums, errors, strict=True):
        if not error <= most:
            why = "an activation (as in ResNet v1) or a norm follows the sum"
            if skips := store.manifest.model.get("ablate_skip", ()):
                why = f"it was extracted without the skip connections {few(list(skips))}"
            raise NotOffered(
                f"{store.label}: {total.name} is not the sum of "
                f"{few([site.name for site in terms])} (off by {error:.2g} of them): {why}"
            )
