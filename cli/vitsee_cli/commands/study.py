"""vitsee study: from models and images to a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vitsee_cli import options
from vitsee_cli.checkpoint_study import CheckpointStudy, run_checkpoints
from vitsee_cli.declared import Listed, a_number, complete_from, model_names
from vitsee_cli.sections import STORES
from vitsee_cli.studies import (
    dry_run_option,
    jobs_option,
    models_by_label,
    run_recipe,
    run_study,
)
from vitsee_cli.study_settings import file_option, settings
from vitsee_cli.values import parse_folder, parse_size, parse_words
from vitsee_core.runtime.registry import names
from vitsee_core.runtime.stability import experimental

if TYPE_CHECKING:
    from vitsee_core.study.steps import Study

QUESTION = STORES


def analysis_names() -> list[str]:
    """Return the names that --analyses and --skip accept; no analysis is imported."""
    return [*(name.replace("_", "-") for name in names()), "explore"]


def models_and_recipes() -> list[str]:
    """Return recipes and models, for completion of the first argument."""
    from vitsee_core.study.recipe_file import bundled_recipes

    return [*bundled_recipes(), *model_names()]


@click.command()
@click.argument(
    "models",
    metavar="RECIPE|[NAME=]MODEL[?OPTION=VALUE]...",
    nargs=-1,
    required=True,
    type=parse_words,
    shell_complete=complete_from(models_and_recipes),
)
@file_option
@click.option(
    "--data",
    metavar="DATA",
    type=parse_words,
    help="The images, as for vitsee extract --data. Of a recipe: the folder in which its "
    "sets of images are, or NAME=FOLDER,NAME=FOLDER.  [default: none; only a recipe's "
    "--quick takes none]",
)
@click.option(
    "--models",
    "recipe_models",
    metavar="NAME[=MODEL]",
    cls=Listed,
    help="Of a recipe: only this store's model, or this one in its place. Repeatable.  "
    "[default: all of the recipe]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Of a recipe: the bundled models and images in place of its own.  [default: its "
    "own]",
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
@a_number(
    "--images",
    default=2000,
    show_default=True,
    help="Images of each, the same in every store.",
)
@a_number(
    "--train-images",
    help="Images of --train to learn from; of these only pooled vectors are kept.  "
    "[default: as many as --images]",
)
@click.option(
    "--analyses",
    metavar="NAME",
    cls=Listed,
    shell_complete=complete_from(analysis_names),
    help="Only this analysis. Repeatable.  [default: all that apply]",
)
@click.option(
    "--skip",
    metavar="NAME",
    cls=Listed,
    shell_complete=complete_from(analysis_names),
    help="Not this one. Repeatable.  [default: none]",
)
@click.option(
    "--set",
    "set_texts",
    metavar="ANALYSIS.OPTION=VALUE",
    multiple=True,
    help="An option of an analysis, or of extract, as cka.batch=512, "
    "saliency.masks=masks, extract.precision=bf16. Repeatable.  [default: as a study "
    "chooses]",
)
@click.option(
    "--checkpoints",
    metavar="GLOB",
    help=experimental(
        "Of one model: its weights over a training, in quotes, as 'run/step_*.pt'; each "
        "is a step of every table. The step is read from the name, else from the file.  "
        "[default: none]"
    ),
)
@click.option(
    "--keep",
    type=click.Choice(("tables", "stores")),
    default="tables",
    show_default=True,
    help="With --checkpoints: remove each store once its results are there, or keep all.",
)
@click.option(
    "--control",
    is_flag=True,
    help="Add an untrained twin of each model, NAME-untrained.  [default: none]",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Keep the sites of all the papers' figures: norms, hidden layers and branches "
    "too, which takes several times as much disk.  [default: the blocks' outputs]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    type=parse_size,
    help="Memory for each analysis to stay within, e.g. 4G; it says how many run at a "
    "time, too.  [default: a quarter of the machine's]",
)
@jobs_option
@options.seed_option
@options.device_option
@dry_run_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Study models or a paper's figures: images to a report.

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
      $ vitsee study raghu2021 --data datasets -o raghu
      $ vitsee study walmer2023 --quick -o walmer
      $ vitsee study vit=vit_small_patch16_224 --checkpoints 'run/step_*.pt' --data photos -o out

    RECIPE is dosovitskiy2021, raghu2021 or walmer2023, the figures of a paper in its order,
    registers or heads, interventions with their controls, clips, what video models see in time,
    towers, what the projectors of vision-language models lose, miniatures, or a file.toml of your
    own. Figures whose images are not there are left out with the reason.
    Options of a model stand behind its name: those of extract that decide weights and input.
    FOLDER gets stores/NAME.zarr, results/COMMAND[-VARIANT].csv (.parquet for the large tables of
    pixels, patches and histograms) and .png, report.html, explore.html and study.json, which says
    of each step what it was made from and how it ended. A file there that this study did not write
    is refused, never replaced.
    """
    # Imported here: --help and completion load no part of the core that they do not need.
    from vitsee_core.study.recipe_file import bundled_recipes, is_recipe

    request = _Request(**values)
    recipes = [name for name in request.models if is_recipe(name)]
    if recipes:
        # One recipe at most, which _study_recipe checks.
        _study_recipe(ctx, request, recipes[0])
        return
    # Options that only one kind of study has are refused in the others, not ignored.
    if request.quick or request.recipe_models:
        word = "--quick" if request.quick else "--models"
        raise click.UsageError(f"{word} is of a recipe: {', '.join(bundled_recipes())}")
    if request.data is None:
        raise click.UsageError(
            "--data DATA is missing: the images to run the models over"
        )
    if request.train_images is not None and request.train is None:
        raise click.UsageError(
            "--train-images says how many images of --train: give that too"
        )
    if request.checkpoints is not None:
        _study_checkpoints(ctx, request, request.data, request.checkpoints)
    else:
        _study_models(ctx, request, request.data)


class _Request(NamedTuple):
    """The values of the command's options; `models` are the words of its argument."""

    models: tuple[str, ...]
    data: str | None
    recipe_models: tuple[str, ...]  # --models
    quick: bool
    train: str | None
    output: Path
    images: int
    train_images: int | None
    analyses: tuple[str, ...]
    skip: tuple[str, ...]
    set_texts: tuple[str, ...]  # --set
    checkpoints: str | None
    keep: str
    control: bool
    thorough: bool
    memory: int | None
    jobs: int | None
    seed: int
    device: str
    dry_run: bool

    def make_study(self, ctx: click.Context, **fields: Any) -> Study:
        """Return the study, with the options that models and recipes share and these fields."""
        from vitsee_core.study.planning import study_analyses
        from vitsee_core.study.steps import Study

        return Study(
            self.output,
            seed=self.seed,
            device=self.device,
            analyses=self.analyses,
            skip=self.skip,
            settings=settings(self.set_texts, self.memory, ctx, study_analyses()),
            **fields,
        )


def _study_recipe(ctx: click.Context, request: _Request, name: str) -> None:
    """Run the study that a recipe describes.

    Raises:
        click.UsageError: the recipe is not alone, or decides an option that was typed.
    """
    from vitsee_core.study.recipe_file import read_recipe

    if len(request.models) > 1:
        raise click.UsageError(f"{name} is a recipe: give it alone, models by --models")
    _refuse_options_of_recipe(ctx, name, request.quick)
    recipe = read_recipe(name).with_models(request.recipe_models)
    # Recipes have numbers of images of their own, which the option's default must not
    # replace.
    if _is_typed(ctx, "images"):
        recipe = recipe.with_n_images(request.images)
    title = recipe.title
    data_folder = request.data
    if request.quick:
        recipe = recipe.with_demo_models()
        title = f"{title} (small models in their place)"
        # The demo's images come with the package.
        data_folder = None
    study = request.make_study(
        ctx,
        models={},
        data="",
        images=request.images,
        title=title,
        # What the recipe is, then what its study does not show.
        note=" ".join([recipe.note, recipe.left_out]).strip(),
    )
    run_recipe(
        ctx, study, recipe, data_folder, dry_run=request.dry_run, at_once=request.jobs
    )


def _study_checkpoints(
    ctx: click.Context, request: _Request, data: str, checkpoints: str
) -> None:
    """Run the study of a model's checkpoints.

    Raises:
        click.UsageError: an option has no meaning for checkpoints.
    """
    for name in ("skip", "set_texts", "control", "thorough", "memory", "jobs"):
        if _is_typed(ctx, name):
            option = "--set" if name == "set_texts" else f"--{name}"
            raise click.UsageError(f"{option} and --checkpoints exclude each other")
    study = CheckpointStudy(
        models=models_by_label(request.models),
        pattern=checkpoints,
        data=data,
        train=request.train,
        output=request.output,
        images=request.images,
        train_images=request.train_images,
        analyses=request.analyses,
        keep=request.keep,
        seed=request.seed,
        device=request.device,
    )
    run_checkpoints(ctx, study, dry_run=request.dry_run)


def _study_models(ctx: click.Context, request: _Request, data: str) -> None:
    """Run the study of the models that were typed.

    Raises:
        click.UsageError: --keep without checkpoints.
    """
    from vitsee_core.study.steps import with_controls

    if _is_typed(ctx, "keep"):
        raise click.UsageError("--keep is of --checkpoints GLOB: give that too")
    models = models_by_label(request.models)
    if request.control:
        models = with_controls(models, request.seed)
    study = request.make_study(
        ctx,
        models=models,
        data=data,
        train=request.train,
        images=request.images,
        train_images=request.train_images,
        thorough=request.thorough,
    )
    run_study(ctx, study, dry_run=request.dry_run, at_once=request.jobs)


def _is_typed(ctx: click.Context, name: str) -> bool:
    """Return whether a parameter was typed, or stands in the file of --file."""
    # Also a value that equals the default counts as typed.
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _refuse_options_of_recipe(ctx: click.Context, recipe: str, quick: bool) -> None:
    """Refuse options that a recipe decides itself.

    Raises:
        click.UsageError: such an option was typed, or not exactly one of --data and --quick.
    """
    for name in ("train", "train_images", "checkpoints", "control", "thorough"):
        if _is_typed(ctx, name):
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{recipe} says itself what {option} would; leave that out"
            )
    # Both or neither.
    if quick == _is_typed(ctx, "data"):
        raise click.UsageError(
            f"{recipe} takes either --data FOLDER, in which its sets of images are, or "
            "--quick"
        )
