"""Tables that come from a pipe: whose figure they are, and what is refused."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import invoke
from tests.test_cli import ENVIRONMENT
from vitsee_core.pages.report.redrawing import open_result
from vitsee_core.tables.files import is_stream, read_stream
from vitsee_stores.errors import VitseeError


def piped(text: str, folder: Path, *words: str, name: str = "-") -> tuple[int, str]:
    """`vitsee plot NAME WORDS` with a text as its input: exit code and stderr."""
    command = [sys.executable, "-m", "vitsee_cli", "plot", name, *words]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT
    )
    return done.returncode, done.stderr


def test_which_paths_are_streams() -> None:
    for path in ("-", "/dev/stdin", "/dev/fd/63", "/proc/self/fd/0"):
        assert is_stream(Path(path))
    for path in ("./-", "a.csv", "/dev/null", "/dev/fd/", "/tmp/fifo", "--"):
        assert not is_stream(Path(path)) or path == "./-"  # Path drops the ./


@pytest.mark.slow
def test_a_table_from_a_pipe_is_drawn(
    make_store: Callable[..., Path], tmp_path: Path
) -> None:
    store = make_store()
    table = invoke("attn-dist", store).stdout
    assert piped(table, tmp_path) == (0, "plot.png is written\n")
    assert piped(table, tmp_path, "-o", "a.png", name="/dev/stdin") == (
        0,
        "a.png is written\n",
    )
    assert invoke(
        "attn-dist", store, "-o", tmp_path / "r.csv", "--png", tmp_path / "r.png"
    )
    drawn = (tmp_path / "r.png").read_bytes()
    assert (
        (tmp_path / "plot.png").read_bytes() == drawn == (tmp_path / "a.png").read_bytes()
    )


def test_what_is_no_table_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, phrase in (
        ("", "has no rows"),
        ("a,b\n1,2\n", "has columns and metrics of no command"),
        (
            "store,site,metric,value\nx,y,other,1\n",
            "has columns and metrics of no command",
        ),
    ):
        data = text.encode()
        monkeypatch.setattr(
            "vitsee_core.tables.results.read_stream", lambda _, data=data: data
        )
        with pytest.raises(VitseeError, match=phrase):
            open_result("-")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("builtins.open", lambda *_, **__: Terminal())
    with pytest.raises(VitseeError, match="is a terminal; expected a table from a pipe"):
        read_stream(Path("-"))


def test_pipes_that_are_not_open_stay_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path / "fifo"), "/dev/null"):
        result = invoke("plot", name)
        assert result.exit_code == 1 and "is a pipe or a device" in result.stderr
    result = invoke("plot", "/dev/fd/987")
    assert result.exit_code == 1 and "no such file" in result.stderr
