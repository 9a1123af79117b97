"""Small stores whose residual dot products a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Samples, new_manifest

Array = NDArray[Any]

VIT = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
REGISTERS = TokenLayout(("cls", "reg0", "reg1"), (2, 2), stride_px=(14.0, 14.0))


def products_of(z: Array, f: Array) -> Array:
    """(..., dim) twice -> (..., 3) float32 z.z, f.f, z.f."""
    return np.stack([(z * z).sum(-1), (f * f).sum(-1), (z * f).sum(-1)], -1).astype(np.float32)


def random_branches(n: int, tokens: int, seed: int = 0, dim: int = 5) -> tuple[Array, Array]:
    """Skips and branches (n, tokens, dim) of very different norms."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, tokens, dim)) * np.exp(rng.normal(size=(n, tokens, 1)))
    return z, rng.normal(size=z.shape) + 0.5 * z


def write_residuals(
    path: Path,
    products: Mapping[str, Array],
    *,
    layout: TokenLayout = VIT,
    layouts: Mapping[str, TokenLayout] | None = None,
    n_images: int | None = None,
    slab: int = 4,
    valid: Sequence[int] | None = None,
    order: str = "shuffled",
    left_out: Mapping[str, str] | None = None,
    slabs: Sequence[int] | None = None,
    name: str = "tiny",
) -> Store:
    """A store of these sublayers, name -> (images, tokens, 3), in the model's order.

    Args:
        path: where; its stem is the label.
        products: rows of images that are not valid become NaN.
        layout: of all sublayers, but for those in `layouts`.
        layouts: of some.
        n_images: needed only without sublayers.
        slab: rows a slab.
        valid: 0 or 1 a row.
        order: of the images, as in the identity.
        left_out: what the manifest says was left out.
        slabs: which are committed; all by default.
        name: of the model.
    """
    n = n_images or len(next(iter(products.values())))
    last = max(len(products) - 1, 1)
    sublayers = tuple((site, (layouts or {}).get(site, layout)) for site in products)
    places = tuple((site, i, i / last) for i, site in enumerate(products))
    plan = StorePlan(n, slab, "none", (), sublayers=sublayers, places=places)
    index = np.arange(n, dtype=np.int64)
    samples = Samples(index, [f"i{i}" for i in index], np.zeros(n, np.int64), [""] * n)
    identity = {"order": order, "seed": 0}
    manifest = new_manifest(identity, plan, samples, model={"name": name}, left_out=left_out)
    keep = np.ones(n, np.uint8) if valid is None else np.array(valid, np.uint8)
    writer = StoreWriter.create_or_join(path, manifest, samples)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, _slab(plan, k, products, keep), {})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None, label=path.stem)


def _slab(plan: StorePlan, k: int, products: Mapping[str, Array], valid: Array) -> dict[str, Array]:
    rows = plan.rows(k)
    out: dict[str, Array] = {
        "valid": valid[rows],
        "n_valid": np.asarray(valid[rows].sum(), np.int64),
        "hash": np.arange(rows.start, rows.stop, dtype=np.uint64),
        "size": np.full((len(valid[rows]), 2), 32, np.int32),
    }
    for path in arrays(plan):
        if path.startswith("residual/"):
            values = products[path.removeprefix("residual/")][rows].astype(np.float32)
            values[valid[rows] == 0] = np.nan
            out[path] = values
    return out


SITES = ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp")


def vit(path: Path, n: int = 10, tokens: int = 7, seed: int = 0, **kwargs: Any) -> Store:
    """Two blocks, random branches of 7 tokens."""
    products = {
        site: products_of(*random_branches(n, tokens, seed + i)) for i, site in enumerate(SITES)
    }
    return write_residuals(path, products, **kwargs)


def cnn(path: Path, n: int = 10, **kwargs: Any) -> Store:
    """Two blocks of 2 x 3 locations and one of a single location."""
    layouts = {
        f"layer{i}.0": TokenLayout((), grid, stride_px=(8.0, 8.0))
        for i, grid in enumerate([(2, 3), (2, 3), (1, 1)], 1)
    }
    products = {
        site: products_of(*random_branches(n, layout.n_tokens, i + 50))
        for i, (site, layout) in enumerate(layouts.items())
    }
    return write_residuals(path, products, layouts=layouts, name="resnet", **kwargs)
