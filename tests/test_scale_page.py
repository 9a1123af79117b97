"""docs/scale.md is what its script prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_page_is_what_the_script_prints() -> None:
    script = ROOT / "benchmarks" / "scale_page.py"
    command = [sys.executable, str(script), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "scale.md").read_text() == done.stdout
