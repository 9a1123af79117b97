"""Ridge probes of pixels from sums over tokens, against tokens upsampled to pixels in memory.

    python benchmarks/dense_probe.py                  # 8, 24 and 72 images of 128 x 128 px
    python benchmarks/dense_probe.py --dim 384 --side 224 --images 16 --images 64

Both fit one-hot classes of every labelled pixel through bilinear interpolation, with one l2 and an
intercept, in float64, from tokens and class maps in memory: `sums` as `vitsee dense-probe` does,
`pixels` with torch's interpolate and scikit-learn's Ridge (Cholesky). One thread of BLAS on both
sides. Times are medians of interleaved rounds; memory is the peak of a process of its own, imports
and the tokens included, taken before this process grows (a child's peak begins at its parent's).
The largest difference of a weight is printed beside them.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from common import Result, add_record_option, interleaved, machine, peak_rss, record
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits

from vitsee_core.analyses.dense_probe.linear import CellSums, PixelSums, Solutions
from vitsee_core.analyses.dense_probe.pixels import labelled_pixels
from vitsee_core.images.placement import Placement
from vitsee_core.truth.masks.png_maps import IGNORED
from vitsee_stores import TokenLayout

Array = NDArray[np.float64]
L2, CLASSES, CELL = 1e-3, 21, 16


class Data(NamedTuple):
    """tokens: (images, rows, cols, dim) float32; labels: (images, side, side)."""

    tokens: NDArray[np.float32]
    labels: NDArray[np.uint8]


def make(n: int, dim: int, side: int) -> Data:
    """Random tokens, and class maps of blocks with a tenth of them ignored."""
    rng = np.random.default_rng(0)
    cells = side // CELL
    tokens = rng.standard_normal((n, cells, cells, dim), np.float32)
    coarse = rng.integers(0, CLASSES, (n, side // 8, side // 8)).astype(np.uint8)
    coarse[rng.random(coarse.shape) < 0.1] = IGNORED
    return Data(tokens, coarse.repeat(8, 1).repeat(8, 2))


def by_sums(data: Data) -> Array:
    """(dim, classes) weights."""
    _, rows, cols, dim = data.tokens.shape
    side = data.labels.shape[1]
    layout = TokenLayout((), (rows, cols), stride_px=(CELL, CELL))
    sums, shift = PixelSums.empty(dim), data.tokens[0, 0, 0].astype(np.float64)
    for x, labels in zip(data.tokens, data.labels, strict=True):
        place = Placement(0, 0, side, side)
        pixels = labelled_pixels(labels, place, layout, (side, side), "label")
        sums.count(x.astype(np.float64) - shift, CellSums.of(pixels))
    return Solutions.of(sums).scores(L2, shift).weights


def by_pixels(data: Data) -> Array:
    """(dim, classes) weights."""
    size = data.labels.shape[1:]
    maps = torch.from_numpy(data.tokens).double().permute(0, 3, 1, 2)
    up = torch.nn.functional.interpolate(maps, size, mode="bilinear", align_corners=False)
    x = up.permute(0, 2, 3, 1).reshape(-1, data.tokens.shape[-1]).numpy()
    labels = data.labels.ravel()
    x, labels = x[labels != IGNORED], labels[labels != IGNORED]
    y = (labels[:, None] == np.unique(labels)).astype(np.float64)
    alpha = L2 * len(x) * x.var(0).mean()
    return np.asarray(Ridge(alpha=alpha, solver="cholesky").fit(x, y).coef_.T)


WAYS = {"sums": by_sums, "pixels": by_pixels}


def main() -> None:
    """Print times, memory and the largest difference at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, action="append")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=WAYS, help="one side, once: for its memory")
    add_record_option(parser)
    args = parser.parse_args()
    sizes = args.images or [8, 24, 72]
    torch.set_num_threads(1)
    with threadpool_limits(1):
        if args.only:
            WAYS[args.only](make(sizes[0], args.dim, args.side))
            return
        print(machine())
        memory = [peaks(n, args) for n in sizes]
        rows = [
            row
            for n, own in zip(sizes, memory, strict=True)
            for row in measured(n, args, own)
        ]
    if args.record:
        record("dense-probe", "Ridge on pixels, from sums over tokens", rows)


def peaks(n: int, args: argparse.Namespace) -> tuple[float, float]:
    """Peak MB of both sides."""
    same = ["--images", str(n), "--dim", str(args.dim), "--side", str(args.side)]
    ours, other = (
        peak_rss([sys.executable, __file__, *same, "--only", way]) / 1e6 for way in WAYS
    )
    return ours, other


def measured(
    n: int, args: argparse.Namespace, memory: tuple[float, float]
) -> list[Result]:
    """Time and memory of one size."""
    data = make(n, args.dim, args.side)
    off = float(np.abs(by_sums(data) - by_pixels(data)).max())
    seconds = interleaved(
        {name: partial(way, data) for name, way in WAYS.items()}, args.rounds
    )
    what = f"{n} images of {args.side} x {args.side} px, {args.dim} channels"
    row = Result.of(f"{what}, against pixels in memory", seconds, *WAYS)
    print(
        f"{what}: sums {row.ours:.2f} s, pixels {row.other:.2f} s, ratio {row.ratio:.1f}"
    )
    print(
        f"  peak memory {memory[0]:.0f} against {memory[1]:.0f} MB; weights differ by {off:.1e}"
    )
    return [
        row,
        Result(f"peak memory, {what}", memory[0], memory[1], memory[1] / memory[0], "MB"),
    ]


if __name__ == "__main__":
    main()
