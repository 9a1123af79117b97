"""The covariance pass of `vitsee spectrum --tokens patches` against the BLAS on the same numbers.

    python benchmarks/covariance.py [--images 256] [--dim 768] [--rounds 5]

A store of one site of 14 x 14 patches in float16 is read and its second moments are summed in
float64; beside it numpy's x.T @ x of the same tokens in float64, already in memory and converted.
Both in turn; medians. The ratio says how much of the BLAS' rate the pass has, reading, conversion
and checks included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from common import Result, add_record_option, interleaved, machine, record

from tests.stores import write_sites
from vitsee_core.features import choose_features
from vitsee_core.runtime.execution import Execution
from vitsee_core.statistics.covariance import block_sums
from vitsee_core.statistics.jackknife import Blocks
from vitsee_stores import TokenLayout


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.images, 196, args.dim)).astype(np.float16)
    layout = TokenLayout((), (14, 14), stride_px=(16.0, 16.0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.zarr"
        store = write_sites(path, {"embed": x}, layout=layout, slab=64, dtype="float16")
        features = choose_features(store, store.site("embed"), "patches")
        execution = Execution()
        rows = execution.rows(store)
        blocks = Blocks.of(store, rows.mask, 0)
        whole = x.reshape(-1, args.dim).astype(np.float64)
        flops = len(whole) * args.dim**2  # a symmetric product: half of 2 n D^2
        sides = {
            "covariance pass": lambda: block_sums(
                features, rows, blocks.of_rows, execution
            ),
            "numpy x.T @ x": lambda: np.matmul(whole.T, whole),
        }
        seconds = interleaved(sides, args.rounds)
    print(f"{len(whole)} tokens of {args.dim} channels")
    for name, spent in seconds.items():
        median = statistics.median(spent)
        print(f"{name:15}  {median:6.2f} s  {flops / median / 1e9:6.1f} GFLOP/s")
    what = f"covariances of {len(whole):,} tokens of {args.dim} channels from the store, "
    what += "against numpy's x.T @ x of float64 in memory"
    row = Result.of(what, seconds, *sides)
    print(f"ratio            {row.ratio:6.2f}")
    if args.record:
        record("covariance", "The pass of `vitsee spectrum --tokens patches`", [row])


if __name__ == "__main__":
    main()
