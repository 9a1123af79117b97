"""Summaries of the attention of clips: against loops, by hand, within windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.attention_calls import PER_HEAD, SUMS, random_scores, reduce
from tests.test_reductions import assert_close, assert_summary
from vitsee_core.summaries import AttentionSummary, attention
from vitsee_stores.layout import TokenLayout

IN_TIME = ("distance_frames", "frame_mass")
GRIDS = [(2, 3, 4), (3, 1, 2), (4, 2, 1), (1, 2, 3), (5, 1, 1)]


@pytest.fixture(params=["compiled loops", "passes of a gpu"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways of computing summaries, both on the CPU."""
    if request.param == "passes of a gpu":
        monkeypatch.setattr(attention, "is_cpu", lambda _device: False)
    return str(request.param)


def of_clips(grid: tuple[int, int, int], prefix: tuple[str, ...] = ()) -> TokenLayout:
    layout: dict[str, Any] = {
        "stride_px": (16.0, 12.0),
        "stride_frames": 2.0,
        "frames": grid[0],
    }
    return TokenLayout(prefix, grid[1:], **layout)


def expected(layout: TokenLayout, scores: Tensor) -> list[reference.Attention]:
    assert layout.grid and layout.stride_px and layout.frames and layout.stride_frames
    in_space = layout.n_prefix, layout.grid, layout.stride_px, layout.cls
    return [
        reference.attention(
            reference.softmax(x), *in_space, layout.frames, layout.stride_frames
        )
        for x in scores.double().numpy()
    ]


def assert_all(found: AttentionSummary, clips: list[reference.Attention]) -> None:
    assert_summary(found, clips)
    for name in IN_TIME:
        want = np.array([getattr(clip, name) for clip in clips])
        assert_close(getattr(found, name), want, name)
    assert found.aligned_frames is not None
    assert_close(
        found.aligned_frames, sum(c.aligned_frames for c in clips), "aligned_frames"
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("prefix", [(), ("cls",), ("cls", "reg0")])
def test_every_quantity_agrees_with_loops(
    prefix: tuple[str, ...], grid: tuple[int, int, int]
) -> None:
    layout = of_clips(grid, prefix)
    scores = random_scores(layout)
    assert_all(reduce(layout, scores), expected(layout, scores))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("window", [(1, 2, 2), (3, 1, 1)])
def test_attention_within_a_frame_and_over_time_at_a_place(
    window: tuple[int, int, int],
) -> None:
    layout = of_clips((3, 2, 2))
    part = torch.arange(12) // 4 if window[0] == 1 else torch.arange(12) % 4
    scores = random_scores(layout)
    scores[:, :, part[:, None] != part] = -math.inf
    found = reduce(layout, scores)
    assert_all(found, expected(layout, scores))
    assert found.distance_frames is not None and found.frame_mass is not None
    if window[0] == 1:
        assert bool((found.distance_frames == 0).all())
        torch.testing.assert_close(found.frame_mass, torch.ones(2, 3))
    else:
        torch.testing.assert_close(found.distance_px, torch.zeros(2, 3))


@pytest.mark.usefixtures("way")
def test_distances_in_time_by_hand() -> None:
    """Three times of one row of two places, two frames between times. Head 0 attends evenly: of the
    first and the last time 0, 2 and 4 frames are each a third, of the middle one 2, 0 and 2. Head 1
    attends to the other place of the time before, the first time to itself."""
    layout = of_clips((3, 1, 2))
    scores = torch.zeros(1, 2, 6, 6)
    scores[0, 1] = -math.inf
    for q in range(6):
        time, place = divmod(q, 2)
        scores[0, 1, q, q if time == 0 else 2 * (time - 1) + 1 - place] = 0.0
    found = reduce(layout, scores)
    assert found.distance_frames is not None and found.frame_mass is not None
    assert found.aligned_frames is not None
    even = (2 + 4 / 3 + 2) / 3
    assert found.distance_frames[0].tolist() == pytest.approx([even, 4 / 3])
    assert found.frame_mass[0].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert found.distance_px[0].tolist() == pytest.approx([6.0, 8.0])
    ninths = [1 / 9, 2 / 9, 3 / 9, 2 / 9, 1 / 9]
    assert found.aligned_frames[0].tolist() == pytest.approx(ninths)
    assert found.aligned_frames[1].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0, 0])


@pytest.mark.usefixtures("way")
def test_clips_that_do_not_count_leave_the_sums_alone() -> None:
    layout = of_clips((2, 2, 3), ("cls",))
    scores = random_scores(layout, n_images=3)
    want = expected(layout, scores)
    scores[1] = math.nan
    found = reduce(layout, scores, [True, False, True])
    for name in (*SUMS, "aligned_frames"):
        total = getattr(want[0], name) + getattr(want[2], name)
        np.testing.assert_allclose(getattr(found, name), total, rtol=2e-5, err_msg=name)
    for name in (*PER_HEAD, *IN_TIME):
        for i in (0, 2):
            assert_close(getattr(found, name)[i], getattr(want[i], name), name)


def test_of_images_nothing_is_in_time() -> None:
    layout = TokenLayout((), (2, 3), stride_px=(16.0, 16.0))
    found = reduce(layout, random_scores(layout))
    assert found.distance_frames is found.frame_mass is found.aligned_frames is None
