"""Files of others: each is read, or refused in one line, and nothing is written elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import foreign
from tests.faults.conftest import Ends
from tests.faults.trials import seeds


@pytest.mark.fault("tables, studies and annotations of others")
@seeds(1)
@pytest.mark.parametrize("kind", foreign.KINDS)
def test_files_of_others(tmp_path: Path, seed: int, kind: str, ended: Ends) -> None:
    if kind == "annotations":
        pytest.importorskip("pycocotools")
    found = foreign.KINDS[kind](tmp_path, seed).run(100)
    for how, n in found.items():
        for _ in range(n):
            ended(how.partition(": ")[2])
    assert not [how for how in found if "FAULT" in how]
    assert sum(n for how, n in found.items() if how.endswith(": read")) > 3
    assert sum(n for how, n in found.items() if how.endswith(": one line")) > 3
