"""The command of a sidecar, to be run again."""

from __future__ import annotations

from pathlib import Path

from vitsee_core.models.sources import runs_code
from vitsee_core.report.materials import picture_beside
from vitsee_core.report.redrawing import open_result
from vitsee_core.runtime.command_lines import without_options
from vitsee_core.tables.sidecars import PYTHON
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError

# Whatever a stranger's sidecar says, nothing is written but the table and its figure.
_OUTPUTS = ("-o", "--output", "--png", "--cache", "--save", "--table")
_EXPORTS = ("--export-queries", "--export-truth")


def command_again(sidecar: Path, output: Path | None, *, force: bool = False) -> list[str]:
    """The words behind `vitsee` that make the table beside a sidecar, or at `output`, again.

    Args:
        sidecar: `r.csv.json`, or `r.csv`.
        output: where the new table goes; None: to the place of the old one, and its figure with it.
        force: files that exist are replaced.

    Raises:
        VitseeError: see `open_result`; or it is not known which options made the table.
        OSError: it cannot be opened.
    """
    beside = sidecar.with_name(sidecar.name.removesuffix(".json"))
    path = beside if sidecar.suffix == ".json" and beside.is_file() else sidecar
    result = open_result(path)
    if call := result.file.sidecar.get(PYTHON):
        raise VitseeError(f"{sidecar} was made in Python, by {visible(str(call))}; call that again")
    words = [str(word) for word in result.file.sidecar["command"][1:]]
    if "--" in words:
        raise VitseeError(f"{sidecar}: a command with -- is not run again; copy it from there")
    words = [*without_options(words, (*_OUTPUTS, *_EXPORTS))]
    words = [word for word in words if word not in ("--force", "--trust-store")]
    if named := [word for word in words if runs_code(word)]:
        raise VitseeError(
            f"{sidecar}: a command that runs the code of {visible(named[0])} is not run again; "
            "copy it from there"
        )
    picture = picture_beside(result.file.path) if output is None else None
    drawn = ["--png", str(picture)] if picture is not None else []
    return [*words, "-o", str(output or path), *drawn, *(["--force"] if force else [])]
