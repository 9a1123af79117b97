"""Propagation of labels through a video, against a plain torch loop of the released algorithm.

One video of noise around moving regions, tokens in memory, float16 as a store has them; from tokens
to labels of pixels. Sides: ours; the released steps (DINO, Walmer et al.: all pairs of tokens,
exp, a window of 0 and 1, the k-th largest, the weights of everything else 0); the same with its
window made by Python loops for every video, as the released code does. Then scoring: J and F of
ours against dilation by a disk. Prints seconds per frame, ratios, and how far the results differ.

    python benchmarks/propagate.py [--grid 28 49] [--cell 16] [--dim 768] [--frames 16] [--rounds 3]

With --cpu-time seconds are those that the process had a core: what a machine that others use at the
same time would take by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from common import interleaved, machine, paired_ratio
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from vitsee_core.analyses.propagate.propagation import (
    Enlarger,
    FrameMap,
    Propagation,
    Window,
    frame_map,
)
from vitsee_core.analyses.propagate.propagation_settings import PropagationSettings
from vitsee_core.analyses.propagate.videos import VideoTruth, boundary_radius, contour_of
from vitsee_core.images.placement import Placement
from vitsee_core.runtime.device import precision_context
from vitsee_stores.layout import TokenLayout

Array = NDArray[Any]
SIZE = (480, 854)
SETTINGS = PropagationSettings()


def main() -> None:
    """Prints the machine and a row a side."""
    parser = argparse.ArgumentParser(
        description="Propagation against the released algorithm."
    )
    parser.add_argument("--grid", type=int, nargs=2, default=(28, 49))
    parser.add_argument("--cell", type=int, default=16)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--objects", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument(
        "--no-loops", action="store_true", help="leave out the Python window"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grid = tuple(args.grid)
    tokens, masks = make_video(grid, args.dim, args.frames, args.objects)
    where = frame_map(
        "s", TokenLayout((), grid, stride_px=(args.cell, args.cell)),
        Placement(0, 0, grid[0] * args.cell, grid[1] * args.cell), SIZE,
    )  # fmt: skip
    seeds = where.seeds(masks[0], args.objects + 1, "nearest")
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(
        f"{args.frames} frames of {grid[0]} x {grid[1]} tokens, {args.dim} channels, {SIZE}"
    )
    found: dict[str, tuple[Array, Array]] = {}
    sides = {"vitsee": lambda: ours(tokens, seeds, where)}
    sides["released steps"] = lambda: released(tokens, seeds, where, window_of(grid))
    if not args.no_loops:
        sides["with its window"] = lambda: released(
            tokens, seeds, where, looped_window(grid)
        )
    with torch.inference_mode(), precision_context(torch.device("cpu"), "fp32"):
        seconds = timed(sides, args.rounds, args.cpu_time, found)
    for name, spent in seconds.items():
        soft = max(
            np.abs(a - b).max()
            for a, b in zip(found[name][0], found["vitsee"][0], strict=True)
        )
        other = np.mean(found[name][1] != found["vitsee"][1])
        print(
            f"{name:16} {statistics.median(spent) / (args.frames - 1):7.3f} s a frame"
            f"  {paired_ratio(spent, seconds['vitsee']):6.2f} x ours"
            f"  soft labels differ by {soft:.1e}, pixels {other:.1e}"
        )
    score_sides(masks, found["vitsee"][1], args.rounds, args.cpu_time)


def timed(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    cpu_time: bool,
    found: dict[str, Any],
) -> dict[str, list[float]]:
    """Seconds of each side, of the processor if wanted; what they return goes into `found`."""

    def by_processor(name: str) -> float:
        began = time.process_time()
        found[name] = sides[name]()
        return time.process_time() - began

    used = {name: partial(by_processor, name) for name in sides} if cpu_time else sides
    return interleaved(used, rounds, found=found)


def make_video(
    grid: tuple[int, int], dim: int, n: int, n_objects: int
) -> tuple[Array, Array]:
    """Tokens (frames, rows, cols, dim) that drift, and masks of the objects that they show."""
    rng = np.random.default_rng(0)
    masks = np.zeros((n, *SIZE), np.uint8)
    for t in range(n):
        for i in range(n_objects):
            top, left = 60 + 150 * i + 4 * t, 80 + 200 * i + 9 * t
            masks[t, top : top + 160, left : left + 130] = i + 1
    kinds = rng.standard_normal((n_objects + 1, dim), np.float32)
    ground = rng.standard_normal((*grid, dim), np.float32)
    rows, cols = (
        np.linspace(0, m - 1, g).astype(int) for m, g in zip(SIZE, grid, strict=True)
    )
    tokens = [
        kinds[mask[rows[:, None], cols]]
        + ground
        + 0.3 * rng.standard_normal((*grid, dim))
        for mask in masks
    ]
    return np.stack(tokens).astype(np.float16), masks


def ours(tokens: Array, seeds: Array, where: FrameMap) -> tuple[Array, Array]:
    """Soft labels and pixels of every frame but the first."""
    window = Window(where.grid, SETTINGS, SETTINGS.radii((1, 1)), torch.device("cpu"))
    run = Propagation(window, tokens.shape[-1], seeds.shape[-1])
    enlarged = Enlarger(where, "bilinear", torch.device("cpu"))
    run.start(window.order_tokens(tokens[0]), window.order_labels(seeds))
    soft, pixels = [], []
    for frame in tokens[1:]:
        maps = window.maps_of(run.step(window.order_tokens(frame)))
        soft.append(maps.numpy().copy())
        pixels.append(enlarged(maps))
    return np.stack(soft), np.stack(pixels)


def released(
    tokens: Array, seeds: Array, where: FrameMap, near: torch.Tensor
) -> tuple[Array, Array]:
    """The same by the released code's steps; near: (tokens, tokens) 0 and 1."""
    grid, cell = where.grid, where.y.cell_px
    n = grid[0] * grid[1]
    features = [
        torch.from_numpy(x).float().reshape(n, -1).T for x in tokens
    ]  # (dim, tokens)
    labels = [torch.from_numpy(seeds).reshape(n, -1).T]  # (classes, tokens)
    soft, pixels = [], []
    for t in range(1, len(tokens)):
        frames = [0, *range(max(1, t - SETTINGS.context), t)]
        query = torch.nn.functional.normalize(features[t], dim=0).T
        keys = torch.nn.functional.normalize(
            torch.stack([features[s] for s in frames]), dim=1
        )
        a = torch.exp(
            torch.bmm(query.expand(len(frames), -1, -1), keys) / SETTINGS.temperature
        )
        a *= near
        a = a.transpose(2, 1).reshape(-1, n)  # (keys of all frames, queries)
        least = torch.topk(a, SETTINGS.topk, dim=0).values.min(dim=0).values
        a[a < least] = 0
        a = a / a.sum(0, keepdim=True)
        found = torch.cat([labels[s] for s in frames], 1) @ a
        labels.append(found)
        maps = found.reshape(-1, *grid)
        soft.append(maps.numpy())
        pixels.append(as_pixels(maps, cell))
    return np.stack(soft), np.stack(pixels)


def as_pixels(maps: torch.Tensor, cell: int) -> Array:
    """Bilinear, each class by its minimum and maximum, the largest, nearest to the frame."""
    large = torch.nn.functional.interpolate(
        maps[None], scale_factor=cell, mode="bilinear", align_corners=False
    )[0]
    for one in large:
        if one.max() > 0:
            one -= one.min()
            one /= one.max()
    labels = Image.fromarray(large.max(0)[1].numpy().astype(np.uint8))
    return np.asarray(labels.resize((SIZE[1], SIZE[0]), Image.Resampling.NEAREST))


def window_of(grid: tuple[int, int]) -> torch.Tensor:
    """(tokens, tokens) 1 within the window, in one go."""
    y, x = (
        i.reshape(-1)
        for i in torch.meshgrid(*(torch.arange(g) for g in grid), indexing="ij")
    )
    apart = [(i[:, None] - i).abs() for i in (y, x)]
    return ((apart[0] <= 12) & (apart[1] <= 12)).float()


def looped_window(grid: tuple[int, int]) -> torch.Tensor:
    """The same, one element after the other."""
    near = torch.zeros(*grid, *grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            for k in range(max(0, i - 12), min(grid[0], i + 13)):
                for m in range(max(0, j - 12), min(grid[1], j + 13)):
                    near[i, j, k, m] = 1
    return near.reshape(grid[0] * grid[1], -1)


def score_sides(masks: Array, pixels: Array, rounds: int, cpu_time: bool) -> None:
    """J and F of an object-frame: ours with the truth's contours at hand, and by dilation."""
    truth = VideoTruth(masks)
    frames = range(1, len(masks) - 1)
    found: dict[str, Any] = {}

    def by_dilation() -> Array:
        return np.array([
            [dilated_f(pixels[t - 1] == i + 1, masks[t] == i + 1) for i in range(truth.n_objects)]
            for t in frames
        ])  # fmt: skip

    sides = {
        "J and F, ours": lambda: np.array(
            [truth.score(t, pixels[t - 1])[1] for t in frames]
        ),
        "F by dilation": by_dilation,
    }
    seconds = timed(sides, rounds, cpu_time, found)
    for name, spent in seconds.items():
        each = 1000 * statistics.median(spent) / (len(frames) * truth.n_objects)
        same = bool((found[name] == found["J and F, ours"]).all())
        print(f"{name:16} {each:7.2f} ms an object-frame, F equal to the bit: {same}")


def dilated_f(found: Array, truth: Array) -> float:
    """F as the official evaluation does it, with scipy's dilation."""
    radius = boundary_radius(found.shape)
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    edges = []
    for mask in (found, truth):
        edge = np.zeros(mask.shape, bool)
        edge[tuple(contour_of(mask).points.T)] = True
        edges.append((edge, ndimage.binary_dilation(edge, y**2 + x**2 <= radius**2)))
    (a, near_a), (b, near_b) = edges
    if not a.any() or not b.any():
        return float(a.any() == b.any())
    precision, recall = (a & near_b).sum() / a.sum(), (b & near_a).sum() / b.sum()
    total = precision + recall
    return float(2 * precision * recall / total) if total else 0.0


if __name__ == "__main__":
    main()
