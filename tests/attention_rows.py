"""Stores of attention rows of a test's choosing, and the images and masks they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.stores import write_attention
from vitsee_stores import AttentionGroup, Store, TokenLayout

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
    level: str = "rows",
    index: Sequence[int] | None = None,
    with_transform: bool = True,
    **more: Any,
) -> Store:
    """A store of these rows; size: (height, width) of the model's input, and of the images, which
    are called 0.jpg and so on; index: their places in the data set, here in the store's order.
    more: of `write_attention`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n = len(groups[0].mean[0])
    transform: dict[str, Any] = {
        "input_size": (3, *size), "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "squash", "mean": (0.5,) * 3, "std": (0.5,) * 3,
    }  # fmt: skip
    images: dict[str, Array] = {}
    for group in groups:
        folder, widest = group.group.folder, max(a.shape[1] for a in group.mean)
        for name, blocks in (("received_rows", group.mean), ("cls_rows", group.cls)):
            if blocks is not None:
                whole = np.full(
                    (n, len(blocks), widest, group.layout.n_tokens), np.nan, np.float16
                )
                for row, a in enumerate(blocks):
                    whole[:, row, : a.shape[1]] = a
                images[folder + name] = whole
    return write_attention(
        path, [group.group for group in groups], images, n_images=n, level=level, index=index,
        transform=transform if with_transform else {},
        **{
            "sizes": size,
            "ids": [f"{i}.jpg" for i in (range(n) if index is None else index)],
            **more,
        },
    )  # fmt: skip


def save_mask(path: Path, tokens: Array, step: int = STEP) -> None:
    """A PNG whose every token is one value, (rows, cols) of the grid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.kron(np.asarray(tokens, np.uint8), np.ones((step, step), np.uint8))
    Image.fromarray(pixels).save(path)
