"""Commands as a user types them, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vitsee_cli.main import main


def invoke(*words: object) -> Result:
    """`vitsee WORDS`."""
    return CliRunner().invoke(main, [*map(str, words)])


def one_line(*words: object, code: int = 1) -> str:
    """The only line of a command that is refused, or of a wrong option (2) the last one."""
    found = invoke(*words)
    assert (found.exit_code, found.stdout) == (code, ""), found.output
    assert code == 2 or found.stderr.count("\n") == 1, found.stderr
    return found.stderr.splitlines()[-1]


def said(folder: Path, *words: str, code: int = 0) -> str:
    """What `vitsee WORDS` prints in `folder`: on stdout, or on stderr where it ends with another
    `code` than 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = invoke(*words)
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.stderr


def refused(*words: object, code: int = 1) -> str:
    """The error of a command that must print nothing on stdout: the last line of stderr, or
    click's text for exit code 2."""
    found = invoke(*words)
    assert (found.exit_code, found.stdout) == (code, ""), found.output
    if code == 2:
        return " ".join(found.stderr.split())
    line = found.stderr.splitlines()[-1]
    assert line.startswith(f"vitsee {words[0]}: "), found.stderr
    return line
