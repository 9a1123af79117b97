"""Model weights that a store keeps: first-layer filters, position embeddings, and the classifier if
it is a formula over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.models.loaded import LoadedModel
from vitsee_core.models.sites import SiteTable
from vitsee_core.models.tokens.clips import frames_of
from vitsee_core.models.weights import FILTERS, POSITIONS, input_weights_of
from vitsee_core.models.weights.classifier import find_classifier
from vitsee_core.runtime.machine import human_bytes
from vitsee_stores.errors import VitseeError

OF_CLIPS = "the model takes clips, and its filters, positions and classifier reach over time"
HEAD_BYTES = 16 << 20  # the largest classifier that is kept without being asked for


@dataclass(frozen=True)
class SmallWeights:
    """Weights for a store."""

    arrays: dict[str, NDArray[np.float32]]  # float32 by name, for `weights/`
    record: dict[str, Any]  # for the manifest's `info`
    notes: list[str] = field(default_factory=list)  # for the user

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of each array, for a store's plan."""
        return tuple((name, values.shape) for name, values in self.arrays.items())


def small_weights(model: LoadedModel, table: SiteTable, head: bool | None) -> SmallWeights:
    """The small weights of a model on the CPU.

    Args:
        model: with its sites in `table`.
        table: see `site_table`.
        head: whether to keep the classifier; None: if it takes at most `HEAD_BYTES`.

    Raises:
        VitseeError: `head` is requested and the model's is not a formula over tokens.
    """
    if frames_of(model.module) is not None:
        if head:
            raise VitseeError(f"--head-weights is not supported: {OF_CLIPS}")
        names = (FILTERS, POSITIONS)
        record: dict[str, Any] = {"sites": {}, "kind": "", "absent": dict.fromkeys(names, OF_CLIPS)}
        return SmallWeights({}, {"input_weights": record, "head_weights": {"absent": OF_CLIPS}})
    own = input_weights_of(model)
    classifier = find_classifier(model, table) if head is not False else "not asked for"
    notes: list[str] = []
    if isinstance(classifier, str):
        if head:
            raise VitseeError(f"--head-weights is not supported: {classifier}")
        absent = classifier
    elif head is None and classifier.n_bytes > HEAD_BYTES:
        size, most = human_bytes(classifier.n_bytes), human_bytes(HEAD_BYTES)
        absent = f"it takes {size}, above {most} (extract --head-weights keeps it)"
        notes.append(f"the classifier's weights are not kept: {absent}")
    else:
        return SmallWeights(
            {**own.arrays, **classifier.arrays},
            {"input_weights": own.record(), "head_weights": classifier.record()},
        )
    record = {"input_weights": own.record(), "head_weights": {"absent": absent}}
    return SmallWeights(own.arrays, record, notes)
