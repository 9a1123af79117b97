"""Extraction against a bare `model(x)` loop over the same loader, writing included.

    python benchmarks/extraction.py                       # ViT-S/16, 128 images, batch 32
    python benchmarks/extraction.py --model vit_base_patch16_224 --device cuda --precision bf16 \
        --images 16384 --batch 256

Three sides in turn on the same images: the bare loop; block outputs, pooled vectors and residual
products; the same with every attention summary. A ratio of 1 is as fast as the bare loop. Slabs
have the size of a batch unless --slab says otherwise; all sides start their loading workers within
the time measured, so take enough images. On a CPU the bare loop's memory is that of glibc as it is;
an extraction keeps what is freed (`vitsee_core/kept_memory.py`), from its second batch on without
the page faults of the first.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import Result, add_record_option, interleaved, machine, paired_ratio, record
from PIL import Image

from vitsee_core.device import precision_context, resolve_device
from vitsee_core.extraction.options import DataOptions, KeepOptions, ModelOptions, RunOptions
from vitsee_core.extraction.run import default_workers, extract
from vitsee_core.extraction.sharding import Shard
from vitsee_core.images import batches, normalise, open_source, select
from vitsee_core.models import load_model


def make_images(folder: Path, n: int) -> None:
    """JPEG files of smooth noise, 256 x 256."""
    rng = np.random.default_rng(0)
    for i in range(n):
        small = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        small.resize((256, 256), Image.Resampling.BICUBIC).save(folder / f"{i:05d}.jpg")


def bare(args: argparse.Namespace, folder: Path) -> float:
    device = resolve_device(args.device)
    model = load_model(args.model, random_init=0)
    model.module.to(device)
    selection = select(open_source(str(folder)))
    ranges = [slice(i, min(i + args.batch, args.images)) for i in range(0, args.images, args.batch)]
    workers = default_workers(device) if args.workers is None else args.workers
    loading = batches(selection, model.transform, ranges, workers=workers, on_error="fail")
    began = time.perf_counter()
    with torch.inference_mode(), precision_context(device, args.precision):
        for batch in loading:
            model.module(normalise(batch.pixels, model.transform, device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def ours(args: argparse.Namespace, folder: Path, work: Path, attention: str) -> float:
    store = work / f"{attention}.zarr"
    shutil.rmtree(store, ignore_errors=True)
    outcome = extract(
        ModelOptions(args.model, random_init=0),
        DataOptions(str(folder)),
        KeepOptions(
            sites=("blocks",),
            attention=attention,
            precision=args.precision,
            slab=args.slab or args.batch,
        ),
        RunOptions(store, args.batch, args.device, args.workers),
        Shard(),
    )
    stages = ", ".join(f"{k} {v:.1f}" for k, v in sorted(outcome.clock.items()))
    print(f"    attention {attention}: {outcome.seconds:.1f} s ({stages})", flush=True)
    return outcome.seconds


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
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name) / "images", Path(name)
        folder.mkdir()
        make_images(folder, args.images)
        seconds = interleaved(
            {
                "bare model(x)": lambda: bare(args, folder),
                "blocks + residual": lambda: ours(args, folder, work, "none"),
                "+ attention": lambda: ours(args, folder, work, "summary"),
            },
            args.repeats,
        )
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
        rows = [
            Result(
                f"{args.model}, {args.images} images in batches of {args.batch}, {side}, written, "
                "against a bare model(x)",
                statistics.median(values),
                statistics.median(base),
                paired_ratio(base, values),
                "s",
            )
            for side, values in seconds.items()
            if values is not base
        ]
        record("extraction", f"Extraction beside a bare loop over the model{args.remark}", rows)


if __name__ == "__main__":
    main()
