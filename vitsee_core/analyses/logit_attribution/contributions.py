"""What each term of the residual stream adds to the logits of some classes, slab by slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from vitsee_core.analyses.logit_attribution.stream import ResidualStream
from vitsee_core.models.capture import Capture, Observer
from vitsee_core.models.head_weights import HeadWeights
from vitsee_core.models.hook_points import HookPoint
from vitsee_core.models.site_tables import site_table
from vitsee_core.models.trace import probe_images
from vitsee_core.statistics.moments import Moments, Summary
from vitsee_core.types import Float, Integers
from vitsee_stores.errors import NotOffered, VitseeError

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores import Slab
    from vitsee_stores.layout import SiteSpec


BIAS, RESIDUE, LOGIT = "bias", "residue", "logit"
HEAD, PROJECTION_BIAS = "head", "projection_bias"
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
        """Less the mean over classes, which softmax does not see."""
        return Readout(
            self.vectors - self.vectors.mean(0), self.offset - self.offset.mean(), self.kernel_bias
        )


@dataclass(frozen=True)
class Asked:
    """Of which classes the logits are explained: of `classes`, for every image; or of each image's
    own class, its label or what the model predicts, if `by_class` in a column per class."""

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
    asked: Asked
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
        into.add((WHOLE, BIAS), measure.logits(np.broadcast_to(shown.offset, logits.shape)))
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
    """What vectors give to the logits asked for. own: (images,) each one's class."""

    readout: Readout
    asked: Asked
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
        """Of what is given for every class (images, classes)."""
        if self.asked.classes:
            return x[:, list(self.asked.classes)]
        return self._spread(x[np.arange(len(x)), self.own])

    def _spread(self, values: Float) -> Float:
        return self.asked.spread(values, self.own, len(self.readout.vectors))


class Contributions:
    """Means over images, to be filled by `streaming.fold`."""

    def __init__(self, read: ReadContributions) -> None:
        self._read, self.gap = read, 0.0
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


# ---------------------------------------------------------------- projections of heads
#
# The projections that turn the heads' outputs into their block's branch, taken from the model.


PROVEN = 1e-5  # of the branch's largest value; float32 sums over some thousand channels


@dataclass
class _Keeper(Observer):
    tokens: dict[str, Float] = field(default_factory=dict)

    def site(self, site: SiteSpec, prefix: Tensor | None, body: Tensor) -> None:
        """Keep the tokens as (tokens of all images, dim)."""
        parts = [part for part in (prefix, body.flatten(1, -2)) if part is not None]
        whole = torch.cat(parts, 1).flatten(0, 1)
        self.tokens[site.part] = whole.double().cpu().numpy()


def projections(model: LoadedModel, blocks: Sequence[str]) -> dict[str, Projection]:
    """Those of these blocks of a model on the CPU, each proven on random images.

    Raises:
        NotOffered: no linear layer and factor per channel make the branch of what the heads gave.
    """
    table = site_table(model)
    n_heads = {block.name: block.n_heads for block in table.attention}
    found = {}
    for block in blocks:
        keeper = _Keeper()
        sites = [table[f"{block}.{part}"] for part in ("attn.heads", "attn.branch")]
        with torch.inference_mode(), Capture(model, table, sites=sites) as capture:
            capture.run(probe_images(model.input_size, False), keeper)
        heads, branch = (keeper.tokens[site.part] for site in sites)
        shape = (branch.shape[1], heads.shape[1])
        layers = [
            layer
            for layer in _around(model.module, table.heads[block]).modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape == shape
        ]
        fits = (_fitted(layer, heads, branch, n_heads[block]) for layer in layers)
        own = next((fit for fit in fits if fit is not None), None)
        if own is None:
            raise NotOffered(
                f"{model.name}: the branch of {block}.attn is no linear layer of what the heads "
                "gave, times one factor per channel (a norm is between, say); leave out --heads"
            )
        found[block] = own
    return found


def _around(module: nn.Module, place: HookPoint) -> nn.Module:
    """The module that has the one which the heads' outputs enter: the projection, or a norm or an
    Identity before it."""
    return module.get_submodule(place.module.rpartition(".")[0])


def _fitted(layer: nn.Linear, heads: Float, branch: Float, n_heads: int) -> Projection | None:
    """The layer with the factor per channel (1, or the layer scale) that makes its output the
    branch; None if none does."""
    weight = layer.weight.detach().double().numpy()
    bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().double().numpy()
    plain = heads @ weight.T + bias
    size = np.square(plain).sum(0)
    factor = (plain * branch).sum(0) / np.where(size > 0, size, 1)
    if not np.abs(plain * factor - branch).max() <= PROVEN * np.abs(branch).max():
        return None
    return Projection(weight * factor[:, np.newaxis], bias * factor, n_heads)
