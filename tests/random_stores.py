"""Stores of random numbers in many shapes."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_stores import StoreWriter
from vitsee_stores.layout import (
    ArraySpec,
    AttentionGroup,
    ErfPlan,
    SiteSpec,
    StorePlan,
    TokenLayout,
    arrays,
)
from vitsee_stores.manifest import Manifest, new_manifest
from vitsee_stores.plan import Clip
from vitsee_stores.samples import Samples

Array = NDArray[Any]

VIT = TokenLayout(("cls",), (3, 5), stride_px=(16.0, 16.0), offset_px=(-2.0, 4.5))
REGISTERS = TokenLayout(("cls", "reg0", "reg1"), (4, 4), stride_px=(14.0, 14.0))
DISTILLED = TokenLayout(("dist", "cls"), (2, 2), stride_px=(16.0, 8.0))
CNN = TokenLayout((), (5, 3), stride_px=(32.0, 32.0))
STAGE = TokenLayout((), (2, 1), stride_px=(64.0, 64.0))
MIXER = TokenLayout((), None, rows=6)
CLIP = TokenLayout(("cls",), (2, 3), stride_px=(16.0, 16.0), frames=4, stride_frames=2.0)
BY_FRAME = TokenLayout(
    ("cls.0", "cls.1", "reg0.0", "reg0.1"),
    (2, 2),
    stride_px=(8.0, 8.0),
    frames=2,
    stride_frames=1.0,
)
STAGES = TokenLayout((), (2, 1), stride_px=(64.0, 64.0), frames=2, stride_frames=1.0)


def tokens_site(
    name: str, layout: TokenLayout, dim: int = 4, depth: int = 0, **more: Any
) -> SiteSpec:
    block, _, part = name.rpartition(".")
    kind = "rows" if layout.grid is None else "tokens"
    shape = (layout.n_tokens, dim)
    more = {"groups": ("blocks",), **more}
    return SiteSpec(
        name, part, block or None, kind=kind, dim=dim, shape=shape, layout=layout, depth=depth,
        rel_depth=depth / 3, **more,
    )  # fmt: skip


def flat_site(name: str, kind: str, shape: tuple[int, ...], **more: Any) -> SiteSpec:
    """A vector or a raw output."""
    dim = int(np.prod(shape))
    groups = ("head",) if kind == "vector" else ("modules",)
    return SiteSpec(name, name, None, groups, kind, dim, shape, None, 3, 1.0, **more)


PLANS: dict[str, StorePlan] = {
    # non-square grid, a short last slab, an alias, both dtypes, pixels
    "vit": StorePlan(
        10,
        4,
        "none",
        (
            tokens_site("embed", VIT),
            tokens_site("blocks.0.out", VIT, depth=1, dtype="float32"),
            tokens_site(
                "blocks.1.in", VIT, depth=1, alias_of="blocks.0.out", groups=("residual",)
            ),
            tokens_site("blocks.1.out", VIT, depth=2),
            flat_site("pooled", "vector", (4,)),
            flat_site("logits", "vector", (7,)),
        ),
        (AttentionGroup("", ("blocks.0", "blocks.1"), (2, 2), VIT),),
        "full",
        rollout=True,
        sublayers=(("blocks.0.attn", VIT), ("blocks.0.mlp", VIT)),
        inputs=(3, 6, 10),
        weights=(("patch_filters", (4, 3, 2, 2)),),
        grams=True,
        erf=ErfPlan(6, ("embed", "blocks.1.out"), (6, 10)),  # 2 of 3 slabs
    ),
    # no prefix, rows that are no grid, a raw output, locations pooled only
    "cnn": StorePlan(
        7,
        7,
        "none",
        (
            tokens_site("stem", CNN),
            tokens_site("layer1.0.out", CNN, depth=1, tokens="pooled"),
            tokens_site("blocks.0.token.hidden", MIXER, depth=2),
            flat_site("module", "raw", (3, 2, 2)),
        ),
        sublayers=(("layer1.0", CNN),),
        grams=True,
    ),
    # two grids, heads that differ between the blocks of one of them, per-image rows, boxes
    "two-grids": StorePlan(
        5,
        2,
        "none",
        (tokens_site("blocks.0.out", CNN), tokens_site("blocks.1.out", STAGE, depth=1)),
        (
            AttentionGroup("", ("blocks.0",), (2,), CNN),
            AttentionGroup("grid_2x1", ("blocks.1", "blocks.2"), (1, 3), STAGE),
        ),
        "rows",
        boxes=True,
    ),
    "registers": StorePlan(
        3,
        1,
        "none",
        (
            tokens_site("blocks.0.out", REGISTERS),
            tokens_site("blocks.1.out", DISTILLED, depth=1),
        ),
        (AttentionGroup("", ("blocks.0",), (2,), REGISTERS),),
        "rows",
        rollout=True,
    ),
    "pixel-hash": StorePlan(
        3, 2, "none", (flat_site("pooled", "vector", (4,)),), pixel_hashes=True
    ),
    # chunks smaller than a slab's array: a grid in 3 pieces, the last one padded
    "chunked": StorePlan(
        70,
        64,
        "none",
        (
            tokens_site(
                "blocks.0.out", TokenLayout(("cls",), (17, 9), stride_px=(1, 1)), dim=1024
            ),
            flat_site("pooled", "vector", (1024,)),
        ),
    ),
    # clips: a grid in time; an attention over time at a place beside one within a frame; pixels
    "clips": StorePlan(
        5,
        2,
        "none",
        (
            tokens_site("embed", CLIP),
            tokens_site("blocks.0.out", CLIP, depth=1),
            flat_site("pooled", "vector", (4,)),
        ),
        (
            AttentionGroup("", ("blocks.0.time",), (2,), CLIP, (4, 1, 1)),
            AttentionGroup("grid_2x1", ("blocks.0", "blocks.1"), (1, 2), CLIP, (1, 2, 3)),
        ),
        "rows",
        sublayers=(("blocks.0.mlp", CLIP),),
        inputs=(3, 6, 10),
        grams=True,
        clip=Clip(8, 4, "shuffled"),
    ),
    # frames that an image model saw one by one
    "by-frame": StorePlan(
        3,
        2,
        "none",
        (tokens_site("blocks.0.out", BY_FRAME), tokens_site("stage", STAGES, depth=1)),
        (AttentionGroup("", ("blocks.0",), (2,), BY_FRAME, (1, 2, 2)),),
        "summary",
        clip=Clip(2, by_frame=True),
    ),
    "many-slabs": StorePlan(
        46,
        4,
        "none",
        tuple(tokens_site(f"blocks.{i}.out", VIT, dim=512, depth=i) for i in range(3)),
    ),
}


def make_samples(n: int, start: int = 0, boxes: bool = False) -> Samples:
    edges = (np.arange(4) + np.arange(n)[:, None] / 4).astype(np.float32)
    edges[1::2] = np.nan  # whole images
    return Samples(
        index=np.random.default_rng(start).permutation(n),
        ids=[f"class {i % 3}/ä{start + i}.png" for i in range(n)],
        labels=np.arange(n) % 3 - 1,
        splits=["train" if i < n // 2 else "" for i in range(n)],
        boxes=edges if boxes else None,
    )


def make_manifest(plan: StorePlan, **identity: Any) -> Manifest:
    return new_manifest(
        {
            "model": {"name": "random", "args": {}},
            "seed": 0,
            "slab": plan.slab,
            **identity,
        },
        plan,
        make_samples(plan.n_images, boxes=plan.boxes),
        model={"name": "random"},
        transform={"mean": [0.5, 0.25, 0.125], "std": [0.2, 0.3, 0.4]},
        class_names=["a", "b"],
        info={"loss": float("inf")},
    )


def validity(plan: StorePlan) -> NDArray[np.bool_]:
    """Every image readable but the second of every second slab."""
    valid = np.ones(plan.n_images, bool)
    for k in range(0, plan.n_slabs, 2):
        rows = plan.rows(k)
        valid[rows.start + 1 : min(rows.start + 2, rows.stop)] = False
    return valid


@functools.cache
def values(plan: StorePlan, spec: ArraySpec) -> Array:
    """The whole array, the same in every process; not to be written to."""
    rng = np.random.default_rng(zlib.crc32(spec.path.encode()))
    valid = validity(plan)
    if spec.path == "valid":
        return valid.astype(np.uint8)
    if spec.path == "n_valid":
        return np.array(
            [valid[plan.rows(k)].sum() for k in range(plan.n_slabs)], np.int64
        )
    if spec.dtype.startswith("float"):
        out = (rng.random(spec.shape, np.float32) - 0.5).astype(spec.dtype)
        if spec.per == "image":
            out[~valid] = np.nan
        if spec.pairs:
            for k, block in enumerate(out):
                there = np.zeros(plan.slab, bool)
                there[: plan.rows(k).stop - plan.rows(k).start] = valid[plan.rows(k)]
                block[~there] = block[:, ~there] = np.nan
        return out
    if spec.path == "size":
        return np.where(valid[:, None], rng.integers(1, 999, spec.shape), 0).astype(
            spec.dtype
        )
    info = np.iinfo(spec.dtype)
    return rng.integers(
        max(info.min, -99), info.max, spec.shape, spec.dtype, endpoint=True
    )


def expected(plan: StorePlan) -> dict[str, Array]:
    """Every array that slabs bring."""
    return {
        path: values(plan, spec)
        for path, spec in arrays(plan).items()
        if spec.per in ("image", "slab")
    }


def slab_of(plan: StorePlan, whole: dict[str, Array], k: int) -> dict[str, Array]:
    specs = arrays(plan)
    return {
        path: array[plan.rows(k)] if specs[path].per == "image" else array[k]
        for path, array in whole.items()
        if specs[path].has_slab(k)
    }


def weights_of(plan: StorePlan) -> dict[str, Array]:
    return {
        path: values(plan, spec)
        for path, spec in arrays(plan).items()
        if path.startswith("weights/")
    }


def create(
    path: Path, plan: StorePlan, *, durable: bool = False, **identity: Any
) -> StoreWriter:
    """A writer; durable where a test is about what a crash leaves."""
    manifest = make_manifest(plan, **identity)
    samples = make_samples(plan.n_images, boxes=plan.boxes)
    return StoreWriter.create_or_join(
        path, manifest, samples, weights_of(plan), durable=durable
    )


def write(
    path: Path, plan: StorePlan, slabs: list[int] | None = None, **identity: Any
) -> StoreWriter:
    """A store with these slabs committed (all)."""
    writer = create(path, plan, **identity)
    whole = expected(plan)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, slab_of(plan, whole, k), {"command": "random"})
    writer.finish()
    return writer


def leftovers(store: Path) -> list[str]:
    """Names of what killed processes left beside and below a store."""
    hidden = [
        p.name for p in store.parent.iterdir() if p.name.startswith(f".{store.name}.")
    ]
    return hidden + [p.name for p in store.rglob("*.partial")]
