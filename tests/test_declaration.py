"""The declarations of vitsee's own analyses; tests/test_guests.py has what is refused in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.every_command import TABLES
from vitsee_core.analyses.probe.options import ClassOptions
from vitsee_core.declaration import Analysis
from vitsee_core.runtime import registry
from vitsee_core.runtime.arguments import analysis
from vitsee_core.runtime.options import Fields, Option
from vitsee_core.runtime.parameters import DeclarationError, options_of
from vitsee_core.tables.results import Table
from vitsee_stores.errors import VitseeError


@pytest.mark.parametrize("name", registry.builtin_names())
def test_ours_are_declared(name: str) -> None:
    """A declaration checks itself when it is made; here by the name of each, with its options."""
    declared: Analysis = registry.load(name)
    assert declared.module == f"vitsee_core.analyses.{name}"
    assert registry.declaration_of(declared.run.__module__) is declared
    assert replace(declared) == declared, "it is checked again"
    for parameter in options_of(declared.run).values():
        assert isinstance(parameter.metadata, Option), parameter.name
    if declared.needs is not None:
        assert declared.stores()


def test_a_word_that_does_not_exist_is_refused_in_ours_too() -> None:
    declared: Analysis = registry.load("knn")
    with pytest.raises(DeclarationError) as caught:
        replace(declared, needs=("sites", "heds"))
    assert str(caught.value) == (
        "vitsee_core.analyses.knn: needs has 'heds'; expected heads, or some of sites, grid, "
        "attention, heads, residual, images"
    )


@dataclass(frozen=True)
class Colours:
    """Options that a function takes as one."""

    shade: Annotated[str, Option("Light or dark.")] = "light"
    names: Annotated[Sequence[str], Option("Names.")] = ()


@analysis
def paint(
    *,
    size: Annotated[int, Option("How large.")] = 1,
    colours: Annotated[Colours, Fields()],
) -> Table:
    """A table of what was given."""
    row = {"metric": colours.shade, "value": float(size), "base": "+".join(colours.names)}
    return Table.from_rows([row])


def test_fields_of_a_group_are_given_by_their_names() -> None:
    """And a single text for a sequence of texts; the group's own name is not a keyword."""
    call: Any = paint
    table = call(size=3, shade="dark", names="red")
    assert table.frame.rows() == [("dark", 3.0, "red")]
    assert call().frame.row(0) == ("light", 1.0, None), (
        "the defaults are those of its fields"
    )
    assert dict(table.made_by[1]) == {"size": 3, "shade": "dark", "names": ("red",)}
    assert [*inspect.signature(paint).parameters] == ["size", "shade", "names"]
    assert "    shade: Light or dark." in (inspect.getdoc(paint) or "")
    assert [*options_of(paint)] == ["size", "shade", "names"]
    with pytest.raises(TypeError, match=r"no keyword 'shape'; did you mean shade\?"):
        call(shape="dark")
    with pytest.raises(TypeError, match="no keyword 'colours'"):
        call(colours=Colours())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (ClassOptions(shots=(5,)), "--shots"),
        (ClassOptions(baselines=("random",)), "--baseline"),
        (ClassOptions(match_last_stage=False), "--match-last-stage"),
        (ClassOptions(solver="sgd"), "--solver"),
    ],
)
def test_a_probe_of_responses_names_the_option_that_it_does_not_have(
    options: ClassOptions, flag: str
) -> None:
    with pytest.raises(VitseeError, match=f"^{flag} belongs to probes of classes"):
        options.refuse_any()
    ClassOptions().refuse_any()


@pytest.mark.slow
@pytest.mark.parametrize("command", TABLES)
def test_what_commands_write_is_as_declared_and_drawn(
    command: str, tables_of: Callable[[str], list[Path]]
) -> None:
    declared: Analysis = registry.load(command.replace("-", "_"))
    for path in tables_of(command):
        table = Table.read(path)
        declared.check_table(table)
        if command != "best-layer":  # whose figure shows the tables that it was made of
            assert declared.draw(table).axes
