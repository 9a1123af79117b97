"""docs/scale.md is what its script prints."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_committed_page_is_what_the_script_prints() -> None:
    script = ROOT / "benchmarks" / "scale_page.py"
    command = [sys.executable, str(script), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "scale.md").read_text() == done.stdout


@pytest.mark.slow
def test_what_no_activations_give_is_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every analysis is tried on both stores."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = importlib.import_module("no_activations").try_all(tmp_path)
    results = ROOT / "benchmarks" / "results" / "scale" / "no-activations.json"
    recorded = json.loads(results.read_text())
    assert [row[:2] for row in found["rows"]] == [row[:2] for row in recorded["rows"]]
    assert found["bytes"] == recorded["bytes"]
