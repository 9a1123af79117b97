"""Keypoints found from similarities at tokens, against features upsampled to every pixel.

Pairs of images of one category; noise around common parts, in a store of float16. Ours: `search`,
from the store to the position of every keypoint. The other side is what released code does, in
plain torch: both images' features upsampled to the input, for `smooth` scaled to unit length again,
one product, argmax; tokens in memory, so that it reads nothing. Prints milliseconds of processor
time per pair, ratios, how many keypoints are found at the same pixel (of the equal ones at the
border any), and the peak memory of ours above the imports for two numbers of images.

    python benchmarks/keypoints.py [--grid 14] [--cell 16] [--dim 768] [--images 26] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleaved, machine, paired_ratio, peak_rss
from numpy.typing import NDArray
from synthetic import block_sites, write_store
from torch.nn.functional import interpolate, normalize

from vitsee_core.analyses.keypoints.positions import LocatedKeypoints
from vitsee_core.analyses.keypoints.search import search
from vitsee_core.runtime.device import precision_context
from vitsee_stores import Store, StorePlan, TokenLayout, open_store

Array = NDArray[Any]
SITE, POINTS, SLAB = "blocks.0.out", 8, 64
MATCHES = ("smooth", "vit_analysis")
FEW = 6  # pairs of the slow side in a round


def main() -> None:
    """Prints the machine and a row a side."""
    parser = argparse.ArgumentParser(description="Keypoints against upsampled features.")
    parser.add_argument("--grid", type=int, default=14)
    parser.add_argument("--cell", type=int, default=16)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--images", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--only", help="a folder with a store to search once, printing nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only == "nothing":
        return
    if args.only:
        store = open_store(args.only)
        search(store, store.site(SITE), pairs_of(store, args), "smooth", device=CPU)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        )
        size = args.grid * args.cell
        print(
            f"{args.grid} x {args.grid} tokens, {args.dim} channels, input of {size} pixels"
        )
        if not args.no_memory:
            print_memory(Path(folder), args)
        store = make_store(
            Path(folder, "bench.zarr"), args.images, args.grid, args.cell, args.dim
        )
        tokens = store.acts(SITE, "patches")[:].astype(np.float32)
        compare(store, tokens, pairs_of(store, args), args.rounds)


CPU = torch.device("cpu")


def compare(store: Store, tokens: Array, located: LocatedKeypoints, rounds: int) -> None:
    """Both sides of both matches in turns."""
    n = len(located.source_row)
    found: dict[str, Array] = {}

    def timed(name: str, run: Callable[[], Array]) -> float:
        began = time.process_time()
        found[name] = run()
        return time.process_time() - began

    # Beyond the centres of the outer tokens all pixels are equal, and rounding chooses.
    edge = located.input_size[0] // tokens.shape[1] // 2
    sides: dict[str, Callable[[], Array]] = {}
    for match in MATCHES:
        sides[match] = partial(
            search, store, store.site(SITE), located, match, device=CPU
        )
        sides[f"upsampled {match}"] = partial(upsampled, tokens, located, match)
    with torch.inference_mode(), precision_context(CPU, "fp32"):
        seconds = interleaved(
            {name: partial(timed, name, run) for name, run in sides.items()}, rounds
        )
    for match in MATCHES:
        slow = [one / FEW for one in seconds[f"upsampled {match}"]]
        fast = [one / n for one in seconds[match]]
        places = [
            np.clip(found[name][: FEW * POINTS], edge, located.input_size[0] - 1 - edge)
            for name in (match, f"upsampled {match}")
        ]
        same = (places[0] == places[1]).all(1).mean()
        print(
            f"{match:13} {1e3 * statistics.median(fast):7.2f} ms a pair of {POINTS} keypoints; "
            f"upsampled features {1e3 * statistics.median(slow):8.1f} ms, "
            f"{paired_ratio(slow, fast):6.0f} x ours; same pixel {same:.1%}"
        )


def upsampled(tokens: Array, located: LocatedKeypoints, match: str) -> Array:
    """The keypoints of the first pairs from features of every pixel."""
    size = located.input_size
    found = []
    for pair in range(FEW):
        own = np.flatnonzero(located.pair_index == pair)
        source, target = (
            interpolate(
                normalize(torch.from_numpy(tokens[rows[pair]]), dim=2).permute(2, 0, 1)[None],
                size, mode="bilinear", align_corners=False,
            )[0]
            for rows in (located.source_row, located.target_row)
        )  # fmt: skip
        xy = located.source_xy[own].astype(
            int
        )  # whole pixels, where both sides sample alike
        vectors = source[:, xy[:, 1], xy[:, 0]]
        if match == "smooth":
            target = normalize(target, dim=0)
        place = (vectors.T @ target.flatten(1)).argmax(1).numpy()
        found.append(np.stack([place % size[1], place // size[1]], 1))
    return np.concatenate(found)


def pairs_of(store: Store, args: argparse.Namespace) -> LocatedKeypoints:
    """All ordered pairs, keypoints at random pixels."""
    n, side = store.n_images, args.grid * args.cell
    rng = np.random.default_rng(0)
    source, target = (rows.ravel() for rows in np.indices((n, n)))
    source, target = source[source != target], target[source != target]
    if args.only:  # no more pairs for more images
        source, target = source[:500], target[-500:]
    points = rng.integers(0, side, (n, POINTS, 2)).astype(float)
    pair = np.repeat(np.arange(len(source)), POINTS)
    of_points = np.ones((len(pair), 1))
    return LocatedKeypoints(
        [], source, target, pair, points[source].reshape(-1, 2), points[target].reshape(-1, 2),
        points[source].reshape(-1, 2), of_points * np.ones(2), of_points[:, 0] * side,
        of_points * np.array([-0.5, -0.5, side - 0.5, side - 0.5]), (side, side), {},
    )  # fmt: skip


def make_store(path: Path, n: int, grid: int, cell: int, dim: int) -> Store:
    """Smooth random features of parts, and noise of each image."""
    layout = TokenLayout((), (grid, grid), stride_px=(float(cell), float(cell)))
    rng = np.random.default_rng(0)
    common = rng.standard_normal((grid, grid, dim), np.float32)

    def values(rows: slice) -> dict[str, Array]:
        noise = rng.standard_normal((rows.stop - rows.start, grid, grid, dim), np.float32)
        return {f"acts/{SITE}/grid": (common + noise).astype(np.float16)}

    plan = StorePlan(n, SLAB, "none", block_sites(1, dim, layout))
    return write_store(path, plan, values, order="dataset")


def print_memory(folder: Path, args: argparse.Namespace) -> None:
    """Peak of one search for few and for many images, of which as many pairs are taken."""
    sizes = ["--grid", args.grid, "--cell", args.cell, "--dim", args.dim]
    command = [sys.executable, __file__, *map(str, sizes), "--only"]
    nothing = peak_rss([*command, "nothing"])
    for n in (2 * SLAB, 16 * SLAB):
        path = folder / f"{n}.zarr"
        make_store(path, n, args.grid, args.cell, args.dim)
        above = (peak_rss([*command, str(path)]) - nothing) / 2**20
        print(f"{n:5} images in slabs of {SLAB}: peak {above:.0f} MiB above the imports")


if __name__ == "__main__":
    main()
