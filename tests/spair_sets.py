"""Pairs of images with keypoints in SPair-71k's files, and stores of given tokens for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stores import write_sites
from vitsee_stores import Store
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
SIZE, STRIDE = 64, 8  # of the input, of a token
GRID = SIZE // STRIDE
LAYOUT = TokenLayout(("cls",), (GRID, GRID), stride_px=(float(STRIDE),) * 2)
SIZES = ((40, 60), (60, 40), (50, 50))  # height, width of the images of a category


def transform(mode: str = "border", size: int = SIZE) -> dict[str, Any]:
    return {
        "input_size": (3, size, size), "interpolation": "bicubic", "crop_pct": 1.0,
        "crop_mode": mode, "mean": (0.0,) * 3, "std": (1.0,) * 3,
    }  # fmt: skip


def annotation(
    source: str = "a0", target: str = "a1", category: str = "cat", **changes: Any
) -> dict[str, Any]:
    """A pair of two images of 60 x 40 (width, height)."""
    return {
        "src_imname": f"{source}.jpg", "trg_imname": f"{target}.jpg",
        "src_imsize": [60, 40, 3], "trg_imsize": [60, 40, 3],
        "src_bndbox": [10, 5, 50, 35], "trg_bndbox": [10, 5, 50, 35], "category": category,
        "src_kps": [[12, 8], [30, 20]], "trg_kps": [[14, 9], [33, 21]], "mirror": 0,
        "viewpoint_variation": 0, "scale_variation": 0, "truncation": 0, "occlusion": 0,
        **changes,
    }  # fmt: skip


def write_pairs(
    root: Path,
    pairs: Sequence[Mapping[str, Any]],
    split: str = "test",
    separator: str = ":",
) -> Path:
    """The folder SPair-71k of these pairs, and their list."""
    folder = root / "PairAnnotation" / split
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, pair in enumerate(pairs, 1):
        both = [
            str(pair[key]).removesuffix(".jpg") for key in ("src_imname", "trg_imname")
        ]
        stem = "-".join([f"{number:06d}", *both])
        names.append(f"{stem}:{pair['category']}")
        (folder / f"{stem}{separator}{pair['category']}.json").write_text(
            json.dumps(pair)
        )
    listed = root / "Layout" / "large" / f"{split}.txt"
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text("\n".join(names))
    return root


def all_pairs(
    categories: Sequence[str] = ("cat", "dog"),
    sizes: Sequence[tuple[int, int]] = SIZES,
    seed: int = 0,
    n_points: int = 4,
) -> tuple[list[dict[str, Any]], list[str], list[tuple[int, int]]]:
    """All ordered pairs of each category, at random keypoints; the images' ids and sizes."""
    rng = np.random.default_rng(seed)
    pairs, ids, every = [], [], []
    for category in categories:
        points, boxes = [], []
        for i, (height, width) in enumerate(sizes):
            ids.append(f"JPEGImages/{category}/{category}{i}.jpg")
            every.append((height, width))
            points.append(rng.integers(0, (width, height), (n_points, 2)).tolist())
            x0, y0 = (int(rng.integers(0, side // 3)) for side in (width, height))
            boxes.append([x0, y0, x0 + width // 2, y0 + height // 2])
        for a in range(len(sizes)):
            for b in range(len(sizes)):
                if a != b:
                    pairs.append(
                        annotation(
                            f"{category}{a}", f"{category}{b}", category,
                            src_imsize=[*sizes[a][::-1], 3], trg_imsize=[*sizes[b][::-1], 3],
                            src_bndbox=boxes[a], trg_bndbox=boxes[b],
                            src_kps=points[a], trg_kps=points[b],
                            viewpoint_variation=(a + b) % 3, scale_variation=a,
                        )
                    )  # fmt: skip
    return pairs, ids, every


def write_store(
    path: Path,
    grids: Mapping[str, Array],
    ids: Sequence[str],
    sizes: Any,
    *,
    mode: str = "border",
    layout: TokenLayout = LAYOUT,
    **more: Any,
) -> Store:
    """A store of grids: site -> (images, rows, cols, dim)."""
    sites = {
        name: np.concatenate(
            [
                np.zeros((len(x), layout.n_prefix, x.shape[-1])),
                x.reshape(len(x), -1, x.shape[-1]),
            ],
            axis=1,
        )
        for name, x in grids.items()
    }
    given = {"slab": 4, "transform": transform(mode), **more}
    return write_sites(path, sites, layout=layout, ids=ids, sizes=sizes, **given)
