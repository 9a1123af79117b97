"""vitsee weights: first-layer filters and position embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import options
from vitsee_cli.values import StorePath, parse_store

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_core.results import Outputs, Table

WHAT = ("components", "filters", "positions")
SCALES = ("shared", "tile")


@click.command()
@click.argument("source", metavar="[NAME=]STORE|MODEL", shell_complete=parse_store.shell_complete)
@options.output_options
@click.option(
    "--what",
    multiple=True,
    type=click.Choice(WHAT),
    show_default="what the model has; filters up to 128",
    help="components: principal components of the first layer's filters; filters: these "
    "themselves; positions: similarity of position embeddings. Repeatable.",
)
@click.option(
    "--components",
    metavar="N",
    type=click.IntRange(min=1),
    default=28,
    show_default=True,
    help="Show the first N components; the table has the shares of variance of all.",
)
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(min=1),
    show_default="1, more beyond a million rows",
    help="Compare the position embeddings of every N-th row and column with all others.",
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="shared",
    show_default=True,
    help="Colours of the figure: one scale for all tiles, or each tile over its own range.",
)
@options.weight_options
@options.allow_partial_option
def command(source: str, outputs: Outputs, scale: str, **parameters: Any) -> None:
    """Show a model's first-layer filters and position embeddings.

    Principal components of the patch embedding's (or the first convolution's) filters and their
    shares of variance, the filters themselves where they are few, and the cosine similarity of
    every patch's position embedding with all others (Dosovitskiy et al. 2021, Figs. 7 left and
    centre, 9). No images are needed: of a MODEL these are its weights, of a STORE those of the
    model that made it. A path that exists is a store.

    \b
      $ vitsee weights demo:vit -o weights.csv --png weights.png
      $ vitsee weights b16.zarr --what positions --png positions.png > positions.csv
      $ vitsee weights vit_base_patch16_224 --img-size 384 --png resampled.png > resampled.csv

    The mean filter is subtracted, components have norm 1 and a positive largest weight. Position
    embeddings are those that the model adds at its input size, without class and register tokens.

    \b
    Columns: store, model, site (layer or tensor), metric and what applies of
      row, col                     pixel of a filter; cosine: a patch of the grid
      component, filter, channel   counted from 0
      other_row, other_col         cosine: the other patch
      value                        variance_share of a component, variance_cumulative of it
                                   and all before; cosine; weight of a component or filter
                                   at a pixel
    """
    from functools import partial

    from vitsee_cli.analysis import run_analysis
    from vitsee_core.analyses import weights

    draw = partial(weights.plot, scale=scale)
    of_model = ("checkpoint_key", "random_init", "img_size", "model_args")
    given = {name: parameters.pop(name) for name in of_model}
    if (store := _store(source)) is not None:
        if any(value not in (None, ()) for value in given.values()):
            raise click.UsageError(
                f"{store.path} is a store: --checkpoint-key, --random-init, --img-size and "
                "--model-arg are for a MODEL"
            )
        run_analysis(weights.run, draw, (store,), outputs, **parameters)
        return
    model = _model(source, parameters.pop("checkpoint"), **given)
    run_analysis(_run_model, draw, (), outputs, model=vars(model), **parameters)


def _store(text: str) -> StorePath | None:
    """The store that this names: what exists, or looks like a path and is to be missed as one."""
    store = parse_store(text)
    named = text.endswith(".zarr") or (store.path.is_absolute() and ":" not in text)
    return store if store.path.exists() or named else None


def _model(name: str, checkpoint: Path | None, model_args: Any, **given: Any) -> ModelOptions:
    from vitsee_core.extraction.options import ModelOptions

    own = {"checkpoint": checkpoint, **given}
    options.check_weight_options(own)
    return ModelOptions(name=name, model_args=dict(model_args), **own)


def _run_model(*, model: dict[str, Any], **parameters: Any) -> Table:
    from vitsee_core.analyses import weights
    from vitsee_core.models import load_model

    return weights.run(load_model(**model), **parameters)
