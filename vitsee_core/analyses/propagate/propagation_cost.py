"""Cost estimate of propagation: time from a few frames, memory from shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from vitsee_core.analyses.propagate.davis import Video
from vitsee_core.analyses.propagate.propagation import STRIP_BYTES, Window
from vitsee_core.analyses.propagate.scores import VideoTruth
from vitsee_core.analyses.propagate.video_run import Frames, VideoRun, noise_frames
from vitsee_core.analyses.propagate.work import Kind, VideoWork, group_videos
from vitsee_core.runtime.device import precision_context

MEASURED = 3  # frames of each kind


@dataclass(frozen=True)
class Cost:
    """Estimated cost."""

    n_frames: int  # of all videos, whose labels are needed
    n_runs: int  # passes over these, one per site of a store and per kind of noise
    seconds: float  # of one thread

    def line(self, jobs: int) -> str:
        seconds = self.seconds / jobs
        minutes, hours = seconds / 60, seconds / 3600
        about = f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} minutes"
        about = about if hours < 2 else f"{hours:.1f} hours"
        each = 1000 * self.seconds / (self.n_frames * self.n_runs)
        return (
            f"{self.n_frames} frames, {self.n_runs} times (sites and noise), at {each:.3g} ms: "
            f"about {about}"
        )


def cost_of(work: VideoWork, videos: Sequence[Video]) -> Cost:
    """Measured on the first video's first masks, with noise as tokens."""
    n_frames = sum(work.n_frames(video) for video in videos)
    kinds = [
        work.kind(number, site, videos[0])
        for number, sites in enumerate(work.sites)
        for site in sites
    ]
    # Enough frames that the last ones have a full context.
    first = work.masks.read(videos[0], range(2))
    truth = VideoTruth(first[[0] + [1] * (work.settings.context + MEASURED + 2)])
    seconds = {kind: _seconds(work, kind, truth) for kind in dict.fromkeys(kinds)}
    noise = list(seconds.values()) if "random" in work.baselines else []
    runs = [*(seconds[kind] for kind in kinds), *noise]
    return Cost(n_frames, len(runs), n_frames * sum(runs))


def _seconds(work: VideoWork, kind: Kind, truth: VideoTruth) -> float:
    """Time per frame, propagated and scored; the shortest of the last ones."""
    frame = next(noise_frames(work.seed, "", kind.where, kind.dim))
    clock: list[float] = []

    def frames() -> Frames:
        while True:
            clock.append(time.perf_counter())
            yield frame

    with torch.inference_mode(), precision_context(work.device, "fp32"):
        window = Window(kind.where.grid, work.settings, kind.radii, work.device)
        VideoRun(truth, kind.where, window).score(frames(), kind.dim, len(truth.labels) - 1)
    return min(after - before for before, after in pairwise(clock[-MEASURED - 1 :]))


def group_bytes(work: VideoWork, videos: Sequence[Video]) -> int:
    """Peak memory of a thread: see `work`."""
    largest = 0
    for store, sites in zip(work.stores, work.sites, strict=True):
        for site in sites:
            frame = 4 * math.prod(site.shape)
            slab = store.plan.slab * frame // (2 if site.dtype == "float16" else 1)
            largest = max(largest, slab + (work.settings.context + 2) * frame)
    groups = group_videos(videos, work.stores[0].plan.slab, 1)
    masks = max(sum(len(v.frames) * math.prod(v.size) for v in group) for group in groups)
    return largest + masks + STRIP_BYTES
