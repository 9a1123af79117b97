"""Commands as a user types them, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vitsee_cli.main import main


def invoke(*words: object) -> Result:
    """`vitsee WORDS`."""
    return CliRunner().invoke(main, [*map(str, words)])


def refused(*words: object, code: int = 1) -> str:
    """The one line on stderr with which a command ends, or of a wrong option (2) the last one."""
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert code == 2 or result.stderr.count("\n") == 1, result.stderr
    return result.stderr.splitlines()[-1]


def said(folder: Path, *words: str, code: int = 0) -> str:
    """What `vitsee WORDS` prints in `folder`: on stdout, or on stderr where it ends with another
    `code` than 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = invoke(*words)
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.stderr


def refused(*words: object, code: int = 1) -> str:
    """What is said of a command that prints nothing: its last line, or click's text where the
    `code` is 2."""
    found = CliRunner().invoke(main, [str(word) for word in words])
    assert (found.exit_code, found.stdout) == (code, ""), found.output
    if code == 2:
        return " ".join(found.stderr.split())
    line = found.stderr.splitlines()[-1]
    assert line.startswith(f"vitsee {words[0]}: "), found.stderr
    return line
