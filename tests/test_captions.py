"""What is said of every figure, beside the analysis that draws it."""

from __future__ import annotations

import re

import pytest

from vitsee_core.analyses import attn_map
from vitsee_core.pages.report.captions import caption, captions
from vitsee_core.tables.results import Table

CAPTIONS = captions()


@pytest.mark.parametrize("command", CAPTIONS)
def test_captions_are_whole_sentences_with_a_source(command: str) -> None:
    one = CAPTIONS[command]
    assert (
        one.question[0].isupper()
        and one.question.endswith("?")
        and len(one.question) < 75
    )
    assert one.title and not one.title.endswith(".") and len(one.title) < 60
    assert re.search(r"\b(19|20)\d\d\b", one.source), "a source has a year"
    assert one.reading.endswith(".") and 60 < len(one.reading) < 500
    assert "  " not in one.reading + one.source and "`" not in one.source + one.reading


def test_figures_of_several_kinds() -> None:
    analysis = attn_map.ANALYSIS
    assert {*analysis.readings} == {kind.replace("-", "_") for kind in attn_map.KINDS}
    table = Table.from_rows([{"metric": "mean_cls"}], notes={"kind": "mean-cls"})
    assert caption(analysis, table).reading == analysis.readings["mean_cls"]
    assert (
        caption(analysis, Table.from_rows([{"metric": "x"}])).reading == analysis.reading
    )
