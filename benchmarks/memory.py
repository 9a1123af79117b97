"""Peak memory of `vitsee extract` as the number of images grows: it must not.

python benchmarks/memory.py                # the demo's ViT on 250 to 2000 images
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from common import machine, peak_rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo:vit")
    parser.add_argument("--data", default="demo:train")
    parser.add_argument("--images", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--slab", default="64")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        for n in args.images:
            store = str(Path(name) / f"{n}.zarr")
            command = [sys.executable, "-m", "vitsee_cli", "extract", args.model]
            command += [
                "--data",
                args.data,
                "-o",
                store,
                "--images",
                str(n),
                "--slab",
                args.slab,
            ]
            print(
                f"{n:6d} images: peak RSS {peak_rss(command) / 1e6:8.1f} MB", flush=True
            )


if __name__ == "__main__":
    main()
