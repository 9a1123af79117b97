"""Options of the commands that train on some images and measure accuracy on others."""

from __future__ import annotations

import click

from vitsee_cli.options import Decorator, distinct_labels
from vitsee_cli.values import parse_store


def tests_argument(*, required: bool) -> Decorator:
    """Stores whose images are tested on, as `tests`: a tuple of StorePath with distinct labels."""
    metavar = "[NAME=]TEST..." if required else "[[NAME=]TEST]..."
    argument = click.argument(
        "tests", metavar=metavar, nargs=-1, required=required, type=parse_store
    )
    return lambda command: argument(distinct_labels(command, "tests"))


random_baseline_option = click.option(
    "--baseline",
    "baselines",
    type=click.Choice(["random"]),
    multiple=True,
    help="Add the rows of Gaussian features of the same shape.  [default: none]",
)

per_class_option = click.option("--per-class", is_flag=True, help="Add top1_class of each class.")

allow_shared_option = click.option(
    "--allow-shared",
    is_flag=True,
    help="Go on where the same image trains and tests.  [default: refuse]",
)
