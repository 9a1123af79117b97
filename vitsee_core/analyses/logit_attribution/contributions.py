"""The residual stream that a store's classifier reads, as a sum of its beginning and all branches
that are added to it; and what each of these terms adds to the logits of some classes, slab by slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

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
# How far a sum of branches may be from the stored output to be recognised as it, relative to its
# terms: exactly computed, and with rounded activations or forward passes. A sum that does not hold
# (an activation or a norm follows) is off by some ten percent.
EXACT = 1e-4
ROUNDED = {"float16": 0.01, "fp16": 0.02, "bf16": 0.05}
# So many images prove the sums.
PROVEN_IMAGES = 8
# The tokens of so many images are in float64 at a time: a slab of them would double in size.
IMAGES_AT_ONCE = 8


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream: base + the sum of all branches = the tokens that the classifier reads.

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
        """All that is added up: the base, then the branches."""
        return (self.base, *self.branches)

    def frozen(self, slab: Slab) -> FrozenNorm:
        """Return pooling and norm as they are for the slab's valid images, now a linear map."""
        head = self.head
        layout = slab.store.site(head.site).layout
        assert layout is not None
        if head.pooled_kind is not None:
            # The store has the class token or the mean as vectors: pooling is already done.
            scale = self._scale(slab.pooled(head.site, head.pooled_kind)[slab.valid])
            return FrozenNorm(scale[:, np.newaxis], head.pooled_kind)
        first = 0 if head.pool == "mean-all" else layout.n_prefix
        # (images, tokens)
        mean_weights = np.zeros((int(slab.valid.sum()), layout.n_tokens))
        mean_weights[:, first:] = 1 / (layout.n_tokens - first)
        if head.norm_first:
            tokens = slab.acts(head.site)[slab.valid]
            for images in _image_groups(len(tokens)):
                mean_weights[images] *= self._scale(tokens[images])
            return FrozenNorm(mean_weights, None)
        pooled = FrozenNorm(mean_weights, None).pooled(slab, head.site)
        scale = self._scale(pooled)
        return FrozenNorm(mean_weights * scale[:, np.newaxis], None)

    def _scale(self, x: Float) -> Float:
        """Return 1 / s for vectors (..., dim): (...), what the norm multiplies each of them by."""
        if self.head.norm not in ("layer", "rms"):
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
        """The weight of what all tokens share, such as a bias: (images,)."""
        return self.weights.sum(1)

    def pooled(self, slab: Slab, site: str) -> Float:
        """Return a site's tokens, weighted and added up: (images, dim)."""
        if self.kind is not None:
            vectors = slab.pooled(site, self.kind)[slab.valid]
            return self.weights * vectors.astype(np.float64)
        tokens = slab.acts(site)[slab.valid]
        pooled = np.empty((len(tokens), tokens.shape[-1]))
        for images in _image_groups(len(tokens)):
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
    if not isinstance(head, HeadWeights) or head.pool == "max":
        raise NotOffered(
            f"{store.label}: its classifier reads tokens through "
            f"{'their maximum' if isinstance(head, HeadWeights) else 'attention pooling'}, "
            "which is not linear: logits are no sum over branches"
        )
    end = store.sites.get(head.site)
    if end is None or end.block is None or end.part != "out":
        raise NotOffered(
            f"{store.label}: its classifier reads {head.site}, which is no block's "
            "output: what the layers after the last block do is no branch"
        )
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


class BlockSum(NamedTuple):
    """A block's input and branches, whose sum should be its output."""

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
        block_reasons = (why for what, why in left_out.items() if what.startswith(block))
        reason = next(block_reasons, None) or left_out.get("residual")
    if reason:
        return NotOffered(f"{store.label}: {block} has no known branch: {reason}")
    return MissingInput(f"{store.label} lacks the branches of {block}: {EXTRACT}")


def _sum_errors(
    stream: ResidualStream, sums: Sequence[BlockSum], slab: Slab
) -> list[float]:
    """Return how far each sum is from its output on the slab's images, relative to its terms."""
    frozen = stream.frozen(slab)
    errors = []
    for terms, output in sums:
        pooled_terms = [frozen.pooled(slab, site.name) for site in terms]
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


# ---------------------------------------------------------------- what each term adds


BIAS = "bias"
RESIDUE = "residue"
LOGIT = "logit"
HEAD = "head"
PROJECTION_BIAS = "projection_bias"
# The site of what belongs to the whole model.
WHOLE = ""
# Site and part.
Key = tuple[str, str]


@dataclass(frozen=True)
class Projection:
    """The map from the heads' outputs to the branch: branch = weight @ heads + bias.

    weight: (dim, heads x head dim), bias: (dim,), both with the layer scale multiplied in.
    """

    weight: Float
    bias: Float
    n_heads: int


@dataclass(frozen=True)
class Readout:
    """The classifier behind its frozen norm: logits = vectors @ (weighted tokens) + offset.

    Attributes:
        vectors: (classes, dim) the classifier's kernel with the norm's weight and its centring.
        offset: (classes,) what the biases of norm and classifier give together.
        kernel_bias: (classes,) the classifier's own bias.
    """

    vectors: Float
    offset: Float
    kernel_bias: Float

    @classmethod
    def of(cls, head: HeadWeights) -> Readout:
        """Return the readout of a classifier and its norm, in float64."""
        arrays = {name: values.astype(np.float64) for name, values in head.arrays.items()}
        kernel = arrays["head_kernel"]
        vectors = kernel * arrays.get("head_norm_scale", 1.0)
        if head.norm == "layer":
            # w . (b - mean(b)) = (w - mean(w)) . b: centring may act on either side.
            vectors = vectors - vectors.mean(1, keepdims=True)
        bias = arrays.get("head_bias", np.zeros(len(kernel)))
        norm_bias = arrays.get("head_norm_bias", np.zeros(kernel.shape[1]))
        return cls(vectors, offset=bias + kernel @ norm_bias, kernel_bias=bias)

    def centred(self) -> Readout:
        """Return the readout less its mean over classes, which softmax does not see."""
        return Readout(
            self.vectors - self.vectors.mean(0),
            self.offset - self.offset.mean(),
            self.kernel_bias,
        )


@dataclass(frozen=True)
class TargetClasses:
    """The classes whose logits are explained.

    Attributes:
        classes: numbers of classes that are explained for every image; empty if each image's own
            class is explained.
        predicted: an image's own class is the one that the model predicts, not its label.
        by_class: values are counted in a column per class.
    """

    classes: tuple[int, ...] = ()
    predicted: bool = False
    by_class: bool = False

    def image_classes(self, slab: Slab, logits: Float) -> Integers:
        """Return each image's own class, (images,); -1 for an image without a label."""
        if self.predicted:
            return logits.argmax(1)
        labels = slab.store.samples.label[slab.rows][slab.valid].astype(np.int64)
        return np.where(labels < logits.shape[1], labels, -1)

    def spread(self, values: Float, image_classes: Integers, n_classes: int) -> Float:
        """Return values of images' own classes as they are counted, with NaN for no value.

        Args:
            values: (images, ...).
            image_classes: (images,) each image's own class, -1 for none.
            n_classes: the number of classes.

        Returns:
            (images, ...), NaN for images without a class; if `by_class` (images, classes, ...),
            NaN but in each image's own class.
        """
        values = values.astype(np.float64)
        values[image_classes < 0] = np.nan
        if not self.by_class:
            return values
        columns = np.full((len(values), n_classes, *values.shape[1:]), np.nan)
        has_class = np.flatnonzero(image_classes >= 0)
        columns[has_class, image_classes[has_class]] = values[has_class]
        return columns


@dataclass(frozen=True)
class ReadContributions:
    """The work on one slab: fills `Contributions` with values (images[, classes][, heads]).

    Attributes:
        stream: the stream that is split.
        readout: the classifier.
        targets: the classes whose logits are explained.
        projections: block -> projection of its heads, for the blocks whose heads are explained.
        raw: logits as they are, not less their mean over classes.
    """

    stream: ResidualStream
    readout: Readout
    targets: TargetClasses
    projections: Mapping[str, Projection]
    raw: bool

    def __call__(self, slab: Slab, into: Contributions) -> None:
        """Add the contributions of a slab's images, reading one site at a time."""
        stream = self.stream
        frozen = stream.frozen(slab)
        logits = self.logits(slab)
        image_classes = self.targets.image_classes(slab, logits)
        readout = self.readout if self.raw else self.readout.centred()
        target = TargetLogits(readout, self.targets, image_classes)
        total = np.zeros((len(image_classes), self.readout.vectors.shape[1]))
        for site in stream.terms:
            vector = frozen.pooled(slab, site.name)
            total += vector
            into.add((site.name, ""), target.from_vectors(vector))
            projection = self.projections.get(str(site.block))
            if projection is not None and site.part == "attn.branch":
                heads = frozen.pooled(slab, f"{site.block}.attn.heads")
                into.add((site.name, HEAD), target.from_heads(heads, projection))
                bias = np.outer(frozen.total, projection.bias)
                into.add((site.name, PROJECTION_BIAS), target.from_vectors(bias))
        # The uncentred readout: the logits of the store are not centred.
        summed_logits = total @ self.readout.vectors.T + self.readout.offset
        residue = logits - summed_logits
        offsets = np.broadcast_to(readout.offset, logits.shape)
        into.add((WHOLE, BIAS), target.from_logits(offsets))
        into.add((WHOLE, RESIDUE), target.from_logits(self._less_mean(residue)))
        into.add((WHOLE, LOGIT), target.from_logits(self._less_mean(logits)))
        size = np.abs(logits - self.readout.kernel_bias).max(1)
        gap = np.abs(residue).max(1) / np.where(size > 0, size, 1)
        into.gap = max(into.gap, float(gap.max(initial=0)))

    def _less_mean(self, logits: Float) -> Float:
        """Return the logits less their mean over classes, or as they are if `raw`."""
        if self.raw:
            return logits - 0.0
        return logits - logits.mean(1, keepdims=True)

    def logits(self, slab: Slab) -> Float:
        """Return the store's logits, (images, classes); without them the classifier is applied.

        Raises:
            VitseeError: a logit is not finite.
        """
        if "logits" in slab.store.sites:
            logits = slab.vectors("logits")[slab.valid].astype(np.float64)
        else:
            frozen = self.stream.frozen(slab)
            pooled = frozen.pooled(slab, self.stream.head.site)
            logits = pooled @ self.readout.vectors.T + self.readout.offset
        if not np.isfinite(logits).all():
            raise VitseeError(
                f"{slab.store.label} has logits that are not finite (see vitsee validate)"
            )
        return logits


@dataclass(frozen=True)
class TargetLogits:
    """The logits of the target classes for some images.

    Its functions return (images, classes[, heads]) if classes are given for all images, else
    (images[, heads]) as `TargetClasses.spread` lays it out.

    Attributes:
        readout: the classifier.
        targets: the classes whose logits are explained.
        image_classes: (images,) each image's own class, -1 for none.
    """

    readout: Readout
    targets: TargetClasses
    image_classes: Integers

    def from_vectors(self, x: Float) -> Float:
        """Return what vectors (images, dim) add to the logits."""
        if self.targets.classes:
            return x @ self.readout.vectors[list(self.targets.classes)].T
        class_vectors = self.readout.vectors[self.image_classes]
        return self._spread(np.einsum("nd,nd->n", x, class_vectors))

    def from_heads(self, x: Float, projection: Projection) -> Float:
        """Return what each head adds, from outputs (images, heads x head dim) side by side."""
        # (classes, heads x head dim): the classes read back through the projection
        back = self.readout.vectors @ projection.weight
        head_dim = projection.weight.shape[1] // projection.n_heads
        by_head = (-1, projection.n_heads, head_dim)
        if self.targets.classes:
            class_back = back[list(self.targets.classes)]
            return np.einsum(
                "nhd,khd->nkh", x.reshape(by_head), class_back.reshape(by_head)
            )
        products = x * back[self.image_classes]
        return self._spread(products.reshape(len(x), *by_head[1:]).sum(-1))

    def from_logits(self, x: Float) -> Float:
        """Return the target classes' logits out of those of every class, (images, classes)."""
        if self.targets.classes:
            return x[:, list(self.targets.classes)]
        return self._spread(x[np.arange(len(x)), self.image_classes])

    def _spread(self, values: Float) -> Float:
        """Return values of images' own classes as they are counted."""
        n_classes = len(self.readout.vectors)
        return self.targets.spread(values, self.image_classes, n_classes)


class Contributions:
    """Means over images of what each term adds, filled by `streaming.fold`.

    `gap` is the largest relative difference between the sum of all parts and the logits.
    """

    def __init__(self, read: ReadContributions) -> None:
        self._read = read
        self.gap = 0.0
        self._moments: dict[Key, Moments] = {}

    def add(self, key: Key, values: Float) -> None:
        """Add the values of some images, (images, ...), to a key's moments."""
        self._moments.setdefault(key, Moments()).add(values)

    def update(self, slab: Slab) -> None:
        self._read(slab, self)

    def merge(self, other: Contributions) -> None:
        for key, moments in other._moments.items():
            self._moments.setdefault(key, Moments()).merge(moments)
        self.gap = max(self.gap, other.gap)

    def result(self) -> tuple[dict[Key, Summary], float]:
        """Return key -> summary of entries ([classes][, heads]), and the largest residue."""
        return {
            key: moments.summary() for key, moments in self._moments.items()
        }, self.gap
