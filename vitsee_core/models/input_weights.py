"""The weights a model lays over its input, of a model or of a store: the first layer's filters and
the position embedding of its patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores.errors import MissingInput
from vitsee_stores.weights_names import weights_name

if TYPE_CHECKING:
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_stores import Store

FILTERS, POSITIONS = "filters", "positions"


@dataclass(frozen=True)
class InputWeights:
    """Arrays of float32 by name, `FILTERS` (filters, channels, height, width) and `POSITIONS`
    (rows, cols, dim).

    store: the label of the store they come from, "" where they come from a model. weights: see
    `weights_name`. sites: name -> the layer or tensor. kind: of the positions, see
    `models.positions`. absent: name -> why the model has none.
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


def of_model(model: LoadedModel) -> InputWeights:
    """The input weights of a model on the CPU, read from parts of a forward pass."""
    from vitsee_core.models.first_layer import find_filters
    from vitsee_core.models.positions import find_positions

    filters, positions = find_filters(model), find_positions(model)
    found = {FILTERS: filters, POSITIONS: positions}
    return InputWeights(
        store="",
        model=model.name,
        weights=weights_name({"weights": model.weights, "ablate_skip": model.ablate_skip}),
        arrays={name: f.values for name, f in found.items() if not isinstance(f, str)},
        sites={name: f.site for name, f in found.items() if not isinstance(f, str)},
        kind="" if isinstance(positions, str) else positions.kind,
        absent={name: f for name, f in found.items() if isinstance(f, str)},
    )


def of_store(store: Store) -> InputWeights:
    """The input weights of a store's model, as stored.

    Raises:
        MissingInput: the store was made without.
    """
    record: Mapping[str, Any] | None = store.manifest.info.get("input_weights")
    if record is None:
        raise MissingInput(f"{store.label} keeps no weights of its model; extract it anew")
    arrays = {n: store.weights(n) for n in (FILTERS, POSITIONS) if store.has(f"weights/{n}")}
    model = store.manifest.model
    name, weights = model.get("name", ""), weights_name(model)
    return InputWeights(store.label, name, weights, arrays, **record)
