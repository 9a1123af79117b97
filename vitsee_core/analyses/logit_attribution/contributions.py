"""Contributions of each term of the residual stream to the logits of some classes, slab by slab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vitsee_core.analyses.logit_attribution.residual_stream import ResidualStream
from vitsee_core.models.weights import HeadWeights
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import VitseeError

if TYPE_CHECKING:
    from vitsee_stores import Slab

# Values of the column `part`.
BIAS = "bias"
RESIDUE = "residue"
LOGIT = "logit"
HEAD = "head"
PROJECTION_BIAS = "projection_bias"
WHOLE_MODEL = ""  # in place of a site
Key = tuple[str, str]  # site and part


class Projection(NamedTuple):
    """The map from the heads' outputs to the branch: branch = weight @ heads + bias.

    Attributes:
        weight: (dim, heads x head dim), with the layer scale multiplied in.
        bias: (dim,), with the layer scale multiplied in.
        n_heads: number of heads.
    """

    weight: Float
    bias: Float
    n_heads: int


@dataclass(frozen=True)
class Readout:
    """The classifier behind its frozen norm: logits = vectors @ (weighted tokens) + offset.

    Attributes:
        vectors: (classes, dim) the classifier's kernel, with the norm's weight g and its centring:
            W_c * g of the formula of `logit_attribution`.
        offset: (classes,) what the biases of norm and classifier give together.
        kernel_bias: (classes,) the classifier's own bias.
    """

    vectors: Float
    offset: Float
    kernel_bias: Float

    @classmethod
    def from_head(cls, head: HeadWeights) -> Readout:
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
        predicted: whether an image's own class is the one that the model predicts, not its label.
        by_class: whether values are counted in a column per class.
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
        values = values.astype(np.float64)  # a copy
        values[image_classes < 0] = np.nan
        if not self.by_class:
            return values
        columns = np.full((len(values), n_classes, *values.shape[1:]), np.nan)
        has_class = np.flatnonzero(image_classes >= 0)
        columns[has_class, image_classes[has_class]] = values[has_class]
        return columns


@dataclass(frozen=True)
class ReadContributions:
    """Reads a slab and adds values of (images[, classes][, heads]) to `Contributions`.

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
        frozen = stream.freeze_norm(slab)
        logits = self.logits(slab)
        image_classes = self.targets.image_classes(slab, logits)
        readout = self.readout if self.raw else self.readout.centred()
        target = TargetLogits(readout, self.targets, image_classes)
        # The stream itself, to compare the sum of all parts with the logits: (images, dim).
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
        into.add((WHOLE_MODEL, BIAS), target.from_logits(offsets))
        into.add((WHOLE_MODEL, RESIDUE), target.from_logits(self._less_mean(residue)))
        into.add((WHOLE_MODEL, LOGIT), target.from_logits(self._less_mean(logits)))
        # Without the bias, which may be far larger than what the stream writes.
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
            frozen = self.stream.freeze_norm(slab)
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
        # The classes read back through the projection: (classes, heads x head dim).
        back = self.readout.vectors @ projection.weight
        head_dim = projection.weight.shape[1] // projection.n_heads
        by_head = (-1, projection.n_heads, head_dim)
        if self.targets.classes:
            # (images, classes, heads)
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
        """Add the images of a slab."""
        self._read(slab, self)

    def merge(self, other: Contributions) -> None:
        """Add the images of another slab's contributions."""
        for key, moments in other._moments.items():
            self._moments.setdefault(key, Moments()).merge(moments)
        self.gap = max(self.gap, other.gap)

    def result(self) -> tuple[dict[Key, Summary], float]:
        """Return key -> summary of entries ([classes][, heads]), and the largest residue."""
        summaries = {key: moments.summary() for key, moments in self._moments.items()}
        return summaries, self.gap
