"""From the scores of videos to the rows of a table: means over objects, intervals over videos."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitsee_core.analyses.propagate.davis import Video
from vitsee_core.analyses.propagate.scores import FrameScores, metrics
from vitsee_core.statistics.jackknife import SHARE, block_sums, interval, means_without
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Integers

INTERVAL = (
    "95 % interval over videos: value -+ t(0.975, videos - 1) * standard error of the jackknife "
    "that leaves out one video, with all its objects, at a time; empty with one video. Of recalls: "
    f"{SHARES}, of videos in place of images"
)
SPREAD = (
    "std: standard deviation (n - 1) over objects; in the row of one object, of j and f, over its "
    "frames"
)
REPLICATES = "value without one video each, in the order of the videos"


@dataclass(frozen=True)
class VideoSummary:
    """Metric -> values of all objects, and the video of each."""

    videos: list[str]
    values: dict[str, Float]
    spreads: dict[str, Float]  # metric -> standard deviations over each object's frames
    of: Integers
    n_frames: list[int]

    @classmethod
    def of_scores(cls, videos: Sequence[Video], scores: Mapping[str, FrameScores]) -> VideoSummary:
        in_order = [scores[video.name] for video in videos]
        parts = [metrics(one) for one in in_order]
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        spreads = {
            name: np.concatenate([_std(getattr(one, name), 1) for one in in_order])
            for name in ("j", "f")
        }
        of = np.repeat(np.arange(len(in_order)), [len(one.j) for one in in_order])
        n_frames = [one.j.shape[1] for one in in_order]
        return cls([video.name for video in videos], values, spreads, of, n_frames)

    def rows(self, per_video: bool) -> Iterator[dict[str, Any]]:
        """A row per metric; with `per_video`, also one per metric and video, and per object."""
        m, n = len(self.videos), len(self.of)
        counts = {"n_objects": n, "n_videos": m, "n_images": sum(self.n_frames)}
        for name, values in self.values.items():
            sums = block_sums(values, self.of, m)
            without = means_without(sums, block_sums(np.ones(n), self.of, m))
            value = values.mean()
            if name.endswith("recall"):
                low, high = jackknife_share(value, without, m)
            else:
                limits = (-1.0, 1.0) if name.endswith("decay") else SHARE
                _, low, high = map(float, interval(value, without, limits))
            row = {"metric": name, "value": float(value), "std": float(_std(values, 0))}
            yield row | {"low": low, "high": high, WORD: without} | counts
        for i, video in enumerate(self.videos if per_video else ()):
            yield from self._video_rows(i, video)

    def _video_rows(self, i: int, video: str) -> Iterator[dict[str, Any]]:
        mine = self.of == i
        about = {"video": video, "n_videos": 1, "n_images": self.n_frames[i]}
        for name, values in self.values.items():
            own = values[mine]
            row = {"metric": name, "value": float(own.mean()), "std": float(_std(own, 0))}
            yield about | row | {"n_objects": len(own)}
        for number in range(int(mine.sum())):
            for name, values in self.values.items():
                std = self.spreads[name][mine][number] if name in self.spreads else np.nan
                row = {"metric": name, "value": float(values[mine][number]), "std": float(std)}
                yield about | row | {"object": number + 1, "n_objects": 1}


def describe_blocks(videos: Sequence[Video]) -> dict[str, Any]:
    """The jackknife's blocks for a sidecar, with a digest that is equal for equal videos."""
    text = json.dumps([[video.name, video.frames] for video in videos])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"n_blocks": len(videos), "digest": digest, "method": REPLICATES}


def _std(values: Float, axis: int) -> Float:
    """Sample standard deviation, NaN for fewer than two."""
    if values.shape[axis] < 2:
        return np.full(np.delete(values.shape, axis), np.nan)
    return values.std(axis, ddof=1)
