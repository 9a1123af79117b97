"""J, F, recall and decay against loops, dilation, distance transforms and values by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from tests.reference_davis import (
    boundary,
    decay_of,
    f_by_dilation,
    f_by_distance,
    j_by_pixels,
)
from vitsee_core.analyses.propagate.videos import (
    FrameScores,
    VideoTruth,
    boundary_radius,
    contour_accuracy,
    contour_of,
    decay,
    object_metrics,
    region_similarity,
)

Mask = NDArray[Any]


def f_of(found: Mask, truth: Mask) -> float:
    return contour_accuracy(
        contour_of(found), contour_of(truth), boundary_radius(found.shape)
    )


def as_map(mask: Mask) -> Mask:
    edge = np.zeros(mask.shape, bool)
    edge[tuple(contour_of(mask).points.T)] = True
    return edge


def blobs(rng: np.random.Generator, size: tuple[int, int], level: float) -> Mask:
    """Smooth random regions, which touch the border."""
    return np.asarray(ndimage.gaussian_filter(rng.normal(size=size), 3) > level)


def test_the_boundary_of_a_square() -> None:
    mask = np.zeros((6, 6), bool)
    mask[2:4, 2:4] = True
    expected = np.zeros((6, 6), bool)
    expected[1:4, 1:4] = True
    expected[2, 2] = False
    assert (as_map(mask) == expected).all()


@pytest.mark.parametrize("level", [-0.1, 0.0, 0.1, 9.0, -9.0])
def test_boundaries_are_those_of_a_loop(level: float) -> None:
    rng = np.random.default_rng(0)
    for size in ((23, 31), (31, 23), (1, 9), (9, 1), (2, 2)):
        mask = blobs(rng, size, level)
        assert (as_map(mask) == boundary(mask)).all(), size


def test_one_pixel_anywhere() -> None:
    for place in np.ndindex(4, 5):
        mask = np.zeros((4, 5), bool)
        mask[place] = True
        assert (as_map(mask) == boundary(mask)).all(), place


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 90), (130, 70), (240, 320)])
def test_f_is_that_of_dilation_and_of_distances_to_the_bit(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    assert boundary_radius(size) == {(60, 90): 1, (130, 70): 2, (240, 320): 4}[size]
    partly = 0
    for _ in range(12):
        a, b = blobs(rng, size, 0.02), blobs(rng, size, 0.02)
        b = np.where(rng.random() < 0.7, np.roll(a, int(rng.integers(6)), 1), b).astype(
            bool
        )
        found = f_of(a, b)
        assert found == f_by_dilation(a, b, as_map) == f_by_distance(a, b, as_map)
        partly += 0 < found < 1
    assert partly > 3


def test_the_radius_of_davis() -> None:
    assert boundary_radius((480, 854)) == 8
    assert boundary_radius((480, 1152)) == 10


def test_f_of_empty_and_full_masks() -> None:
    empty, full = np.zeros((20, 20), bool), np.ones((20, 20), bool)
    half = np.arange(20) < np.full((20, 1), 10)
    assert f_of(empty, empty) == 1
    assert f_of(full, empty) == f_of(full, full) == 1  # the frame's border is no boundary
    assert (
        f_of(full, half)
        == f_of(half, full)
        == f_of(half, empty)
        == f_of(empty, half)
        == 0
    )


def test_f_of_a_half_plane_that_moves() -> None:
    size = (100, 260)  # a radius of 3
    radius = boundary_radius(size)
    columns = np.broadcast_to(np.arange(260), size)
    assert radius == 3
    assert f_of(columns < 50, columns < 50 + radius) == 1
    assert f_of(columns < 50, columns < 51 + radius) == 0


def test_j_by_hand_and_by_pixels() -> None:
    truth = np.array([[1, 1, 0], [2, 0, 0]], np.uint8)
    found = np.array([[1, 0, 0], [2, 2, 7]], np.uint8)
    # 1: one of two; 2: one of two; 3: empty in both
    assert region_similarity(found, truth, 3).tolist() == [0.5, 0.5, 1]
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 4, (2, 17, 13)).astype(np.uint8)
    expected = [j_by_pixels(a == i, b == i) for i in (1, 2, 3)]
    assert region_similarity(a, b, 3).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 67, 300])
def test_decay(n: int) -> None:
    values = np.random.default_rng(n).random(n)
    assert decay(values) == pytest.approx(decay_of(values.tolist()), abs=1e-15)


def test_decay_by_hand() -> None:
    # ids 0, 2, 4, 6, 8: the first bin is frames 0 to 2, the last 6 to 8
    assert decay(np.array([1, 0.8, 0.6, 0, 0, 0, 0.3, 0.2, 0.1])) == pytest.approx(
        0.8 - 0.2
    )
    # the last of 300 frames is 299, which 8 bits would make 43
    falling = np.arange(300, 0, -1) / 300
    assert decay(falling) == pytest.approx(falling[:76].mean() - falling[224:].mean())


def test_metrics_by_hand() -> None:
    j = np.array([[1.0, 0.5, 0.0], [0.6, 0.6, 0.6]])
    f = np.array([[0.8, 0.8, 0.8], [0.0, 0.0, 0.3]])
    found = object_metrics(FrameScores(j, f))
    assert found["j"].tolist() == pytest.approx([0.5, 0.6])
    assert found["jf"].tolist() == pytest.approx([0.65, 0.35])
    assert found["j_recall"].tolist() == pytest.approx([1 / 3, 1])  # 0.5 is not above 0.5
    assert found["f_recall"].tolist() == [1, 0]
    assert list(found) == ["jf", "j", "f", "j_recall", "f_recall", "j_decay", "f_decay"]


def test_truth_scores_frames_between_the_first_and_the_last() -> None:
    labels = np.zeros((4, 30, 40), np.uint8)
    labels[:, 5:15, 5:15] = 1
    labels[:2, 15:25, 20:30] = 2
    labels[3, 0, 0] = 9  # not in the first frame: nobody's
    truth = VideoTruth(labels)
    assert (truth.n_objects, truth.scored_frames) == (2, range(1, 3))
    j, f = truth.score(2, labels[2])
    assert j.tolist() == f.tolist() == [1, 1]  # the second is gone, and not found
    j, f = truth.score(2, labels[1])
    assert j.tolist() == f.tolist() == [1, 0]
