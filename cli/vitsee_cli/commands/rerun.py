"""vitsee rerun: a result made again, by the command in its sidecar."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from vitsee_cli import console, options
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import parse_path
from vitsee_core.models.sources import runs_code
from vitsee_core.pages.report.materials import picture_beside
from vitsee_core.pages.report.redrawing import open_result
from vitsee_core.runtime.command_lines import without_options
from vitsee_core.tables.sidecars import PYTHON
from vitsee_core.tables.text import visible
from vitsee_stores.errors import VitseeError

QUESTION = RESULTS


@click.command()
@click.argument("sidecar", metavar="SIDECAR", type=parse_path)
@click.option(
    "-o",
    "--output",
    metavar="TABLE",
    type=parse_path,
    help="Where the new table goes.  [default: to the place of the one beside SIDECAR]",
)
@options.force_option
@click.pass_context
def command(ctx: click.Context, sidecar: Path, output: Path | None, force: bool) -> None:
    """Make a result again, by the command in its sidecar.

    SIDECAR is the .json file beside a table (RESULT.json of RESULT), or the table itself. The
    command runs in the working folder, which its relative paths refer to, and is printed on stderr
    before; it writes the table (and in its own place the figure beside it), and nothing elsewhere.
    Only commands that draw figures run again: no extraction, no study.

    \b
      $ vitsee rerun dist.csv.json --force
      $ vitsee rerun results/cka.csv -o new.csv
    """
    words = command_again(sidecar, output, force=force)
    console.say(shlex.join(["vitsee", *words]))
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    code = group.main(words, prog_name="vitsee", standalone_mode=False, parent=ctx)
    if code:
        console.fail(f"vitsee rerun: {ctx.meta.get(console.REASON, 'it failed')}")
    ctx.exit(code or 0)


# Whatever a stranger's sidecar says, nothing is written but the table and its figure.
_OUTPUTS = ("-o", "--output", "--png", "--cache", "--save", "--table")
_EXPORTS = ("--export-queries", "--export-truth")


def command_again(
    sidecar: Path, output: Path | None, *, force: bool = False
) -> list[str]:
    """The words behind `vitsee` that make the table beside a sidecar again, or at `output`. Without
    an output it takes the place of the old table, and its figure that of the old figure."""
    beside = sidecar.with_name(sidecar.name.removesuffix(".json"))
    path = beside if sidecar.suffix == ".json" and beside.is_file() else sidecar
    result = open_result(path)
    if call := result.file.sidecar.get(PYTHON):
        raise VitseeError(
            f"{sidecar} was made in Python, by {visible(str(call))}; call that again"
        )
    words = [str(word) for word in result.file.sidecar["command"][1:]]
    if "--" in words:
        raise VitseeError(
            f"{sidecar}: a command with -- is not run again; copy it from there"
        )
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
