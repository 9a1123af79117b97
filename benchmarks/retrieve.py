"""`vitsee retrieve` with many distractors: time and peak memory, against a full argsort in numpy.

Both sides read the same stores of vectors, each in a process of its own. numpy has all vectors in
RAM, normalises them, makes one product in float32 and sorts every row of it, as the published code
does; vitsee streams them and counts. Prints seconds without imports (of the clock, and of the
processor, which other work disturbs less), the peak of resident memory beside that of the imports
alone, and how far the mean average precisions are apart.

    python benchmarks/retrieve.py --distractors 10000 100000 1000000 --dim 768 [--memory 512M]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from common import machine, peak_rss
from numpy.typing import NDArray
from synthetic import write_store

from vitsee_cli.values import parse_size
from vitsee_stores import SiteSpec, StorePlan, open_store

SLAB, SITE = 4096, "pooled"
IMAGES, QUERIES, EASY, HARD, JUNK = 5000, 70, 40, 40, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--distractors", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--memory", default="512M", help="of vitsee")
    parser.add_argument(
        "--most", type=int, default=10**9, help="distractors that numpy is given"
    )
    parser.add_argument("--only", choices=("make", *SIDES), help="one side")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.only == "make":
        make(args.folder, args.distractors, args.dim)
    elif args.only is not None:
        began = time.perf_counter(), time.process_time()
        value = SIDES[args.only](
            args.folder, args.distractors[0], parse_size(args.memory)
        )
        seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        found = {"seconds": seconds, "cpu": cpu, "value": value}
        (args.folder / f"{args.only}.json").write_text(json.dumps(found))
    else:
        compare(args.distractors, args.dim, args.memory, args.most)


def compare(distractors: list[int], dim: int, memory: str, most: int) -> None:
    """A line per number of distractors and side."""
    print(
        f"{machine()}\n{QUERIES} queries, {IMAGES} images, {dim} channels, --memory {memory}"
    )
    with tempfile.TemporaryDirectory() as name:
        here = [
            sys.executable,
            __file__,
            "--folder",
            name,
            "--dim",
            str(dim),
            "--memory",
            memory,
        ]
        numbers = [*map(str, distractors)]
        subprocess.run([*here, "--only", "make", "--distractors", *numbers], check=True)
        modules = "import torch, vitsee_core.analyses.retrieve"
        imports = peak_rss([sys.executable, "-c", modules])
        print(f"imports alone: {imports / 1e6:.0f} MB")
        for n in distractors:
            values = {}
            for side in SIDES:
                if side == "numpy" and n > most:
                    continue
                peak = peak_rss([*here, "--only", side, "--distractors", str(n)])
                found = json.loads((Path(name) / f"{side}.json").read_text())
                values[side] = found["value"]
                print(
                    f"{n:9,d} distractors  {side:7} {found['seconds']:7.1f} s, processor "
                    f"{found['cpu']:5.1f} s  peak RSS {peak / 1e6:8.0f} MB",
                    flush=True,
                )
            if len(values) > 1:
                print(f"{'':23}apart by {abs(values['vitsee'] - values['numpy']):.1e}")


def make(folder: Path, distractors: list[int], dim: int) -> None:
    """Stores of images with queries and of distractors, and the ground truth."""
    rng = np.random.default_rng(0)
    kinds = np.zeros((QUERIES, IMAGES), np.int8)
    for own in kinds:
        chosen = rng.choice(IMAGES, EASY + HARD + JUNK, replace=False)
        own[chosen] = np.repeat([1, 2, 3], [EASY, HARD, JUNK])
    names = ("easy", "hard", "junk")
    ids = [f"im{i}" for i in range(IMAGES)] + [f"q{i}" for i in range(QUERIES)]
    truth = {
        "imlist": ids[:IMAGES],
        "qimlist": ids[IMAGES:],
        "gnd": [
            {"bbx": [0, 0, 1, 1]}
            | {
                name: np.flatnonzero(own == k + 1).tolist()
                for k, name in enumerate(names)
            }
            for own in kinds
        ],
    }
    (folder / "gnd.json").write_text(json.dumps(truth))
    centres = rng.standard_normal((QUERIES, dim), np.float32)
    pull = np.array([0, 0.25, 0.12, 0.1], np.float32)[kinds]
    images = rng.standard_normal((IMAGES, dim), np.float32) + pull.T @ centres
    every = np.concatenate([images, centres])
    write(folder / "images.zarr", ids, lambda rows: every[rows], dim)
    for n in distractors:

        def drawn(rows: slice) -> NDArray[np.float32]:
            return np.random.default_rng((1, rows.start)).standard_normal(
                (rows.stop - rows.start, dim), np.float32
            )

        write(folder / f"{n}.zarr", [f"x{i}" for i in range(n)], drawn, dim, 10**7)


def write(path: Path, ids: list[str], of: Any, dim: int, offset: int = 0) -> None:
    """A store of one vector site. of: rows -> their vectors."""
    spec = SiteSpec(SITE, SITE, None, ("head",), "vector", dim, (dim,), None, 1, 1.0)
    plan = StorePlan(len(ids), min(SLAB, len(ids)), "none", (spec,))

    def values(rows: slice) -> dict[str, NDArray[np.float32]]:
        return {f"vectors/{SITE}": of(rows)}

    write_store(path, plan, values, ids=ids, order="dataset", first_hash=offset)


def ours(folder: Path, n: int, memory: int) -> float:
    """map_medium of `vitsee retrieve`."""
    from vitsee_core.analyses.retrieve import run

    table = run(
        str(folder / "images.zarr"), truth=folder / "gnd.json", sites=SITE, memory=memory,
        distractors=[str(folder / f"{n}.zarr")],
    )  # fmt: skip
    return float(
        table.filter(pl.col("baseline").is_null(), metric="map_medium")["value"][0]
    )


def theirs(folder: Path, n: int, memory: int) -> float:
    """The same by a full argsort in numpy, junk taken out of each ranking."""
    x = open_store(folder / "images.zarr").vectors(SITE)[:]
    queries, x = x[IMAGES:], x[:IMAGES]
    x = np.concatenate([x, open_store(folder / f"{n}.zarr").vectors(SITE)[:]])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    order = np.argsort(-(queries @ x.T), axis=1)
    values = []
    truth = json.loads((folder / "gnd.json").read_text())["gnd"]
    for ranking, own in zip(order, truth, strict=True):
        ranking = ranking[~np.isin(ranking, own["junk"])]
        ranks = np.flatnonzero(np.isin(ranking, own["easy"] + own["hard"]))
        j = np.arange(len(ranks))
        before = np.where(ranks == 0, 1, j / np.maximum(ranks, 1))
        values.append(((before + (j + 1) / (ranks + 1)) / 2).mean())
    return float(np.mean(values))


SIDES = {"vitsee": ours, "numpy": theirs}

if __name__ == "__main__":
    main()
