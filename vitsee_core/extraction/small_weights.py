"""The small weights of a model that a store keeps: filters, positions, and the classifier."""

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

REACH_OVER_TIME = (
    "the model takes clips, and its filters, positions and classifier reach over time"
)
MAX_HEAD_BYTES = 16 << 20  # the largest classifier that is kept without being requested


@dataclass(frozen=True)
class SmallWeights:
    """Weights for a store.

    Attributes:
        arrays: name -> values, for `weights/`.
        record: their description, for the manifest's `info`.
        notes: remarks for the user.
    """

    arrays: dict[str, NDArray[np.float32]]
    record: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of each array, for a store's plan."""
        return tuple((name, values.shape) for name, values in self.arrays.items())


def small_weights(
    model: LoadedModel, table: SiteTable, keep_head: bool | None
) -> SmallWeights:
    """Collect the small weights of a model that is on the CPU.

    Args:
        model: the model.
        table: its sites; the classifier reads the tokens of one of them.
        keep_head: whether to keep the classifier; None to keep it if it takes at most
            `MAX_HEAD_BYTES`.

    Raises:
        VitseeError: the classifier is requested, and the model's is not a formula over
            tokens.
    """
    if frames_of(model.module) is not None:
        return _no_weights_of_clips(keep_head)
    input_weights = input_weights_of(model)
    record = {"input_weights": input_weights.record()}
    notes: list[str] = []
    if keep_head is False:
        absent = "not asked for"
    else:
        classifier = find_classifier(model, table)
        if isinstance(classifier, str):  # the reason why there is none
            if keep_head:
                raise VitseeError(f"--head-weights is not supported: {classifier}")
            absent = classifier
        elif keep_head is None and classifier.n_bytes > MAX_HEAD_BYTES:
            size = human_bytes(classifier.n_bytes)
            bound = human_bytes(MAX_HEAD_BYTES)
            absent = f"it takes {size}, above {bound} (extract --head-weights keeps it)"
            notes.append(f"the classifier's weights are not kept: {absent}")
        else:
            return SmallWeights(
                arrays={**input_weights.arrays, **classifier.arrays},
                record={**record, "head_weights": classifier.record()},
            )
    record["head_weights"] = {"absent": absent}
    return SmallWeights(input_weights.arrays, record, notes)


def _no_weights_of_clips(keep_head: bool | None) -> SmallWeights:
    """Return the record of a model of clips, of which no weights are kept."""
    if keep_head:
        raise VitseeError(f"--head-weights is not supported: {REACH_OVER_TIME}")
    input_record: dict[str, Any] = {
        "sites": {},
        "kind": "",
        "absent": dict.fromkeys((FILTERS, POSITIONS), REACH_OVER_TIME),
    }
    return SmallWeights(
        arrays={},
        record={
            "input_weights": input_record,
            "head_weights": {"absent": REACH_OVER_TIME},
        },
    )
