"""vitsee weights: first-layer filters and position embeddings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import Listed, a_number
from vitsee_cli.model_options import check_weight_options, weight_options
from vitsee_cli.sections import KNOWLEDGE
from vitsee_cli.values import StorePath, parse_store
from vitsee_core.analyses import weights
from vitsee_core.analyses.weights.weights_figure import SCALES
from vitsee_stores.url import Url

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_core.models.loaded import LoadedModel
    from vitsee_core.pages.report.outputs import Outputs
    from vitsee_core.runtime.progress import Progress
    from vitsee_core.tables.results import Table
    from vitsee_stores import Store

QUESTION = KNOWLEDGE


@click.command()
@options.defaults_of(weights.run, weights.plot)
@click.argument(
    "sources",
    metavar="[NAME=]STORE|MODEL[?OPTION=VALUE]...",
    nargs=-1,
    required=True,
    shell_complete=parse_store.shell_complete,
)
@options.output_options
@click.option(
    "--what",
    cls=Listed,
    type=click.Choice(weights.WHAT),
    show_default="what the model has; filters up to 128",
    help="components: principal components of the first layer's filters; filters: these "
    "themselves; positions: similarity of position embeddings. Repeatable.",
)
@a_number(
    "--components",
    help="Show the first N components; the table has the shares of variance of all.",
)
@a_number(
    "--query-stride",
    show_default="1, more beyond a million rows",
    help="Compare the position embeddings of every N-th row and column with all others.",
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    help="Colours of the figure: one scale for all tiles, or each tile over its own "
    "range.",
)
@weight_options
@options.allow_partial_option
def command(
    sources: tuple[str, ...], outputs: Outputs, scale: str, **parameters: Any
) -> None:
    """Show models' first-layer filters and position embeddings.

    Principal components of the patch embedding's (or the first convolution's) filters and their
    shares of variance, the filters themselves where they are few, and the cosine similarity of
    every patch's position embedding with all others (Dosovitskiy et al. 2021, Figs. 7 left and
    centre, 9). No images are needed: a MODEL gives its weights, a STORE those of the model that
    made it. A path that exists is a store, and so is a URL. Options of the weights are for
    MODELs: --checkpoint for the only one, the others for each; those in a MODEL's name are its own.

    \b
      $ vitsee weights demo:vit -o weights.csv --png weights.png
      $ vitsee weights b16.zarr --what positions --png positions.png > positions.csv
      $ vitsee weights b16.zarr dino.zarr --what components --png both.png > both.csv
      $ vitsee weights demo:vit 'demo:vit?random-init=0' -o trained.csv --png trained.png
      $ vitsee weights vit_base_patch16_224 --img-size 384 --png resampled.png > resampled.csv

    The mean filter is subtracted, components have norm 1 and a positive largest weight. Position
    embeddings are those that the model adds at its input size, without class and register tokens.

    \b
    Columns: store, model, weights, site (layer or tensor), metric and what applies of
      row, col                     pixel of a filter; cosine: a patch of the grid
      component, filter, channel   counted from 0
      other_row, other_col         cosine: the other patch
      value                        variance_share of a component, variance_cumulative of it
                                   and all before; cosine; weight of a component or filter
                                   at a pixel
    """
    # `run_analysis` opens the stores alone, and `_run_in_order` loads the models; `kinds` keeps
    # the order in which they were typed, which is that of the table's rows.
    stores = []
    model_names = []
    kinds = []  # "store" or "model"
    for text in sources:
        store = _store_path(text)
        if store is None:
            kinds.append("model")
            model_names.append(text)
        else:
            kinds.append("store")
            stores.append(store)
    weight_options = {name: parameters.pop(name) for name in _MODEL_PARAMETERS}
    _refuse_misplaced_options(model_names, weight_options)
    models = [vars(_model_options(name, **weight_options)) for name in model_names]
    run_analysis(
        partial(_run_in_order, kinds),
        weights.ANALYSIS.draw,
        tuple(stores),
        outputs,
        models=models,
        drawing={"scale": scale},
        **parameters,
    )


_MODEL_PARAMETERS = (
    "checkpoint",
    "checkpoint_key",
    "weights_size",
    "resample_patches",
    "random_init",
    "img_size",
    "model_args",
)


def _refuse_misplaced_options(models: list[str], weight_options: dict[str, Any]) -> None:
    """Refuse options of weights if no MODEL is given, or several are where one is meant.

    Raises:
        click.UsageError: names the options.
    """
    used = []
    for name, value in weight_options.items():
        # By identity: the seed 0 of --random-init equals False.
        is_unset = value is None or value is False or value == ()
        if not is_unset:
            flag = (
                "--model-arg" if name == "model_args" else f"--{name.replace('_', '-')}"
            )
            used.append(flag)
    if used and not models:
        raise click.UsageError(
            f"{', '.join(used)}: for a MODEL, and there are stores only"
        )
    if len(models) > 1 and weight_options["checkpoint"] is not None:
        raise click.UsageError(f"--checkpoint is for one MODEL; here are {len(models)}")
    check_weight_options(weight_options)


def _store_path(text: str) -> StorePath | None:
    """Return the store that an argument names; None if it is the name of a model.

    A store is a path that exists, or that looks like one and is then reported as missing.
    """
    store: StorePath = parse_store(text)
    if isinstance(store.place, Url):
        return store
    looks_like_path = text.endswith(".zarr")
    looks_like_path = looks_like_path or (store.place.is_absolute() and ":" not in text)
    if store.place.exists() or looks_like_path:
        return store
    return None


def _model_options(name: str, model_args: Any, **weight_options: Any) -> ModelOptions:
    """Return the options of a model: those in its name win over the command line's."""
    from vitsee_core.extraction.options import ModelOptions, options_in_name

    name, options_of_name = options_in_name(name)
    options = {**weight_options, **options_of_name}
    check_weight_options(options)
    options["model_args"] = {
        **dict(model_args),
        **options_of_name.get("model_args", {}),
    }
    return ModelOptions(name=name, **options)


def _run_in_order(
    kinds: list[str],
    *stores: Store,
    models: list[dict[str, Any]],
    progress: Progress,
    keep: object = None,
    **parameters: Any,
) -> Table:
    """Run the analysis over stores and models in the order in which they were typed.

    Args:
        kinds: "store" or "model" of each source.
        stores: the opened stores, in their order.
        models: keywords of `load_model` for each model, in their order.
        progress: counts sources.
        keep: not used: this takes seconds.
        parameters: keywords of the analysis.
    """
    from vitsee_core.runtime.progress import counting

    remaining_stores = iter(stores)
    remaining_models = iter(models)
    sources: list[Any] = []
    with counting(progress, len(kinds), "sources"):
        for kind in kinds:
            if kind == "store":
                sources.append(next(remaining_stores))
            else:
                sources.append(_load_with_notes(next(remaining_models)))
            progress.advance(1)
    return weights.run(*sources, **parameters)


def _load_with_notes(model: dict[str, Any]) -> LoadedModel:
    """Load a model, and show the warnings about its weights. model: keywords of `load_model`."""
    from vitsee_core.models.load import load_model

    loaded = load_model(**model)
    for note in loaded.notes():
        console.warn(note)
    return loaded
