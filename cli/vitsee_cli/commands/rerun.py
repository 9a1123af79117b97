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
    """Repeat the command that made a result.

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
_OUTPUT_OPTIONS = ("-o", "--output", "--png", "--cache", "--save", "--table")
_EXPORT_OPTIONS = ("--export-queries", "--export-truth")


def command_again(
    sidecar: Path, output: Path | None, *, force: bool = False
) -> list[str]:
    """Return the words behind `vitsee` that repeat the command in a sidecar.

    Args:
        sidecar: the sidecar, or its table.
        output: where the new table goes. None: it replaces the old table, and its figure the old
            figure.
        force: whether the words have --force.

    Raises:
        VitseeError: the sidecar has no command that may be repeated.
    """
    path = sidecar
    if sidecar.suffix == ".json":
        table = sidecar.with_name(sidecar.name.removesuffix(".json"))
        if table.is_file():
            path = table
    result = open_result(path)
    python_call = result.file.sidecar.get(PYTHON)
    if python_call:
        raise VitseeError(
            f"{sidecar} was made in Python, by {visible(str(python_call))}; call that "
            "again"
        )
    words = [str(word) for word in result.file.sidecar["command"][1:]]
    # Behind `--` a word that looks like an output option is an argument, and cannot be told apart.
    if "--" in words:
        raise VitseeError(
            f"{sidecar}: a command with -- is not run again; copy it from there"
        )
    # A sidecar may come from a stranger: it replaces no file and runs no code unless the user says
    # so now, by --force, or by typing the command.
    words = [*without_options(words, (*_OUTPUT_OPTIONS, *_EXPORT_OPTIONS))]
    words = [word for word in words if word not in ("--force", "--trust-store")]
    code_words = [word for word in words if runs_code(word)]
    if code_words:
        raise VitseeError(
            f"{sidecar}: a command that runs the code of {visible(code_words[0])} is not "
            "run again; copy it from there"
        )
    words += ["-o", str(output or path)]
    if output is None:
        picture = picture_beside(result.file.path)
        if picture is not None:
            words += ["--png", str(picture)]
    if force:
        words.append("--force")
    return words
