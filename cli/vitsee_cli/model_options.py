"""Options of commands that build a model or read images.

They choose the model, its weights and the images, and say where a store's images are now.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli.declared import a_file, a_number, complete_from, model_names
from vitsee_cli.options import Decorator, add_options, device_option, together
from vitsee_cli.values import (
    SEED,
    WholeNumber,
    parse_floats,
    parse_fraction,
    parse_image_size,
    parse_model_arg,
    parse_positive_floats,
    parse_words,
)
from vitsee_core.images.selection import ORDERS
from vitsee_core.runtime.stability import experimental
from vitsee_stores.errors import VitseeError
from vitsee_stores.plan import TIMES

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions

# Images and their order: the fields of a DataOptions.
data_options = together(
    [
        click.option(
            "--data",
            required=True,
            metavar="DATA",
            help="Folder of images (with --frames of videos, or of folders of frames), "
            ".csv, .tsv or .txt list, .npz, .zip, .tar or .parquet files "
            "('shards/in1k-{0000..0063}.tar', 'data/*.parquet'), folders and files at "
            "s3://, gs://, az://, https:// or hf://datasets/OWNER/NAME, "
            "torch/NAME[:FOLDER] (torchvision's, in FOLDER), hfds/NAME[:CACHE] (Hugging "
            "Face's, cached in CACHE), demo:train or demo:test.",
        ),
        click.option(
            "--label-key",
            metavar="KEY",
            type=parse_words,
            help="Of .tar files: where an image's label is, cls or txt for that file "
            "beside it, else a field of its .json; none for no labels.  [default: .cls, "
            "else label, cls or class of .json, else .txt if a number]",
        ),
        click.option(
            "--image-column",
            metavar="COLUMN",
            type=parse_words,
            help="Of .parquet files: the column of images.  [default: the only one]",
        ),
        click.option(
            "--label-column",
            metavar="COLUMN",
            type=parse_words,
            help="Of .parquet files: the column of labels, numbers or names; none for no "
            "labels.  [default: label, labels, fine_label, cls or class]",
        ),
        click.option(
            "--split",
            metavar="SPLIT",
            help="Part of the data: train, 'train[:45000]', 'test[10%:20%]', train+test.  "
            "[default: all]",
        ),
        a_number(
            "--images",
            help="Take N images: the first of the order.  [default: all]",
        ),
        click.option(
            "--per-class",
            metavar="K",
            type=WholeNumber(min=1),
            help="Take K images of every class.  [default: all]",
        ),
        a_file(
            "--only",
            help="Choose from the images that FILE names, one a line: ids with or "
            "without ending, folders of them, or names of files.  [default: all]",
        ),
        click.option(
            "--seed",
            metavar="SEED",
            type=SEED,
            help="Seed of the order.  [default: 0]",
        ),
        click.option(
            "--order",
            type=click.Choice(ORDERS),
            help="Order of the images in the store.  [default: shuffled]",
        ),
        click.option(
            "--exif",
            is_flag=True,
            default=None,
            help="Turn images upright by the EXIF orientation in their files; boxes and "
            "masks are then in the pixels of the upright image.  [default: pixels as "
            "they are in the file]",
        ),
        a_number(
            "--short-side",
            help="No crop: resize each image so that its short side has N pixels, and "
            "its long side, in proportion, a multiple of M.  [default: bring every image "
            "to the model's input]",
        ),
        click.option(
            "--multiple",
            metavar="M",
            type=WholeNumber(min=1),
            help="Of --short-side.  [default: the model's patch]",
        ),
        a_number(
            "--frames",
            help=experimental(
                "DATA has clips (videos, or folders of frames): take N frames of each, "
                "evenly spread; an image model sees them one by one.  [default: of a "
                "model of clips its own number]"
            ),
        ),
        click.option(
            "--every",
            metavar="K",
            type=WholeNumber(min=1),
            help=experimental(
                "Of clips: take each K-th frame, around the middle of the clip.  "
                "[default: evenly spread]"
            ),
        ),
        click.option(
            "--time",
            type=click.Choice(TIMES),
            help=experimental(
                "Of clips: frames in order, shuffled, or the middle one N times (still): "
                "what is in both is no matter of time.  [default: ordered]"
            ),
        ),
        click.option(
            "--tiles",
            is_flag=True,
            help="Of --short-side: run the model on tiles of its own input size and put "
            "their tokens into one grid per image; images may differ in size.",
        ),
        click.option(
            "--native",
            is_flag=True,
            help=experimental(
                "Of towers of vision-language models: bring each image to the size that "
                "the model's own image processor gives it, in its own proportions, with "
                "a grid of its own."
            ),
        ),
        a_number(
            "--min-pixels",
            help=experimental(
                "Of --native: enlarge images of fewer pixels.  [default: the image "
                "processor's]"
            ),
        ),
        a_number(
            "--max-pixels",
            help=experimental(
                "Of --native: shrink images of more pixels.  [default: the image "
                "processor's]"
            ),
        ),
    ],
)

recompute_data_option = click.option(
    "--data",
    metavar="DATA",
    type=parse_words,
    help="Where the images are now, for what has to be recomputed.  [default: where "
    "extract read them]",
)


# Entry of the click context: (key, value) of the arguments in the model's name.
_NAME_ARGUMENTS = f"{__name__}.arguments"


def model_options(command: Any) -> Any:
    """Add MODEL and the options that decide its weights and input.

    The command gets them as `model`, a ModelOptions.
    """

    @functools.wraps(command)
    def gather_and_call(*args: Any, **kwargs: Any) -> Any:
        """Call the command with `model` in place of the options that it is made from."""
        values = {name: kwargs.pop(name) for name in OPTION_NAMES}
        values["model_name"] = kwargs.pop("model_name")
        return command(*args, model=make_model_options(values), **kwargs)

    return add_options(gather_and_call, _MODEL_OPTIONS)


def make_model_options(values: Mapping[str, Any]) -> ModelOptions:
    """Return the ModelOptions of a command line.

    Args:
        values: click's values by the names of parameters. Arguments in the model's name are taken
            from the current context, where the name that was parsed last left them.

    Raises:
        click.UsageError: options of weights exclude each other.
    """
    from vitsee_core.extraction.options import ModelOptions

    check_weight_options(values)
    fields = {name: values[name] for name in OPTION_NAMES}
    # Options win over arguments in the name.
    model_args = dict(click.get_current_context().meta.get(_NAME_ARGUMENTS, ()))
    model_args.update(fields["model_args"])
    fields["model_args"] = model_args
    return ModelOptions(values["model_name"], **fields)


def _split_name(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Return MODEL of `MODEL?random-init=0`, click's callback of the argument.

    Options in the name become defaults of this command line. Anything else is an argument of the
    model, if models of its source take such (`model.py:build?depth=12`).

    Raises:
        click.BadParameter: an unknown option, or several values for one.
    """
    from vitsee_core.extraction.options import split_model
    from vitsee_core.models.sources import source_of

    try:
        name, options = split_model(text)
    except VitseeError as error:
        raise click.BadParameter(str(error)) from None
    # By the long name, as it stands in MODEL?random-init=0.
    known_options = {
        option.opts[0]: option
        for option in ctx.command.params
        if option.name in NAMED_OPTIONS
    }
    defaults: dict[str, Any] = {}
    arguments: list[tuple[str, Any]] = []
    for key, values in options.items():
        option = known_options.get(f"--{key}")
        # An unknown key is an argument where models take such; with several values it is
        # neither.
        if option is None and source_of(name).arguments_in_name and len(values) == 1:
            arguments.append(parse_model_arg(f"{key}={values[0]}"))
            continue
        if len(values) > 1 and (option is None or not option.multiple):
            raise click.BadParameter(f"{text!r}: {key} takes one value")
        if option is None:
            expected = ", ".join(word.removeprefix("--") for word in known_options)
            raise click.BadParameter(
                f"{text!r}: no option {key!r} of a model; expected {expected}"
            )
        defaults[str(option.name)] = values if option.multiple else values[0]
    # As click's defaults, so that an option on the command line wins and values are
    # parsed alike.
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    # Arguments have no parameter of click's that could carry them.
    ctx.meta[_NAME_ARGUMENTS] = arguments
    return name


def check_weight_options(values: Mapping[str, Any]) -> None:
    """Refuse options of weights that exclude each other.

    Args:
        values: click's values by the names of parameters.

    Raises:
        click.UsageError: names the options.
    """
    if values["checkpoint"] is not None and values["random_init"] is not None:
        raise click.UsageError("--checkpoint and --random-init exclude each other")
    if values["checkpoint"] is None and values["checkpoint_key"] is not None:
        raise click.UsageError(
            "--checkpoint-key chooses within a file: give --checkpoint too"
        )
    # Both change tables of trained weights, which random ones do not have.
    resamples = values["weights_size"] is not None or values["resample_patches"]
    if values["random_init"] is not None and resamples:
        raise click.UsageError(
            "--weights-size and --resample-patches are about trained weights; leave them "
            "out with --random-init"
        )


_WEIGHT_OPTIONS: tuple[Decorator, ...] = (
    a_file(
        "--checkpoint",
        help="Weights from a .pth, .pt or .safetensors file; a published layout brings "
        "its normalisation, of others it is assumed and logged.  [default: timm's "
        "pretrained ones]",
    ),
    click.option(
        "--checkpoint-key",
        metavar="KEY",
        help="Which weights of FILE, e.g. model_ema, teacher.  [default: the ones its "
        "authors evaluate, averaged ones only if there are no others; the choice is "
        "logged]",
    ),
    click.option(
        "--weights-size",
        metavar="SIZE",
        type=parse_image_size,
        help="Input size in pixels, 224 or HEIGHTxWIDTH, that the position table in "
        "trained weights is for.  [default: what the weights say, else square]",
    ),
    click.option(
        "--resample-patches",
        is_flag=True,
        help="Resample the patch embedding of weights with another patch size.  "
        "[default: they are refused]",
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
    help="An argument of the model: of timm's create_model (dynamic_img_size=true), of a "
    "file's function (depth=6). Repeatable.  [default: none]",
)

_MODEL_OPTIONS: tuple[Decorator, ...] = (
    click.argument(
        "model_name",
        metavar="MODEL[?OPTION=VALUE]",
        callback=_split_name,
        shell_complete=complete_from(model_names),
        is_eager=True,  # its options are defaults of the others
    ),
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
        help="How images of other proportions come to the input: center cuts the ends of "
        "the long side, squash distorts, border fills up the short side; for whole "
        "images with --crop-pct 1.",
    ),
    click.option(
        "--fill",
        type=click.Choice(["mean", "black"]),
        help="What --crop-mode border lays around an image.  [default: mean]",
    ),
    click.option(
        "--processor",
        type=click.Choice(["pil", "torchvision"]),
        show_default="as transformers chooses",
        help="What resizes in the image processor of a model of transformers; the pixels "
        "of the two differ by a level here and there.",
    ),
    click.option(
        "--transform",
        type=click.Choice(["timm"]),
        show_default="the model's own",
        help="vitsee's own way of resizing, which is timm's, in place of the image "
        "processor.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run the code of the model's repository, where transformers needs it; read "
        "it first.",
    ),
    _MODEL_ARG_OPTION,
)


# The options that decide a model's weights, for commands that take them one by one.
weight_options = together([*_WEIGHT_OPTIONS, _MODEL_ARG_OPTION])


# Names of the options' parameters: the fields of a ModelOptions but its name.
OPTION_NAMES = (
    "checkpoint",
    "checkpoint_key",
    "weights_size",
    "resample_patches",
    "random_init",
    "img_size",
    "img_mean",
    "img_std",
    "crop_pct",
    "crop_mode",
    "fill",
    "transform",
    "processor",
    "trust_remote_code",
    "model_args",
)
# Options that may stand in a model's name: those of the model, and of its forward pass.
NAMED_OPTIONS = (
    *OPTION_NAMES,
    "ablate_skip",
    "replace",
    "ablate_heads",
    "block_attention",
    "registers",
    "precision",
)


# For commands that recompute what a store lacks: `data`, `checkpoint`, `trust_store`, `device`.
recompute_options = together(
    [
        recompute_data_option,
        a_file(
            "--checkpoint",
            help="Where the weights are now, where the store's model is needed again.  "
            "[default: where extract read them]",
        ),
        click.option(
            "--trust-store",
            is_flag=True,
            help="For your own store: take its model from the folder or the hub that it "
            "names.  [default: only timm's models and files that this machine has, no "
            "network]",
        ),
        device_option,
    ],
)
