"""Small stores with labels, whose activations a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import SiteSpec, StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Samples, new_manifest

Array = NDArray[Any]

VIT = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))


def grid(rows: int, cols: int) -> TokenLayout:
    """A CNN's locations."""
    return TokenLayout((), (rows, cols), stride_px=(8.0, 8.0))


def write_labelled(
    path: Path,
    sites: Mapping[str, tuple[Array, TokenLayout | None]],
    labels: Array,
    *,
    slab: int = 16,
    classes: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    valid: Array | None = None,
    order: Array | None = None,
    slabs: Sequence[int] | None = None,
    hash_offset: int = 0,
    tokens: str = "all",
    model: str = "tiny",
) -> Store:
    """A store of these sites.

    Args:
        path: where.
        sites: name -> values (n, tokens, dim) and their layout; (n, dim) and None for a vector.
        labels: (n,).
        slab: rows a slab.
        classes: names; "c0", "c1", ... by default.
        splits: names, one an image.
        valid: (n,) 0 or 1; the others' values become NaN.
        order: (n,) which image each row holds; all given arrays are in the data set's order.
        slabs: which are committed; all by default.
        hash_offset: added to the images' hashes.
        tokens: "all" or "pooled".
        model: its name.
    """
    n = len(labels)
    order = np.arange(n) if order is None else order
    keep = (np.ones(n) if valid is None else np.asarray(valid)).astype(np.uint8)[order]
    specs, values = [], {}
    last = max(len(sites) - 1, 1)
    for depth, (name, (x, layout)) in enumerate(sites.items()):
        block, _, part = name.rpartition(".")
        specs.append(
            SiteSpec(
                name=name, part=part or name, block=block or None,
                groups=("head",) if layout is None else ("blocks",),
                kind="vector" if layout is None else "rows" if layout.grid is None else "tokens",
                dim=x.shape[-1], shape=x.shape[1:], layout=layout, depth=depth,
                rel_depth=depth / last, tokens=tokens if layout is not None else "all",
                dtype="float32",
            )
        )  # fmt: skip
        values[name] = np.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x[order], np.nan)
    plan = StorePlan(n, slab, "none", tuple(specs))
    split = [""] * n if splits is None else [splits[int(i)] for i in order]
    samples = Samples(order.astype(np.int64), [f"i{i}" for i in order], labels[order], split)
    names = [f"c{i}" for i in range(int(labels.max()) + 1)] if classes is None else list(classes)
    manifest = new_manifest(
        {"order": "shuffled", "seed": 0, "model": {"architecture": model}}, plan, samples,
        model={"name": model}, class_names=names or None,
    )  # fmt: skip
    writer = StoreWriter.create_or_join(path, manifest, samples)
    rows = {"valid": keep, "hash": order.astype(np.uint64) + np.uint64(hash_offset)}
    rows["size"] = np.full((n, 2), 32)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        place = plan.rows(k)
        out: dict[str, Array] = {}
        for name, spec in arrays(plan).items():
            if spec.per in ("once", "commit"):
                continue
            if name == "n_valid":
                out[name] = np.asarray(keep[place].sum(), np.int64)
            else:
                whole = rows[name] if name in rows else _array(name, values, sites)
                out[name] = whole[place].astype(spec.dtype)
        writer.write_slab(k, out, {})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None)


def _array(name: str, values: Mapping[str, Array], sites: Mapping[str, tuple[Array, Any]]) -> Array:
    folder, _, rest = name.partition("/")
    if folder == "vectors":
        return values[rest]
    site, _, part = rest.rpartition("/")
    x, layout = values[site], sites[site][1]
    prefix = layout.n_prefix
    if part == "prefix":
        return x[:, :prefix]
    if part == "cls":
        return x[:, layout.cls]
    if part == "mean":
        return np.asarray(x[:, prefix:].mean(1))
    if part == "rows":
        return x[:, prefix:]
    return x[:, prefix:].reshape(len(x), *layout.grid, x.shape[-1])


def class_features(
    labels: Array, tokens: int, dim: int, *, signal: float = 1.0, seed: int = 0
) -> Array:
    """(n, tokens, dim): a direction a class (the same whatever the seed) and unit noise, float32
    numbers."""
    means = np.random.default_rng(77).normal(size=(int(labels.max()) + 1, tokens, dim))
    noise = np.random.default_rng(seed).normal(size=(len(labels), tokens, dim))
    return (signal * means[labels] + noise).astype(np.float32)


def balanced(n: int, classes: int, seed: int = 0) -> Array:
    """(n,) labels in random order, as many of each as possible."""
    return np.random.default_rng(seed).permutation(np.arange(n) % classes)
