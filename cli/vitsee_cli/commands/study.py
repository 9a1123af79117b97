"""vitsee study: from models and images to a report."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import click

from vitsee_cli import options
from vitsee_cli.completion import model_names, one_of
from vitsee_cli.listed import Listed
from vitsee_cli.sections import STORES
from vitsee_cli.studies import dry_run_option, named, run_study
from vitsee_cli.study_settings import file_option, settings
from vitsee_cli.values import WholeNumber, parse_folder, parse_size, parse_words
from vitsee_core import analyses as room

QUESTION = STORES


def analysis_names() -> list[str]:
    """Names that --analyses and --skip accept; no analysis is imported."""
    names = [module.name.replace("_", "-") for module in pkgutil.iter_modules(room.__path__)]
    return [*names, "explore"]


@click.command()
@click.argument(
    "models",
    metavar="[NAME=]MODEL[?OPTION=VALUE]...",
    nargs=-1,
    required=True,
    type=parse_words,
    shell_complete=one_of(model_names),
)
@file_option
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
    type=WholeNumber(min=1),
    default=2000,
    show_default=True,
    help="Images of each, the same in every store.",
)
@click.option(
    "--train-images",
    metavar="N",
    type=WholeNumber(min=1),
    help="Images of --train to learn from; of these only pooled vectors are kept.  "
    "[default: as many as --images]",
)
@click.option(
    "--analyses",
    metavar="NAME",
    cls=Listed,
    shell_complete=one_of(analysis_names),
    help="Only this analysis. Repeatable.  [default: all that apply]",
)
@click.option(
    "--skip",
    metavar="NAME",
    cls=Listed,
    shell_complete=one_of(analysis_names),
    help="Not this one. Repeatable.  [default: none]",
)
@click.option(
    "--set",
    "given",
    metavar="ANALYSIS.OPTION=VALUE",
    multiple=True,
    help="An option of an analysis, or of extract, as cka.batch=512, saliency.masks=masks, "
    "extract.precision=bf16. Repeatable.  [default: as a study chooses]",
)
@click.option(
    "--control",
    is_flag=True,
    help="Add an untrained twin of each model, NAME-untrained.  [default: none]",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Keep the sites of all the papers' figures: norms, hidden layers and branches too, which "
    "takes several times as much disk.  [default: the blocks' outputs]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    type=parse_size,
    help="Memory for each analysis to stay within, e.g. 4G.  [default: a quarter of the machine's]",
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
    given: tuple[str, ...],
    control: bool,
    thorough: bool,
    memory: int | None,
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
      $ vitsee study mae='vit_base_patch16_224?checkpoint=mae.pth' --control --data photos -o out
      $ vitsee study --file study.toml -o out --set cka.batch=512

    Options of a model stand behind its name: those of extract that decide weights and input.
    FOLDER gets stores/NAME.zarr, results/COMMAND[-VARIANT].csv and .png, report.html, explore.html
    and study.json, which says of each step what it was made from and how it ended. A file there
    that this study did not write is refused, never replaced.
    """
    from vitsee_core.study.planning import known_analyses
    from vitsee_core.study.steps import Study, with_controls

    if train_images is not None and train is None:
        raise click.UsageError("--train-images says how many images of --train: give that too")
    chosen = with_controls(named(models), seed) if control else named(models)
    study = Study(output, chosen, data, train, images, seed, device, analyses, skip,
                  train_images=train_images, thorough=thorough,
                  settings=settings(given, memory, ctx, known_analyses()))  # fmt: skip
    run_study(ctx, study, dry_run=dry_run)
