"""The arithmetic of split expressions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitsee_core.images import DataError
from vitsee_core.images.image_source import apply_split

SPLITS = ["train"] * 10 + ["test"] * 4


@pytest.mark.parametrize(
    ("expression", "positions"),
    [
        ("train", range(10)),
        ("test", range(10, 14)),
        ("training", range(10)),
        ("train+test", range(14)),
        ("test + train", [*range(10, 14), *range(10)]),
        ("all", range(14)),
        ("[:3]", range(3)),
        ("all[50%:]", range(7, 14)),
        ("train[:4]", range(4)),
        ("train[4:]", range(4, 10)),
        ("train[-2:]", [8, 9]),
        ("train[:-8]", [0, 1]),
        ("test[25%:75%]", [11, 12]),
        ("train[:25%]", [0, 1]),
        ("train[25%:]", range(2, 10)),
        ("train[12.5%:30%]", [1, 2]),
        ("train[:10]", range(10)),
        ("train[2:5]+test[:1]", [2, 3, 4, 10]),
    ],
)
def test_positions(expression: str, positions: list[int]) -> None:
    assert apply_split(expression, SPLITS, "data")[0] == list(positions)


def test_a_sample_keeps_its_split_or_the_term_where_a_split_is_cut() -> None:
    assert apply_split("train[:1]+test[:1]", SPLITS, "data")[1] == ["train", "test"]
    assert apply_split("train[:1]+train[9:]", SPLITS, "data")[1] == [
        "train[:1]",
        "train[9:]",
    ]
    assert apply_split("all[9:11]", SPLITS, "data")[1] == ["train", "test"]


@given(n=st.integers(1, 400), cut=st.integers(1, 99))
def test_neighbouring_percentages_share_nothing_and_leave_nothing(
    n: int, cut: int
) -> None:
    low = int(Fraction(cut, 100) * n)
    for expression, expected in (
        (f"a[:{cut}%]", range(low)),
        (f"a[{cut}%:]", range(low, n)),
    ):
        if expected:
            assert apply_split(expression, ["a"] * n, "data")[0] == list(expected)


@pytest.mark.parametrize(
    ("expression", "phrase"),
    [
        ("", "cannot read the split ''"),
        ("train+", "cannot read"),
        ("train[4]", "cannot read"),
        ("train[a:b]", "cannot read"),
        ("train[1:2:3]", "cannot read"),
        ("train[:-5%]", "cannot read"),
        ("train[:4", "cannot read"),
        ("dev", "data has no split 'dev'; its splits: train, test"),
        ("train[:11]", "reaches outside the 10 images"),
        ("train[:101%]", "reaches outside"),
        ("train[-11:]", "reaches outside"),
        ("train[5:5]", "picks none of the 10 images"),
        ("train[6:2]", "picks none"),
        ("test[:1%]", "picks none"),
        ("train[:5]+train[4:]", "overlap"),
        ("all+test", "overlap"),
    ],
)
def test_what_is_refused(expression: str, phrase: str) -> None:
    with pytest.raises(DataError) as caught:
        apply_split(expression, SPLITS, "data")
    assert phrase in str(caught.value) and "\n" not in str(caught.value)


def test_data_without_splits() -> None:
    with pytest.raises(DataError, match="it has no splits"):
        apply_split("train", ["", ""], "data")
    assert apply_split("all[1:]", ["", ""], "data") == ([1], [""])
