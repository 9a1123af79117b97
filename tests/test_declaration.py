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
    analysis: Analysis = registry.load(name)
    assert analysis.module == f"vitsee_core.analyses.{name}"
    assert registry.declaration_of(analysis.run.__module__) is analysis
    assert replace(analysis) == analysis, "it is checked again"
    for parameter in options_of(analysis.run).values():
        assert isinstance(parameter.about, Option), parameter.name
