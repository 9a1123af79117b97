"""Damage trials, a few of each kind; tools/damage_trials.py does them at length."""

from __future__ import annotations

from pathlib import Path

import damage_trials
import pytest


@pytest.mark.parametrize("kind", damage_trials.KINDS)
def test_damage_is_found_and_never_read(tmp_path: Path, kind: str) -> None:
    ended = damage_trials.Trials(tmp_path, seed=11).run(kind, 25)
    assert ended["trials"] == ended["validate --deep finds"] == 25
    assert ended["readers: refused"] > 5
    assert "readers: other numbers" not in ended
    if kind != "bit in a chunk":
        assert ended["validate finds"] == 25
