"""Writes docs/guide/papers.md: every figure of three papers, and the commands that make it.

    python tools/papers_page.py            # writes the page
    python tools/papers_page.py --print

The figures are those of the recipes of `vitsee study`, which tests run on the demo's models.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from pathlib import Path

from vitsee_core.study.recipe_file import (
    FigureRecipe,
    RecipeFile,
    StoreRecipe,
    read_recipe,
)

PAPERS = ("raghu2021", "walmer2023", "dosovitskiy2021")
INTERVENTIONS = ("registers", "heads")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "papers.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="to stdout")
    if parser.parse_args().print:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page())


def page() -> str:
    parts = [
        "# Figures of the papers",
        "<!-- Written by python tools/papers_page.py; do not edit it. -->",
        prose(
            "Every figure of the papers that vitsee sets out from, the public checkpoint that is "
            "nearest to the paper's, and the commands that make it; `-o TABLE --png FIGURE` goes "
            "behind each. `vitsee study raghu2021 --data DATASETS -o raghu` makes all of a "
            "paper's, and a report of them in its order; `--quick` tries that on the demo's "
            "models and images ([more of it](study.md#figures-of-a-paper)). Each paper's findings "
            "as numbers with intervals: [findings](../findings.md). Two studies of interventions, "
            "each with the controls that its claims need, come last."
        ),
    ]
    recipes = map(read_recipe, (*PAPERS, *INTERVENTIONS))
    return "\n\n".join([*parts, *map(section, recipes)]) + "\n"


def section(paper: RecipeFile) -> str:
    extractions = "\n".join(wrapped(extraction(*item)) for item in paper.stores.items())
    rows = ["| figure | command | |", "|---|---|---|", *map(row, paper.figures)]
    about = prose(f"`vitsee study {paper.name}`. {paper.note}")
    parts = [f"## {paper.title}", about, f"```sh\n{extractions}\n```", "\n".join(rows)]
    return "\n\n".join([*parts, prose(paper.left_out)])


def extraction(name: str, made: StoreRecipe) -> str:
    return f"vitsee extract {shlex.quote(made.model)} {made.options} -o {name}.zarr"


def row(figure: FigureRecipe) -> str:
    commands = "<br>".join(f"`vitsee {command}`" for command in figure.commands)
    return f"| {figure.names} | {commands} | {figure.note} |"


def prose(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def wrapped(command: str) -> str:
    """A command over as many lines as it takes."""
    lines = textwrap.wrap(command, 96, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


if __name__ == "__main__":
    main()
