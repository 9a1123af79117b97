"""Small stores whose activations a test chooses."""

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

LAYOUT = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
CNN = TokenLayout((), (2, 2), stride_px=(32.0, 32.0))


def activations(
    n: int, dim: int = 4, seed: int = 0, layout: TokenLayout = LAYOUT, latent: int = 5
) -> Array:
    """(n, tokens, dim) of `latent` common directions and noise; the directions are those of the
    images, so that two sites with other seeds resemble each other."""
    common = np.random.default_rng(99).normal(size=(n, latent))
    rng = np.random.default_rng(seed)
    mixed = common @ rng.normal(size=(latent, layout.n_tokens * dim))
    noise = rng.normal(size=mixed.shape)
    return (mixed + noise).reshape(n, layout.n_tokens, dim)


def write_acts(
    path: Path,
    sites: Mapping[str, Array],
    *,
    layout: TokenLayout = LAYOUT,
    slab: int = 8,
    dtype: str = "float32",
    tokens: str = "all",
    valid: Sequence[int] | None = None,
    order: str = "shuffled",
    slabs: Sequence[int] | None = None,
    name: str = "image",
    grams: bool = False,
    groups: Sequence[str] = ("blocks",),
    command: str = "",
) -> Store:
    """A store of these sites; (n, tokens, dim) an array, or (n, dim) for a vector.

    Args:
        path: where.
        sites: name -> values, in the model's order.
        layout: of all sites with tokens.
        slab: rows a slab.
        dtype: of `acts/`.
        tokens: "all" or "pooled".
        valid: 0 or 1 a row; the others' values become NaN.
        order: of the images, as in the identity.
        slabs: which are committed; all by default.
        name: decides the samples' ids, and so which stores pair.
        grams: keep Gram matrices within slabs.
        groups: of every site.
        command: what the slabs' commit markers say.
    """
    n = len(next(iter(sites.values())))
    specs = tuple(
        _site(site, depth, len(sites) - 1, values, layout, dtype, tokens, groups)
        for depth, (site, values) in enumerate(sites.items())
    )
    plan = StorePlan(n, slab, "none", specs, grams=grams)
    index = np.arange(n, dtype=np.int64)
    ids = [f"{name}{i}" for i in index]
    samples = Samples(index, ids, index % 2, [""] * n)
    manifest = new_manifest({"order": order, "seed": 0}, plan, samples, model={"name": "tiny"})
    writer = StoreWriter.create_or_join(path, manifest, samples)
    keep = np.ones(n, np.uint8) if valid is None else np.array(valid, np.uint8)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, _slab(plan, k, sites, keep), {"command": command})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None)


def _site(
    name: str,
    depth: int,
    last: int,
    values: Array,
    layout: TokenLayout,
    dtype: str,
    tokens: str,
    groups: Sequence[str],
) -> SiteSpec:
    block, _, part = name.rpartition(".")
    vector = values.ndim == 2
    return SiteSpec(
        name=name,
        part=part,
        block=block or None,
        groups=tuple(groups),
        kind="vector" if vector else "tokens",
        dim=values.shape[-1],
        shape=values.shape[1:],
        layout=None if vector else layout,
        depth=depth,
        rel_depth=depth / max(last, 1),
        tokens="all" if vector else tokens,
        dtype="float32" if vector else dtype,
    )


def _slab(plan: StorePlan, k: int, sites: Mapping[str, Array], valid: Array) -> dict[str, Array]:
    rows = plan.rows(k)
    keep = valid[rows] == 1
    out: dict[str, Array] = {
        "valid": valid[rows],
        "n_valid": np.asarray(keep.sum(), np.int64),
        "hash": np.arange(rows.start, rows.stop, dtype=np.uint64),
        "size": np.zeros((len(keep), 2), np.int32),
    }
    for path, spec in arrays(plan).items():
        if path in out or spec.per in ("once", "commit"):
            continue
        folder, _, rest = path.partition("/")
        name, part = (rest, "") if folder == "vectors" else rest.rsplit("/", 1)
        values = sites[name][rows].astype(np.float64)
        values[~keep] = np.nan
        layout = next(site.layout for site in plan.sites if site.name == name)
        n_prefix = 0 if layout is None else layout.n_prefix
        out[path] = _part(part, values, n_prefix, spec.shape, keep).astype(spec.dtype)
    return out


def _part(part: str, values: Array, n_prefix: int, shape: tuple[int, ...], keep: Array) -> Array:
    if part == "all":
        return _within(values, keep, shape[-1])
    if part == "cls":
        return values[:, 0]
    if part == "prefix":
        return values[:, :n_prefix]
    if part == "mean":
        return np.asarray(values[:, n_prefix:].mean(1))
    return values[:, n_prefix:].reshape(len(values), *shape[1:]) if part == "grid" else values


def _within(values: Array, keep: Array, slab: int) -> Array:
    """The slab's Gram matrix, NaN where there is no valid image."""
    whole = np.full((slab, slab), np.nan)
    places = np.flatnonzero(keep)
    flat = values[places].reshape(len(places), -1)
    flat = flat - flat.mean(0)
    whole[np.ix_(places, places)] = flat @ flat.T
    return whole
