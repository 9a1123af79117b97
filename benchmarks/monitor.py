"""What `vitsee.Monitor` costs in the demo's training: 512 images every 1,000 updates.

    python benchmarks/monitor.py --threads 1

The demo's ViT is trained as tools/train_demo_models.py does it (batches of 64, bfloat16 by
autocast, attention written out), on the bundled images. In every round some updates and then one
measurement with the monitor's own choice of analyses are timed; the time of 1,000 updates is that
of these, scaled. The first round, in which things are imported and compiled, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import Result, add_record_option, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from demo_recipes import MEAN, RECIPES, SIZE, STD
from over_training import bundled_split
from timm.layers.config import set_fused_attn
from train_demo_models import EPOCH, Training

import vitsee

EVERY = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=512, help="that are measured")
    parser.add_argument("--updates", type=int, default=100, help="of a round, that are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_record_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_fused_attn(False)
    training = Training(RECIPES["vit"], EPOCH)
    images, labels = bundled_split("train")
    batch = training.recipe.batch
    measuring: list[float] = []
    updating: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        monitor = vitsee.Monitor(
            training.network,
            "demo:test",
            Path(folder) / "run.zarrs",
            every=args.updates,
            images=args.images,
            transform={"input_size": (3, SIZE, SIZE), "mean": (MEAN,) * 3, "std": (STD,) * 3},
        )
        step = 0
        for _ in range(1 + args.rounds):
            began = time.perf_counter()
            for _ in range(args.updates):
                some = training.rng.integers(0, len(images), batch)
                training.network.train()
                training._update(step, images[some], labels[some])
                step += 1
            done = time.perf_counter()
            monitor(step)
            updating.append((done - began) * EVERY / args.updates)
            measuring.append(time.perf_counter() - done)
    measuring, updating = measuring[1:], updating[1:]
    share = statistics.median(m / u for m, u in zip(measuring, updating, strict=True))
    what = f"{args.images} images measured, against {EVERY:,} updates"
    rows = [
        Result.of(what, {"monitor": measuring, "updates": updating}, "monitor", "updates"),
        Result("the same as a share of the training time", 100 * share, None, None, "%"),
    ]
    for row in rows:
        print(row)
    if args.record:
        record("monitor", "A monitor in the demo's training", rows)


if __name__ == "__main__":
    main()
