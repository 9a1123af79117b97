"""One video on one grid: its first mask as labels of tokens, their propagation, and its scores."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitsee_core.analyses.propagate.frame_map import FrameMap
from vitsee_core.analyses.propagate.propagation import Enlarged, Propagation, Window
from vitsee_core.analyses.propagate.scores import FrameScores, Labels, VideoTruth
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.types import Float32

Frames = Iterator[NDArray[np.floating]]


@dataclass(frozen=True)
class Lost:
    """Objects of a first mask without any token, out of a total."""

    n_lost: int
    n_objects: int


class VideoRun:
    """Data of a video that all sites with this grid share."""

    def __init__(self, truth: VideoTruth, where: FrameMap, window: Window) -> None:
        self._truth, self._where, self._window = truth, where, window
        self._n_classes = truth.n_objects + 1
        self._enlarged = Enlarged(where, window.settings.upsample, window.device)
        self._first = self._seeds(0)

    @cached_property
    def lost(self) -> Lost:
        """Objects of the first frame without any token."""
        first = self._truth.labels[0]
        there, kept = np.unique(first[first > 0]), np.flatnonzero(self._first.any((0, 1)))
        return Lost(len(np.setdiff1d(there, kept)), len(there))

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
        return self._where.seeds(labels, self._n_classes, self._window.settings.seeds)


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
