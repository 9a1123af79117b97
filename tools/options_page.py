"""Writes docs/options.md: every option, the commands that take it, and what it means.

python tools/options_page.py
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import click

from vitsee_cli.main import main as vitsee_command

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
HEAD = """# Every option

Written by `python tools/options_page.py` from the commands' own help; do not edit it. An option of
one name means the same in all commands that take it; where their help differs in detail, the
meaning that they share stands here.

| option | meaning | commands |
| --- | --- | --- |
"""
# Options whose help differs between commands: the one meaning that they share.
SHARED_MEANINGS = {
    "--baseline": "also measure what needs no trained model: random features, chance",
    "--batch": "number of images in a minibatch of the algorithm",
    "--checkpoint": "the file with the model's weights",
    "--clamp": "take negative numbers as 0 first",
    "--components": "number of principal components",
    "--dask": "spread the work over the workers of a Dask cluster, or over processes",
    "--data": "the images",
    "--dry-run": "print what would be done, and do nothing",
    "--dtype": "number format of what is written",
    "--epochs": "passes over the training data",
    "--force": "replace output that exists",
    "--foreground": "which patches are foreground",
    "--holdout": "without TEST: test on this share of the images",
    "--ids": "a file with an image's id on each line",
    "--image": "an image to show, by its id or its row",
    "--images": "number of images",
    "--jobs": "how many things to work on at a time",
    "--json": "print JSON for programs",
    "--k": "number of what is counted: clusters, concepts, neighbours, directions",
    "--masks": "the masks of the images",
    "--memory": "memory to stay within",
    "--metric": "which metrics to compute, or to keep",
    "--only": "a file with the names of the images, or videos, to use",
    "--output": "where the result goes",
    "--pairs": "which pairs to compare: of sites, or of images",
    "--patches": "also for every patch alone",
    "--per-class": "for each class: a number of images, or rows of the table",
    "--precision": "arithmetic of the products",
    "--preset": "the settings of a paper or its code",
    "--prove": "prove on random pixels what is otherwise read from shapes",
    "--quick": "bundled models and few images, to try it out",
    "--radius": "half the side, or the radius, of a neighbourhood of patches",
    "--save": "also write what was computed on the way",
    "--scale": "whether the panels of a figure share one colour scale",
    "--seed": "seed of everything random",
    "--seeds": "number of random draws, with the seeds SEED, SEED + 1, ...",
    "--sites": "which layers",
    "--sites-b": "which layers of the second store",
    "--solver": "how the linear layer is fitted",
    "--split": "a named part of the data",
    "--table": "also write a second table",
    "--temperature": "of exp(cosine / temperature)",
    "--threshold": "a number above which something counts",
    "--title": "title of the page or figure",
    "--tokens": "which tokens",
    "--train-images": "number of training images",
    "--x": "draw against an attribute of the stores",
}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def helps() -> dict[str, dict[str, list[str]]]:
    """Return option -> help text -> the commands whose option has that text."""
    result: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    context = click.Context(vitsee_command)
    for command_name in vitsee_command.list_commands(context):
        command = vitsee_command.get_command(context, command_name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                name = max(parameter.opts, key=len)
                text = " ".join((parameter.help or "").split())
                result[name][text].append(command_name)
    return {name: dict(result[name]) for name in sorted(result)}


def page() -> str:
    """Return the page: a row per option."""
    rows = []
    for name, commands_of_text in helps().items():
        if name in SHARED_MEANINGS:
            meaning = SHARED_MEANINGS[name]
        else:
            meaning = next(iter(commands_of_text)).partition("  [default")[0]
        commands = sorted(c for names in commands_of_text.values() for c in names)
        cells = (f"`{name}`", meaning.replace("|", "\\|"), ", ".join(commands))
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
