"""The cost of `vitsee.Monitor` in the demo's training: 512 images every 1,000 updates.

    python benchmarks/monitor.py --threads 1

The demo's ViT is trained as tools/train_demo_models.py does it (batches of 64, bfloat16 by
autocast, attention written out), on the bundled images. In every round some updates and then one
measurement with the monitor's own choice of analyses are timed; the time of 1,000 updates is that
of these, scaled. Beside the clock's time stands the processor's, which other work on the machine
changes less. The first round, in which things are imported and compiled, is left out.
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


def now() -> tuple[float, float]:
    """Seconds of the clock and of the processor."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=512, help="that are measured")
    parser.add_argument(
        "--updates", type=int, default=100, help="of a round, that are timed"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_record_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_fused_attn(False)
    training = Training(RECIPES["vit"], EPOCH)
    images, labels = bundled_split("train")
    batch = training.recipe.batch
    # Of each round, by the clock and by the processor.
    measuring: list[tuple[float, float]] = []
    updating: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        monitor = vitsee.Monitor(
            training.network,
            "demo:test",
            Path(folder) / "run.zarrs",
            every=args.updates,
            images=args.images,
            transform={
                "input_size": (3, SIZE, SIZE),
                "mean": (MEAN,) * 3,
                "std": (STD,) * 3,
            },
        )
        step = 0
        for _ in range(1 + args.rounds):
            began = now()
            for _ in range(args.updates):
                some = training.rng.integers(0, len(images), batch)
                training.network.train()
                training._update(step, images[some], labels[some])
                step += 1
            done = now()
            monitor(step)
            end = now()
            scale = EVERY / args.updates
            updating.append(((done[0] - began[0]) * scale, (done[1] - began[1]) * scale))
            measuring.append((end[0] - done[0], end[1] - done[1]))
    rows = []
    what = f"{args.images} images measured, against {EVERY:,} updates"
    for k, by in enumerate(("", ", the processor's time")):
        own, training_time = (
            [times[k] for times in of[1:]] for of in (measuring, updating)
        )
        sides = {"monitor": own, "updates": training_time}
        share = statistics.median(m / u for m, u in zip(own, training_time, strict=True))
        rows.append(Result.of(f"{what}{by}", sides, "monitor", "updates"))
        text = "the same as a share of the training"
        rows.append(Result(f"{text}{by}", 100 * share, None, None, "%"))
    for row in rows:
        print(row)
    if args.record:
        record("monitor", "A monitor in the demo's training", rows)


if __name__ == "__main__":
    main()
