"""Region similarity J and contour accuracy F of one object's mask (Perazzi et al. 2016), and their
summaries over the frames of a video; bitwise the numbers of DAVIS-2017's own evaluation.

    J = |P & G| / |P | G|, 1 where both are empty
    F = 2 p r / (p + r), p the share of P's boundary pixels within a distance d of G's boundary, r
        the share of G's within d of P's; d = ceil(0.008 sqrt(height^2 + width^2))

A pixel is on the boundary where it differs from its right, lower or lower right neighbour; the
frame's border is no boundary, so that a mask of the whole frame has none. One boundary empty: 0;
both: 1.

The official code dilates by a disk of radius d. Here the distance to the nearest boundary pixel is
looked up in a k-d tree: the same pixels, as squared distances are integers. The trees of the truth
are reused for every prediction.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from vitsee_core.analyses.propagate.davis import Video
from vitsee_core.analyses.propagate.propagation import (
    Enlarged,
    FrameMap,
    Propagation,
    Window,
)
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.statistics.jackknife import SHARE, block_sums, interval, means_without
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.replicates import WORD
from vitsee_core.types import Float, Float32, Integers, Mask

# ---------------------------------------------------------------- J and F of a mask


TOLERANCE = 0.008  # of the frame's diagonal
BINS = 4
RECALLED = 0.5

Labels = NDArray[np.uint8]


@dataclass(frozen=True)
class FrameScores:
    """j, f: (objects, frames) of the frames that are scored."""

    j: Float
    f: Float


@dataclass
class Contour:
    """The boundary of a mask. points: (pixels, 2) rows and columns."""

    points: Integers

    @cached_property
    def tree(self) -> cKDTree:
        """A k-d tree of the boundary's pixels, for distances to it."""
        return cKDTree(self.points)

    def share_near(self, other: Contour, radius: int) -> float:
        """Share of its pixels within `radius` of a non-empty boundary; 1 without pixels."""
        if not len(self.points):
            return 1.0
        # The bound is exclusive; sqrt(radius^2 + 1) may be below it.
        distances, _ = other.tree.query(self.points, distance_upper_bound=radius + 0.5)
        return float(np.count_nonzero(distances <= radius) / len(self.points))


def contour_of(mask: Mask) -> Contour:
    """The boundary of (height, width)."""
    rows = np.flatnonzero(mask.any(1))
    cols = np.flatnonzero(mask.any(0))
    if not len(rows):
        return Contour(np.empty((0, 2), np.int64))
    # Only the object and one pixel around it matter.
    top = max(rows[0] - 1, 0)
    left = max(cols[0] - 1, 0)
    s = mask[top : rows[-1] + 2, left : cols[-1] + 2]
    edge = np.zeros_like(s)
    edge[:, :-1] = s[:, :-1] ^ s[:, 1:]
    edge[:-1] |= s[:-1] ^ s[1:]
    edge[:-1, :-1] |= s[:-1, :-1] ^ s[1:, 1:]
    return Contour(np.argwhere(edge) + np.array([top, left]))


def boundary_radius(size: tuple[int, int]) -> int:
    """Tolerance between boundaries in frames of (height, width), in pixels."""
    return int(np.ceil(TOLERANCE * np.linalg.norm(size)))


def contour_accuracy(found: Contour, truth: Contour, radius: int) -> float:
    """F of two boundaries."""
    if not len(found.points) or not len(truth.points):
        return float(len(found.points) == len(truth.points))
    precision = found.share_near(truth, radius)
    recall = truth.share_near(found, radius)
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def region_similarity(found: Labels, truth: Labels, n_objects: int) -> Float:
    """(objects,) J of the objects 1, 2, ...; labels above `n_objects` are background."""
    n = n_objects + 1
    pairs = _upto(truth, n_objects).astype(np.uint16).ravel()
    pairs *= n
    pairs += _upto(found, n_objects).ravel()
    table = np.bincount(pairs, minlength=n * n).reshape(n, n)
    both = np.diag(table)[1:]
    either = table.sum(0)[1:] + table.sum(1)[1:] - both
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def _upto(labels: Labels, largest: int) -> Labels:
    """Labels with those above `largest` set to background."""
    if labels.max(initial=0) <= largest:
        return labels
    return np.where(labels > largest, 0, labels)


class VideoTruth:
    """The annotated masks of a video's frames, (frames, height, width), void pixels background.

    Objects are numbered from 1 to the largest number in the first frame. The first and the last
    frame are not scored.
    """

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.n_objects = int(labels[0].max())
        self._radius = boundary_radius((labels.shape[1], labels.shape[2]))
        self._contours: dict[int, list[Contour]] = {}

    @property
    def scored(self) -> range:
        """The frames that are scored."""
        return range(1, len(self.labels) - 1)

    def score(self, frame: int, found: Labels) -> tuple[Float, Float]:
        """(objects,) J and F of the predicted labels of a frame."""
        if frame not in self._contours:
            self._contours[frame] = self._contours_of(self.labels[frame])
        pairs = zip(self._contours_of(found), self._contours[frame], strict=True)
        f = [contour_accuracy(ours, theirs, self._radius) for ours, theirs in pairs]
        return region_similarity(found, self.labels[frame], self.n_objects), np.array(f)

    def _contours_of(self, labels: Labels) -> list[Contour]:
        return [contour_of(labels == i) for i in range(1, self.n_objects + 1)]


def decay(values: Float) -> Float:
    """(...) the mean over the first quarter of the frames minus that over the last; values: (...,
    frames). Quarters share a frame at their bounds. (The official code keeps their bounds in 8
    bits, which is wrong from 257 frames on.)"""
    bounds = (
        np.round(np.linspace(1, values.shape[-1], BINS + 1) + 1e-10).astype(np.int64) - 1
    )
    first, last = (values[..., bounds[i] : bounds[i + 1] + 1] for i in (0, BINS - 1))
    return first.mean(-1) - last.mean(-1)


def metrics(scores: FrameScores) -> dict[str, Float]:
    """Metric -> (objects,): means over frames (`j`, `f` and their mean `jf`), the share of frames
    above 0.5 (`j_recall`, `f_recall`), and `decay`."""
    j = scores.j
    f = scores.f
    means = {"jf": (j.mean(-1) + f.mean(-1)) / 2, "j": j.mean(-1), "f": f.mean(-1)}
    recalls = {f"{n}_recall": (x > RECALLED).mean(-1) for n, x in (("j", j), ("f", f))}
    return {**means, **recalls, "j_decay": decay(j), "f_decay": decay(f)}


# ---------------------------------------------------------------- one video on one grid


Frames = Iterator[NDArray[np.floating]]


class VideoRun:
    """One video on one grid: its first mask as labels of tokens, which all sites with this grid
    share, their propagation, and its scores."""

    def __init__(self, truth: VideoTruth, where: FrameMap, window: Window) -> None:
        self._truth = truth
        self._where = where
        self._window = window
        self._n_classes = truth.n_objects + 1
        self._enlarged = Enlarged(where, window.settings.upsample, window.device)
        self._first = self._seeds(0)

    @cached_property
    def lost(self) -> tuple[int, int]:
        """Number of objects in the first frame without any token, and of all objects there."""
        first = self._truth.labels[0]
        there = np.unique(first[first > 0])
        kept = np.flatnonzero(self._first.any((0, 1)))
        return len(np.setdiff1d(there, kept)), len(there)

    def score(
        self,
        frames: Frames,
        dim: int,
        n_frames: int,
        save: Callable[[int, Labels], None] | None = None,
        progress: Progress = SILENT,
    ) -> FrameScores:
        """The scores of the propagated labels.

        Args:
            frames: (rows, cols, dim) of the site's grid, frame by frame.
            dim: channels.
            n_frames: number of frames to label.
            save: receives each frame's number and labels, (height, width).
            progress: counts frames.
        """
        propagation = Propagation(self._window, dim, self._n_classes)
        first = self._window.tokens(self._where.cells(next(frames)))
        propagation.start(first, self._window.labels(self._first))
        if save is not None:
            save(0, self._truth.labels[0])
        progress.advance(1)

        def labels(frame: int) -> Labels:
            tokens = self._window.tokens(self._where.cells(next(frames)))
            predicted = self._enlarged(self._window.maps(propagation.step(tokens)))
            if save is not None:
                save(frame, predicted)
            progress.advance(1)
            return predicted

        scores = scored(self._truth, labels)
        for frame in range(self._truth.scored.stop, n_frames):
            labels(frame)
        return scores

    def through_grid(self, frame: int) -> Labels:
        """A frame's own mask, as labels of tokens and back."""
        seeds = self._window.labels(self._seeds(frame))
        return self._enlarged(self._window.maps(seeds))

    def _seeds(self, frame: int) -> Float32:
        labels = self._truth.labels[frame]
        return self._where.seeds(
            labels, self._n_classes, self._window.settings.first_labels
        )


def scored(truth: VideoTruth, labels: Callable[[int], Labels]) -> FrameScores:
    """The scores of the labels of each frame, which are requested in order."""
    pairs = [truth.score(frame, labels(frame)) for frame in truth.scored]
    j, f = (np.stack([pair[i] for pair in pairs], 1) for i in (0, 1))
    return FrameScores(j, f)


def noise_frames(seed: int, video: str, where: FrameMap, dim: int) -> Frames:
    """(rows, cols, dim) standard normal numbers for each frame, depending only on the video and the
    grid."""
    rng = np.random.default_rng((seed, zlib.crc32(video.encode())))
    while True:
        yield rng.standard_normal((where.y.stop, where.x.stop, dim), np.float32)


# ---------------------------------------------------------------- rows of the table


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
    """The scores of all objects by metric, and the video of each, which become the rows of a table:
    means over objects, intervals over videos."""

    videos: list[str]
    values: dict[str, Float]
    spreads: dict[str, Float]  # metric -> standard deviations over each object's frames
    of: Integers
    n_frames: list[int]

    @classmethod
    def of_scores(
        cls, videos: Sequence[Video], scores: Mapping[str, FrameScores]
    ) -> VideoSummary:
        in_order = [scores[video.name] for video in videos]
        parts = [metrics(one) for one in in_order]
        values = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        spreads = {
            name: np.concatenate([_std(getattr(one, name), 1) for one in in_order])
            for name in ("j", "f")
        }
        of = np.repeat(np.arange(len(in_order)), [len(one.j) for one in in_order])
        n_frames = [one.j.shape[1] for one in in_order]
        return cls([video.name for video in videos], values, spreads, of, n_frames)

    def rows(self, per_video: bool) -> Iterator[dict[str, Any]]:
        """A row per metric; with `per_video`, also one per metric and video, and per object."""
        m = len(self.videos)
        n = len(self.of)
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
                row = {
                    "metric": name,
                    "value": float(values[mine][number]),
                    "std": float(std),
                }
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
