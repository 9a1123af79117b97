"""vitsee rerun: a result made again, by the command in its sidecar."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from vitsee_cli import console, options
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import parse_path

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
    from vitsee_core.report.rerun import command_again

    words = command_again(sidecar, output, force=force)
    console.say(shlex.join(["vitsee", *words]))
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    code = group.main(words, prog_name="vitsee", standalone_mode=False, parent=ctx)
    if code:
        console.fail(f"vitsee rerun: {ctx.meta.get(console.REASON, 'it failed')}")
    ctx.exit(code or 0)
