"""Damage, and what stands in another's place: found, refused, never read as other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import damage
from tests.faults.conftest import Ends
from tests.faults.trials import seeds


@pytest.mark.fault("damage in a store, all of it read")
@seeds(1)
@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("grown", [False, True], ids=["made", "grown"])
def test_damage_is_found_and_never_read(
    tmp_path: Path, kind: str, grown: bool, seed: int, ended: Ends
) -> None:
    found = damage.Trials(tmp_path, seed, grown).run(kind, 25)
    assert found["trials"] == found["validate --deep finds"] == 25
    assert found["readers: refused"] > 5
    assert "readers: other numbers" not in found
    if kind != "bit in a chunk":
        assert found["validate finds"] == 25
    for how in ("refused", "unaffected"):
        for _ in range(found[f"readers: {how}"]):
            ended(how)
