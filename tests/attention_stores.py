"""Small stores whose attention distances a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Samples, new_manifest

Array = NDArray[Any]


def group(
    blocks: Sequence[str],
    n_heads: Sequence[int],
    grid: tuple[int, int] = (2, 3),
    stride: tuple[float, float] = (16.0, 16.0),
    prefix: str = "",
) -> AttentionGroup:
    """Blocks with a class token and this grid."""
    layout = TokenLayout(("cls",), grid, stride_px=stride)
    return AttentionGroup(prefix, tuple(blocks), tuple(n_heads), layout)


def write_store(
    path: Path,
    groups: Sequence[AttentionGroup],
    values: Mapping[str, Array],
    *,
    n_images: int,
    slab: int = 4,
    valid: Sequence[int] | None = None,
    order: str = "shuffled",
    model_blocks: Sequence[str] | None = None,
    left_out: Mapping[str, str] | None = None,
    slabs: Sequence[int] | None = None,
    name: str = "image",
    hash_offset: int = 0,
) -> Path:
    """A store with these attention arrays, everything else zero.

    Args:
        path: where.
        groups: blocks, heads, grids; none for a store without attention.
        values: array name -> (images, ...); invalid rows should be NaN there.
        n_images: rows.
        slab: rows a slab.
        valid: 0 or 1 a row.
        order: of the images, as in the identity.
        model_blocks: blocks whose outputs the store lists, in the model's order; None: no outputs.
        left_out: what the manifest says was left out.
        slabs: which are committed; all by default.
        name: decides the samples' ids, and so which stores pair.
        hash_offset: added to the images' hashes.
    """
    layout = groups[0].layout if groups else TokenLayout((), (2, 2), stride_px=(16.0, 16.0))
    outputs = () if model_blocks is None else ("embed", *(f"{b}.out" for b in model_blocks))
    sites = tuple(_site(out, depth, len(outputs) - 1, layout) for depth, out in enumerate(outputs))
    level = "summary" if groups else "none"
    blocks = [block for g in groups for block in g.blocks]
    order_of = list(blocks if model_blocks is None else model_blocks)
    index_of = {block: order_of.index(block) for block in blocks}
    places = tuple((b, i, i / max(len(order_of) - 1, 1)) for b, i in index_of.items())
    plan = StorePlan(n_images, slab, "none", sites, tuple(groups), level, places=places)
    index = np.arange(n_images, dtype=np.int64)
    ids = [f"{name}{i}" for i in index]
    samples = Samples(index, ids, np.zeros(n_images, np.int64), [""] * n_images)
    manifest = new_manifest(
        {"order": order, "seed": 0}, plan, samples, model={"name": "tiny"}, left_out=left_out
    )
    rows = {
        "valid": np.ones(n_images, np.uint8) if valid is None else np.array(valid, np.uint8),
        "hash": index.astype(np.uint64) + np.uint64(hash_offset),
        **values,
    }
    writer = StoreWriter.create_or_join(path, manifest, samples)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, _slab(plan, k, rows), {})
    writer.finish()
    return path


def _site(name: str, depth: int, last: int, layout: TokenLayout) -> SiteSpec:
    block, _, part = name.rpartition(".")
    return SiteSpec(
        name=name,
        part=part,
        block=block or None,
        groups=("blocks", "all"),
        kind="tokens",
        dim=1,
        shape=(layout.n_tokens, 1),
        layout=layout,
        depth=depth,
        rel_depth=depth / last,
        tokens="pooled",
    )


def _slab(plan: StorePlan, k: int, rows: Mapping[str, Array]) -> dict[str, Array]:
    place = plan.rows(k)
    out: dict[str, Array] = {}
    for path, spec in arrays(plan).items():
        if spec.per in ("once", "commit"):
            continue
        n_rows = place.stop - place.start
        shape = (n_rows, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
        out[path] = np.zeros(shape, spec.dtype)
        if path in rows:
            out[path][...] = rows[path][place]
    out["n_valid"] = np.array(out["valid"].sum(), np.int64)
    return out


def open_labelled(path: Path, **kwargs: Any) -> Store:
    """The store, labelled with its file's stem."""
    return open_store(path, label=path.stem, **kwargs)
