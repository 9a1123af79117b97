"""Options of the commands that build a model: which one, and with which weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli.data_options import recompute_data_option
from vitsee_cli.options import Decorator, apply, device_option
from vitsee_cli.values import (
    SEED,
    parse_floats,
    parse_fraction,
    parse_image_size,
    parse_model_arg,
    parse_path,
    parse_positive_floats,
)

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions


def model_options(command: Any) -> Any:
    """MODEL and the options that decide its weights and input, as `model`: a ModelOptions."""

    @functools.wraps(command)
    def gathered(*args: Any, model_name: str, model_args: Any, **kwargs: Any) -> Any:
        from vitsee_core.extraction.options import ModelOptions

        fields = ("checkpoint", "checkpoint_key", "random_init", "img_size", "img_mean", "img_std")
        own = {field: kwargs.pop(field) for field in (*fields, "crop_pct", "crop_mode", "fill")}
        check_weight_options(own)
        options: ModelOptions = ModelOptions(name=model_name, model_args=dict(model_args), **own)
        return command(*args, model=options, **kwargs)

    return apply(gathered, _MODEL_OPTIONS)


def check_weight_options(given: Mapping[str, Any]) -> None:
    """Refuse options of weights that exclude each other, by click's names of their parameters."""
    if given["checkpoint"] is not None and given["random_init"] is not None:
        raise click.UsageError("--checkpoint and --random-init exclude each other")
    if given["checkpoint"] is None and given["checkpoint_key"] is not None:
        raise click.UsageError("--checkpoint-key chooses within a file: give --checkpoint too")


_WEIGHT_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--checkpoint",
        metavar="FILE",
        type=parse_path,
        help="Weights from a .pth, .pt or .safetensors file.  [default: timm's pretrained ones]",
    ),
    click.option(
        "--checkpoint-key",
        metavar="KEY",
        help="Which weights of FILE, e.g. model_ema, teacher.  [default: the ones its authors "
        "evaluate, averaged ones only if there are no others; the choice is logged]",
    ),
    click.option(
        "--random-init",
        metavar="SEED",
        type=SEED,
        help="Random weights drawn with SEED: a control.  [default: trained weights]",
    ),
    click.option(
        "--img-size",
        metavar="SIZE",
        type=parse_image_size,
        show_default="the model's own",
        help="Input size in pixels, 224 or HEIGHTxWIDTH; position tables are resampled.",
    ),
)

_MODEL_ARG_OPTION: Decorator = click.option(
    "--model-arg",
    "model_args",
    metavar="KEY=VALUE",
    multiple=True,
    type=parse_model_arg,
    help="Passed to timm's create_model, e.g. dynamic_img_size=true. Repeatable.  [default: none]",
)

_MODEL_OPTIONS: tuple[Decorator, ...] = (
    click.argument("model_name", metavar="MODEL"),
    *_WEIGHT_OPTIONS,
    click.option(
        "--img-mean",
        metavar="MEAN",
        type=parse_floats,
        show_default="the model's own",
        help="Mean of the normalisation, e.g. 0.5,0.5,0.5.",
    ),
    click.option(
        "--img-std",
        metavar="STD",
        type=parse_positive_floats,
        show_default="the model's own",
        help="Standard deviation of the normalisation.",
    ),
    click.option(
        "--crop-pct",
        metavar="FRACTION",
        type=parse_fraction,
        show_default="the model's own",
        help="Part of the resized image's side that the centre crop keeps, e.g. 0.9.",
    ),
    click.option(
        "--crop-mode",
        type=click.Choice(["center", "squash", "border"]),
        show_default="the model's own",
        help="How images of other proportions come to the input: center cuts the ends of the "
        "long side, squash distorts, border fills up the short side; for whole images with "
        "--crop-pct 1.",
    ),
    click.option(
        "--fill",
        type=click.Choice(["mean", "black"]),
        help="What --crop-mode border lays around an image.  [default: mean]",
    ),
    _MODEL_ARG_OPTION,
)


def weight_options(command: Any) -> Any:
    """Those of `model_options` that decide a model's weights, as click gives them: `checkpoint`,
    `checkpoint_key`, `random_init`, `img_size`, `model_args`."""
    return apply(command, (*_WEIGHT_OPTIONS, _MODEL_ARG_OPTION))


def recompute_options(command: Any) -> Any:
    """From where to recompute what a store lacks: `data`, `checkpoint`, `trust_store`,
    `device`."""
    return apply(command, _RECOMPUTE_OPTIONS)


def rebuild_options(command: Any) -> Any:
    """From where to build a store's model again: `checkpoint`, `trust_store`."""
    return apply(command, _REBUILD_OPTIONS)


_REBUILD_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--checkpoint",
        metavar="FILE",
        type=parse_path,
        help="Where the weights are now, where the store's model is needed again.  "
        "[default: where extract read them]",
    ),
    click.option(
        "--trust-store",
        is_flag=True,
        help="For your own store: take its model from the folder or the hub that it names.  "
        "[default: only timm's models and files that this machine has, no network]",
    ),
)
_RECOMPUTE_OPTIONS: tuple[Decorator, ...] = (
    recompute_data_option,
    *_REBUILD_OPTIONS,
    device_option,
)
