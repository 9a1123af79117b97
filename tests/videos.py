"""Small videos with masks in the layout of DAVIS, and stores of their frames' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stores import write_sites
from tests.tables import having
from vitsee_core.demo.indexed_masks import write_mask
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
CELL = 8
METRICS = ["jf", "j", "f", "j_recall", "f_recall", "j_decay", "f_decay"]
Videos = Mapping[str, Array]  # name -> (frames, height, width) numbers of objects


def plant(folder: Path, videos: Videos) -> Path:
    """Masks in the layout of DAVIS."""
    for name, labels in videos.items():
        for frame, mask in enumerate(labels):
            path = folder / "Annotations" / "480p" / name / f"{frame:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_mask(path, mask.astype(np.uint8))
    return folder


def store_of(
    path: Path,
    tokens: Mapping[str, Array],
    size: tuple[int, int],
    *,
    slab: int = 4,
    **more: Any,
) -> Store:
    """A store of the frames' tokens, (frames, rows, cols, dim) a video; they cover the frames."""
    grid = next(iter(tokens.values())).shape[1:3]
    layout = TokenLayout((), grid, stride_px=(CELL, CELL))
    values = np.concatenate([x.reshape(len(x), -1, x.shape[-1]) for x in tokens.values()])
    ids = [
        f"{name}/{frame:05d}.jpg" for name, x in tokens.items() for frame in range(len(x))
    ]
    height, width = grid[0] * CELL, grid[1] * CELL
    transform = {
        "input_size": [3, height, width], "interpolation": "bilinear", "crop_pct": 1.0,
        "crop_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3,
    }  # fmt: skip
    more = {"ids": ids, "order": "dataset", "sizes": size, "transform": transform, **more}
    return write_sites(path, {"blocks.0.out": values}, layout=layout, slab=slab, **more)


def two_videos(folder: Path, **more: Any) -> tuple[Store, Path]:
    """Random tokens, masks of one and of two objects."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    shapes = np.zeros((7, 48, 80), np.uint8)
    for t in range(7):
        shapes[t, 10 + t : 30 + t, 5 + 4 * t : 30 + 4 * t] = 1
        shapes[t, 30:40, 60 - 3 * t : 75 - 3 * t] = 2
    videos = {"a": shapes, "b": np.minimum(shapes[:5, ::-1], 1)}
    tokens = {name: rng.normal(size=(len(x), 6, 10, 5)) for name, x in videos.items()}
    return store_of(folder / "s.zarr", tokens, (48, 80), **more), plant(
        folder / "DAVIS", videos
    )


def value(table: Table, metric: str, **where: Any) -> float:
    rows = having(table, **({"metric": metric, "baseline": ""} | where))
    assert len(rows) == 1
    return float(rows["value"][0])
