"""Weights: read from files (`checkpoint_files`, `checkpoints`), and those that a store keeps of its
model, found by running it: its classifier (`classifier`), and what it lays over its input, the
first layer's filters and the position embedding of its patches (`input`). Here is what is kept,
which needs neither torch nor the model.

The classifier is a formula over the tokens of one site: norm, pooling, linear layer.

    logits = kernel @ norm(pool(tokens)) + bias, or kernel @ pool(norm(tokens)) + bias

Where a model works like this it can be read on any tokens of the same width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_core.models.weights.classifier import AttentionPooled
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

FILTERS = "filters"
POSITIONS = "positions"
ARRAYS = ("head_kernel", "head_bias", "head_norm_scale", "head_norm_bias")
POOLS = ("cls", "mean", "mean-all", "max")
# Of the norms that may precede the mean: those that give the same of the mean itself.
LINEAR_NORMS = ("none", "affine")


@dataclass(frozen=True)
class HeadWeights:
    """A classifier turns the tokens of a block into logits, as if the model ended there.

    arrays: float32, `head_kernel` (classes, dim) and as far as the model has them `head_bias`
    (classes,), `head_norm_scale` and `head_norm_bias` (dim,).

    site: whose tokens it reads. pool: "cls" (the class token), "mean" (over the grid), "mean-all"
    (over all tokens) or "max" (over the grid, each channel for itself). norm: "none", "layer"
    (zero mean and variance 1 over the channels), "rms" (mean square 1) or "affine" (scale and bias
    alone: a batch norm with its running statistics); eps: added to the variance or mean square.
    norm_first: whether each token is normalised before they are pooled. error: largest difference
    from the model's logits over the largest of these less its bias, on random images.
    """

    arrays: dict[str, NDArray[np.float32]]
    site: str
    pool: str
    norm: str
    eps: float
    norm_first: bool
    error: float = 0.0

    @property
    def width(self) -> int:
        """Channels of a token."""
        return int(self.arrays["head_kernel"].shape[1])

    @property
    def n_classes(self) -> int:
        """The number of logits."""
        return len(self.arrays["head_kernel"])

    @property
    def pooled_kind(self) -> str | None:
        """The kind of a store's `pooled/` that is enough, "cls" or "mean", because its `of_tokens`
        are the logits; None where every token is needed."""
        if self.pool == "cls":
            return "cls"
        if self.pool == "mean" and (not self.norm_first or self.norm in LINEAR_NORMS):
            return "mean"
        return None

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(values.nbytes for values in self.arrays.values())

    def record(self) -> dict[str, Any]:
        """The fields that a store's manifest records beside the arrays, as JSON values."""
        names = ("site", "pool", "norm", "eps", "norm_first", "error")
        return {name: getattr(self, name) for name in names}

    def logits(self, tokens: NDArray[Any], layout: TokenLayout) -> Float:
        """Return (images, classes) for tokens (images, tokens, dim), prefix tokens first."""
        if self.norm_first:
            tokens = self.normalised(tokens)
        pooled = pool(np.asarray(tokens, np.float64), layout, self.pool)
        if not self.norm_first:
            pooled = self.normalised(pooled)
        return self.classify(pooled)

    def of_tokens(self, tokens: NDArray[Any]) -> Float:
        """Return (..., classes) for tokens (..., dim), each by itself, as if it were pooled."""
        return self.classify(self.normalised(tokens))

    def normalised(self, x: NDArray[Any]) -> Float:
        """Return vectors (..., dim) after the norm, in float64."""
        x = np.asarray(x, np.float64)
        if self.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        if self.norm in ("layer", "rms"):
            x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps)
        if "head_norm_scale" in self.arrays:
            x = x * self.arrays["head_norm_scale"].astype(np.float64)
        if "head_norm_bias" in self.arrays:
            x = x + self.arrays["head_norm_bias"].astype(np.float64)
        return x

    def classify(self, x: NDArray[Any]) -> Float:
        """Return (..., classes) for vectors (..., dim) after the norm."""
        kernel = self.arrays["head_kernel"].astype(np.float64)
        logits: Float = np.asarray(x, np.float64) @ kernel.T
        if "head_bias" in self.arrays:
            logits = logits + self.arrays["head_bias"]
        return logits


Classifier: TypeAlias = "HeadWeights | AttentionPooled"


def pool(tokens: Float, layout: TokenLayout, how: str) -> Float:
    """Return tokens pooled over an image, (images, dim).

    Args:
        tokens: (images, tokens, dim), prefix tokens first.
        layout: prefix tokens and grid.
        how: "cls", "mean", "mean-all" or "max", as in `HeadWeights`.

    Raises:
        ValueError: the class token of a layout without one.
    """
    if how == "cls":
        if layout.cls is None:
            raise ValueError("no class token")
        return tokens[:, layout.cls]
    if how == "mean-all":
        return tokens.mean(1)
    body = tokens[:, layout.n_prefix :]
    if how == "max":
        return body.max(1)
    return body.mean(1)


def stored_classifier(store: Store) -> HeadWeights:
    """Return the classifier that a store keeps.

    Raises:
        MissingInput: the store does not keep one; with the reason.
    """
    record = store.manifest.info.get("head_weights") or {}
    if "site" not in record:
        reason = record.get("absent", "it was made without (extract --head-weights)")
        raise MissingInput(f"{store.label} has no weights of the classifier: {reason}")
    arrays = {
        name: store.weights(name) for name in ARRAYS if store.has(f"weights/{name}")
    }
    return HeadWeights(arrays, **record)


@dataclass(frozen=True)
class InputWeights:
    """The first weights that an image meets.

    Attributes:
        store: the label of the store that they come from, "" where they come from a model.
        model: the model's name.
        weights: the name of its weights.
        arrays: float32, `FILTERS` (filters, channels, height, width) and `POSITIONS` (rows, cols,
            dim).
        sites: name of an array -> the layer or tensor.
        kind: how positions come about: "learned", "fixed", "sine-cosine" or "computed".
        absent: name of an array -> why the model has none.
    """

    store: str
    model: str
    weights: str
    arrays: dict[str, NDArray[np.float32]]
    sites: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    absent: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The fields that a store's manifest records beside the arrays, as JSON values."""
        return {"sites": self.sites, "kind": self.kind, "absent": self.absent}


def input_weights_of(model: LoadedModel) -> InputWeights:
    """Return the input weights of a model on the CPU, read from parts of a forward pass."""
    from vitsee_core.models.weights.input import find_filters, find_positions

    filters = find_filters(model)
    positions = find_positions(model)
    record = {"weights": model.weights, "ablate_skip": model.ablate_skip}
    weights = InputWeights(
        store="", model=model.name, weights=weights_name(record), arrays={}
    )
    for name, array_or_reason in {FILTERS: filters, POSITIONS: positions}.items():
        if isinstance(array_or_reason, str):
            weights.absent[name] = array_or_reason
        else:
            weights.arrays[name] = array_or_reason.values
            weights.sites[name] = array_or_reason.site
    if not isinstance(positions, str):
        weights = replace(weights, kind=positions.kind)
    return weights


def stored_input_weights(store: Store) -> InputWeights:
    """Return the input weights of a store's model, as stored.

    Raises:
        MissingInput: the store was made without.
    """
    record: Mapping[str, Any] | None = store.manifest.info.get("input_weights")
    if record is None:
        raise MissingInput(
            f"{store.label} keeps no weights of its model; extract it anew"
        )
    arrays = {
        n: store.weights(n) for n in (FILTERS, POSITIONS) if store.has(f"weights/{n}")
    }
    model = store.manifest.model
    name = model.get("name", "")
    weights = weights_name(model)
    return InputWeights(
        store=store.label, model=name, weights=weights, arrays=arrays, **record
    )
