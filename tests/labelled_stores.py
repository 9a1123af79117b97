"""Small stores whose features and labels a test chooses."""

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

LAYOUT = TokenLayout(("cls",), (1, 2), stride_px=(16.0, 16.0))
CNN = TokenLayout((), (1, 2), stride_px=(16.0, 16.0))


def write_labelled(
    path: Path,
    sites: Mapping[str, Array],
    labels: Sequence[int] | Array,
    *,
    classes: Sequence[str] | None = None,
    layout: TokenLayout = LAYOUT,
    slab: int = 8,
    tokens: str = "all",
    valid: Sequence[int] | None = None,
    order: str = "shuffled",
    slabs: Sequence[int] | None = None,
    splits: Sequence[str] | None = None,
    index: Sequence[int] | None = None,
    hash_offset: int = 0,
    weights: str = "w",
    model: str = "tiny",
) -> Store:
    """A store of these sites: (n, dim) is a vector, (n, tokens, dim) has tokens of `layout`.

    Args:
        path: where.
        sites: name -> values, in the model's order.
        labels: (n,) classes, -1 for none.
        classes: their names; "a", "b", ... of all labels by default, none where empty.
        layout: of all sites with tokens.
        slab: rows a slab.
        tokens: "all" or "pooled".
        valid: 0 or 1 a row; the others' values become NaN.
        order: of the images, as in the identity.
        slabs: which are committed; all by default.
        splits: name of each image's split.
        index: places in the data set's order.
        hash_offset: of the images' hashes: stores with the same share images.
        weights: in the identity.
        model: its name.
    """
    n, labels = len(labels), np.asarray(labels, np.int64)
    names = [chr(97 + i) for i in range(labels.max() + 1)] if classes is None else list(classes)
    specs = tuple(
        _site(name, depth, len(sites) - 1, values, layout, tokens)
        for depth, (name, values) in enumerate(sites.items())
    )
    plan = StorePlan(n, slab, "none", specs)
    places = np.arange(n, dtype=np.int64) if index is None else np.asarray(index, np.int64)
    ids = [f"{hash_offset}-{i}" for i in range(n)]
    samples = Samples(places, ids, labels, list(splits or [""] * n))
    identity = {"order": order, "seed": 0, "model": {"architecture": model}, "weights": weights}
    manifest = new_manifest(
        identity, plan, samples, model={"name": model}, class_names=names or None
    )
    writer = StoreWriter.create_or_join(path, manifest, samples)
    keep = np.ones(n, np.uint8) if valid is None else np.array(valid, np.uint8)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, _slab(plan, k, sites, keep, hash_offset), {})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None)


def _site(
    name: str, depth: int, last: int, values: Array, layout: TokenLayout, tokens: str
) -> SiteSpec:
    block, _, part = name.rpartition(".")
    vector = values.ndim == 2
    return SiteSpec(
        name=name,
        part=part,
        block=block or None,
        groups=("head",) if vector else ("blocks",),
        kind="vector" if vector else "tokens",
        dim=values.shape[-1],
        shape=values.shape[1:],
        layout=None if vector else layout,
        depth=depth,
        rel_depth=depth / max(last, 1),
        tokens="all" if vector else tokens,
        dtype="float32",
    )


def _slab(
    plan: StorePlan, k: int, sites: Mapping[str, Array], valid: Array, hash_offset: int
) -> dict[str, Array]:
    rows = plan.rows(k)
    keep = valid[rows] == 1
    out: dict[str, Array] = {
        "valid": valid[rows],
        "n_valid": np.asarray(keep.sum(), np.int64),
        "hash": np.arange(rows.start, rows.stop, dtype=np.uint64) + np.uint64(hash_offset),
        "size": np.full((len(valid[rows]), 2), 32, np.int32),
    }
    for path, spec in arrays(plan).items():
        if path in out or spec.per in ("once", "commit"):
            continue
        folder, _, rest = path.partition("/")
        name, part = (rest, "") if folder == "vectors" else rest.rsplit("/", 1)
        values = sites[name][rows].astype(np.float64)
        values[~keep] = np.nan
        layout = next(site.layout for site in plan.sites if site.name == name)
        first = 0 if layout is None else layout.n_prefix
        body = values[:, first:]
        parts = {"cls": values[:, 0], "prefix": values[:, :first], "": values}
        if part == "mean":
            parts[part] = np.asarray(body.mean(1))
        elif part == "grid":
            parts[part] = body.reshape(len(values), *spec.shape[1:])
        out[path] = parts[part].astype(spec.dtype)
    return out
