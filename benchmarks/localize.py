"""Localisation: every token of a 14 x 14 grid against every 16-pixel patch, from a store.

    python benchmarks/localize.py [--images 1024] [--dim 384] [--rounds 3] [--order dataset]
                                  [--memory 1G] [--folder DIR]

- Rate: useful operations, n (n + 1) (sum of features + tokens x patches), over the time of `run`
  (reading, casting, centring, jackknife included), against the rate of a plain float32 product of
  1024 x 1024 x 1024 on the same threads, interleaved.
- Reference: the published scheme with everything in RAM (Nguyen et al. 2021: Gram matrices,
  U-centring, one product for all pairs; float32), without reading and without a jackknife; for up
  to 1500 images, as it takes 4 n^2 bytes for each token and patch.
- Agreement with float64 on some pairs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cka_peers import alignment, float64_hsic, u_centre
from common import (
    Result,
    add_record_option,
    interleaved,
    machine,
    paired_ratio,
    peak_rss,
    record,
)
from numpy.typing import NDArray
from synthetic import block_sites, write_store

from vitsee_cli.values import parse_size
from vitsee_core.analyses.localize import run
from vitsee_stores import Store, StorePlan, TokenLayout, open_store

GRID, PATCH = 14, 16
ORDERS = ("shuffled", "dataset")
LAYOUT = TokenLayout((), (GRID, GRID), stride_px=(float(PATCH), float(PATCH)))
SITE = "blocks.0.out"
MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


def make(folder: Path, images: int, dim: int, order: str) -> Store:
    """Smooth pictures; each token sees its patch, its neighbours' and noise."""
    side = GRID * PATCH
    sites = block_sites(1, dim, LAYOUT)
    plan = StorePlan(images, min(256, images), "none", sites, inputs=(3, side, side))
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(3 * PATCH**2, dim)).astype(np.float32) / PATCH

    def values(rows: slice) -> dict[str, NDArray[Any]]:
        n = rows.stop - rows.start
        coarse = torch.from_numpy(rng.random((n, 3, 28, 28), np.float32))
        smooth = torch.nn.functional.interpolate(
            coarse, size=(side, side), mode="bilinear"
        )
        pixels = (smooth.numpy() * 255).astype(np.uint8)
        tokens = patches_of(pixels) @ mixing
        tokens += rng.standard_normal(tokens.shape, np.float32)
        return {
            "input": pixels,
            f"pooled/{SITE}/mean": tokens.mean(1, dtype=np.float32),
            f"acts/{SITE}/grid": tokens.astype(np.float16).reshape(n, GRID, GRID, dim),
        }

    transform = {"mean": MEAN, "std": STD}
    return write_store(
        folder / "bench.zarr", plan, values, order=order, transform=transform
    )


def patches_of(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(images, patches, features), normalised."""
    x = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.25)
    cells = x.reshape(len(x), 3, GRID, PATCH, GRID, PATCH).transpose(0, 2, 4, 1, 3, 5)
    return cells.reshape(len(x), GRID * GRID, -1)


def published(features: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """CKA of the first half of the features with the second."""
    n = len(features[0])
    grams = np.empty((len(features), n, n), np.float32)
    for x, gram in zip(features, grams, strict=True):
        np.matmul(x, x.T, out=gram)
        u_centre(gram)
    flat = torch.from_numpy(grams.reshape(len(features), -1))
    half = len(features) // 2
    own = torch.linalg.vecdot(flat, flat).sqrt().numpy()
    cross: NDArray[np.float32] = (flat[:half] @ flat[half:].T).numpy()
    cross /= own[:half, None] * own[None, half:]
    return cross


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--order", default="shuffled", choices=ORDERS, help="of the store"
    )
    parser.add_argument(
        "--memory", default="1G", help="of the command whose peak is measured"
    )
    parser.add_argument("--folder", type=Path)
    add_record_option(parser)
    arguments = parser.parse_args()
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        # Stores are made, and peaks measured, in processes of their own: a new process counts the
        # peak of the one that started it as its own.
        made = "import sys; from pathlib import Path; from localize import make; "
        made += f"make(Path(sys.argv[1]), {arguments.images}, {arguments.dim}, {arguments.order!r})"
        here = Path(__file__).parent
        subprocess.run([sys.executable, "-c", made, folder], check=True, cwd=here)
        memory = peak_of(Path(folder), arguments)
        rows = compare(open_store(Path(folder) / "bench.zarr"), arguments)
    if arguments.record:
        title = f"`vitsee localize`, all tokens against all patches, {arguments.images:,} images"
        record("localize", title, [*rows, memory])


def peak_of(folder: Path, arguments: argparse.Namespace) -> Result:
    """Of the command, above its imports, against the memory it was given."""
    imports = peak_rss(
        [sys.executable, "-c", "import numba, torch, vitsee_core.analyses.localize"]
    )
    command = [
        sys.executable,
        "-m",
        "vitsee_cli",
        "-q",
        "localize",
        str(folder / "bench.zarr"),
    ]
    command += ["--memory", arguments.memory]
    if arguments.device != "cpu":  # else as by default, which imports torch to find a GPU
        command += ["--device", arguments.device]
    above = (peak_rss(command) - imports) / 1e6
    given = parse_size(arguments.memory) / 1e6
    print(
        f"--memory {arguments.memory}: peak {above:.0f} MB above {imports / 1e6:.0f} of imports"
    )
    what = f"peak memory above the imports with --memory {arguments.memory}, against that"
    return Result(what, above, given, given / above, "MB")


def compare(store: Store, arguments: argparse.Namespace) -> list[Result]:
    """Print the claims."""
    n, dim, k = arguments.images, arguments.dim, GRID * GRID
    work = n * (n + 1) * (k * (dim + 3 * PATCH**2) + k * k)
    a, b = (torch.randn(1024, 1024, device=arguments.device) for _ in range(2))

    def product() -> float:
        began = time.perf_counter()
        for _ in range(20):
            out = a @ b
        float(out[0, 0])
        return (time.perf_counter() - began) / 20

    found: dict[str, Any] = {}
    tokens = store.acts(SITE, "patches")[:].astype(np.float32).reshape(n, k, dim)
    patches = patches_of(store.array("input")[:])
    sides: dict[str, Any] = {
        "product": product,
        "ours": lambda: run(store, device=arguments.device),
    }
    if n <= 1500:
        features = [
            np.ascontiguousarray(x[:, t]) for x in (tokens, patches) for t in range(k)
        ]
        sides["reference"] = lambda: published(features)
    seconds = interleaved(sides, arguments.rounds, found=found)
    rate = [work / s / 1e9 for s in seconds["ours"]]
    peak = [2 * 1024**3 / s / 1e9 for s in seconds["product"]]
    print(
        f"{k} tokens of {dim} x {k} patches of {3 * PATCH**2}, {n} images, from the store"
    )
    print(
        f"  {statistics.median(seconds['ours']):.2f} s, {statistics.median(rate):.0f} GFLOP/s"
    )
    print(f"  plain float32 product: {statistics.median(peak):.0f} GFLOP/s")
    print(f"  share: {paired_ratio(rate, peak):.2f}")
    cka = found["ours"]["value"].reshape(k, k)
    if "reference" in found:
        print(
            f"published scheme in RAM: {statistics.median(seconds['reference']):.2f} s, ",
            end="",
        )
        print(
            f"{paired_ratio(seconds['reference'], seconds['ours']):.2f} times ours; ",
            end="",
        )
        print(f"it differs by up to {np.abs(found['reference'] - cka).max():.0e}")
    worst = max(
        abs(alignment(float64_hsic([tokens[:, t], patches[:, p]]))[0, 1] - cka[t, p])
        for t, p in ((0, 0), (90, 90), (90, 5))
    )
    print(f"float64, pair by pair: ours differs by up to {worst:.0e}")
    what = "Gram matrices and pairs from the store, against the rate of a float32 product"
    medians = statistics.median(rate), statistics.median(peak)
    rows = [Result(what, *medians, paired_ratio(rate, peak), "G/s")]
    if "reference" in found:
        what = "against the published scheme, given float32"
        rows.append(Result.of(what, seconds, "ours", "reference"))
    return rows


if __name__ == "__main__":
    main()
