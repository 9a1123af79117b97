"""Stores of made-up numbers that benchmarks need: any plan, written slab by slab without fsync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import (
    Samples,
    SiteSpec,
    Store,
    StorePlan,
    StoreWriter,
    TokenLayout,
    open_store,
)
from vitsee_stores.layout import arrays
from vitsee_stores.manifest import new_manifest

Array = NDArray[Any]


def block_sites(n: int, dim: int, layout: TokenLayout) -> tuple[SiteSpec, ...]:
    """The outputs of n blocks, with all their tokens."""
    return tuple(
        SiteSpec(
            f"blocks.{k}.out", "out", f"blocks.{k}", ("blocks",), "tokens", dim,
            (layout.n_tokens, dim), layout, k, k / max(n - 1, 1),
        )
        for k in range(n)
    )  # fmt: skip


def write_store(
    path: Path,
    plan: StorePlan,
    values: Callable[[slice], Mapping[str, Array]],
    *,
    ids: Sequence[str] | None = None,
    labels: NDArray[np.int64] | None = None,
    order: str = "shuffled",
    first_hash: int = 0,
    size: tuple[int, int] = (224, 224),
    **about: Any,
) -> Store:
    """A complete store at `path`; every image is valid.

    Args:
        path: where.
        plan: what it holds.
        values: rows of a slab -> path -> its values; those of other arrays are 0.
        ids: (images,) their names; their places by default.
        labels: (images,) classes; 0 by default.
        order: "shuffled" or "dataset".
        first_hash: of the first image; the others count on.
        size: height and width of the original images.
        about: more of `new_manifest`.
    """
    n = plan.n_images
    classes = np.zeros(n, np.int64) if labels is None else labels
    names = [str(i) for i in range(n)] if ids is None else list(ids)
    samples = Samples(np.arange(n), names, classes, [""] * n)
    manifest = new_manifest({"order": order, "seed": 0}, plan, samples, **about)
    writer = StoreWriter.create_or_join(path, manifest, samples, durable=False)
    of_slabs = {
        p: spec for p, spec in arrays(plan).items() if spec.per in ("image", "slab")
    }
    for k in range(plan.n_slabs):
        rows = plan.rows(k)
        m = rows.stop - rows.start
        given = {
            "valid": np.ones(m, np.uint8),
            "n_valid": np.array(m),
            "hash": np.arange(rows.start, rows.stop, dtype=np.uint64)
            + np.uint64(first_hash),
            "size": np.tile(np.array(size, np.int32), (m, 1)),
            **values(rows),
        }
        for name in of_slabs.keys() - given.keys():
            shape = of_slabs[name].shape[1:]
            whole = (m, *shape) if of_slabs[name].per == "image" else shape
            given[name] = np.zeros(whole, of_slabs[name].dtype)
        writer.write_slab(k, given, {})
    writer.finish()
    return open_store(path)
