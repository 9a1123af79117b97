"""A store with everything that a small ViT's extraction leaves, of any number of images.

    python benchmarks/scale_stores.py STORE IMAGES [--first HASH] [--seed SEED]

Two of five sites keep all tokens, the others their class token and mean; four blocks have attention
summaries, eight sublayers their residual products. 16 channels and ten tokens keep a million images
within 4 GB, so that what is measured is the work per image, slab and file, not the disk. Numbers
are drawn slab by slab, from a seed and the slab's first row.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
from synthetic import Array, write_store

from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays

SLAB, DIM, HEADS, CLASSES = 256, 16, 3, 10
BLOCKS = tuple(f"blocks.{i}" for i in range(4))
WHOLE = ("blocks.1.out", "blocks.3.out")
LAYOUT = TokenLayout(("cls",), (3, 3), stride_px=(16.0, 16.0))


def plan_of(images: int) -> StorePlan:
    """What such a store holds."""
    sublayers = tuple(f"{block}.{part}" for block in BLOCKS for part in ("attn", "mlp"))
    last = len(sublayers) - 1
    names = ("embed", *(f"{block}.out" for block in BLOCKS))
    return StorePlan(
        images,
        min(SLAB, images),
        "none",
        tuple(_site(name, depth) for depth, name in enumerate(names)),
        (AttentionGroup("", BLOCKS, (HEADS,) * len(BLOCKS), LAYOUT),),
        "summary",
        sublayers=tuple((name, LAYOUT) for name in sublayers),
        places=(
            *((block, i, i / (len(BLOCKS) - 1)) for i, block in enumerate(BLOCKS)),
            *((name, i, i / last) for i, name in enumerate(sublayers)),
        ),
    )


def _site(name: str, depth: int) -> SiteSpec:
    block, _, part = name.rpartition(".")
    shape, tokens = (LAYOUT.n_tokens, DIM), "all" if name in WHOLE else "pooled"
    return SiteSpec(
        name, part, block or None, ("blocks",), "tokens", DIM, shape, LAYOUT, depth,
        depth / len(BLOCKS), tokens=tokens,
    )  # fmt: skip


def make(path: Path, images: int, first_hash: int = 0, seed: int = 0) -> None:
    """The store at `path`; images of other hashes are other images, other seeds other numbers of
    the same ones."""
    plan = plan_of(images)
    labels = (np.arange(images) % CLASSES).astype(np.int64)
    write_store(
        path,
        plan,
        functools.partial(_slab, plan, labels, (seed, first_hash)),
        ids=[f"class{label}/{first_hash + i:08d}.png" for i, label in enumerate(labels)],
        labels=labels,
        class_names=[f"class{i}" for i in range(CLASSES)],
        first_hash=first_hash,
    )


def _slab(
    plan: StorePlan, labels: Array, seed: tuple[int, int], rows: slice
) -> dict[str, Array]:
    """Activations lean towards their class' centre, more so with depth; a skip is twice as long as
    its branch."""
    rng = np.random.default_rng((*seed, rows.start))
    n = rows.stop - rows.start
    centres = np.random.default_rng(seed[0]).standard_normal((CLASSES, DIM), np.float32)
    own = centres[labels[rows]][:, None]
    values: dict[str, Array] = {}
    for site in plan.sites:
        x = (
            rng.standard_normal((n, LAYOUT.n_tokens, DIM), np.float32)
            + own * site.rel_depth
        )
        values[f"pooled/{site.name}/cls"] = x[:, 0]
        values[f"pooled/{site.name}/mean"] = x[:, 1:].mean(1)
        if site.tokens == "all":
            x = x.astype(np.float16)
            values[f"acts/{site.name}/prefix"] = x[:, :1]
            values[f"acts/{site.name}/grid"] = x[:, 1:].reshape(n, 3, 3, DIM)
    for name, _ in plan.sublayers:
        products = rng.random((n, LAYOUT.n_tokens, 3), np.float32) + np.array(
            [4, 1, 0], np.float32
        )
        values[f"residual/{name}"] = products
    for path, spec in arrays(plan).items():
        if path.startswith("attention/"):
            shape = (n, *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
            values[path] = (16 * rng.random(shape, np.float32)).astype(spec.dtype)
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("images", type=int)
    parser.add_argument("--first", type=int, default=0, help="hash of the first image")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.store, args.images, args.first, args.seed)
