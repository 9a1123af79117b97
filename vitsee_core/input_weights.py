"""The weights a model lays over its input, of a model or of a store: the first layer's filters and
the position embedding of its patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vitsee_core.models import LoadedModel
    from vitsee_stores import Store

FILTERS, POSITIONS = "filters", "positions"


@dataclass(frozen=True)
class InputWeights:
    """Arrays of float32 by name, `FILTERS` (filters, channels, height, width) and `POSITIONS`
    (rows, cols, dim).

    store: the label of the store they come from, "" where they come from a model. sites: name ->
    the layer or tensor. kind: of the positions, see `models.positions`. absent: name -> why the
    model has none.
    """

    store: str
    model: str
    arrays: dict[str, NDArray[np.float32]]
    sites: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of each array, for a store's plan."""
        return tuple((name, values.shape) for name, values in self.arrays.items())

    def record(self) -> dict[str, Any]:
        """What a store's manifest says beside the arrays, as JSON can hold it."""
        return {"sites": self.sites, "kind": self.kind, "absent": self.absent}


def of_model(model: LoadedModel) -> InputWeights:
    """Those of a model on the CPU, read from parts of a forward pass."""
    from vitsee_core.models.first_layer import find_filters
    from vitsee_core.models.positions import find_positions

    filters, positions = find_filters(model), find_positions(model)
    found = {FILTERS: filters, POSITIONS: positions}
    return InputWeights(
        store="",
        model=model.name,
        arrays={name: f.values for name, f in found.items() if not isinstance(f, str)},
        sites={name: f.site for name, f in found.items() if not isinstance(f, str)},
        kind="" if isinstance(positions, str) else positions.kind,
        absent={name: f for name, f in found.items() if isinstance(f, str)},
    )


def of_store(store: Store, checkpoint: Path | None = None) -> InputWeights:
    """Those of a store's model: as stored, else, where the store was made before they were kept,
    of its model made once more.

    Args:
        store: any.
        checkpoint: where the file with the weights is now, for a model made once more.

    Raises:
        VitseeError: the weights are needed and gone, or others than the store's.
    """
    from dataclasses import replace

    record: Mapping[str, Any] | None = store.manifest.info.get("input_weights")
    if record is None:
        from vitsee_core.origin import model_of

        return replace(of_model(model_of(store, checkpoint)), store=store.label)
    arrays = {name: store.array(f"weights/{name}")[:] for name, _ in store.plan.weights}
    name = store.manifest.model.get("name", "")
    return InputWeights(store.label, name, arrays, **record)
