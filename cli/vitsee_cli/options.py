"""Every option that two commands share, once.

A command takes what it needs: `@options.stores_argument`, `@options.output_options`, ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console
from vitsee_cli.values import (
    TOKENS,
    StorePath,
    parse_device,
    parse_floats,
    parse_folder,
    parse_fraction,
    parse_image_size,
    parse_model_arg,
    parse_output,
    parse_path,
    parse_positive_floats,
    parse_size,
    parse_store,
    parse_words,
    token_parser,
)
from vitsee_core import machine
from vitsee_stores.selectors import GROUPS

if TYPE_CHECKING:
    from vitsee_core.extraction.options import ModelOptions
    from vitsee_stores.reader import Store

Decorator = Callable[[Any], Any]
VERBOSITY = "vitsee.verbosity"  # in the click context, shared by the group and its command


def apply(command: Any, decorators: Sequence[Decorator]) -> Any:
    """The command with these options, which its help lists in this order."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


# ---------------------------------------------------------------- every command


def verbosity(command: Any) -> Any:
    """-v and -q, on the group and on every command alike: the last one given counts."""

    def set_up(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[VERBOSITY] = 1 if param.name == "verbose" else -1
        # Every option's callback runs, the ones that were not given after the others.
        console.setup(ctx.meta.get(VERBOSITY, 0))

    shared: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": set_up}
    both = (
        click.option("-v", "--verbose", **shared, help="Say more on stderr; show tracebacks."),
        click.option("-q", "--quiet", **shared, help="Only warnings and errors on stderr."),
    )
    # A finished command appends options, a function collects them from the last to the first.
    for option in both if isinstance(command, click.Command) else reversed(both):
        command = option(command)
    return command


# ---------------------------------------------------------------- stores in, results out

store_argument = click.argument("store", metavar="STORE", type=parse_folder)

_stores_argument = click.argument(
    "stores", metavar="[NAME=]STORE...", nargs=-1, required=True, type=parse_store
)

allow_partial_option = click.option(
    "--allow-partial",
    is_flag=True,
    help="Read an unfinished store: its committed slabs only.  [default: refuse it]",
)


def stores_argument(command: Any) -> Any:
    """One or more stores, as `stores`: a tuple of StorePath with distinct labels."""

    @functools.wraps(command)
    def checked(*args: Any, stores: tuple[StorePath, ...], **kwargs: Any) -> Any:
        seen: dict[str, StorePath] = {}
        for store in stores:
            other = seen.setdefault(store.label, store)
            if other is not store:
                raise click.UsageError(
                    f"two stores are called {store.label!r}; "
                    f"name them: first={other.path} second={store.path}"
                )
        return command(*args, stores=stores, **kwargs)

    return _stores_argument(checked)


def open_stores(stores: Iterable[StorePath], *, allow_partial: bool = False) -> list[Store]:
    """The stores of the command line, opened in their order.

    Raises:
        StoreError: one of them is missing, foreign, damaged, or unfinished without allow_partial.
    """
    from vitsee_stores import open_store

    return [open_store(s.path, allow_partial=allow_partial, label=s.label) for s in stores]


force_option = click.option(
    "--force", is_flag=True, help="Overwrite existing output.  [default: refuse, before any work]"
)


_output_option = click.option(
    "-o",
    "--output",
    metavar="TABLE",
    type=parse_output,
    help="Write the table to TABLE, a .csv, .csv.gz, .tsv, .json or .parquet, and how it was made "
    "to TABLE.json.  [default: - , CSV on stdout]",
)

_png_option = click.option(
    "--png",
    metavar="FILE",
    type=parse_path,
    help="Draw the figure into FILE, a .png, .svg or .pdf.  [default: no figure]",
)


def output_options(command: Any) -> Any:
    """-o, --png and --force, together as `outputs`: an Outputs."""

    @functools.wraps(command)
    def gathered(*args: Any, output: Any, png: Any, force: bool, **kwargs: Any) -> Any:
        from vitsee_core.results import Outputs

        output = None if output == Path("-") else output
        return command(*args, outputs=Outputs(csv=output, png=png, force=force), **kwargs)

    return _output_option(_png_option(force_option(gathered)))


def table_options(command: Any) -> Any:
    """-o and --force of a command without a figure, together as `outputs`: an Outputs."""

    @functools.wraps(command)
    def gathered(*args: Any, output: Any, force: bool, **kwargs: Any) -> Any:
        from vitsee_core.results import Outputs

        output = None if output == Path("-") else output
        return command(*args, outputs=Outputs(csv=output, force=force), **kwargs)

    return _output_option(force_option(gathered))


# ---------------------------------------------------------------- what to look at


_PLACES = "first, last, stage:I, depth:F (0 to 1)"


def sites_option(*default: str, show_default: str | None = None) -> Decorator:
    """--sites, repeatable, as `sites`: a tuple of globs, groups and names.

    Args:
        default: what is taken without the option.
        show_default: the default in words, where these say more.
    """
    return click.option(
        "--sites",
        metavar="GLOB",
        multiple=True,
        default=default,
        show_default=show_default or " ".join(default),
        help=f"Sites by name, glob or group ({', '.join(GROUPS)}), or by place: {_PLACES}. "
        "blocks.-1.out counts from the end, !NAME leaves out. Repeatable, or a comma list.",
    )


def blocks_option(show_default: str, default: tuple[str, ...] = ("blocks",)) -> Decorator:
    """--sites of an analysis of whole blocks, repeatable, as `sites`."""
    return click.option(
        "--sites",
        metavar="BLOCK",
        multiple=True,
        default=default,
        show_default=show_default,
        help=f"Blocks by path or glob (blocks.0, 'blocks.1?'), or by place: {_PLACES}. blocks.-1 "
        "counts from the end, !BLOCK leaves out. Repeatable, or a comma list.",
    )


_TOKEN_WORDS = {
    "prefix": "class token and registers",
    "mean": "of the patches",
    "mean-all": "of all tokens",
    "rest": "mean of all but the first",
    "each": "one by one",
}


def tokens_option(
    default: str | None,
    choices: Iterable[str] = TOKENS,
    *,
    multiple: bool = False,
    show_default: str | None = None,
) -> Decorator:
    """--tokens of an analysis, as `tokens`: one word of `choices` or ROW,COL.

    Args:
        default: the word; None where the analysis decides (then say so in `show_default`).
        choices: the words that this analysis knows.
        multiple: take several; `tokens` is then a tuple.
        show_default: the default in words.
    """
    words = tuple(choices)
    listed = ", ".join(f"{w} ({_TOKEN_WORDS[w]})" if w in _TOKEN_WORDS else w for w in words)
    return click.option(
        "--tokens",
        metavar="TOKENS",
        multiple=True,
        default=(default,) if default else (),
        show_default=show_default or default or True,
        type=token_parser(words),
        callback=None if multiple else _one_value,
        help=f"Tokens: {listed}, or ROW,COL of the grid." + (" Repeatable." if multiple else ""),
    )


def _one_value(_ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The value of an option that is given once at most; of several, none is dropped unsaid."""
    if len(values) > 1:
        given = " and ".join(map(str, values))
        raise click.UsageError(f"{param.opts[0]} was given as {given}; it takes one value")
    return values[0] if values else None


# What makes an image's features one vector; `each` does not.
FEATURE_TOKENS = tuple(word for word in TOKENS if word != "each")


def side_option(side: str, which: str, show_default: str = "as --sites") -> Decorator:
    """--sites-a or --sites-b, repeatable, as `sites_a` or `sites_b`: sites of `which` only."""
    return click.option(
        f"--sites-{side}",
        metavar="GLOB",
        multiple=True,
        help=f"Sites of {which}. Repeatable.  [default: {show_default}]",
    )


images_option = click.option(
    "--images",
    metavar="N",
    type=click.IntRange(min=1),
    show_default="all",
    help="Use N images: the first rows of a shuffled store, a random sample of an ordered one.",
)

seed_option = click.option(
    "--seed",
    metavar="SEED",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of everything random.",
)


# ---------------------------------------------------------------- how to work

device_option = click.option(
    "--device",
    metavar="DEVICE",
    type=parse_device,
    default="auto",
    show_default=True,
    help="auto (a GPU if there is one), cpu, cuda, cuda:INDEX or mps.",
)

memory_option = click.option(
    "--memory",
    metavar="SIZE",
    type=parse_size,
    default=lambda: machine.memory_bytes() // 4,
    show_default="a quarter of the machine's memory",
    help="Memory to stay within, e.g. 4G or 512M.",
)

jobs_option = click.option(
    "-j",
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    default=machine.n_cores,
    show_default="the cores of this process",
    help="Slabs to work on at a time; the result does not depend on it.",
)


# ---------------------------------------------------------------- similarity

ESTIMATORS = ("exact", "minibatch", "biased")


def estimator_options(*presets: str) -> Decorator:
    """--estimator and the sizes of minibatches, and --preset with these names."""
    sizes = (
        ("--batch", "images in a minibatch", 4, "1024"),
        ("--examples", "images in a repeat, drawn without replacement", 4, "10240"),
        ("--repeats", "how often they are drawn", 1, "20"),
    )
    return lambda command: apply(
        command,
        (
            click.option(
                "--estimator",
                type=click.Choice(ESTIMATORS),
                show_default="exact for up to 16384 images, else minibatch",
                help="exact: unbiased HSIC over all images; minibatch: its mean over batches; "
                "biased: the original CKA, inflated for few images.",
            ),
            *(
                click.option(
                    name,
                    metavar="N",
                    type=click.IntRange(min=least),
                    show_default=default,
                    help=f"Of the minibatch estimator: {text}.",
                )
                for name, text, least, default in sizes
            ),
            click.option(
                "--preset",
                type=click.Choice(presets),
                help="The estimator of a paper or its code; options given beside it win.  "
                "[default: none]",
            ),
        ),
    )


def gram_options(command: Any) -> Any:
    """Where Gram matrices are kept and made: `cache`, `no_cache`, `device`, `memory`."""

    @functools.wraps(command)
    def checked(*args: Any, cache: Any, no_cache: bool, **kwargs: Any) -> Any:
        if cache is not None and no_cache:
            raise click.UsageError("--cache and --no-cache exclude each other")
        return command(*args, cache=cache, no_cache=no_cache, **kwargs)

    return apply(checked, _GRAM_OPTIONS)


_GRAM_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--cache",
        metavar="DIR",
        type=parse_folder,
        help="Keep Gram matrices in DIR.  [default: STORE.grams beside each store]",
    ),
    click.option(
        "--no-cache",
        is_flag=True,
        help="Keep no Gram matrices.  [default: keep them for later comparisons]",
    ),
    device_option,
    memory_option,
)


# ---------------------------------------------------------------- what a store does not hold


data_again_option = click.option(
    "--data",
    metavar="DATA",
    type=parse_words,
    help="Where the images are now, for what has to be computed once more.  [default: where "
    "extract read them]",
)


def recompute_options(command: Any) -> Any:
    """Where to compute once more what a store does not hold, and from what: `data`, `checkpoint`,
    `trust_store`, `device`."""
    return apply(command, _RECOMPUTE_OPTIONS)


_RECOMPUTE_OPTIONS: tuple[Decorator, ...] = (
    data_again_option,
    click.option(
        "--checkpoint",
        metavar="FILE",
        type=parse_path,
        help="Where the weights are now, for the same.  [default: where extract read them]",
    ),
    click.option(
        "--trust-store",
        is_flag=True,
        help="Your own store: take its model from the folder or the hub that it names.  [default: "
        "only timm's models and files that this machine has, no network]",
    ),
    device_option,
)


# ---------------------------------------------------------------- which model


def model_options(command: Any) -> Any:
    """MODEL and all that decides its weights and input, as `model`: a ModelOptions."""

    @functools.wraps(command)
    def gathered(*args: Any, model_name: str, model_args: Any, **kwargs: Any) -> Any:
        from vitsee_core.extraction.options import ModelOptions

        fields = ("checkpoint", "checkpoint_key", "random_init", "img_size", "img_mean", "img_std")
        own = {field: kwargs.pop(field) for field in (*fields, "crop_pct")}
        check_weight_options(own)
        options: ModelOptions = ModelOptions(name=model_name, model_args=dict(model_args), **own)
        return command(*args, model=options, **kwargs)

    return apply(gathered, _MODEL_OPTIONS)


def check_weight_options(given: Mapping[str, Any]) -> None:
    """Refuse options of weights that do not go together, named as click names them."""
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
        "evaluate, averaged ones only if there are no others; said]",
    ),
    click.option(
        "--random-init",
        metavar="SEED",
        type=click.IntRange(min=0, max=2**63 - 1),
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
    _MODEL_ARG_OPTION,
)


def weight_options(command: Any) -> Any:
    """Those of `model_options` that decide a model's weights, as click gives them: `checkpoint`,
    `checkpoint_key`, `random_init`, `img_size`, `model_args`."""
    return apply(command, (*_WEIGHT_OPTIONS, _MODEL_ARG_OPTION))
