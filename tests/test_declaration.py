"""The declarations of vitsee's own analyses; tests/test_guests.py has what is refused in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.every_command import TABLES
from vitsee_core.declaration import Analysis
from vitsee_core.runtime import registry
from vitsee_core.runtime.options import Option
from vitsee_core.runtime.parameters import DeclarationError, options_of
from vitsee_core.tables.results import Table


@pytest.mark.parametrize("name", registry.own_names())
def test_ours_are_declared(name: str) -> None:
    """A declaration checks itself when it is made; here by the name of each, with its options."""
    analysis: Analysis = registry.load(name)
    assert analysis.module == f"vitsee_core.analyses.{name}"
    assert registry.declaration_of(analysis.run.__module__) is analysis
    assert replace(analysis) == analysis, "it is checked again"
    for parameter in options_of(analysis.run).values():
        assert (isinstance(parameter.about, Option) and parameter.about.help) or parameter.name
    if analysis.needs is not None:
        assert [store.name for store in analysis.stores()] or name == "weights"


def test_a_word_that_does_not_exist_is_refused_in_ours_too() -> None:
    analysis: Analysis = registry.load("knn")
    with pytest.raises(DeclarationError) as caught:
        replace(analysis, needs=("sites", "heds"))
    assert str(caught.value) == (
        "vitsee_core.analyses.knn: needs has 'heds'; expected heads, or some of sites, grid, "
        "attention, heads, residual, images"
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_what_commands_write_is_as_declared_and_drawn(
    command: str, tables_of: Callable[[str], list[Path]]
) -> None:
    analysis: Analysis = registry.load(command.replace("-", "_"))
    for path in tables_of(command):
        table = Table.read(path)
        analysis.check_table(table)
        if command != "best-layer":  # whose figure shows the tables that it was made of
            assert analysis.draw(table).axes
