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

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from vitsee_core.types import Float, Integers, Mask

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
        """For distances to it."""
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
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return Contour(np.empty((0, 2), np.int64))
    # Only the object and one pixel around it matter.
    top, left = max(rows[0] - 1, 0), max(cols[0] - 1, 0)
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
    precision, recall = found.share_near(truth, radius), truth.share_near(found, radius)
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
    return labels if labels.max(initial=0) <= largest else np.where(labels > largest, 0, labels)


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
    bounds = np.round(np.linspace(1, values.shape[-1], BINS + 1) + 1e-10).astype(np.int64) - 1
    first, last = (values[..., bounds[i] : bounds[i + 1] + 1] for i in (0, BINS - 1))
    return first.mean(-1) - last.mean(-1)


def metrics(scores: FrameScores) -> dict[str, Float]:
    """Metric -> (objects,): means over frames (`j`, `f` and their mean `jf`), the share of frames
    above 0.5 (`j_recall`, `f_recall`), and `decay`."""
    j, f = scores.j, scores.f
    means = {"jf": (j.mean(-1) + f.mean(-1)) / 2, "j": j.mean(-1), "f": f.mean(-1)}
    recalls = {f"{n}_recall": (x > RECALLED).mean(-1) for n, x in (("j", j), ("f", f))}
    return {**means, **recalls, "j_decay": decay(j), "f_decay": decay(f)}
