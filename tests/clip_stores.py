"""Small stores of clips whose maps are known: a square that moves one cell a place in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stores import write, write_sites
from vitsee_stores import Store
from vitsee_stores.layout import AttentionGroup, SiteSpec, StorePlan, TokenLayout, arrays
from vitsee_stores.plan import Clip

Array = NDArray[Any]

CELL = 8  # pixels
SIDE = 4  # cells
TIMES, STRIDE = 4, 2  # places in time, and sampled frames of each
FRAMES = TIMES * STRIDE
CLIP = Clip(FRAMES)
LAYOUT = TokenLayout(
    (), (SIDE, SIDE), stride_px=(CELL, CELL), frames=TIMES, stride_frames=float(STRIDE)
)
N, DIM = 3, 6


def path_of(clip: int) -> list[tuple[int, int]]:
    """(row, col) of the square at each place in time: clip k moves along row k, from the left."""
    return [(clip % SIDE, time) for time in range(TIMES)]


def square_mask(n: int = N) -> Array:
    """(clips, times, rows, cols) True where the square is."""
    found = np.zeros((n, TIMES, SIDE, SIDE), bool)
    for clip in range(n):
        for time, (row, col) in enumerate(path_of(clip)):
            found[clip, time, row, col] = True
    return found


def square_pixels(n: int = N) -> Array:
    """(clips, frames, 3, height, width) uint8: the square is bright on dark ground."""
    cells = np.repeat(square_mask(n), STRIDE, axis=1)
    pixels = cells.repeat(CELL, axis=2).repeat(CELL, axis=3)
    return np.where(pixels[:, :, None], np.uint8(230), np.uint8(40)).repeat(3, axis=2)


def square_tokens(n: int = N, noise: float = 0.0, seed: int = 0) -> Array:
    """(clips, tokens, dim): one direction for the square, another one for the ground."""
    rng = np.random.default_rng(seed)
    square, ground = np.eye(DIM)[:2]
    tokens = np.where(square_mask(n)[..., None], 3 * square, ground)
    tokens = tokens + noise * rng.normal(size=tokens.shape)
    return tokens.reshape(n, LAYOUT.n_tokens, DIM).astype(np.float32)


def write_clips(path: Path, noise: tuple[float, ...] = (0.3, 0.0), **more: Any) -> Store:
    """A store of clips of the moving square: a block for each noise on its tokens."""
    n = more.pop("n", N)
    sites = {
        f"blocks.{i}.out": square_tokens(n, level, seed=i)
        for i, level in enumerate(noise)
    }
    about = {
        "layout": LAYOUT,
        "clip": CLIP,
        "pixels": square_pixels(n),
        "slab": 2,
        **more,
    }
    ids = [f"clip{i}.mp4" for i in range(n)]
    return write_sites(
        path, sites, **{"ids": ids, "sizes": (CELL * SIDE, CELL * SIDE), **about}
    )


def moving_attention(n: int = N, n_heads: int = 2) -> Array:
    """(clips, heads, tokens, tokens): head 0 attends evenly to the square at all times, the others
    evenly to their own frame."""
    mask = square_mask(n).reshape(n, -1)
    of_frame = np.repeat(np.arange(TIMES), SIDE * SIDE)
    own = (of_frame[:, None] == of_frame) / SIDE**2
    found = np.empty((n, n_heads, LAYOUT.n_tokens, LAYOUT.n_tokens))
    found[:, 0] = (mask / mask.sum(1, keepdims=True))[:, None]
    found[:, 1:] = own
    return found


def write_clip_attention(
    path: Path, n: int = N, *, level: str = "full", clip: Clip = CLIP, **more: Any
) -> Store:
    """A store with the full attention of `moving_attention` in two blocks, its received rows, sums
    and rollout, as far as `level` has them."""
    a = moving_attention(n)
    group = AttentionGroup("", ("blocks.0", "blocks.1"), (2, 2), LAYOUT)
    site = SiteSpec(
        "blocks.1.out", "out", "blocks.1", ("blocks",), "tokens", DIM, (LAYOUT.n_tokens, DIM),
        LAYOUT, 1, 1.0, tokens="pooled",
    )  # fmt: skip
    places = (("blocks.0", 0, 0.0), ("blocks.1", 1, 1.0))
    plan = StorePlan(
        n, 2, "none", (site,), (group,), level, rollout=True, places=places, clip=clip,
        inputs=(3, CELL * SIDE, CELL * SIDE),
    )  # fmt: skip
    received = np.stack([a.mean(2)] * 2, 1)
    values = {
        "input": square_pixels(n),
        "attention/received": received,
        "attention/received_rows": received,
        "attention/rollout": a.mean((1, 2)),
        "attention/full/blocks.0": a,
        "attention/full/blocks.1": a,
        "attention/entropy": np.full((n, 2, 2), 2.0),
        "seconds": np.full(n, 0.04),
    }
    ids = [f"clip{i}.mp4" for i in range(n)]
    there = arrays(plan)
    kept = {name: own for name, own in values.items() if name in there}
    return write(path, plan, kept, **{"ids": ids, **more})
