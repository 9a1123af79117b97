"""Small stores whose contents a test chooses: one writer, and what it needs for sites, labels,
attention and residual branches. Nothing is synced: no test cuts the power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import (
    ArraySpec,
    AttentionGroup,
    SiteSpec,
    StorePlan,
    TokenLayout,
    arrays,
)
from vitsee_stores.manifest import new_manifest
from vitsee_stores.plan import Clip
from vitsee_stores.samples import Samples

Array = NDArray[Any]
# Values and the layout of their tokens (None: a vector, or as told for all), or the site it equals.
Site = Array | tuple[Array, TokenLayout | None] | str

VIT = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0))
CNN = TokenLayout((), (2, 2), stride_px=(32.0, 32.0))
# Of stores with labels: a class token and two patches, two locations.
VIT_PAIR = TokenLayout(("cls",), (1, 2), stride_px=(16.0, 16.0))
CNN_PAIR = TokenLayout((), (1, 2), stride_px=(16.0, 16.0))

GROUPS = {"norm1": "norms", "norm2": "norms", "attn.heads": "heads", "out": "blocks"}


def write(
    path: Path,
    plan: StorePlan,
    values: Mapping[str, Array],
    *,
    labels: Sequence[int] | Array | None = None,
    ids: Sequence[str] | None = None,
    name: str = "image",
    index: Sequence[int] | Array | None = None,
    splits: Sequence[str] | None = None,
    valid: Sequence[int] | Sequence[bool] | Array | None = None,
    hash_offset: int = 0,
    sizes: Sequence[Sequence[int]] | Sequence[int] | Array | None = None,
    boxes: Array | None = None,
    order: str = "shuffled",
    identity: Mapping[str, Any] | None = None,
    model: str = "tiny",
    slabs: Sequence[int] | None = None,
    command: str = "",
    **about: Any,
) -> Store:
    """A store of this plan.

    Args:
        path: where; its stem is the label.
        plan: what it holds.
        values: array path -> (images, ...); of an array with one entry a slab its valid images'
            sum is stored, of Gram matrices those of the valid images' centred rows. What is not
            given is zero.
        labels: of the images; 0 by default.
        ids: of the images; `name` and their place by default.
        name: decides the ids, and so which stores pair.
        index: places in the data set's order.
        splits: name of each image's split.
        valid: 0 or 1 an image; the others' values become NaN.
        hash_offset: added to the images' hashes, their places: stores with the same share images.
        sizes: (images, 2) height and width of the original images, or those of all; none (0, which
            is nothing to a reader of sizes) by default.
        boxes: (images, 4) the parts of their files that images are, NaN for whole ones.
        order: of the images, as in the identity.
        identity: more of it.
        model: its name.
        slabs: which are committed; all by default.
        command: what the slabs' commit markers say.
        about: more of `new_manifest`.
    """
    n = plan.n_images
    place = np.arange(n, dtype=np.int64)
    samples = Samples(
        place if index is None else np.asarray(index, np.int64),
        [f"{name}{i}" for i in range(n)] if ids is None else list(ids),
        np.zeros(n, np.int64) if labels is None else np.asarray(labels, np.int64),
        [""] * n if splits is None else list(splits),
        boxes,
    )
    manifest = new_manifest(
        {"order": order, "seed": 0, **(identity or {})}, plan, samples, model={"name": model},
        **about,
    )  # fmt: skip
    keep = np.ones(n, bool) if valid is None else np.array(valid, bool)
    own: dict[str, Array] = {"valid": keep, "n_valid": keep}
    own["hash"] = place.astype(np.uint64) + np.uint64(hash_offset)
    if sizes is not None:
        whole = np.broadcast_to(np.asarray(sizes, np.int32), (n, 2))
        own["size"] = np.where(keep[:, None], whole, 0)
    specs = {p: spec for p, spec in arrays(plan).items() if spec.per in ("image", "slab")}
    assert not values.keys() - specs.keys(), "arrays that the plan does not have"
    writer = StoreWriter.create_or_join(path, manifest, samples, durable=False)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        rows = plan.rows(k)
        given = {p: v[rows] for p, v in {**values, **own}.items() if p in specs}
        slab = {p: _entry(spec, given.get(p), keep[rows]) for p, spec in specs.items()}
        slab |= {p: given[p].astype(specs[p].dtype) for p in ("valid", "hash")}
        writer.write_slab(k, slab, {"command": command})
    writer.finish()
    return open_store(path, allow_partial=slabs is not None)


def _entry(spec: ArraySpec, values: Array | None, keep: NDArray[np.bool_]) -> Array:
    """What a slab has of an array; values: (images of the slab, ...)."""
    shape = (len(keep), *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
    if values is None:
        return np.zeros(shape, spec.dtype)
    if spec.per == "image":
        rows = np.zeros(shape, spec.dtype)
        rows[...] = values.reshape(shape)
        if np.issubdtype(rows.dtype, np.floating):
            rows[~keep] = np.nan
        return rows
    if spec.pairs:
        return _gram(values[keep], np.flatnonzero(keep), shape[0]).astype(spec.dtype)
    return np.asarray(values[keep].sum(0), spec.dtype)


def _gram(values: Array, places: Array, slab: int) -> Array:
    """The slab's Gram matrix, NaN where there is no valid image."""
    whole = np.full((slab, slab), np.nan)
    flat = values.reshape(len(values), -1).astype(np.float64)
    flat = flat - flat.mean(0)
    whole[np.ix_(places, places)] = flat @ flat.T
    return whole


# ------------------------------------------------------------------------------------ token sites


def write_sites(
    path: Path,
    sites: Mapping[str, Site],
    *,
    layout: TokenLayout = VIT,
    slab: int = 8,
    dtype: str = "float32",
    tokens: str = "all",
    groups: Sequence[str] | None = None,
    as_extracted: bool = False,
    grams: bool = False,
    pixels: Array | None = None,
    pixel_hashes: Array | None = None,
    distances: Array | None = None,
    clip: Clip | None = None,
    **more: Any,
) -> Store:
    """A store of these sites.

    Args:
        path: where.
        sites: name -> values in the model's order: (n, tokens, dim), with their layout or without;
            (n, dim) for a vector; or the name of the site that it equals.
        layout: of all sites with tokens that bring none.
        slab: rows a slab.
        dtype: of `acts/`.
        tokens: "all" or "pooled".
        groups: of every site; by default "head" for a vector, else "blocks".
        as_extracted: depth and groups follow from the names, as they do in extracted stores; else
            depth is the place in `sites`.
        grams: keep Gram matrices within slabs.
        pixels: (n, 3, height, width) bytes, the images as the model saw them.
        pixel_hashes: (n,) hashes of these.
        distances: (n, blocks, heads) attention distances of `blocks.0`, `blocks.1`, ...
        clip: how the frames were taken, of stores of clips.
        more: of `write`; labels are 0 and 1 in turn by default.
    """
    stored = {
        name: site
        if isinstance(site, tuple)
        else (site, layout if site.ndim > 2 else None)
        for name, site in sites.items()
        if not isinstance(site, str)
    }
    specs = []
    for at, (name, site) in enumerate(sites.items()):
        alias = site if isinstance(site, str) else None
        x, where = stored[alias or name]
        describe = _as_extracted if as_extracted else _by_place
        about = describe(name, at, tuple(sites), where is None)
        if groups is not None:
            about["groups"] = tuple(groups)
        specs.append(
            SiteSpec(
                name, dim=x.shape[-1], shape=x.shape[1:], layout=where, alias_of=alias,
                kind="vector" if where is None else "tokens" if where.grid else "rows",
                tokens="all" if where is None else tokens,
                dtype="float32" if where is None else dtype,
                **about,
            )
        )  # fmt: skip
    n = len(next(iter(stored.values()))[0])
    values: dict[str, Array] = {}
    for name, (x, where) in stored.items():
        values |= _parts(name, x.astype(np.float64), where)
    plan: dict[str, Any] = {"grams": grams, "clip": clip}
    if pixels is not None:
        values["input"] = pixels
        plan["inputs"] = (3, *pixels.shape[-2:])
    if pixel_hashes is not None:
        values["pixel_hash"] = pixel_hashes
        plan["pixel_hashes"] = True
    if distances is not None:
        blocks = tuple(f"blocks.{i}" for i in range(distances.shape[1]))
        group = AttentionGroup("", blocks, (distances.shape[2],) * len(blocks), layout)
        plan |= {"attention": (group,), "attention_level": "summary"}
        plan["places"] = tuple((b, i, float(i)) for i, b in enumerate(blocks))
        values["attention/distance_px"] = distances
    made = StorePlan(n, slab, "none", tuple(specs), **plan)
    values = {path: values[path] for path in arrays(made).keys() & values.keys()}
    return write(path, made, values, **{"labels": np.arange(n) % 2, **more})


def write_model(path: Path, sites: Mapping[str, Site], **more: Any) -> Store:
    """As `write_sites`, of a model's sites: groups and depth follow from their names, as in stores
    that are extracted."""
    return write_sites(path, sites, as_extracted=True, **more)


def _by_place(name: str, at: int, sites: Sequence[str], vector: bool) -> dict[str, Any]:
    """Part, block, groups and depth of a site: everything before the last word is the block."""
    block, _, part = name.rpartition(".")
    return {
        "part": part,
        "block": block or None,
        "groups": ("head",) if vector else ("blocks",),
        "depth": at,
        "rel_depth": at / max(len(sites) - 1, 1),
    }


def _as_extracted(
    name: str, at: int, sites: Sequence[str], vector: bool
) -> dict[str, Any]:
    """The same as extraction has it: the block is two words, as in `blocks.3.attn.branch` and
    `layer1.0.branch`, and depth counts the sites of one part, `out` from 1 on."""
    words = name.split(".")
    block = ".".join(words[:2]) if len(words) > 2 else None
    part = ".".join(words[2:]) if block else name
    group = "head" if vector else GROUPS.get(part, "residual" if block else "blocks")
    depth = sum(other.endswith(f".{part}") for other in sites[:at]) + (part == "out")
    return {
        "part": part,
        "block": block,
        "groups": ("residual", "all", group) if group == "blocks" else (group, "all"),
        "depth": depth,
        "rel_depth": depth / max(1, sum(other.endswith(f".{part}") for other in sites)),
    }


def _parts(name: str, x: Array, layout: TokenLayout | None) -> dict[str, Array]:
    """Everything that a store may keep of a site."""
    if layout is None:
        return {f"vectors/{name}": x}
    prefix, grid = x[:, : layout.n_prefix], x[:, layout.n_prefix :]
    parts = {
        f"acts/{name}/prefix": prefix,
        f"acts/{name}/grid": grid,
        f"acts/{name}/rows": grid,
        f"pooled/{name}/prefix": prefix,
        f"pooled/{name}/mean": grid.mean(1),
        f"grams/{name}/all": x,
    }
    cls = list(layout.cls_tokens)
    return {**parts, f"pooled/{name}/cls": x[:, cls].mean(1)} if cls else parts


def write_labelled(
    path: Path,
    sites: Mapping[str, Site],
    labels: Sequence[int] | Array,
    *,
    classes: Sequence[str] | None = None,
    layout: TokenLayout = VIT_PAIR,
    rows: Array | None = None,
    hash_offset: int = 0,
    weights: str = "w",
    model: str = "tiny",
    identity: Mapping[str, Any] | None = None,
    **more: Any,
) -> Store:
    """A store of these sites and labels, -1 for none.

    Args:
        path: where.
        sites: as of `write_sites`.
        labels: (n,) classes.
        classes: their names; "a", "b", ... of all labels by default, none where empty.
        layout: of all sites with tokens that bring none.
        rows: (n,) which image of the data set each row holds; the arrays, `valid` and `splits` are
            in the data set's order then.
        hash_offset: of the images' hashes and ids: stores with the same share images.
        weights: in the identity.
        model: its name, in the identity too.
        identity: more of it.
        more: of `write_sites`.
    """
    labels = np.asarray(labels, np.int64)
    names = [chr(97 + i) for i in range(labels.max() + 1)] if classes is None else classes
    places = np.arange(len(labels))
    if rows is not None:
        places, labels = rows, labels[rows]
        sites = {name: _chosen(site, rows) for name, site in sites.items()}
        for key in more.keys() & {"valid", "splits"}:
            more[key] = np.asarray(more[key])[rows]
        more["index"] = rows
    return write_sites(
        path, sites, labels=labels, class_names=list(names) or None, layout=layout,
        ids=[f"{hash_offset}-{i}" for i in places], hash_offset=hash_offset, model=model,
        identity={"model": {"architecture": model}, "weights": weights, **(identity or {})},
        **more,
    )  # fmt: skip


def _chosen(site: Site, rows: Array) -> Site:
    if isinstance(site, tuple):
        return site[0][rows], site[1]
    return site if isinstance(site, str) else site[rows]


# --------------------------------------------------------------------------- attention, residuals


def attention_group(
    blocks: Sequence[str],
    n_heads: Sequence[int],
    grid: tuple[int, int] = (2, 3),
    stride: tuple[float, float] = (16.0, 16.0),
    prefix: str = "",
) -> AttentionGroup:
    """Blocks with a class token and this grid."""
    layout = TokenLayout(("cls",), grid, stride_px=stride)
    return AttentionGroup(prefix, tuple(blocks), tuple(n_heads), layout)


def write_attention(
    path: Path,
    groups: Sequence[AttentionGroup],
    values: Mapping[str, Array],
    *,
    n_images: int,
    slab: int = 4,
    level: str = "summary",
    rollout: bool = False,
    model_blocks: Sequence[str] | None = None,
    clip: Clip | None = None,
    **more: Any,
) -> Store:
    """A store with these attention arrays, everything else zero.

    Args:
        path: where.
        groups: blocks, heads, grids; none for a store without attention.
        values: as of `write`.
        n_images: rows.
        slab: rows a slab.
        level: of `--attention`.
        rollout: whether it is kept.
        model_blocks: blocks whose outputs the store lists, in the model's order; None: no outputs.
        clip: how the frames were taken, of stores of clips.
        more: of `write`.
    """
    blocks = [block for group in groups for block in group.blocks]
    every = list(blocks if model_blocks is None else model_blocks)
    places = tuple(
        (b, every.index(b), every.index(b) / max(len(every) - 1, 1)) for b in blocks
    )
    names = () if model_blocks is None else ("embed", *(f"{b}.out" for b in model_blocks))
    layout = groups[0].layout if groups else CNN
    sites = tuple(
        SiteSpec(
            name, kind="tokens", dim=1, shape=(layout.n_tokens, 1), layout=layout, tokens="pooled",
            **_by_place(name, at, names, False),
        )
        for at, name in enumerate(names)
    )  # fmt: skip
    plan = StorePlan(
        n_images, slab, "none", sites, tuple(groups), level if groups else "none", rollout=rollout,
        places=places, clip=clip,
    )  # fmt: skip
    return write(path, plan, values, **more)


def write_residuals(
    path: Path,
    products: Mapping[str, Array],
    *,
    layout: TokenLayout = VIT,
    layouts: Mapping[str, TokenLayout] | None = None,
    n_images: int | None = None,
    slab: int = 4,
    clip: Clip | None = None,
    **more: Any,
) -> Store:
    """A store of these sublayers, name -> (images, tokens, 3), in the model's order.

    Args:
        path: where.
        products: z.z, f.f and z.f of every token.
        layout: of all sublayers, but for those in `layouts`.
        layouts: of some.
        n_images: needed only without sublayers.
        slab: rows a slab.
        clip: how the frames were taken, of stores of clips.
        more: of `write`.
    """
    n = n_images or len(next(iter(products.values())))
    last = max(len(products) - 1, 1)
    plan = StorePlan(
        n, slab, "none", (),
        sublayers=tuple((site, (layouts or {}).get(site, layout)) for site in products),
        clip=clip,
        places=tuple((site, i, i / last) for i, site in enumerate(products)),
    )  # fmt: skip
    values = {f"residual/{site}": array for site, array in products.items()}
    return write(path, plan, values, **more)
