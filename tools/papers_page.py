"""Writes docs/guide/papers.md: every figure of three papers, and the commands that make it.

    python tools/papers_page.py            # writes the page
    python tools/papers_page.py --print

The figures are the table of tools/paper_figures.py, whose every command a test runs on the demo's
models in place of the real checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from paper_figures import PAPERS, Figure, Made, Paper

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "papers.md"
# Words of a store's command -> those of its stand-in, the first that fits of each kind.
STAND_INS = (
    ("--data imagenet/val --images 10240", "--data demo:test --images 64"),
    ("--data imagenet/val --images 128", "--data demo:test --images 32"),
    ("--data imagenet/val", "--data demo:test --images 64"),
    ("--data imagenet/train --per-class", "--data demo:train --per-class"),
    ("--data imagenet/train", "--data demo:train --images 200"),
    ("--data imagenet50 --per-class 100", "--data demo:test --per-class 6"),
    ("--data cifar10", "--data demo:test --images 200"),
    ("--short-side 448", "--short-side 56"),
    ("--erf 256", "--erf 8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    if parser.parse_args().print:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page())


def page() -> str:
    """The page."""
    parts = [
        "# Figures of the papers",
        "Written by `python tools/papers_page.py`; do not edit it.",
        prose(
            "Every figure of the papers that vitsee sets out from, the public checkpoint that is "
            "nearest to the paper's, and the commands that make it; `-o TABLE --png FIGURE` goes "
            "behind each. A test runs all of them on the demo's models in place of these. Each "
            "paper's findings as numbers with intervals: [findings](../findings.md)."
        ),
    ]
    return "\n\n".join([*parts, *map(section, PAPERS)]) + "\n"


def section(paper: Paper) -> str:
    """A paper: its stores, its figures, what is left out."""
    extractions = "\n".join(wrapped(extraction(*item)) for item in paper.stores.items())
    rows = ["| figure | command | |", "|---|---|---|", *map(row, paper.figures)]
    parts = [f"## {paper.title}", prose(paper.note), f"```sh\n{extractions}\n```", "\n".join(rows)]
    return "\n\n".join([*parts, *map(prose, paper.left_out)])


def extraction(name: str, made: Made) -> str:
    """The command that makes a store."""
    return f"vitsee extract {made.model} {made.options} -o {name}.zarr"


def stand_in(name: str, made: Made) -> list[str]:
    """The words behind `vitsee` that make the store from the demo's model and images."""
    options = made.options
    for real, bundled in STAND_INS:
        options = options.replace(real, bundled)
    return ["extract", made.demo, *options.split(), "-o", f"{name}.zarr"]


def row(figure: Figure) -> str:
    """A row of the table."""
    commands = "<br>".join(f"`vitsee {command}`" for command in figure.commands)
    return f"| {figure.names} | {commands} | {figure.note} |"


def prose(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def wrapped(command: str) -> str:
    """A command over as many lines as it takes."""
    lines = textwrap.wrap(command, 96, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


if __name__ == "__main__":
    main()
