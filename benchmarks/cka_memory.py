"""Peak memory of `vitsee cka` as the number of images grows, --memory fixed: it must not.

    python benchmarks/cka_memory.py            # 8 sites, p = 12608, 500 to 4000 images
    python benchmarks/cka_memory.py --images 50000 --dim 4 --sites 2 --memory 512M

The claim: the peak stays below that of the imports and the memory given.

Stores are made in processes of their own, and nothing large is imported here: a new process counts
the peak of the one that started it as its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import machine, peak_rss

from vitsee_cli.values import parse_size

TOKENS = 197


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, nargs="+", default=[500, 2000, 4000])
    parser.add_argument("--dim", type=int, default=64, help="a token; p = 197 times this")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--memory", default="256M")
    parser.add_argument("--estimator", default="exact", choices=("exact", "minibatch"))
    args = parser.parse_args()
    print(machine())
    print(
        f"vitsee cka --memory {args.memory}, {args.sites} sites, p = {TOKENS * args.dim}"
    )
    imports = peak_rss([sys.executable, "-c", "import torch, vitsee_core.analyses.cka"])
    allowed = imports + parse_size(args.memory)
    print(
        f"imports alone: peak RSS {imports / 1e6:8.1f} MB; allowed {allowed / 1e6:8.1f} MB"
    )
    with tempfile.TemporaryDirectory() as name:
        for n in args.images:
            store = Path(name) / f"{n}.zarr"
            make = "import sys; from pathlib import Path; from activations import make; "
            make += f"make(Path(sys.argv[1]), {n}, {args.dim}, {args.sites}, 2)"
            here = Path(__file__).parent
            subprocess.run([sys.executable, "-c", make, str(store)], check=True, cwd=here)
            command = [sys.executable, "-m", "vitsee_cli", "-q", "cka", str(store)]
            command += [
                "--no-cache",
                "--memory",
                args.memory,
                "--estimator",
                args.estimator,
            ]
            size = args.sites * n * TOKENS * args.dim * 2 / 1e6
            peak = peak_rss(command)
            verdict = "held" if peak < allowed else "NOT HELD"
            print(
                f"{n:6d} images, {size:6.0f} MB of activations: "
                f"peak RSS {peak / 1e6:8.1f} MB, {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
