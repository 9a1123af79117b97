"""Region similarity J and contour accuracy F of one object's mask (Perazzi et al. 2016),
and their summaries over the frames of a video; bitwise the numbers of DAVIS-2017's own
evaluation.

    J = |P & G| / |P | G|, 1 where both are empty
    F = 2 p r / (p + r), p the share of P's boundary pixels within a distance d of G's
    boundary, r
        the share of G's within d of P's; d = ceil(0.008 sqrt(height^2 + width^2))

A pixel is on the boundary where it differs from its right, lower or lower right neighbour;
the frame's border is no boundary, so that a mask of the whole frame has none. One boundary
empty: 0;
both: 1.

The official code dilates by a disk of radius d. Here the distance to the nearest boundary
pixel is looked up in a k-d tree: the same pixels, as squared distances are integers. The
trees of the truth are reused for every prediction.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from vitsee_core.analyses.propagate.davis import Video
from vitsee_core.analyses.propagate.propagation import (
    Enlarger,
    FrameMap,
    Propagation,
    Window,
)
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.statistics.jackknife import SHARE, block_sums, interval, means_without
from vitsee_core.statistics.shares import METHOD as SHARES
from vitsee_core.statistics.shares import jackknife_share
from vitsee_core.tables.columns import REPLICATES
from vitsee_core.types import Float, Float32, Integers, Mask

# ---------------------------------------------------------------- J and F of a mask


TOLERANCE = 0.008  # of the frame's diagonal
N_QUARTERS = 4
RECALL_THRESHOLD = 0.5

Labels = NDArray[np.uint8]


@dataclass(frozen=True)
class FrameScores:
    """J and F of one video.

    Attributes:
        j: (objects, scored frames) region similarity.
        f: (objects, scored frames) contour accuracy.
    """

    j: Float
    f: Float


@dataclass
class Contour:
    """The boundary of a mask.

    points: (pixels, 2) rows and columns.
    """

    points: Integers

    @cached_property
    def tree(self) -> cKDTree:
        """A k-d tree of the boundary's pixels, for distances to it."""
        return cKDTree(self.points)

    def share_near(self, other: Contour, radius: int) -> float:
        """Return the share of its pixels within `radius` of another boundary; 1 without
        pixels.

        other: a boundary that is not empty.
        """
        if not len(self.points):
            return 1.0
        # The bound is exclusive; sqrt(radius^2 + 1) may be below it.
        distances, _ = other.tree.query(self.points, distance_upper_bound=radius + 0.5)
        return float(np.count_nonzero(distances <= radius) / len(self.points))


def contour_of(mask: Mask) -> Contour:
    """Return the boundary of a mask (height, width)."""
    rows = np.flatnonzero(mask.any(1))
    cols = np.flatnonzero(mask.any(0))
    if not len(rows):
        return Contour(np.empty((0, 2), np.int64))
    # Only the object and one pixel around it matter.
    top = max(rows[0] - 1, 0)
    left = max(cols[0] - 1, 0)
    crop = mask[top : rows[-1] + 2, left : cols[-1] + 2]
    # Pixels that differ from the right, the lower, or the lower right neighbour.
    is_edge = np.zeros_like(crop)
    is_edge[:, :-1] = crop[:, :-1] ^ crop[:, 1:]
    is_edge[:-1] |= crop[:-1] ^ crop[1:]
    is_edge[:-1, :-1] |= crop[:-1, :-1] ^ crop[1:, 1:]
    return Contour(np.argwhere(is_edge) + np.array([top, left]))


def boundary_radius(size: tuple[int, int]) -> int:
    """Return the tolerance between boundaries in frames of (height, width), in pixels."""
    return int(np.ceil(TOLERANCE * np.linalg.norm(size)))


def contour_accuracy(predicted: Contour, truth: Contour, radius: int) -> float:
    """Return F of two boundaries, with a tolerance of `radius` pixels."""
    if not len(predicted.points) or not len(truth.points):
        return float(len(predicted.points) == len(truth.points))
    precision = predicted.share_near(truth, radius)
    recall = truth.share_near(predicted, radius)
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def region_similarity(predicted: Labels, truth: Labels, n_objects: int) -> Float:
    """Return (objects,) J of the objects 1, 2, ...; labels above `n_objects` are
    background.

    Args:
        predicted: (height, width) labels.
        truth: (height, width) labels.
        n_objects: number of objects.
    """
    # One pass for all objects: a table of pixels by true and predicted label. 256^2 fit 16
    # bits.
    n = n_objects + 1
    pairs = _drop_labels_above(truth, n_objects).astype(np.uint16).ravel()
    pairs *= n
    pairs += _drop_labels_above(predicted, n_objects).ravel()
    table = np.bincount(pairs, minlength=n * n).reshape(n, n)
    both = np.diag(table)[1:]
    either = table.sum(0)[1:] + table.sum(1)[1:] - both
    return np.where(either > 0, both / np.maximum(either, 1), 1.0)


def _drop_labels_above(labels: Labels, largest: int) -> Labels:
    """Return labels with those above `largest` set to background."""
    if labels.max(initial=0) <= largest:
        return labels
    return np.where(labels > largest, 0, labels)


class VideoTruth:
    """The annotated masks of a video's frames, and the contours of their objects.

    Objects are numbered from 1 to the largest number in the first frame. The first and the
    last frame are not scored.
    """

    def __init__(self, labels: Labels) -> None:
        """labels: (frames, height, width) numbers of objects, 0 for background and void."""
        self.labels = labels
        self.n_objects = int(labels[0].max())
        self._radius = boundary_radius((labels.shape[1], labels.shape[2]))
        self._contours: dict[int, list[Contour]] = {}

    @property
    def scored_frames(self) -> range:
        """The frames that are scored."""
        return range(1, len(self.labels) - 1)

    def score(self, frame: int, predicted: Labels) -> tuple[Float, Float]:
        """Return J and F of a frame, (objects,) each; predicted: (height, width) labels."""
        # Contours of the truth are kept: every site and control is compared with them.
        if frame not in self._contours:
            self._contours[frame] = self._object_contours(self.labels[frame])
        j = region_similarity(predicted, self.labels[frame], self.n_objects)
        f = [
            contour_accuracy(predicted_contour, true_contour, self._radius)
            for predicted_contour, true_contour in zip(
                self._object_contours(predicted), self._contours[frame], strict=True
            )
        ]
        return j, np.array(f)

    def _object_contours(self, labels: Labels) -> list[Contour]:
        """Return the contour of each object."""
        return [contour_of(labels == i) for i in range(1, self.n_objects + 1)]


def decay(values: Float) -> Float:
    """Return (...) the mean over the first quarter of the frames minus that over the last.

    Quarters share a frame at their bounds. (The official code keeps their bounds in 8
    bits, which is wrong from 257 frames on.)

    values: (..., frames).
    """
    # The official code's bounds, which count frames from 1; 1e-10 rounds halves up.
    edges = np.linspace(1, values.shape[-1], N_QUARTERS + 1)
    bounds = np.round(edges + 1e-10).astype(np.int64) - 1
    first = values[..., bounds[0] : bounds[1] + 1]
    last = values[..., bounds[-2] : bounds[-1] + 1]
    return first.mean(-1) - last.mean(-1)


def object_metrics(scores: FrameScores) -> dict[str, Float]:
    """Return metric -> (objects,) summaries over the scored frames.

    They are means (`j`, `f` and their mean `jf`), shares of frames above 0.5 (`j_recall`,
    `f_recall`), and `decay`.
    """
    mean_j = scores.j.mean(-1)
    mean_f = scores.f.mean(-1)
    return {
        "jf": (mean_j + mean_f) / 2,
        "j": mean_j,
        "f": mean_f,
        "j_recall": (scores.j > RECALL_THRESHOLD).mean(-1),
        "f_recall": (scores.f > RECALL_THRESHOLD).mean(-1),
        "j_decay": decay(scores.j),
        "f_decay": decay(scores.f),
    }


# ---------------------------------------------------------------- one video on one grid


# The tokens of each frame, (rows, cols, dim) of the site's grid.
Frames = Iterator[NDArray[np.floating]]


class LostObjects(NamedTuple):
    """How many objects of the first mask no token stands for, and how many it has."""

    n_lost: int
    n_objects: int


class VideoRun:
    """One video on one grid: its first mask as labels of tokens, their propagation, its
    scores.

    All sites with this grid share the first labels.
    """

    def __init__(self, truth: VideoTruth, frame_map: FrameMap, window: Window) -> None:
        self._truth = truth
        self._frame_map = frame_map
        self._window = window
        self._n_classes = truth.n_objects + 1
        self._enlarge = Enlarger(frame_map, window.settings.upsample, window.device)
        self._first_labels = self._cell_labels(0)

    @cached_property
    def lost_objects(self) -> LostObjects:
        """The objects in the first frame without any token."""
        first = self._truth.labels[0]
        objects = np.unique(first[first > 0])
        classes_with_token = np.flatnonzero(self._first_labels.any((0, 1)))
        lost = np.setdiff1d(objects, classes_with_token)
        return LostObjects(n_lost=len(lost), n_objects=len(objects))

    def score(
        self,
        frames: Frames,
        *,
        dim: int,
        n_frames: int,
        save: Callable[[int, Labels], None] | None = None,
        progress: Progress = SILENT,
    ) -> FrameScores:
        """Return the scores of the propagated labels.

        Args:
            frames: (rows, cols, dim) of the site's grid, frame by frame.
            dim: number of channels.
            n_frames: number of frames to label; those behind the scored ones are only
                saved.
            save: receives each frame's number and labels, (height, width).
            progress: counts frames.
        """
        propagation = Propagation(self._window, dim, self._n_classes)
        first_tokens = self._window.order_tokens(self._frame_map.cells(next(frames)))
        propagation.start(first_tokens, self._window.order_labels(self._first_labels))
        if save is not None:
            save(0, self._truth.labels[0])
        progress.advance(1)

        def predict(frame: int) -> Labels:
            """Return (height, width) labels of the next frame, whose number this is."""
            tokens = self._window.order_tokens(self._frame_map.cells(next(frames)))
            predicted = self._enlarge(self._window.maps_of(propagation.step(tokens)))
            if save is not None:
                save(frame, predicted)
            progress.advance(1)
            return predicted

        scores = score_frames(self._truth, predict)
        for frame in range(self._truth.scored_frames.stop, n_frames):
            predict(frame)
        return scores

    def through_grid(self, frame: int) -> Labels:
        """Return a frame's own mask, as labels of tokens and back, (height, width)."""
        cell_labels = self._window.order_labels(self._cell_labels(frame))
        return self._enlarge(self._window.maps_of(cell_labels))

    def _cell_labels(self, frame: int) -> Float32:
        """Return (rows, cols, classes) labels of the cells from a frame's mask."""
        labels = self._truth.labels[frame]
        return self._frame_map.seeds(
            labels, self._n_classes, self._window.settings.first_labels
        )


def score_frames(truth: VideoTruth, predict: Callable[[int], Labels]) -> FrameScores:
    """Return the scores of a video.

    predict: frame -> (height, width) labels; called in the frames' order.
    """
    j = []
    f = []
    for frame in truth.scored_frames:
        frame_j, frame_f = truth.score(frame, predict(frame))
        j.append(frame_j)
        f.append(frame_f)
    return FrameScores(j=np.stack(j, axis=1), f=np.stack(f, axis=1))


def noise_frames(seed: int, video: str, frame_map: FrameMap, dim: int) -> Frames:
    """Yield (rows, cols, dim) standard normal numbers for each frame, without an end.

    They depend only on the seed, the video and the grid.
    """
    rng = np.random.default_rng((seed, zlib.crc32(video.encode())))
    while True:
        yield rng.standard_normal((frame_map.y.stop, frame_map.x.stop, dim), np.float32)


# ---------------------------------------------------------------- rows of the table


INTERVAL = (
    "95 % interval over videos: value -+ t(0.975, videos - 1) * standard error of the "
    "jackknife that leaves out one video, with all its objects, at a time; empty with "
    f"one video. Of recalls: {SHARES}, of videos in place of images"
)
SPREAD = (
    "std: standard deviation (n - 1) over objects; in the row of one object, of j and "
    "f, over its frames"
)
REPLICATES_METHOD = "value without one video each, in the order of the videos"


@dataclass(frozen=True)
class VideoSummary:
    """The scores of all objects, which become the rows of a table.

    Values are means over objects, intervals are over videos.

    Attributes:
        videos: names of the videos.
        values: metric -> (objects,) of all videos, one after the other.
        spreads: metric -> (objects,) standard deviations over each object's frames; of j
            and f.
        video_index: (objects,) the video of each.
        n_frames: (videos,) frames that are scored.
    """

    videos: list[str]
    values: dict[str, Float]
    spreads: dict[str, Float]
    video_index: Integers
    n_frames: list[int]

    @classmethod
    def from_scores(
        cls, videos: Sequence[Video], scores: Mapping[str, FrameScores]
    ) -> VideoSummary:
        """Return the summary of these videos; scores: name of a video -> its scores."""
        video_scores = [scores[video.name] for video in videos]
        metrics = [object_metrics(frame_scores) for frame_scores in video_scores]
        n_objects = [len(frame_scores.j) for frame_scores in video_scores]
        return cls(
            videos=[video.name for video in videos],
            values={
                name: np.concatenate([values[name] for values in metrics])
                for name in metrics[0]
            },
            spreads={
                "j": np.concatenate([_std(s.j, axis=1) for s in video_scores]),
                "f": np.concatenate([_std(s.f, axis=1) for s in video_scores]),
            },
            video_index=np.repeat(np.arange(len(videos)), n_objects),
            n_frames=[frame_scores.j.shape[1] for frame_scores in video_scores],
        )

    def rows(self, per_video: bool) -> Iterator[dict[str, Any]]:
        """Yield a row per metric.

        With `per_video` also one per metric and video, and per metric and object.
        """
        n_videos = len(self.videos)
        n_objects = len(self.video_index)
        # An object counts in the blocks of the jackknife with its video.
        objects_per_video = block_sums(np.ones(n_objects), self.video_index, n_videos)
        for name, values in self.values.items():
            sums = block_sums(values, self.video_index, n_videos)
            without = means_without(sums, objects_per_video)
            value = values.mean()
            if name.endswith("recall"):
                low, high = jackknife_share(value, without, n_videos)
            else:
                limits = (-1.0, 1.0) if name.endswith("decay") else SHARE
                _, low, high = map(float, interval(value, without, limits))
            yield {
                "metric": name,
                "value": float(value),
                "std": float(_std(values, axis=0)),
                "low": low,
                "high": high,
                REPLICATES: without,
                "n_objects": n_objects,
                "n_videos": n_videos,
                "n_images": sum(self.n_frames),
            }
        if per_video:
            for i in range(n_videos):
                yield from self._video_rows(i)

    def _video_rows(self, i: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a video: one per metric, then one per object and metric."""
        in_video = self.video_index == i
        about = {"video": self.videos[i], "n_videos": 1, "n_images": self.n_frames[i]}
        for name, values in self.values.items():
            video_values = values[in_video]
            yield {
                **about,
                "metric": name,
                "value": float(video_values.mean()),
                "std": float(_std(video_values, axis=0)),
                "n_objects": len(video_values),
            }
        for object_index, k in enumerate(np.flatnonzero(in_video).tolist()):
            for name, values in self.values.items():
                std = self.spreads[name][k] if name in self.spreads else np.nan
                yield {
                    **about,
                    "metric": name,
                    "value": float(values[k]),
                    "std": float(std),
                    "object": object_index + 1,
                    "n_objects": 1,
                }


def describe_blocks(videos: Sequence[Video]) -> dict[str, Any]:
    """Return the jackknife's blocks for a sidecar, with a digest that is equal for equal videos."""
    text = json.dumps([[video.name, video.frames] for video in videos])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"n_blocks": len(videos), "digest": digest, "method": REPLICATES_METHOD}


def _std(values: Float, axis: int) -> Float:
    """Return the sample standard deviation along an axis, NaN for fewer than two values."""
    if values.shape[axis] < 2:
        return np.full(np.delete(values.shape, axis), np.nan)
    return values.std(axis, ddof=1)
