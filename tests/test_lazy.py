"""Lazy arrays index as numpy arrays do, and read each slab once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitsee_stores import open_store
from vitsee_stores.chunks import Box
from vitsee_stores.lazy import LazyArray, cut_out

SHAPE = (10, 4, 3, 5)


class InMemory(LazyArray):
    """An array whose reads are noted."""

    rows_per_chunk = 4

    def __init__(self, values: NDArray[Any]):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.read: list[Box] = []

    def load(self, box: Box) -> NDArray[Any]:
        self.read.append(box)
        return self.values[box]


VALUES = np.arange(np.prod(SHAPE)).reshape(SHAPE)


def plain(n: int) -> st.SearchStrategy[Any]:
    ends = st.none() | st.integers(-n - 1, n + 1)
    return st.integers(-n, n - 1) | st.builds(
        slice, ends, ends, st.sampled_from([None, 1, 2, -1])
    )


def listed(n: int) -> st.SearchStrategy[Any]:
    places = st.lists(st.integers(-n, n - 1), max_size=12)
    return (
        places
        | places.map(lambda p: np.array(p, np.int64))
        | st.lists(st.booleans(), min_size=n, max_size=n).map(np.array)
    )


@st.composite
def indices(draw: st.DrawFn) -> tuple[Any, ...]:
    axis = draw(st.integers(0, len(SHAPE) - 1))
    parts = [draw(listed(n) if i == axis else plain(n)) for i, n in enumerate(SHAPE)]
    return tuple(parts[: draw(st.integers(axis + 1, len(SHAPE)))])


@settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
@given(indices())
def test_as_numpy(index: tuple[Any, ...]) -> None:
    found, expected = InMemory(VALUES)[index], VALUES[_arrays(index)]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def _arrays(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """numpy takes an empty list for one of floats."""
    return tuple(np.array(p, np.int64) if isinstance(p, list) else p for p in index)


def test_by_hand() -> None:
    array = InMemory(VALUES)
    assert array[[7, 0], 1, 2, 3].tolist() == [7 * 60 + 15 + 10 + 3, 15 + 10 + 3]
    assert array[0, :, [1, 2]].shape == (2, 4, 5), (
        "an axis apart from an integer comes first"
    )
    assert array[..., [0, -1]].shape == (10, 4, 3, 2)


def test_each_slab_is_read_once_and_no_other() -> None:
    array = InMemory(VALUES)
    array[np.array([9, 0, 9, 2, 8])]
    assert [(box[0].start, box[0].stop) for box in array.read] == [(0, 3), (8, 10)]
    array.read.clear()
    array[1:9, [2, 0]]
    assert [(b[0].start, b[0].stop, b[1]) for b in array.read] == [
        (1, 4, slice(0, 3)),
        (4, 8, slice(0, 3)),
        (8, 9, slice(0, 3)),
    ]
    array.read.clear()
    assert array[np.zeros(10, bool)].shape == (0, 4, 3, 5)
    assert array.read == []


@pytest.mark.parametrize(
    ("index", "error", "phrase"),
    [
        ([10], IndexError, "index 10 of an axis with 10 entries"),
        ([-11], IndexError, "index -11 of an axis"),
        (np.ones(9, bool), IndexError, "a mask of 9 entries for an axis with 10"),
        (np.ones((10, 4), bool), TypeError, "of one axis only"),
        (([0], [1]), TypeError, "one list of places or mask"),
        ([0.5], TypeError, "whole numbers or a mask"),
        (["a"], TypeError, "whole numbers or a mask"),
        (True, TypeError, "integers, slices"),
        (1.0, TypeError, "integers, slices"),
        ((..., ...), IndexError, "two ellipses"),
        ((0,) * 5, IndexError, "5 indices for an array with 4 axes"),
    ],
)
def test_refusals(index: Any, error: type[Exception], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        cut_out(index, SHAPE)


def test_every_array_of_a_store(make_store: Callable[..., Path]) -> None:
    """Masks and places of images, of each kind of lazy array, against all of it read."""
    store = open_store(make_store())
    mask = store.samples.label == 1
    places = np.array([9, 1, 1, 4])
    for array in (
        store.acts("blocks.0.out"),
        store.acts("blocks.0.out", "patches"),
        store.acts("blocks.0.out", (1, 2)),
        store.acts("blocks.0.out", "mean-all"),
        store.pooled("blocks.1.out", "cls"),
        store.vectors("pooled"),
        store.attention("distance_px"),
        store.residual("blocks.0.attn"),
    ):
        whole = array[:]
        for index in (mask, places, mask.tolist(), [0]):
            np.testing.assert_array_equal(array[index], whole[index])
        np.testing.assert_array_equal(array[2:7, [-1, 0]], whole[2:7, [-1, 0]])
    sums = store.attention_sums("received")
    np.testing.assert_array_equal(sums[[2, 0]], sums[:][[2, 0]])
