"""Words of --tokens, and the tokens of a layout that they stand for."""

from __future__ import annotations

import json

import pytest

from vitsee_stores.errors import SiteError
from vitsee_stores.layout import TokenLayout
from vitsee_stores.selectors import (
    WORDS,
    TokenSelection,
    layout_tokens,
    parse_cell,
)

LAYOUT = TokenLayout(("cls", "reg0"), (2, 3))
CNN = TokenLayout((), (2, 3))
ROWS = TokenLayout((), None, rows=4)


@pytest.mark.parametrize(
    ("word", "of_vit", "of_cnn"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("each", [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("mean-all", [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("patches", [2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("mean", [2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("rest", [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5]),
        ("cls", [0], []),
        ("prefix", [0, 1], []),
        ("first", [0], [0]),
        ("1,2", [7], [5]),
        ("0,1", [3], [1]),
        ("2,0", [], []),
        ("0,3", [], []),
    ],
)
def test_members_of_two_layouts(word: str, of_vit: list[int], of_cnn: list[int]) -> None:
    chosen = TokenSelection.parse(word)
    assert list(chosen.members(LAYOUT)) == of_vit
    assert list(chosen.members(CNN)) == of_cnn


def test_plain_rows_have_no_cells() -> None:
    assert not TokenSelection.parse("0,0").members(ROWS)
    assert list(TokenSelection.parse("patches").members(ROWS)) == [0, 1, 2, 3]
    assert [token.name for token in layout_tokens(ROWS)] == ["0", "1", "2", "3"]


def test_cells_and_names_agree() -> None:
    """The name of every cell, read back, stands for that cell; prefix tokens have their kinds."""
    tokens = layout_tokens(LAYOUT)
    assert [token.name for token in tokens[:2]] == ["cls", "reg0"]
    for i, token in enumerate(tokens[2:], 2):
        assert list(TokenSelection.parse(token.name).members(LAYOUT)) == [i]
        assert parse_cell(token.name) == (token.row, token.col)


def test_kinds_of_selections() -> None:
    vectors = [word for word in (*WORDS, "3,4") if TokenSelection.parse(word).is_vector]
    assert vectors == ["cls", "mean", "mean-all", "first", "rest", "3,4"]
    assert [word for word in WORDS if TokenSelection.parse(word).is_mean] == [
        *("mean", "mean-all", "rest")
    ]


def test_a_selection_is_its_text() -> None:
    chosen = TokenSelection.parse("01, 2")
    assert (
        chosen == "1,2"
        and chosen.cell == (1, 2)
        and TokenSelection.parse((1, 2)) == chosen
    )
    assert TokenSelection.parse(chosen) == chosen
    assert json.dumps({"tokens": chosen}) == '{"tokens": "1,2"}'


@pytest.mark.parametrize(
    "text", ["", "CLS", "-1,2", "1,2,3,4", "1", "1;2", "a,b", "\N{SUPERSCRIPT TWO},1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SiteError, match=r"expected all, patches, .* or ROW,COL"):
        TokenSelection.parse(text)


def test_only_the_words_that_an_analysis_knows() -> None:
    assert TokenSelection.parse("flat", ("each", "flat")) == "flat"
    with pytest.raises(
        SiteError, match="no tokens 'mean'; expected each, cls or ROW,COL"
    ):
        TokenSelection.parse("mean", ("each", "cls"))


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("cls", "s has no class token: it has no prefix tokens and a grid of 1 x 1"),
        ("rest", "s has no tokens but the first: it has "),
        ("prefix", "s has no tokens 'prefix': it has "),
        ("1,0", "s has no token 1,0: it has .*, counted from 0"),
    ],
)
def test_tokens_that_a_layout_lacks(word: str, what: str) -> None:
    with pytest.raises(SiteError, match=what):
        TokenSelection.parse(word).require(TokenLayout((), (1, 1)), "s")


def test_class_tokens_of_views_are_no_class_token_of_all() -> None:
    layout = TokenLayout(("camera.0", "camera.1", "class.0", "class.1"), (1, 1))
    with pytest.raises(
        SiteError,
        match=r"^s has a class token of each view, class\.0 to class\.1, and no cls of all; exp",
    ):
        TokenSelection.parse("cls").require(layout, "s")
