"""vitsee plot: the figure of a result, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import a_file
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import FiniteRange, parse_table
from vitsee_core.figures.looks import AXES, NONE, Look
from vitsee_core.figures.panels import MEDIA
from vitsee_core.figures.plotting import DPI, THEMES
from vitsee_core.tables.files import check_new_files, is_stream, write_files
from vitsee_core.tables.formats import FIGURE_ENDINGS, ending_of, stem_of

QUESTION = RESULTS
MAX_INCHES = 200.0


def _two_numbers(text: Any, expected: str) -> tuple[float, float]:
    """Return the two finite numbers of `A,B`. Raises BadParameter: says what was expected."""
    if isinstance(text, tuple):  # a default, which click passes on
        return text
    words = text.split(",")
    try:
        # Through click's type, so that inf and nan are refused as elsewhere.
        numbers = [FiniteRange().convert(word, None, None) for word in words]
        first, second = numbers
    except (ValueError, click.UsageError):
        raise click.BadParameter(f"{text!r}; expected {expected}") from None
    return first, second


def parse_size(text: Any) -> tuple[float, float]:
    """Return width and height of `WIDTH,HEIGHT`, in inches."""
    expected = f"WIDTH,HEIGHT in inches, from 0.5 to {MAX_INCHES:g}, e.g. 6.5,4"
    width, height = _two_numbers(text, expected)
    if not (0.5 <= width <= MAX_INCHES and 0.5 <= height <= MAX_INCHES):
        raise click.BadParameter(f"{text!r}; expected {expected}")
    return width, height


def parse_range(text: Any) -> tuple[float, float]:
    """Return the two numbers of `LOW,HIGH`, the first the smaller one."""
    low, high = _two_numbers(text, "LOW,HIGH, e.g. 0,0.5")
    if low >= high:
        raise click.BadParameter(f"{text!r}; expected LOW,HIGH with LOW below HIGH")
    return low, high


@click.command()
@click.argument("results", metavar="RESULT...", nargs=-1, required=True, type=parse_table)
@a_file(
    "-o",
    "--output",
    help="Where the figure goes, a .png, .svg or .pdf, in which text stays text.  "
    "[default: RESULT.png, without the table's ending; of a pipe plot.png; of several "
    "RESULTs, required]",
)
@options.force_option
@options.sites_option(show_default="all rows of the table")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME",
    multiple=True,
    help="Only the rows of this metric. Repeatable.  [default: all rows of the table]",
)
@click.option(
    "--x",
    metavar="FIELD",
    default="",
    help="A chart of the values along an attribute of the stores: params, resolution (of "
    "the input), images, data, a column of RESULT (shots) or of --attributes; of a table "
    "over a training step, or rel_depth for the command's figure.  [default: the "
    "command's figure, over a training the chart along its steps]",
)
@click.option(
    "--by",
    metavar="FIELD",
    multiple=True,
    help="With --x: join what has the same value of this attribute or column to a curve. "
    "Repeatable. With --x step, site takes the models for repetitions: their mean and "
    "its interval over them.  [default: a curve per store]",
)
@click.option(
    "--group-by",
    metavar="FIELD",
    default="",
    help="A panel per value of this attribute or column, with its stores.  "
    "[default: groups of labels GROUP/NAME]",
)
@a_file(
    "--attributes",
    help="With --x or --group-by: a table of your own with a column store or model and "
    "attributes beside it; that of vitsee models has flops.  [default: none]",
)
@click.option(
    "--for",
    "medium",
    type=click.Choice(list(MEDIA)),
    help="Column: at most 3.5 inches wide, letters of 7 points. Page: 7 inches, 8 "
    "points. Slide: 12 inches, up to 15 points. Panels wrap by that width.  [default: "
    "page]",
)
@click.option(
    "--size",
    metavar="W,H",
    type=parse_size,
    help="Width and height in inches, instead; letters have 6 to 8 points, or those of "
    "--for.  [default: what --for and the content decide]",
)
@click.option(
    "--dpi",
    metavar="N",
    type=FiniteRange(10, 2400),
    default=DPI,
    show_default=True,
    help="Dots per inch of a .png.",
)
@click.option(
    "--theme",
    type=click.Choice(list(THEMES)),
    default="light",
    show_default=True,
    help="Dark letters on white paper, or light ones on dark.",
)
@click.option(
    "--cmap",
    metavar="NAME",
    help="One of matplotlib's colour maps, for the panels that have one (magma, cividis, "
    "RdBu_r).  [default: the command's choice]",
)
@click.option(
    "--range",
    "limits",
    metavar="LOW,HIGH",
    type=parse_range,
    help="Values of the first and the last colour; of the y axis in a figure without "
    "colours.  [default: the command's choice]",
)
@click.option("--title", metavar="TEXT", help="Above all panels.  [default: none]")
@click.option(
    "--log",
    type=click.Choice((*AXES, NONE)),
    multiple=True,
    help="Make this axis logarithmic, or none. Repeatable.  [default: the command's "
    "choice]",
)
def command(
    results: tuple[Path, ...],
    output: Path | None,
    force: bool,
    dpi: float,
    theme: str,
    cmap: str | None,
    limits: tuple[float, float] | None,
    title: str | None,
    log: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Draw the figure of a result again.

    RESULT is a table that a command wrote with -o; its sidecar (RESULT.json) says which command's
    figure it is. Nothing is computed: stores and models are not needed. Several RESULTs of one
    command are drawn as one: of cka --pairs same-depth a curve per pair of stores. A RESULT may
    also come from a pipe, as - or <(...): it is CSV, and its columns and metrics say whose it is.

    \b
      $ vitsee plot cka.csv
      $ vitsee plot cka.csv -o cka.pdf --cmap magma --range 0,0.8 --title "ViT-B/16"
      $ vitsee plot cka.csv -o cka.pdf --for column
      $ vitsee plot probe.csv -o probe.svg --size 5,3 --sites 'blocks,!embed'
      $ vitsee plot norms.csv -o slide.png --theme dark --dpi 300 --log y
      $ vitsee plot best.csv -o size.png --x params --by family --attributes mine.csv
      $ vitsee plot probe.csv -o shots.png --x shots --sites last
      $ vitsee plot knn.csv -o panels.png --group-by family --attributes mine.csv
      $ vitsee plot b16.csv l16.csv -o pairs.png
      $ vitsee norms b16.zarr | vitsee plot - -o norms.png
      $ vitsee plot over/seed*/results/attn-dist.csv --x step --by site -o seeds.png
    """
    from vitsee_core.figures.plotting import figure_bytes
    from vitsee_core.pages.report.redrawing import redraw

    x = chosen["x"]
    groups = chosen["group_by"]
    if chosen["by"] and not x:
        raise click.UsageError("--by is of a chart along --x FIELD")
    if chosen["attributes"] is not None and not (x or groups):
        raise click.UsageError("--attributes are of --x FIELD or --group-by FIELD")
    if x and groups:
        raise click.UsageError(
            "a chart along --x has curves --by FIELD in place of --group-by"
        )
    if output is None and len(results) > 1:
        raise click.UsageError(f"{len(results)} results make one figure: name it with -o")
    if output is not None:
        path = output
    elif is_stream(results[0]):
        # A pipe has no name to derive the figure's from.
        path = Path(f"plot{FIGURE_ENDINGS[0]}")
    else:
        path = results[0].with_name(stem_of(results[0]) + FIGURE_ENDINGS[0])
    # A wrong name is refused before the figure is drawn, which takes seconds.
    ending = ending_of(path, FIGURE_ENDINGS, "-o")
    check_new_files([path], force=force)
    look = Look(theme, cmap, limits, title, log)
    figure = redraw(results, look=look, **chosen)
    write_files({path: figure_bytes(figure, ending, dpi)}, force=force)
    console.say(f"{path} is written")
