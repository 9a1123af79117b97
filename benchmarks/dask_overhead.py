"""What `--dask local:N` costs and brings on this machine, beside a plain loop and beside threads.

Overhead: milliseconds a task of a function that does nothing, over a plain loop of as many calls.
Speed-up: analyses of a made-up store by one thread, by two threads (`jobs=2`) and by one and two
worker processes, whose start (printed apart, once a command) is not in them. All tables are
compared first: the same numbers.

    OMP_NUM_THREADS=1 python benchmarks/dask_overhead.py [--images 2048] [--rounds 3] [--record]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Result, add_record_option, interleaved, machine, record
from synthetic import write_store

from vitsee_core.analyses import cluster, knn, probe, spectrum
from vitsee_core.runtime.dask_map import dask_map
from vitsee_core.tables.results import Table
from vitsee_stores import Store
from vitsee_stores.layout import SiteSpec, StorePlan

SITES, DIM, CLASSES, SLAB = 8, 256, 20, 128
TASKS = 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Dask's workers against a loop and threads."
    )
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", help="of the analyses, by name; repeatable"
    )
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers: dict[int, Any] = {}
        for n in (1, 2):
            began = time.perf_counter()
            workers[n] = stack.enter_context(dask_map(f"local:{n}"))
            seconds = time.perf_counter() - began
            rows.append(
                Result(f"start of local:{n}, once a command", seconds, None, None, "s")
            )
            list(workers[n](nothing, range(TASKS)))
            began = time.perf_counter()
            list(workers[n](nothing, range(TASKS)))
            each = 1000 * (time.perf_counter() - began) / TASKS
            rows.append(
                Result(f"a task that does nothing, local:{n}", each, 0.0, None, "ms")
            )
        shown(rows)
        train = make(Path(folder, "train.zarr"), args.images, 0)
        test = make(Path(folder, "test.zarr"), args.images // 2, args.images)
        for name, run in analyses(train, test).items():
            if args.only is None or name in args.only:
                rows += shown(compare(name, run, workers, args.rounds))
    if args.record:
        record(
            "dask",
            f"Workers of --dask local:N, {args.images:,} images, {SITES} sites",
            rows,
        )


def shown(rows: list[Result]) -> list[Result]:
    """The rows, printed."""
    for row in rows:
        other = "" if row.other is None else f"  {row.other:8.2f} {row.unit}"
        ratio = "" if row.ratio is None else f"  x {row.ratio:.2f}"
        print(f"{row.what:60} {row.ours:8.2f} {row.unit}{other}{ratio}", flush=True)
    return rows


def nothing(x: int) -> int:
    return x


def analyses(train: Store, test: Store) -> dict[str, Callable[..., Table]]:
    """Each spreads its sites."""
    return {
        "probe": partial(probe.run, train, test),
        "knn": partial(knn.run, train, test),
        "cluster": partial(cluster.run, train, n_seeds=1, baselines=()),
        "spectrum": partial(spectrum.run, train),
    }


def compare(
    name: str, run: Callable[..., Table], workers: dict[int, Any], rounds: int
) -> list[Result]:
    """Against one thread, which is the other side of each row."""
    ways: dict[str, dict[str, Any]] = {
        "two threads": {"jobs": 2},
        "one worker": {"map": workers[1]},
        "two workers": {"map": workers[2]},
    }
    expected = run()
    for way, how in ways.items():
        found = run(**how)
        same = np.array_equal(found["value"], expected["value"], equal_nan=True)
        print(f"{name}, {way}: {'the same bits' if same else 'OTHER NUMBERS'}")
    sides = {"one thread": run} | {way: partial(run, **how) for way, how in ways.items()}
    seconds = interleaved(sides, rounds)
    what = f"{name} by {{}}, against one thread"
    return [Result.of(what.format(way), seconds, way, "one thread") for way in ways]


def make(path: Path, images: int, first_hash: int) -> Store:
    """Vectors with classes in them."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, DIM)).astype(np.float32)
    labels = np.random.default_rng((1, first_hash)).integers(0, CLASSES, images)
    sites = tuple(
        SiteSpec(
            *(f"blocks.{k}.out", "out", f"blocks.{k}", ("blocks",), "vector"),
            *(DIM, (DIM,), None, k, k / (SITES - 1)),
        )
        for k in range(SITES)
    )

    def values(rows: slice) -> dict[str, Any]:
        noise = np.random.default_rng((first_hash, rows.start))
        shape = rows.stop - rows.start, DIM
        return {
            f"vectors/{site.name}": 0.3 * centres[labels[rows]]
            + noise.standard_normal(shape).astype(np.float32)
            for site in sites
        }

    return write_store(
        path,
        StorePlan(images, SLAB, "none", sites),
        values,
        ids=[f"{first_hash + i}" for i in range(images)],
        labels=labels,
        class_names=[f"class{c}" for c in range(CLASSES)],
        first_hash=first_hash,
    )


if __name__ == "__main__":
    main()
