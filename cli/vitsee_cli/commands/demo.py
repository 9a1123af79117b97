"""`vitsee demo`: the study of the models, images and miniature sets that ship with vitsee."""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli.sections import STORES
from vitsee_cli.studies import dry_run_option, run_study
from vitsee_cli.values import parse_folder

QUESTION = STORES


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=parse_folder,
    default="demo-out",
    show_default=True,
    help="Where stores, tables, pictures and the report go.",
)
@click.option(
    "--quick", is_flag=True, help="Two models and fewer images.  [default: every command, once]"
)
@dry_run_option
@click.pass_context
def command(ctx: click.Context, output: Path, quick: bool, dry_run: bool) -> None:
    """Run vitsee on its own models and images.

    A study of the demo's models, trained on Fashion-MNIST, over its test images, and of miniature
    sets of videos, keypoints, buildings and objects; at its end stands the path of the report, to
    be opened in a browser. Offline; some minutes on two cores. Repeat the command to go on.

    \b
      vitsee demo --quick
      vitsee demo -o /tmp/demo
    """
    from vitsee_core.study.demo import demo_study, with_sets

    run_study(
        ctx,
        demo_study(output, quick=quick),
        dry_run=dry_run,
        extend=lambda study, plan: with_sets(study, plan, quick=quick),
    )
