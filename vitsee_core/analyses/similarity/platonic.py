"""The protocol of the Platonic Representation Hypothesis (Huh et al. 2024) for vision models.

As their code has it: the class token of every block's output; values beyond the 0.95 quantile of
|x| (of all layers and images of a model together, exact) cut off; cosine; mutual k-NN with k = 10;
and of all pairs of layers of two models the largest value. The largest of many is high by chance:
`p_family` of --calibrate says how high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitsee_core.features.matrix import quantile_of_sizes
from vitsee_core.runtime.streaming import choose_rows
from vitsee_core.similarity import Representation
from vitsee_core.similarity.pairs import paired_rows
from vitsee_core.tables.headlines import extremes, picked

if TYPE_CHECKING:
    from vitsee_core.runtime.execution import Execution
    from vitsee_core.tables.results import Table

NAME = "platonic"
SITES = ("*.out",)
TOKENS = "cls"
QUANTILE = 0.95
SOURCE = (
    "Huh et al. 2024 and their code: class tokens of all blocks, values cut at the 0.95 quantile "
    "of |x| of all layers and images of a model together, the largest over pairs of layers"
)


def without_outliers(
    representations: Sequence[Representation], execution: Execution, pair_by: str
) -> list[Representation]:
    """The same, clipped at the quantile over all representations of one store, over the compared
    images.

    Raises:
        StoreMismatch: the stores do not hold the same images.
        VitseeError: non-finite numbers.
    """
    stores = {one.store.manifest.store_id: one.store for one in representations}
    first = next(iter(stores.values()))
    chosen = choose_rows(first, execution.images, execution.seed)
    rows = paired_rows(list(stores.values()), chosen, pair_by)[0]
    bounds = {}
    for store_id, store in stores.items():
        own = {
            one.features.identity: one.features
            for one in representations
            if one.store.manifest.store_id == store_id
        }
        mask = np.zeros(len(store.valid), bool)
        mask[rows[store_id]] = True
        bounds[store_id] = quantile_of_sizes(list(own.values()), mask, QUANTILE)
    return [replace(r, clamp=bounds[r.store.manifest.store_id]) for r in representations]


def alignments(table: Table) -> list[str]:
    """A line for each measure and pair of stores: its largest value over pairs of layers, and which
    layers (the first of ties)."""
    lines = []
    pairs = picked(table).group_by("metric", "store_a", "store_b", maintain_order=True)
    for (metric, a, b), rows in pairs:
        if metric != "gulp" and a != b:
            best = rows.row(extremes(rows)[1], named=True)
            lines.append(
                f"{metric} of {a} and {b}, the largest over layers: {best['value']:.4g} "
                f"({best['site_a']}, {best['site_b']})"
            )
    return lines
