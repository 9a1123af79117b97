"""Stores of made-up numbers that benchmarks need: any plan, written slab by slab without fsync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Samples, StorePlan, StoreWriter
from vitsee_stores.manifest import new_manifest

Array = NDArray[Any]


def write_store(
    path: Path,
    plan: StorePlan,
    ids: Sequence[str],
    values: Callable[[slice], Mapping[str, Array]],
    *,
    labels: NDArray[np.int64] | None = None,
    class_names: Sequence[str] | None = None,
    order: str = "shuffled",
    first_hash: int = 0,
) -> None:
    """A complete store at `path`; every image is valid.

    Args:
        path: where.
        plan: what it holds.
        ids: (images,) their names.
        values: rows of a slab -> path -> its values, but for what every store has.
        labels: (images,) classes; 0 by default.
        class_names: of the labels.
        order: "shuffled" or "dataset".
        first_hash: of the first image; the others count on.
    """
    n = plan.n_images
    classes = np.zeros(n, np.int64) if labels is None else labels
    samples = Samples(np.arange(n), list(ids), classes, [""] * n)
    identity = {"order": order, "seed": 0}
    manifest = new_manifest(identity, plan, samples, class_names=class_names)
    writer = StoreWriter.create_or_join(path, manifest, samples, durable=False)
    for k in range(plan.n_slabs):
        rows = plan.rows(k)
        m = rows.stop - rows.start
        about = {
            "valid": np.ones(m, np.uint8),
            "n_valid": np.array(m),
            "hash": np.arange(rows.start, rows.stop, dtype=np.uint64) + np.uint64(first_hash),
            "size": np.full((m, 2), 224, np.int32),
        }
        writer.write_slab(k, {**about, **values(rows)}, {})
    writer.finish()
