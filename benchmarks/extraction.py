"""Extraction against a bare `model(x)` loop over the same loader, writing included.

    python benchmarks/extraction.py                       # ViT-S/16, 128 images, batch 32
    python benchmarks/extraction.py --model vit_base_patch16_224 --device cuda --precision bf16 \
        --images 16384 --batch 256

Three sides in turn on the same images: the bare loop; block outputs, pooled vectors and residual
products; the same with every attention summary. A ratio of 1 is as fast as the bare loop. Slabs
have the size of a batch unless --slab says otherwise; all sides start their loading workers within
the time measured, so take enough images. Every run has a process of its own and goes over one batch
before: an extraction changes how glibc treats freed memory (`vitsee_core/runtime/machine.py`), and
a bare loop after it in the same process would no longer be a bare loop.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import Result, add_record_option, interleaved, machine, paired_ratio, record
from PIL import Image

from vitsee_cli.__main__ import share_cores
from vitsee_core.extraction.options import (
    DataOptions,
    KeepOptions,
    ModelOptions,
    Request,
    RunOptions,
)
from vitsee_core.extraction.run import default_workers, extract
from vitsee_core.extraction.sharding import Shard
from vitsee_core.images import batches, normalise, open_source, select
from vitsee_core.models.load import load_model
from vitsee_core.runtime.device import precision_context, resolve_device


def make_images(folder: Path, n: int) -> None:
    """JPEG files of smooth noise, 256 x 256."""
    rng = np.random.default_rng(0)
    for i in range(n):
        small = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        small.resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{i:05d}.jpg")


def bare(args: argparse.Namespace, folder: Path, images: int) -> float:
    device = resolve_device(args.device)
    model = load_model(args.model, random_init=0)
    model.module.to(device)
    selection = select(open_source(str(folder)), images=images)
    ranges = [slice(i, min(i + args.batch, images)) for i in range(0, images, args.batch)]
    workers = default_workers(device) if args.workers is None else args.workers
    loading = batches(
        selection, model.transform, ranges, workers=workers, on_error="fail"
    )
    began = time.perf_counter()
    with torch.inference_mode(), precision_context(device, args.precision):
        for batch in loading:
            model.module(normalise(batch.pixels, model.transform, device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def ours(args: argparse.Namespace, folder: Path, images: int, attention: str) -> float:
    store = folder.with_name(f"{attention}.zarr")
    shutil.rmtree(store, ignore_errors=True)
    asked = Request(
        ModelOptions(args.model, random_init=0),
        DataOptions(str(folder), images=images),
        KeepOptions(
            sites=("blocks",),
            attention=attention,
            precision=args.precision,
            slab=args.slab or args.batch,
        ),
        RunOptions(store, args.batch, args.device, args.workers),
    )
    outcome = extract(asked, Shard())
    stages = ", ".join(f"{k} {v:.1f}" for k, v in sorted(outcome.clock.items()))
    if images == args.images:
        print(
            f"    attention {attention}: {outcome.seconds:.1f} s ({stages})",
            file=sys.stderr,
        )
    return outcome.seconds


SIDES: dict[str, Callable[[argparse.Namespace, Path, int], float]] = {
    "bare model(x)": bare,
    "blocks + residual": partial(ours, attention="none"),
    "+ attention": partial(ours, attention="summary"),
}


def in_a_process(side: str, folder: Path) -> float:
    """Seconds of a side, by this script itself; ours with the threads' setting of the command."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--side",
        side,
        "--folder",
        str(folder),
    ]
    environ = dict(os.environ)
    if SIDES[side] is not bare:
        share_cores(environ)
    said = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environ
    )
    return float(said.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--slab", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--remark", default="", help="added to the result's title")
    parser.add_argument(
        "--side", choices=SIDES, help="this one alone, on the images of --folder"
    )
    parser.add_argument("--folder", type=Path, help="of the images of --side")
    add_record_option(parser)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](args, args.folder, min(args.batch, args.images))
        print(SIDES[args.side](args, args.folder, args.images))
        return
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "images"
        folder.mkdir()
        make_images(folder, args.images)
        sides = {side: partial(in_a_process, side, folder) for side in SIDES}
        seconds = interleaved(sides, args.repeats, warmup=0)
    base = seconds["bare model(x)"]
    print(
        f"{args.model}, {args.images} images, batch {args.batch}, "
        f"slab {args.slab or args.batch}, {args.device}, {args.precision}"
    )
    for side, values in seconds.items():
        print(
            f"{side:20s} median {statistics.median(values):7.2f} s, "
            f"{args.images / statistics.median(values):8.1f} images/s, "
            f"speed against bare {paired_ratio(base, values):.3f}"
        )
    if args.record:
        what = f"{args.model}, {args.images} images in batches of {args.batch}, {{}}, written, "
        what += "against a bare model(x)"
        bare_side, *others = SIDES
        rows = [Result.of(what.format(side), seconds, side, bare_side) for side in others]
        record(
            "extraction",
            f"Extraction beside a bare loop over the model{args.remark}",
            rows,
        )


if __name__ == "__main__":
    main()
