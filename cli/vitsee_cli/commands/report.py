"""vitsee report: results and stores of a folder as one page for a browser."""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli import console, options
from vitsee_cli.sections import RESULTS, commands_by_question
from vitsee_cli.values import parse_folder, parse_path

QUESTION = RESULTS


@click.command()
@click.argument("folder", metavar="FOLDER", type=parse_folder)
@click.option(
    "-o",
    "--output",
    metavar="PAGE",
    type=parse_path,
    help="Where the page goes, a .html.  [default: report.html in FOLDER]",
)
@click.option(
    "--title",
    metavar="TEXT",
    help="Of the page.  [default: a study's models, else the folder's name]",
)
@options.force_option
@click.pass_context
def command(
    ctx: click.Context, folder: Path, output: Path | None, title: str | None, force: bool
) -> None:
    """Write one page about all results and stores in a folder.

    The page opens with the questions that the results in FOLDER answer, each with a picture and,
    per model, a line of numbers with their intervals. Below, every table with its sidecar that lies
    in FOLDER or deeper becomes a figure with how to read it, charts whose marks show site, value
    and interval, a table to sort, and the command that made it; last, every store with its model,
    data, preprocessing and self-check. The page is one file and asks for nothing from a network; it
    opens in any browser, on a phone and in the dark too. Tables above 400 kB lie beside it and are
    linked.

    \b
      $ vitsee attn-dist b16.zarr -o results/dist.csv --png results/dist.png
      $ vitsee cka b16.zarr -o results/cka.csv --png results/cka.png
      $ vitsee report results -o report.html
    """
    from vitsee_core.pages.report.page import write_report
    from vitsee_core.runtime.machine import human_bytes, plural
    from vitsee_core.tables.formats import ending_of

    # Which command answers which question is known here alone: the page gets it as an argument.
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    page = folder / "report.html" if output is None else output
    ending_of(page, (".html", ".htm"), "-o")
    contents = write_report(
        folder,
        page,
        sections=commands_by_question(group.list_commands(ctx)),
        title=title or "",
        force=force,
        progress=console.Reporter("report"),
    )
    if contents is None:
        console.say(f"{page}: nothing has changed since it was written")
        return
    for path, reason in contents.left_out.items():
        console.say(f"left out: {path}: {reason}")
    n_results = sum(
        result.file.path not in contents.left_out for result in contents.results
    )
    console.say(
        f"{page}: {plural(n_results, 'results')} and "
        f"{plural(len(contents.stores), 'stores')}, {human_bytes(page.stat().st_size)}"
    )
