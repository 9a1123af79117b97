"""Small stores with named parts of blocks, aliases and attention: what cka and cka-heads read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.activation_stores import LAYOUT, activations
from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Samples, new_manifest

Array = NDArray[Any]

VIT_PARTS = ("norm1", "attn.heads", "attn.branch", "mid", "norm2", "mlp.branch", "out")
GROUPS = {"norm1": "norms", "norm2": "norms", "attn.heads": "heads", "out": "blocks"}


def write_store(
    path: Path,
    sites: Mapping[str, Array | str],
    *,
    n: int,
    layout: TokenLayout = LAYOUT,
    slab: int = 8,
    valid: Sequence[int] | None = None,
    order: str = "shuffled",
    name: str = "image",
    tokens: str = "all",
    distances: Array | None = None,
    left_out: Mapping[str, str] | None = None,
    slabs: Sequence[int] | None = None,
    ids: Sequence[str] | None = None,
    hash_offset: int = 0,
) -> Store:
    """A store of these sites.

    Args:
        path: where.
        sites: name -> (n, tokens, dim) or (n, dim), or the name of the site that it equals.
        n: images.
        layout: of all sites with tokens.
        slab: rows a slab.
        valid: 0 or 1 a row; the others' values become NaN.
        order: of the images, as in the identity.
        name: decides the samples' ids, and so which stores pair.
        tokens: "all" or "pooled".
        distances: (n, blocks, heads) attention distances of `blocks.0`, `blocks.1`, ...
        left_out: what the manifest says was left out.
        slabs: which are committed; all by default.
        ids: of the samples, in place of those by `name`.
        hash_offset: added to the images' hashes.
    """
    specs = tuple(_site(site, at, sites, layout, tokens) for at, site in enumerate(sites))
    attention: dict[str, Any] = {}
    if distances is not None:
        blocks = tuple(f"blocks.{i}" for i in range(distances.shape[1]))
        group = AttentionGroup("", blocks, (distances.shape[2],) * len(blocks), layout)
        attention = {"attention": (group,), "attention_level": "summary"}
        attention["places"] = tuple((b, i, float(i)) for i, b in enumerate(blocks))
    plan = StorePlan(n, slab, "none", specs, **attention)
    index = np.arange(n, dtype=np.int64)
    samples = Samples(index, list(ids or [f"{name}{i}" for i in index]), index % 2, [""] * n)
    manifest = new_manifest(
        {"order": order, "seed": 0}, plan, samples, model={"name": "tiny"}, left_out=left_out
    )
    keep = np.ones(n, np.uint8) if valid is None else np.array(valid, np.uint8)
    whole = _arrays(plan, sites, keep, distances)
    whole["hash"] = whole["hash"] + np.uint64(hash_offset)
    writer = StoreWriter.create_or_join(path, manifest, samples)
    specs_of = arrays(plan)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        rows = plan.rows(k)
        parts = {p: v[rows] if specs_of[p].per == "image" else v[k] for p, v in whole.items()}
        parts["n_valid"] = np.asarray(keep[rows].sum(), np.int64)
        writer.write_slab(k, parts, {})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None)


def _site(
    name: str, at: int, sites: Mapping[str, Array | str], layout: TokenLayout, tokens: str
) -> SiteSpec:
    value = sites[name]
    values = sites[value] if isinstance(value, str) else value
    assert isinstance(values, np.ndarray)
    # `blocks.3.attn.branch` and `layer1.0.branch`: two words of path
    words = name.split(".")
    block = ".".join(words[:2]) if len(words) > 2 else None
    part = ".".join(words[2:]) if block else name
    vector = values.ndim == 2
    group = "head" if vector else GROUPS.get(part, "blocks" if block is None else "residual")
    depth = sum(other.endswith(f".{part}") for other in list(sites)[:at])
    if part == "out":
        depth += 1
    last = max(1, sum(other.endswith(f".{part}") for other in sites))
    return SiteSpec(
        name=name,
        part=part,
        block=block,
        groups=("residual", "all", group) if group == "blocks" else (group, "all"),
        kind="vector" if vector else "tokens",
        dim=values.shape[-1],
        shape=values.shape[1:],
        layout=None if vector else layout,
        depth=depth,
        rel_depth=depth / last,
        alias_of=value if isinstance(value, str) else None,
        tokens="all" if vector else tokens,
        dtype="float32",
    )


def _arrays(
    plan: StorePlan, sites: Mapping[str, Array | str], keep: Array, distances: Array | None
) -> dict[str, Array]:
    """Every array of the store whole; what a test does not choose is zero."""
    out: dict[str, Array] = {}
    for path, spec in arrays(plan).items():
        if spec.per in ("once", "commit") or path == "n_valid":
            continue
        out[path] = np.zeros(spec.shape, spec.dtype)
        folder, _, rest = path.partition("/")
        name, part = (rest, "") if folder == "vectors" else rest.rpartition("/")[::2]
        if folder in ("acts", "pooled", "vectors"):
            values = sites[name]
            assert isinstance(values, np.ndarray)
            values = values.astype(np.float64)
            values[keep == 0] = np.nan
            layout = next(site.layout for site in plan.sites if site.name == name)
            out[path][...] = _part(part, values, layout).reshape(spec.shape)
    out["valid"][...] = keep
    out["hash"][...] = np.arange(len(keep))
    if distances is not None:
        out["attention/distance_px"][...] = distances
    return out


def _part(part: str, values: Array, layout: TokenLayout | None) -> Array:
    n_prefix = 0 if layout is None else layout.n_prefix
    parts: dict[str, Any] = {
        "cls": lambda: values[:, 0],
        "prefix": lambda: values[:, :n_prefix],
        "mean": lambda: values[:, n_prefix:].mean(1),
        "grid": lambda: values[:, n_prefix:],
    }
    chosen: Array = parts.get(part, lambda: values)()
    return chosen


def vit_sites(n: int, blocks: int = 2, dim: int = 4, seed: int = 0) -> dict[str, Array | str]:
    """All parts of a small transformer: name -> values, or the site it equals."""
    sites: dict[str, Array | str] = {"embed": activations(n, dim, 100 * seed)}
    before = "embed"
    for i in range(blocks):
        sites[f"blocks.{i}.in"] = before
        for k, part in enumerate(VIT_PARTS):
            sites[f"blocks.{i}.{part}"] = activations(n, dim, 100 * seed + 10 * i + k + 1)
        before = f"blocks.{i}.out"
    return sites | {"pooled": activations(n, dim, 100 * seed + 99)[:, 0]}


def cnn_sites(n: int, layout: TokenLayout, seed: int = 50) -> dict[str, Array | str]:
    """All parts of a small residual CNN, whose second block has an identity shortcut."""

    def values(k: int) -> Array:
        return activations(n, 3, seed + k, layout)

    return {
        "stem": values(0),
        "layer1.0.branch": values(1),
        "layer1.0.shortcut": values(2),
        "layer1.0.out": values(3),
        "layer1.1.branch": values(4),
        "layer1.1.shortcut": "layer1.0.out",
        "layer1.1.out": values(5),
    }
