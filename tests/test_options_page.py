"""An option's name has one meaning, a meaning has one name, and docs/options.md lists them all."""

from __future__ import annotations

from collections import defaultdict

import options_page


def test_the_page_is_in_step() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), (
        "run python tools/options_page.py, which writes docs/options.md"
    )


def test_an_option_whose_help_differs_has_a_shared_meaning() -> None:
    """Whoever gives a known name to another option has to say what they have in common."""
    several = {name for name, texts in options_page.helps().items() if len(texts) > 1}
    assert several == {*options_page.SHARED_MEANINGS}


def test_a_meaning_has_one_name() -> None:
    names_of_text: dict[str, list[str]] = defaultdict(list)
    for name, texts in options_page.helps().items():
        for text in texts:
            names_of_text[text].append(name)
    assert [names for names in names_of_text.values() if len(names) > 1] == []
