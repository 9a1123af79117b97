"""Commands as a user types them, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from vitsee_cli.main import main


def said(folder: Path, *words: str, code: int = 0) -> str:
    """What `vitsee WORDS` prints in `folder`: on stdout, or on stderr where it ends with another
    `code` than 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = CliRunner().invoke(main, [*words])
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.stderr
