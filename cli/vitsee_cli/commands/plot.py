"""vitsee plot: the figure of a result, drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.sections import RESULTS
from vitsee_cli.values import FiniteRange, parse_path
from vitsee_core.figures.looks import AXES, THEMES, Look
from vitsee_core.files import check_new_files, write_files
from vitsee_core.formats import FIGURE_ENDINGS, TABLE_ENDINGS, ending_of
from vitsee_core.plotting import DPI

QUESTION = RESULTS
MOST_INCHES = 200.0


def _two_numbers(text: Any, expected: str) -> tuple[float, float]:
    if isinstance(text, tuple):
        return text
    try:
        first, second = (FiniteRange().convert(part, None, None) for part in text.split(","))
    except (ValueError, click.UsageError):
        raise click.BadParameter(f"{text!r}; expected {expected}") from None
    return first, second


def parse_size(text: Any) -> tuple[float, float]:
    """`WIDTH,HEIGHT` in inches."""
    expected = f"WIDTH,HEIGHT in inches, from 0.5 to {MOST_INCHES:g}, e.g. 6.5,4"
    width, height = _two_numbers(text, expected)
    if not (0.5 <= width <= MOST_INCHES and 0.5 <= height <= MOST_INCHES):
        raise click.BadParameter(f"{text!r}; expected {expected}")
    return width, height


def parse_range(text: Any) -> tuple[float, float]:
    """`LOW,HIGH`, the first the smaller one."""
    low, high = _two_numbers(text, "LOW,HIGH, e.g. 0,0.5")
    if low >= high:
        raise click.BadParameter(f"{text!r}; expected LOW,HIGH with LOW below HIGH")
    return low, high


@click.command()
@click.argument("result", metavar="RESULT", type=parse_path)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=parse_path,
    help="Where the figure goes, a .png, .svg or .pdf, in which text stays text.  "
    "[default: RESULT.png, without the table's ending]",
)
@options.force_option
@options.sites_option(show_default="all rows of the table")
@click.option(
    "--size",
    metavar="W,H",
    type=parse_size,
    help="Width and height in inches.  [default: the command's choice]",
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
    type=click.Choice(THEMES),
    default=THEMES[0],
    show_default=True,
    help="Dark letters on white paper, or light ones on dark.",
)
@click.option(
    "--cmap",
    metavar="NAME",
    help="One of matplotlib's colour maps, for the panels that have one (magma, cividis, RdBu_r).  "
    "[default: the command's choice]",
)
@click.option(
    "--range",
    "limits",
    metavar="LOW,HIGH",
    type=parse_range,
    help="Values of the first and the last colour; of the y axis in a figure without colours.  "
    "[default: the command's choice]",
)
@click.option("--title", metavar="TEXT", help="Above all panels.  [default: none]")
@click.option(
    "--log",
    type=click.Choice(AXES),
    multiple=True,
    help="Make this axis logarithmic. Repeatable.  [default: the command's choice]",
)
def command(
    result: Path,
    output: Path | None,
    force: bool,
    sites: tuple[str, ...],
    size: tuple[float, float] | None,
    dpi: float,
    theme: str,
    cmap: str | None,
    limits: tuple[float, float] | None,
    title: str | None,
    log: tuple[str, ...],
) -> None:
    """Draw the figure of a result again.

    RESULT is a table that a command wrote with -o; its sidecar (RESULT.json) says which command's
    figure it is. Nothing is computed: stores and models are not needed.

    \b
      $ vitsee plot cka.csv
      $ vitsee plot cka.csv -o cka.pdf --cmap magma --range 0,0.8 --title "ViT-B/16"
      $ vitsee plot probe.csv -o probe.svg --size 5,3 --sites 'blocks,!embed'
      $ vitsee plot norms.csv -o slide.png --theme dark --dpi 300 --log y
    """
    from vitsee_core.plotting import figure_bytes
    from vitsee_core.redrawing import redraw

    place = output or _beside(result)
    ending = ending_of(place, FIGURE_ENDINGS, "-o")
    check_new_files([place], force=force)
    look = Look(theme, cmap, limits, title, log)
    figure = redraw(result, sites=sites, size=size, look=look)
    write_files({place: figure_bytes(figure, ending, dpi)}, force=force)
    console.say(f"{place} is written")


def _beside(result: Path) -> Path:
    """`r.png` for `r.csv` and `r.csv.gz`."""
    name = result.name
    known = next((e for e in TABLE_ENDINGS if name.lower().endswith(e)), "")
    return result.with_name(name[: len(name) - len(known)] + FIGURE_ENDINGS[0])
