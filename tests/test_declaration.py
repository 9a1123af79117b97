"""The declarations of vitsee's own analyses; tests/test_guests.py has what is refused in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitsee_core.declaration import Analysis
from vitsee_core.runtime import registry
from vitsee_core.runtime.options import Option
from vitsee_core.runtime.parameters import options_of


@pytest.mark.parametrize("name", registry.own_names())
def test_ours_are_declared(name: str) -> None:
    """A declaration checks itself when it is made; here by the name of each, with its options."""
    declared: Analysis = registry.load(name)
    assert declared.module == f"vitsee_core.analyses.{name}"
    assert registry.declaration_of(declared.run.__module__) is declared
    assert replace(declared) == declared, "it is checked again"
    for parameter in options_of(declared.run).values():
        assert isinstance(parameter.about, Option), parameter.name
