"""Does the norm ratio read the dot products alone, and what does it take beside reading them?

A store of ViT-B/16's size (24 sublayers of 197 tokens; the block outputs of some blocks, so that
the store is as large as one with activations) is written once. Claims: of the store's bytes only
those of the residual dot products are read, counted by the kernel; the time of every metric stands
beside that of numpy.fromfile over the same bytes, from the page cache. All sides alternate.

    python benchmarks/normratio.py [--images 1024] [--blocks 1] [--rounds 5] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from common import interleaved, machine, paired_ratio
from numpy.typing import NDArray
from synthetic import block_sites, write_store

from vitsee_core.analyses import normratio
from vitsee_core.runtime.machine import human_bytes, n_cores
from vitsee_stores import Store, StorePlan, TokenLayout
from vitsee_stores.layout import n_bytes

SLAB, DEPTH, DIM = 256, 12, 768
LAYOUT = TokenLayout(("cls",), (14, 14), stride_px=(16.0, 16.0))


def main() -> None:
    """Prints the machine, the bytes read, and a row a side."""
    parser = argparse.ArgumentParser(description="Norm ratio against reading its input.")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument(
        "--blocks", type=int, default=1, help="whose outputs the store holds"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=n_cores())
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: /tmp"
    )
    args = parser.parse_args()
    print(
        f"{machine()}, numpy {np.__version__}, {args.jobs} jobs, load {os.getloadavg()[0]:.1f}"
    )
    folder = Path(tempfile.mkdtemp(prefix="normratio-", dir=args.folder))
    try:
        measure(
            write(folder / "b16.zarr", args.images, args.blocks), args.rounds, args.jobs
        )
    finally:
        shutil.rmtree(folder)


def measure(store: Store, rounds: int, jobs: int) -> None:
    """Bytes, then times."""
    sizes = n_bytes(store.plan)
    stored = sum(n for path, n in sizes.items() if path.startswith("residual/"))
    before = bytes_read()
    normratio.run(store, jobs=jobs)
    print(
        f"store {human_bytes(sum(sizes.values()))}, residual dot products {human_bytes(stored)}; "
        f"read {human_bytes(bytes_read() - before)}"
    )
    files = sorted(Path(store.path, "residual").rglob("c.*"))
    first = "norm_ratio"
    sides = {
        "numpy fromfile": partial(from_file, files),
        f"{first} of each token": partial(analyse, store, jobs, (first,), ("each",)),
        f"{first} of CLS, patches": partial(analyse, store, jobs, (first,), ("all",)),
        "norm_ratio_median": partial(
            analyse, store, jobs, ("norm_ratio_median",), ("each",)
        ),
        "all five of each token": partial(
            analyse, store, jobs, normratio.DEFAULT_METRICS, ("each",)
        ),
    }
    seconds = interleaved(sides, rounds)
    values = stored / 12
    print(
        f"{'':26} {'s':>7} {'MB/s':>6} {'ratio':>6} {'ns':>6}   ns: a token of an image"
    )
    for name, spent in seconds.items():
        middle = statistics.median(spent)
        ratio = paired_ratio(seconds["numpy fromfile"], spent)
        rate, each = stored / 1e6 / middle, 1e9 * middle / values
        print(f"{name:26} {middle:7.3f} {rate:6.0f} {ratio:6.2f} {each:6.1f}")


def from_file(files: list[Path]) -> None:
    """The same bytes, file by file."""
    for path in files:
        np.fromfile(path, np.uint8)


def analyse(
    store: Store, jobs: int, metrics: tuple[str, ...], tokens: tuple[str, ...]
) -> None:
    """The analysis as the command runs it, without its table's CSV."""
    normratio.run(store, jobs=jobs, metrics=metrics, tokens=tokens)


def bytes_read() -> int:
    """Bytes that this process has read so far, from files in the page cache too (Linux)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def write(path: Path, n: int, n_outputs: int) -> Store:
    """Random dot products of ViT-B/16, and the outputs of its first blocks."""
    names = [f"blocks.{i}.{kind}" for i in range(DEPTH) for kind in ("attn", "mlp")]
    places = tuple((name, i, i / (len(names) - 1)) for i, name in enumerate(names))
    plan = StorePlan(
        n, SLAB, "none", block_sites(n_outputs, DIM, LAYOUT),
        sublayers=tuple((x, LAYOUT) for x in names), places=places,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def values(rows: slice) -> dict[str, NDArray[np.float32]]:
        shape = (rows.stop - rows.start, LAYOUT.n_tokens, 3)
        return {
            f"residual/{x}": rng.uniform(0.5, 1, shape).astype(np.float32) for x in names
        }

    return write_store(path, plan, values)


if __name__ == "__main__":
    main()
