"""vitsee study: from models and images to a report."""

from __future__ import annotations

from pathlib import Path

import click

from vitsee_cli import options
from vitsee_cli.sections import STORES
from vitsee_cli.studies import dry_run_option, named, run_study
from vitsee_cli.values import parse_folder, parse_words

QUESTION = STORES


@click.command()
@click.argument("models", metavar="[NAME=]MODEL...", nargs=-1, required=True, type=parse_words)
@click.option(
    "--data",
    metavar="DATA",
    required=True,
    type=parse_words,
    help="The images, as for vitsee extract --data.",
)
@click.option(
    "--train",
    metavar="DATA",
    type=parse_words,
    help="Other images of the same classes, that probes and neighbours learn from.  "
    "[default: none; probes then hold out a share of the images]",
)
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    required=True,
    type=parse_folder,
    help="Where stores, results, report.html and study.json go.",
)
@click.option(
    "--images",
    metavar="N",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Images of each, the same in every store.",
)
@click.option(
    "--train-images",
    metavar="N",
    type=click.IntRange(min=1),
    help="Images of --train to learn from; of these only pooled vectors are kept.  "
    "[default: as many as --images]",
)
@click.option(
    "--analyses",
    metavar="NAME",
    multiple=True,
    help="Only this analysis. Repeatable.  [default: all that apply]",
)
@click.option(
    "--skip", metavar="NAME", multiple=True, help="Not this one. Repeatable.  [default: none]"
)
@options.seed_option
@options.device_option
@dry_run_option
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    data: str,
    train: str | None,
    output: Path,
    images: int,
    train_images: int | None,
    analyses: tuple[str, ...],
    skip: tuple[str, ...],
    seed: int,
    device: str,
    dry_run: bool,
) -> None:
    """Study models on images, from extraction to a report.

    Each model is run once over the images and keeps what the analyses need; every analysis that
    applies is run, and the report shows it all. What does not apply is named with the reason, and
    the size and time of the extraction are said first. Repeat the command to go on: finished steps
    whose inputs are unchanged are not done again; a step that fails does not stop the others.

    \b
      $ vitsee study vit_base_patch16_224 resnet50 --data imagenet/val --train imagenet/train -o out
      $ vitsee study a=vit_small_patch16_224.dino mae=vit_base_patch16_224.mae --data photos -o out
      $ vitsee study resnet50 --data photos -o out --analyses cka --analyses erf
      $ vitsee study vit_large_patch16_224 --data photos -o out --dry-run > steps.sh

    FOLDER gets stores/NAME.zarr, results/COMMAND[-VARIANT].csv and .png, report.html and
    study.json, which says of each step what it was made from and how it ended. A file there that
    this study did not write is refused, never replaced.
    """
    from vitsee_core.study.steps import Study

    if train_images is not None and train is None:
        raise click.UsageError("--train-images says how many images of --train: give that too")
    study = Study(output, named(models), data, train, images, seed, device, analyses, skip,
                  train_images=train_images)  # fmt: skip
    run_study(ctx, study, dry_run=dry_run)
