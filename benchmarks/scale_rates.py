"""What docs/scale.md's hours rest on: processor time per image of models, and bytes a second.

    OMP_NUM_THREADS=1 python benchmarks/scale_rates.py --folder DIR [--record]

The forward pass of each model, with random weights, and the attention summaries of all its blocks
beside it, in processor seconds of one thread: the least of three images. Decoding images is not in
it. Then slabs of four sites of ViT-B/16's size are written by one process, fsync included.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from common import add_record_option, machine
from scale import keep
from synthetic import block_sites

from vitsee_core.models.attention_watch import (
    AttentionCall,
    AttentionEvent,
    AttentionWatch,
)
from vitsee_core.summaries import AttentionReducer
from vitsee_stores import Samples, StorePlan, StoreWriter, TokenLayout
from vitsee_stores.manifest import new_manifest

# With options of timm.
MODELS: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {},
    "vit_large_patch16_224": {},
    "vit_huge_patch14_224": {},
    "vit_large_patch14_dinov2": {"img_size": 224},
}
BATCH, ROUNDS = 1, 3
LAYOUT = TokenLayout(("cls",), (14, 14), stride_px=(16.0, 16.0))
SLAB, DIM, SLABS = 256, 768, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk that is meant"
    )
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    rows = [of_model(name, options) for name, options in MODELS.items()]
    seconds, size = write(args.folder / "written.zarr")
    print(f"written: {size / 1e6 / seconds:.0f} MB/s")
    rows.append({"what": "write", "seconds": round(seconds, 3), "bytes": size})
    if args.record:
        keep("rates.json", rows)


@torch.inference_mode()
def of_model(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Processor seconds per image: of the forward pass, and of the attention summaries."""
    with torch.device("meta"):
        model: Any = timm.create_model(name, **options).eval()
    model.to_empty(device="cpu")
    for values in model.state_dict().values():
        values.uniform_(-0.02, 0.02)
    images = torch.randn(BATCH, 3, *model.patch_embed.img_size)
    calls: list[AttentionCall] = []

    def note(event: AttentionEvent) -> None:
        assert event.call is not None
        calls.append(event.call)

    with AttentionWatch(note):
        model(images)
    layout = TokenLayout(
        ("cls",), tuple(model.patch_embed.grid_size), stride_px=(1.0, 1.0)
    )
    reducer, valid = AttentionReducer(layout, "cpu"), torch.ones(BATCH, dtype=torch.bool)
    sides: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(images),
        "attention": lambda: [reducer.reduce(call, valid) for call in calls],
    }
    cpu: dict[str, float] = {}
    for what, work in sides.items():
        spent = []
        for _ in range(ROUNDS):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
        cpu[what] = round(min(spent) / BATCH, 4)
    print(f"{name}: processor seconds per image {cpu}", flush=True)
    return {"what": "model", "model": name, "options": options, "cpu": cpu}


def write(path: Path) -> tuple[float, int]:
    """Seconds and bytes of a few slabs, synced to the disk."""
    n = SLAB * SLABS
    plan = StorePlan(n, SLAB, "none", block_sites(4, DIM, LAYOUT))
    samples = Samples(
        np.arange(n), [str(i) for i in range(n)], np.zeros(n, np.int64), [""] * n
    )
    writer = StoreWriter.create_or_join(path, new_manifest({}, plan, samples), samples)
    rng = np.random.default_rng(0)
    slab = {
        name: np.array(SLAB)
        if spec.per == "slab"
        else rng.integers(1, 100, (SLAB, *spec.shape[1:])).astype(spec.dtype)
        for name, spec in writer.arrays.items()
        if spec.has_slab(0)
    }
    slab["valid"] = np.ones(SLAB, np.uint8)
    began = time.perf_counter()
    size = sum(writer.write_slab(k, slab, {}) for k in range(SLABS))
    seconds = time.perf_counter() - began
    shutil.rmtree(path)
    return seconds, size


if __name__ == "__main__":
    main()
