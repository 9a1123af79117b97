"""Which frames of a clip are taken: hand-computed, and against a loop over frames as they show."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitsee_core.images.errors import ImageError
from vitsee_core.images.videos import Sampling, Timeline


def even(n: int, tick: float | None = None) -> Timeline:
    return Timeline(range(n), n, tick)


def test_by_hand() -> None:
    """16 frames in 4 parts of 4: the third of each begins at its middle; every second of 4 around
    the middle of 16: from 4 to 12 in steps of 2, each at the middle of its step."""
    assert Sampling(4).chosen("c", even(16)) == [2, 6, 10, 14]
    assert Sampling(4, 2).chosen("c", even(16)) == [5, 7, 9, 11]
    assert Sampling(4, 1).chosen("c", even(16)) == [6, 7, 8, 9]
    assert Sampling(16).chosen("c", even(16)) == list(range(16))
    assert Sampling(16, 1).chosen("c", even(16)) == list(range(16))
    assert Sampling(1).chosen("c", even(5)) == [2]
    assert Sampling(3).chosen("c", even(5)) == [0, 2, 4]


def test_times_decide_where_the_rate_varies() -> None:
    """Six frames in half a second, four more a second each: of 4.6 s the middles of 4 parts are at
    0.575, 1.725, 2.875 and 4.025 s, where frames 5, 6, 7 and 8 show."""
    starts = [0, 100, 200, 300, 400, 500, 1500, 2500, 3500, 4500]
    line = Timeline(starts, 4600, 0.001)
    assert Sampling(4).chosen("c", line) == [5, 6, 7, 8]
    assert Sampling(4).seconds(line) == pytest.approx(1.15)
    # 4.6 s / 10 frames is the mean interval: 2.3 +- 0.23 s and 2.3 +- 0.69 s, all in frames 6 and 7
    assert Sampling(4, 1).chosen("c", line) == [6, 6, 7, 7]
    assert Sampling(4, 1).seconds(line) == pytest.approx(0.46)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(-100, 100),
)
def test_against_a_walk_along_the_clip(
    lengths: list[int], frames: int, every: int | None, begin: int
) -> None:
    starts = [begin + sum(lengths[:k]) for k in range(len(lengths))]
    line = Timeline(starts, starts[-1] + lengths[-1])
    n, total = len(lengths), sum(lengths)
    sampling = Sampling(frames, every)
    reach = frames if every is None else (frames - 1) * every + 1
    if reach > n:
        with pytest.raises(ImageError, match=rf"it has {n} frames?\b"):
            sampling.chosen("c", line)
        return
    step = Fraction(total, frames) if every is None else Fraction(every * total, n)
    expected = []
    for k in range(frames):
        at = begin + Fraction(total, 2) + (k - Fraction(frames - 1, 2)) * step
        shown = [i for i, start in enumerate(starts) if start <= at]
        expected.append(shown[-1])
    assert sampling.chosen("c", line) == expected


def test_too_few_frames_are_said() -> None:
    with pytest.raises(ImageError, match="c: it has no frames"):
        Sampling(1).chosen("c", even(0))
    with pytest.raises(ImageError, match="c: it has 3 frames; 4 frames were asked for"):
        Sampling(4).chosen("c", even(3))
    said = "it has 12 frames; 4 frames every 4 reach over 13 and were asked for"
    with pytest.raises(ImageError, match=said):
        Sampling(4, 4).chosen("c", even(12))
    assert Sampling(4, 4).chosen("c", even(13)) == [0, 4, 8, 12]


def test_orders() -> None:
    assert Sampling(5).order("a") == [0, 1, 2, 3, 4]
    assert Sampling(5, time="still").order("a") == [2] * 5
    assert Sampling(1, time="shuffled").order("a") == [0]
    orders = [Sampling(3, time="shuffled", seed=4).order(f"clip {k}") for k in range(300)]
    assert orders == [
        Sampling(3, time="shuffled", seed=4).order(f"clip {k}") for k in range(300)
    ]
    assert {tuple(order) for order in orders} == {
        (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)
    }, "every permutation but the order of time"  # fmt: skip
    assert orders != [
        Sampling(3, time="shuffled", seed=5).order(f"clip {k}") for k in range(300)
    ]
    assert {tuple(Sampling(2, time="shuffled").order(f"{k}")) for k in range(50)} == {
        (1, 0)
    }


def test_seconds() -> None:
    assert Sampling(4).seconds(even(16, 0.1)) == pytest.approx(0.4)
    assert Sampling(4, 3).seconds(even(16, 0.1)) == pytest.approx(0.3)
    assert math.isnan(Sampling(4).seconds(even(16)))
    assert math.isnan(Sampling(1).seconds(even(16, 0.1)))
