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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitsee_core.types import Float
from vitsee_stores.errors import MissingInput
from vitsee_stores.manifest import weights_name

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
        """(images, classes) of tokens (images, tokens, dim), prefix tokens first."""
        tokens = self.normalised(tokens) if self.norm_first else tokens
        pooled = pool(np.asarray(tokens, np.float64), layout, self.pool)
        return self.classify(pooled if self.norm_first else self.normalised(pooled))

    def of_tokens(self, tokens: NDArray[Any]) -> Float:
        """(..., classes) of tokens (..., dim), each for itself."""
        return self.classify(self.normalised(tokens))

    def normalised(self, x: NDArray[Any]) -> Float:
        """`x` (..., dim) through the norm."""
        x = np.asarray(x, np.float64)
        if self.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        if self.norm in ("layer", "rms"):
            x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps)
        for name, combine in (
            ("head_norm_scale", np.multiply),
            ("head_norm_bias", np.add),
        ):
            if name in self.arrays:
                x = combine(x, self.arrays[name].astype(np.float64))
        return x

    def classify(self, x: NDArray[Any]) -> Float:
        """(..., classes) of vectors (..., dim) that have been through the norm."""
        kernel = self.arrays["head_kernel"].astype(np.float64)
        found: Float = np.asarray(x, np.float64) @ kernel.T
        if "head_bias" in self.arrays:
            return found + self.arrays["head_bias"]
        return found


Classifier: TypeAlias = "HeadWeights | AttentionPooled"


def pool(tokens: Float, layout: TokenLayout, how: str) -> Float:
    """(images, dim) of tokens (images, tokens, dim), prefix tokens first.

    Raises:
        ValueError: the class token of a layout without one.
    """
    body = tokens[:, layout.n_prefix :]
    if how == "cls":
        if layout.cls is None:
            raise ValueError("no class token")
        return tokens[:, layout.cls]
    if how != "max":
        return (tokens if how == "mean-all" else body).mean(1)
    return body.max(1)


def stored_classifier(store: Store) -> HeadWeights:
    """The classifier that a store keeps.

    Raises:
        MissingInput: it keeps none; with the reason.
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
    """Arrays of float32 by name, `FILTERS` (filters, channels, height, width) and `POSITIONS`
    (rows, cols, dim).

    store: the label of the store they come from, "" where they come from a model. weights: see
    `weights_name`. sites: name -> the layer or tensor. kind: of the positions, see
    `weights.input`. absent: name -> why the model has none.
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
    """The input weights of a model on the CPU, read from parts of a forward pass."""
    from vitsee_core.models.weights.input import find_filters, find_positions

    filters = find_filters(model)
    positions = find_positions(model)
    found = {FILTERS: filters, POSITIONS: positions}
    return InputWeights(
        store="",
        model=model.name,
        weights=weights_name(
            {"weights": model.weights, "ablate_skip": model.ablate_skip}
        ),
        arrays={name: f.values for name, f in found.items() if not isinstance(f, str)},
        sites={name: f.site for name, f in found.items() if not isinstance(f, str)},
        kind="" if isinstance(positions, str) else positions.kind,
        absent={name: f for name, f in found.items() if isinstance(f, str)},
    )


def stored_input_weights(store: Store) -> InputWeights:
    """The input weights of a store's model, as stored.

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
    return InputWeights(store.label, name, weights, arrays, **record)
