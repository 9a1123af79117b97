"""Are vectors of segments bound by reading, and is their memory flat in the images?

A store with one site of ViT-B/16's patches (float16) and objects in COCO's form, seven an image,
are written once. Sides, one thread each, in turn: reading the patches alone; the segments' vectors,
reading included; and the loop of the published code on the same tokens (a product of all masks
with all tokens of an image, in float32). Before that the peak memory of vectors at two numbers of
images.

    python benchmarks/segments.py [--images 512] [--rounds 3] [--sizes 256 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import interleaved, machine, paired_ratio, peak_rss
from numpy.typing import NDArray
from synthetic import block_sites, write_store

from vitsee_core.demo.coco import outlines
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.machine import human_bytes
from vitsee_core.runtime.streaming import Rows, each_slab
from vitsee_core.truth.masks.segments import (
    LabelledSegments,
    Segmentation,
    SegmentFeatures,
    examples_of,
)
from vitsee_stores import Slab, Store, StorePlan, TokenLayout, open_store

SLAB, DIM, SITE, PER_IMAGE = 64, 768, "blocks.0.out", 7
SIZE = (480, 640)
GRID = (14, 14)
LAYOUT = TokenLayout((), GRID, stride_px=(16.0, 16.0))
TRANSFORM = {
    "input_size": (3, 224, 224),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
}


def main() -> None:
    """Prints the machine, a row a side, and peaks."""
    parser = argparse.ArgumentParser(description="Vectors of segments against reading.")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 1024])
    parser.add_argument(
        "--only", type=Path, help="a folder: its vectors, once, printing nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only is not None:
        store = open_store(args.only / "b16.zarr")
        vectors(*found(store, args.only / "objects.json"))
        return
    folder = Path(tempfile.mkdtemp(prefix="segments-"))
    try:
        peaks(folder, args.sizes)
        measure(folder, args.images, args.rounds)
    finally:
        shutil.rmtree(folder)


def peaks(folder: Path, sizes: list[int]) -> None:
    """Before any work of this process: a new one begins with the peak of the one that starts it."""
    print(f"{machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for n in sizes:
        of_size = folder / str(n)
        command = [sys.executable, __file__, "--images", str(n), "--only", str(of_size)]
        code = f"import segments, pathlib; segments.write(pathlib.Path({str(of_size)!r}), {n})"
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [here, os.environ.get("PYTHONPATH", "")]
        )
        peak_rss([sys.executable, "-c", code])
        print(f"{n:6d} images: peak RSS {human_bytes(peak_rss(command))}", flush=True)
        shutil.rmtree(of_size)


def measure(folder: Path, n: int, rounds: int) -> None:
    """Times of the three sides."""
    write(folder, n)
    store = open_store(folder / "b16.zarr")
    data, features = found(store, folder / "objects.json")
    stored = 2 * n * 196 * DIM
    print(f"{n} images, {len(data)} segments, {human_bytes(stored)} of patches")
    own, published = vectors(data, features), loop(data, features)
    print(f"largest difference {np.abs(own - published).max():.1e}")
    sides: dict[str, Callable[[], object]] = {
        "reading": partial(read, store),
        "vectors": partial(vectors, data, features),
        "published loop": partial(loop, data, features),
    }
    seconds = interleaved(sides, rounds)
    for name, spent in seconds.items():
        middle = statistics.median(spent)
        ratio = paired_ratio(spent, seconds["reading"])
        print(
            f"{name:16} {middle:7.3f} s {stored / 1e6 / middle:6.0f} MB/s  {ratio:5.2f} of reading"
        )


def read(store: Store) -> None:
    """Every stored patch, slab by slab."""

    def work(slab: Slab) -> int:
        return int(slab.acts(SITE, "patches").nbytes)

    sum(each_slab(store, work, rows=Rows(store.valid, 0, "")))


def found(store: Store, masks: Path) -> tuple[LabelledSegments, SegmentFeatures]:
    """The segments, and the reader of their vectors."""
    sites = store.select([SITE])
    examples = examples_of(Segmentation(masks), [(store, sites)], Execution())
    data = examples.rows(store)
    assert isinstance(data, LabelledSegments)
    features = examples.features(data, sites[0])
    assert isinstance(features, SegmentFeatures)
    return data, features


def vectors(data: LabelledSegments, features: SegmentFeatures) -> np.ndarray:
    """(segments, dim) by our reader, one slab at a time."""
    every = np.arange(len(data))
    read_ = data.read(features, every, slice(0, 1), jobs=1, memory=1 << 40)
    return np.concatenate([x[:, 0] for _, x in read_])


def loop(data: LabelledSegments, features: SegmentFeatures) -> np.ndarray:
    """The same as the published code does it: image by image, all masks times all tokens."""
    out = []
    whole = features.weights
    for slab in data.store.slabs():
        x = slab.acts(SITE, "patches")
        for row in range(slab.rows.start, slab.rows.stop):
            own = np.flatnonzero(data.rows == row)
            masks = np.zeros((len(own), 196), np.float32)
            for k, number in enumerate(data.numbers[own]):
                part = slice(whole.starts[number], whole.starts[number + 1])
                masks[k, whole.tokens[part]] = whole.values[part]
            tokens = torch.from_numpy(x[row - slab.rows.start].reshape(196, DIM)).float()
            weighted = torch.from_numpy(masks)[:, :, None] * tokens[None]
            out.append(weighted.sum(1).numpy())
    return np.concatenate(out)


def write(folder: Path, n: int) -> None:
    """The store and its objects."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:06d}.jpg" for i in range(n)]
    rng = np.random.default_rng(0)

    def values(rows: slice) -> dict[str, NDArray[np.float16]]:
        noise = rng.standard_normal((rows.stop - rows.start, *GRID, DIM), np.float32)
        return {f"acts/{SITE}/grid": noise.astype(np.float16)}

    plan = StorePlan(n, SLAB, "none", block_sites(1, DIM, LAYOUT))
    write_store(
        folder / "b16.zarr", plan, values, ids=names, size=SIZE, transform=TRANSFORM
    )
    (folder / "objects.json").write_text(json.dumps(objects(names, rng)))


def objects(names: list[str], rng: np.random.Generator) -> dict[str, object]:
    """Disks of 10 to 150 pixels radius."""
    annotations: list[dict[str, object]] = []
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    for image in range(len(names)):
        for _ in range(PER_IMAGE):
            cy, cx = rng.integers(0, SIZE[0]), rng.integers(80, 560)
            mask = (y - cy) ** 2 + (x - cx) ** 2 < rng.integers(10, 150) ** 2
            # An outline a row would be slow to read: the disk's rows are rectangles of 8.
            small = mask[::8, ::8]
            shapes = [[8 * edge for edge in outline] for outline in outlines(small)]
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": image,
                    "category_id": int(rng.integers(0, 80)),
                    "segmentation": shapes,
                }
            )
    images = [
        {"id": i, "file_name": name, "height": SIZE[0], "width": SIZE[1]}
        for i, name in enumerate(names)
    ]
    categories = [{"id": i, "name": f"kind {i}"} for i in range(80)]
    return {"images": images, "annotations": annotations, "categories": categories}


if __name__ == "__main__":
    main()
