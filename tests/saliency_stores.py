"""Stores of attention rows of a test's choosing, and the images and masks they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsee_stores import Store, StoreWriter, open_store
from vitsee_stores.layout import AttentionGroup, StorePlan, TokenLayout, arrays
from vitsee_stores.manifest import Samples, new_manifest

Array = NDArray[Any]
STEP = 4  # pixels of a token


@dataclass(frozen=True)
class Rows:
    """Blocks that share a layout. cls, mean: one (images, heads, tokens) array a block, prefix
    tokens first; no cls without a class token."""

    layout: TokenLayout
    blocks: tuple[str, ...]
    mean: tuple[Array, ...]
    cls: tuple[Array, ...] | None = None
    prefix: str = ""

    @property
    def group(self) -> AttentionGroup:
        heads = tuple(a.shape[1] for a in self.mean)
        return AttentionGroup(self.prefix, self.blocks, heads, self.layout)


def layout(
    grid: tuple[int, int], prefix: Sequence[str] = ("cls",), step: float = STEP
) -> TokenLayout:
    return TokenLayout(tuple(prefix), grid, stride_px=(step, step))


def random_rows(
    where: TokenLayout, n: int, heads: Sequence[int], *, seed: int = 0, prefix: str = ""
) -> Rows:
    """Softmax of random scores in float16, as stores keep it."""
    rng = np.random.default_rng(seed)

    def draw(h: int) -> Array:
        e = np.exp(2 * rng.standard_normal((n, h, where.n_tokens)))
        return np.asarray(e / e.sum(-1, keepdims=True), np.float16)

    names = tuple(f"{prefix or 'blocks'}.{i}" for i in range(len(heads)))
    mean = tuple(draw(h) for h in heads)
    cls = tuple(draw(h) for h in heads) if where.cls is not None else None
    return Rows(where, names, mean, cls, prefix)


def write(
    path: Path,
    groups: Sequence[Rows],
    *,
    size: tuple[int, int],
    slab: int = 4,
    valid: Sequence[int] | None = None,
    level: str = "rows",
    order: str = "shuffled",
    slabs: Sequence[int] | None = None,
    index: Sequence[int] | None = None,
    data: Path | None = None,
    left_out: dict[str, str] | None = None,
    with_transform: bool = True,
) -> Store:
    """A store of these rows; size: (height, width) of the model's input, and of the images, which
    are called 0.jpg and so on; index: their places in the data set, here in the store's order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n = len(groups[0].mean[0])
    names = [name for group in groups for name in group.blocks]
    places = tuple((name, i, i / max(len(names) - 1, 1)) for i, name in enumerate(names))
    plan = StorePlan(
        *(n, slab, "none", ()),
        attention=tuple(group.group for group in groups),
        attention_level=level,
        places=places,
    )
    place = np.arange(n, dtype=np.int64) if index is None else np.array(index, np.int64)
    ids = [f"{i}.jpg" for i in place]
    samples = Samples(place, ids, np.zeros(n, np.int64), [""] * n)
    transform: dict[str, Any] = {
        "input_size": (3, *size), "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "squash", "mean": (0.5,) * 3, "std": (0.5,) * 3,
    }  # fmt: skip
    manifest = new_manifest(
        {"order": order, "seed": 0},
        plan,
        samples,
        model={"name": "tiny"},
        transform=transform if with_transform else {},
        left_out=left_out,
        info={"data": {"data": str(data), "split": None}, "data_folder": "."} if data else {},
    )
    ok = np.ones(n, bool) if valid is None else np.array(valid, bool)
    images: dict[str, Array] = {}
    for group in groups:
        folder, widest = group.group.folder, max(a.shape[1] for a in group.mean)
        for name, blocks in (("received_rows", group.mean), ("cls_rows", group.cls)):
            if blocks is not None:
                whole = np.full((n, len(blocks), widest, group.layout.n_tokens), np.nan, np.float16)
                for row, a in enumerate(blocks):
                    whole[:, row, : a.shape[1]] = a
                whole[~ok] = np.nan
                images[folder + name] = whole
    writer = StoreWriter.create_or_join(path, manifest, samples)
    for k in range(plan.n_slabs) if slabs is None else slabs:
        writer.write_slab(k, _slab(plan, k, images, ok), {})
    writer.finish()
    return open_store(path, label=path.stem, allow_partial=slabs is not None)


def _slab(plan: StorePlan, k: int, images: dict[str, Array], valid: Array) -> dict[str, Array]:
    place = plan.rows(k)
    ok = valid[place]
    out: dict[str, Array] = {}
    for path, spec in arrays(plan).items():
        if spec.per in ("once", "commit"):
            continue
        shape = (len(ok), *spec.shape[1:]) if spec.per == "image" else spec.shape[1:]
        out[path] = images[path][place] if path in images else np.zeros(shape, spec.dtype)
    out["valid"] = ok.astype(np.uint8)
    out["hash"] = np.arange(place.start, place.stop, dtype=np.uint64)
    out["n_valid"] = np.array(ok.sum(), np.int64)
    return out


def save_mask(path: Path, tokens: Array, step: int = STEP) -> None:
    """A PNG whose every token is one value, (rows, cols) of the grid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.kron(np.asarray(tokens, np.uint8), np.ones((step, step), np.uint8))
    Image.fromarray(pixels).save(path)


def save_image(path: Path, size: tuple[int, int]) -> None:
    """A black picture, (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size[1], size[0])).save(path)
