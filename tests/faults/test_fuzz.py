"""Stores as malice could make them: each reader ends with a result or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import fuzz
from tests.faults.conftest import Ends
from tests.faults.trials import seeds


@pytest.mark.fault("hostile manifests, markers and samples")
@seeds(1)
def test_what_reads_a_store_survives_any(tmp_path: Path, seed: int, ended: Ends) -> None:
    found = fuzz.Fuzzer(tmp_path, seed, readers={"info": fuzz.info}).run(120)
    for what, n in found.items():
        for _ in range(n):
            ended(what.partition(": ")[2])
    assert not [what for what in found if "FAULT" in what]
    assert found["open: one line"] > 20
    assert found["describe: read"] > 20
