"""The results of benchmarks and the page that is made of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from common import Result, record
sys.argv = ["/elsewhere/benchmarks/knn.py", "--record", "--rounds", "3", "--folder", "/mine",
            "--pair=/theirs"]
record("a-b", "Of two things", {rows}, Path({folder!r}))
"""
ROWS = """[
    Result("finding, against a loop", 0.123456, 1.5, 12.15039, "s"),
    Result("peak memory", 1234.5, None, None, "MB"),
    Result("a rate, against another", 50.0, 40.0, 1.3, "G/s"),
]"""


def page(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "page.py"), kind, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def recorded(folder: Path, rows: str = ROWS) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(
        benchmarks=str(ROOT / "benchmarks"), rows=rows, folder=str(folder)
    )
    command = [sys.executable, "-c", script]
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )


def test_the_committed_page_is_what_the_script_prints() -> None:
    done = page("--print")
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "performance.md").read_text() == done.stdout


def test_the_table_of_readme_is_what_the_script_prints() -> None:
    done = page("--readme")
    assert done.returncode == 0, done.stderr
    text = (ROOT / "README.md").read_text()
    assert done.stdout == text
    assert re.search(r"against torch_cka \| [\d.]+ s \| [\d,]+ s \| [\d.]+ \|\n", text)


def test_a_line_that_readme_shows_and_nobody_measured(tmp_path: Path) -> None:
    done = page("--readme", "--results", str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert "no line 'vitsee, against torch_cka' in cka.json" in done.stderr


def test_a_result_goes_from_the_run_to_the_page(tmp_path: Path) -> None:
    done = recorded(tmp_path)
    assert done.returncode == 0, done.stderr
    fields = json.loads((tmp_path / "a-b.json").read_text())
    assert fields["rows"] == [
        ["finding, against a loop", 0.1235, 1.5, 12.15, "s"],
        ["peak memory", 1234.0, None, None, "MB"],
        ["a rate, against another", 50.0, 40.0, 1.3, "G/s"],
    ]
    assert fields["command"] == "OMP_NUM_THREADS=1 python benchmarks/knn.py --rounds 3"
    text = page("--print", "--results", str(tmp_path)).stdout
    assert f"## Of two things\n\n`{fields['command']}`\n\n{fields['date']}, " in text
    # the quotient of what stands beside it, of rates the other way round
    assert "| finding, against a loop | 0.123 s | 1.5 s | 12.1 |\n" in text
    assert "| a rate, against another | 50 G/s | 40 G/s | 1.25 |\n" in text
    assert "| peak memory | 1,234 MB |  |  |\n" in text


@pytest.mark.parametrize("rows", ["[]", "[Result('x', float('nan'), 1, 1, 's')]"])
def test_what_is_no_result_is_not_recorded(tmp_path: Path, rows: str) -> None:
    done = recorded(tmp_path, rows)
    assert done.returncode != 0 and "ValueError" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{}", "[", '{"rows": [[1]]}'])
def test_another_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    done = page("--print", "--results", str(tmp_path))
    assert (
        done.returncode == 1 and "x.json was not written by common.record" in done.stderr
    )
    assert done.stdout == "" and "Traceback" not in done.stderr
