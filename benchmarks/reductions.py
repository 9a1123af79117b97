"""How much do all attention summaries cost beside the forward pass that they accompany?

Measured: the forward pass of a batch, and the same with scores, softmax, every summary of all
blocks and the rollout; forward / (forward + summaries), 1 where the summaries cost nothing. Both
sides alternate in one process; medians are printed, and how far the summaries are from plain
float64 ones.

    python benchmarks/reductions.py [MODEL ...] [--batch 32] [--rounds 5] [--threads N] [--record]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import torch
from common import Result, add_record_option, interleaved, machine, paired_ratio, record

from vitsee_core.models.attention_watch import (
    AttentionCall,
    AttentionEvent,
    AttentionWatch,
)
from vitsee_core.models.load import load_model
from vitsee_core.runtime.machine import freed_memory_kept
from vitsee_core.summaries import AttentionReducer, AttentionSummary, rollout
from vitsee_core.summaries.summary import distances
from vitsee_stores.layout import TokenLayout

MODELS = ["demo:vit", "vit_small_patch16_224", "vit_base_patch16_224"]


def main() -> None:
    """Prints the machine and a row a model."""
    parser = argparse.ArgumentParser(
        description="Attention summaries against the bare forward."
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--remark", default="", help="added to the result's title")
    add_record_option(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    if args.device.startswith("cuda"):
        print(torch.cuda.get_device_name(args.device))
    print(f"batch {args.batch}, medians of {args.rounds} rounds")
    columns = f"{'model':24} {'forward':>9} {'summaries':>9} {'ratio':>6}"
    print(f"{columns}  error of entropy, distance, query_std")
    with freed_memory_kept():  # as in an extraction
        models = args.models or MODELS
        rows = [measure(name, args.batch, args.rounds, args.device) for name in models]
    print(f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if args.record:
        record(
            "reductions",
            f"Attention summaries beside the forward pass{args.remark}",
            rows,
        )


@torch.inference_mode()
def measure(name: str, batch: int, rounds: int, device: str) -> Result:
    """Prints one model's row."""
    torch.manual_seed(0)
    seed = None if name.startswith("demo:") else 0
    model: Any = load_model(name, random_init=seed).module.to(device)
    images = torch.randn(batch, 3, *model.patch_embed.img_size, device=device)
    calls: list[AttentionCall] = []

    def note(event: AttentionEvent) -> None:
        assert event.call is not None
        calls.append(event.call)

    with AttentionWatch(note):
        model(images)
    size = [float(length) for length in model.patch_embed.patch_size]
    layout = TokenLayout(
        ("cls",), tuple(model.patch_embed.grid_size), stride_px=(size[0], size[1])
    )
    reducer, valid = AttentionReducer(layout, device), torch.ones(batch, dtype=torch.bool)

    def forward() -> float:
        began = time.perf_counter()
        model(images)
        return elapsed(began, device)

    def summaries() -> float:
        began = time.perf_counter()
        found = [reducer.reduce(call, valid) for call in calls]
        rollout(
            [summary.head_mean for summary in found if summary.head_mean is not None],
            layout,
        )
        return elapsed(began, device)

    seconds = interleaved({"forward": forward, "summaries": summaries}, rounds)
    plain, more = seconds["forward"], seconds["summaries"]
    ratio = paired_ratio(plain, [a + b for a, b in zip(plain, more, strict=True)])
    errors = agreement(calls[0], reducer.reduce(calls[0], valid), layout)
    print(
        f"{name:24} {statistics.median(plain) * 1e3:6.0f} ms"
        f" {statistics.median(more) * 1e3:6.0f} ms {ratio:6.3f}"
        f"  {errors[0]:.1e} nats, {errors[1]:.1e} px, {errors[2]:.1e} of it"
    )
    what = f"{name}, batch {batch}: all attention summaries, against the forward pass"
    in_ms = {name: [1e3 * one for one in spent] for name, spent in seconds.items()}
    return Result.of(what, in_ms, "summaries", "forward", "ms")


def elapsed(began: float, device: str) -> float:
    """Seconds since then, once the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def agreement(
    call: AttentionCall, summary: AttentionSummary, layout: TokenLayout
) -> tuple[float, float, float]:
    """Largest differences from plain float64 values, over two images: of entropy, of distance, and
    of the standard deviation over queries relative to it."""
    assert layout.grid and layout.stride_px
    n = layout.n_prefix
    rows = torch.softmax(call.scores(slice(0, 2)).double(), -1)[:, :, n:]
    entropy = torch.special.entr(rows).sum(-1).mean(-1)
    inner = rows[..., n:] / rows[..., n:].sum(-1, keepdim=True)
    distance = (
        (inner * distances(layout.grid, layout.stride_px).to(inner.device))
        .sum(-1)
        .mean(-1)
    )
    spread = rows[..., n:].std(2).mean(-1)
    return (
        float((summary.entropy[:2] - entropy).abs().max()),
        float((summary.distance_px[:2] - distance).abs().max()),
        float(((summary.query_std[:2] - spread) / spread).abs().max()),
    )


if __name__ == "__main__":
    main()
