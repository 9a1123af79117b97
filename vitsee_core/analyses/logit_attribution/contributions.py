"""The residual stream that a store's classifier reads, as the sum of where it begins and of all
branches that are added to it; and what each of these terms adds to the logits of some classes,
slab by slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.models.weights import Classifier, HeadWeights
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import MissingInput, NotOffered, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import SiteSpec, Slab, Store


# ---------------------------------------------------------------- the residual stream


EXTRACT = "extract with --sites blocks --sites head --sites residual"
# Of the terms of a sum, how far it may be from the stored one to be recognised as it; sums that do
# not hold (an activation or a norm follows) are off by some ten percent. Of activations in float16,
# and of forward passes in these precisions.
EXACT = 1e-4
ROUNDED = {"float16": 0.01, "fp16": 0.02, "bf16": 0.05}
PROVEN_IMAGES = 8
IMAGES_AT_ONCE = 8  # whose tokens are in float64 at a time


@dataclass(frozen=True)
class ResidualStream:
    """The stream whose end, the tokens of `head.site`, the classifier reads: base + the sum of all
    branches.

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
            return self.weights * slab.pooled(site, self.kind)[slab.valid].astype(
                np.float64
            )
        tokens = slab.acts(site)[slab.valid]
        found = np.empty((len(tokens), tokens.shape[-1]))
        for at in _pieces(len(tokens)):
            found[at] = np.einsum(
                "nt,ntd->nd", self.weights[at], tokens[at].astype(np.float64)
            )
        return found


def _pieces(n: int) -> Iterator[slice]:
    return (slice(i, i + IMAGES_AT_ONCE) for i in range(0, n, IMAGES_AT_ONCE))


def tolerance_of(store: Store, stream: ResidualStream) -> float:
    """The distance that sums may have from what the store has, relative to their terms."""
    own = [
        ROUNDED[p] for p in (store.manifest.identity.get("precision"),) if p in ROUNDED
    ]
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
    base = end
    total = end
    for i in range(at, -1, -1):
        parts = {site.part: site for site in blocks[i]}
        own = [
            site for part, site in parts.items() if part.rpartition(".")[2] == "branch"
        ]
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
    """The distance of each sum from its total on some images, relative to its terms."""
    frozen = stream.frozen(slab)
    errors = []
    for terms, total in sums:
        found = [frozen.pooled(slab, site.name) for site in terms]
        size = sum(np.abs(term).max() for term in found) or 1.0
        gap = np.abs(np.sum(found, axis=0) - frozen.pooled(slab, total.name)).max()
        errors.append(float(gap / size))
    return errors


def _prove(
    store: Store,
    stream: ResidualStream,
    sums: list[tuple[list[SiteSpec], SiteSpec]],
    rows: Rows,
) -> None:
    """Raises NotOffered: a block's output is not the sum of its branches and what came in."""
    usable = np.flatnonzero(rows.mask & store.valid)[:PROVEN_IMAGES]
    mask = np.zeros_like(rows.mask)
    mask[usable] = True
    found = each_slab(
        store, partial(_errors, stream, sums), rows=Rows(mask, 0, "the first")
    )
    errors = np.max(list(found), axis=0)
    most = tolerance_of(store, stream)
    for (terms, total), error in zip(sums, errors, strict=True):
        if not error <= most:
            why = "an activation (as in ResNet v1) or a norm follows the sum"
            if skips := store.manifest.model.get("ablate_skip", ()):
                why = f"it was extracted without the skip connections {abbreviate(list(skips))}"
            raise NotOffered(
                f"{store.label}: {total.name} is not the sum of "
                f"{abbreviate([site.name for site in terms])} (off by {error:.2g} of them): {why}"
            )


# ---------------------------------------------------------------- what each term adds


BIAS = "bias"
RESIDUE = "residue"
LOGIT = "logit"
HEAD = "head"
PROJECTION_BIAS = "projection_bias"
WHOLE = ""  # the site of what belongs to the whole model
Key = tuple[str, str]  # site and part


@dataclass(frozen=True)
class Projection:
    """branch = weight @ heads + bias, layer scale included. weight: (dim, heads x head dim); bias:
    (dim,)."""

    weight: Float
    bias: Float
    n_heads: int


@dataclass(frozen=True)
class Readout:
    """The classifier behind its frozen norm: logits = vectors @ (weighted tokens) + offset, with
    the norm's weight and its centring in vectors (classes, dim), what the biases of norm and
    classifier give in offset (classes,), and the classifier's own bias, kernel_bias."""

    vectors: Float
    offset: Float
    kernel_bias: Float

    @classmethod
    def of(cls, head: HeadWeights) -> Readout:
        own = {name: values.astype(np.float64) for name, values in head.arrays.items()}
        kernel = own["head_kernel"]
        vectors = kernel * own.get("head_norm_scale", 1.0)
        if head.norm == "layer":  # the centring is symmetric: it may act on either side
            vectors = vectors - vectors.mean(1, keepdims=True)
        bias = own.get("head_bias", np.zeros(len(kernel)))
        offset = bias + kernel @ own.get("head_norm_bias", np.zeros(kernel.shape[1]))
        return cls(vectors, offset, bias)

    def centred(self) -> Readout:
        """The readout less its mean over classes, which softmax does not see."""
        return Readout(
            self.vectors - self.vectors.mean(0),
            self.offset - self.offset.mean(),
            self.kernel_bias,
        )


@dataclass(frozen=True)
class TargetClasses:
    """The classes whose logits are explained: `classes`, for every image; or each image's own, its
    label or what the model predicts, if `by_class` in a column per class."""

    classes: tuple[int, ...] = ()
    predicted: bool = False
    by_class: bool = False

    def own(self, slab: Slab, logits: Float) -> Integers:
        """(images,) each image's class; -1 without a label."""
        if self.predicted:
            return logits.argmax(1)
        labels = slab.store.samples.label[slab.rows][slab.valid].astype(np.int64)
        return np.where(labels < logits.shape[1], labels, -1)

    def spread(self, values: Float, own: Integers, n_classes: int) -> Float:
        """Values (images, ...) of each image's own class as they are counted: NaN without a class;
        by class (images, classes, ...), NaN but for the own."""
        values = values.astype(np.float64)
        values[own < 0] = np.nan
        if not self.by_class:
            return values
        found = np.full((len(values), n_classes, *values.shape[1:]), np.nan)
        at = np.flatnonzero(own >= 0)
        found[at, own[at]] = values[at]
        return found


@dataclass(frozen=True)
class ReadContributions:
    """The work on one slab: values (images[, classes][, heads]) by key, and the largest relative
    difference between the sum of all parts and the logits."""

    stream: ResidualStream
    readout: Readout
    asked: TargetClasses
    projections: Mapping[str, Projection]
    raw: bool

    def __call__(self, slab: Slab, into: Contributions) -> None:
        """Reads one site at a time."""
        stream = self.stream
        frozen = stream.frozen(slab)
        logits = self.logits(slab)
        own = self.asked.own(slab, logits)
        shown = self.readout if self.raw else self.readout.centred()
        measure = _Measure(shown, self.asked, own)
        total = np.zeros((len(own), self.readout.vectors.shape[1]))
        for site in stream.terms:
            vector = frozen.pooled(slab, site.name)
            total += vector
            into.add((site.name, ""), measure.vectors(vector))
            projection = self.projections.get(str(site.block))
            if projection is not None and site.part == "attn.branch":
                heads = frozen.pooled(slab, f"{site.block}.attn.heads")
                into.add((site.name, HEAD), measure.heads(heads, projection))
                bias = np.outer(frozen.total, projection.bias)
                into.add((site.name, PROJECTION_BIAS), measure.vectors(bias))
        found = total @ self.readout.vectors.T + self.readout.offset
        into.add(
            (WHOLE, BIAS), measure.logits(np.broadcast_to(shown.offset, logits.shape))
        )
        for part, values in ((RESIDUE, logits - found), (LOGIT, logits)):
            level = 0.0 if self.raw else values.mean(1, keepdims=True)
            into.add((WHOLE, part), measure.logits(values - level))
        size = np.abs(logits - self.readout.kernel_bias).max(1)
        gap = np.abs(logits - found).max(1) / np.where(size > 0, size, 1)
        into.gap = max(into.gap, float(gap.max(initial=0)))

    def logits(self, slab: Slab) -> Float:
        """(images, classes) as the store has them, else those of its classifier on the stream.

        Raises:
            VitseeError: they are not finite, or those of another number of classes.
        """
        if "logits" in slab.store.sites:
            found = slab.vectors("logits")[slab.valid].astype(np.float64)
        else:
            frozen = self.stream.frozen(slab)
            pooled = frozen.pooled(slab, self.stream.head.site)
            found = pooled @ self.readout.vectors.T + self.readout.offset
        if not np.isfinite(found).all():
            raise VitseeError(
                f"{slab.store.label} has logits that are not finite (see vitsee validate)"
            )
        return found


@dataclass(frozen=True)
class _Measure:
    """The parts that vectors have in the logits asked for. own: (images,) each one's class."""

    readout: Readout
    asked: TargetClasses
    own: Integers

    def vectors(self, x: Float) -> Float:
        """Contributions of vectors (images, dim)."""
        if self.asked.classes:
            return x @ self.readout.vectors[list(self.asked.classes)].T
        return self._spread(np.einsum("nd,nd->n", x, self.readout.vectors[self.own]))

    def heads(self, x: Float, projection: Projection) -> Float:
        """Contributions of head outputs (images, heads x head dim), each through its part of the
        projection."""
        back = self.readout.vectors @ projection.weight  # (classes, heads x head dim)
        shape = (-1, projection.n_heads, projection.weight.shape[1] // projection.n_heads)
        if self.asked.classes:
            some = back[list(self.asked.classes)]
            return np.einsum("nhd,khd->nkh", x.reshape(shape), some.reshape(shape))
        return self._spread((x * back[self.own]).reshape(len(x), *shape[1:]).sum(-1))

    def logits(self, x: Float) -> Float:
        """The logits asked for, of those of every class (images, classes)."""
        if self.asked.classes:
            return x[:, list(self.asked.classes)]
        return self._spread(x[np.arange(len(x)), self.own])

    def _spread(self, values: Float) -> Float:
        return self.asked.spread(values, self.own, len(self.readout.vectors))


class Contributions:
    """Means over images, to be filled by `streaming.fold`."""

    def __init__(self, read: ReadContributions) -> None:
        self._read = read
        self.gap = 0.0
        self._moments: dict[Key, Moments] = {}

    def add(self, key: Key, values: Float) -> None:
        """Count values (images, ...)."""
        self._moments.setdefault(key, Moments()).add(values)

    def update(self, slab: Slab) -> None:
        self._read(slab, self)

    def merge(self, other: Contributions) -> None:
        for key, moments in other._moments.items():
            self._moments.setdefault(key, Moments()).merge(moments)
        self.gap = max(self.gap, other.gap)

    def result(self) -> tuple[dict[Key, Summary], float]:
        """Key -> summary of entries ([classes][, heads]), and the largest relative residue."""
        return {key: m.summary() for key, m in self._moments.items()}, self.gap
