"""Options that several commands share, each declared once: those of every subject, and a table.

An option of one command alone is declared in that command. The others:

    options             every command   verbosity, defaults_of
                        stores          stores_argument, allow_partial_option, open_stores
                        results         output_options, table_options, force_option,
                                        replicates_option
                        what to read    sites_option, blocks_option, side_option, tokens_option,
                                        images_option, image_option, metric_option
                        how to work     seed_option, device_option, memory_option, jobs_option,
                                        dask_option
    model_options       a model         model_options, weight_options, rebuild_options,
                                        recompute_options
    data_options        images          data_options, recompute_data_option
    extraction_options  what extract    store_output_option, keep_options, ablate_skip_option,
                        stores, how     precision_option, run_options
    similarity_options  pairs of sites  estimator_options, gram_options, pair_options,
                                        precision_option
    accuracy_options    accuracies      tests_argument, random_baseline_option, per_class_option,
                                        allow_shared_option
    mask_options        masks           background_option, void_option, panoptic_option,
                                        segment_options

A command takes what it needs as decorators: `@options.stores_argument`, `@model_options`, ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console
from vitsee_cli.values import (
    SEED,
    StorePath,
    parse_dask,
    parse_device,
    parse_output,
    parse_path,
    parse_size,
    parse_store,
    token_parser,
)
from vitsee_core import machine
from vitsee_stores.selectors import GROUPS
from vitsee_stores.token_selection import WORDS as TOKENS

if TYPE_CHECKING:
    from vitsee_stores import Store

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
        click.option("-v", "--verbose", **shared, help="More detail on stderr, and tracebacks."),
        click.option("-q", "--quiet", **shared, help="Only warnings and errors on stderr."),
    )
    # A finished command appends options, a function collects them from the last to the first.
    for option in both if isinstance(command, click.Command) else reversed(both):
        command = option(command)
    return command


_UNSET = click.Option(["--x"]).default  # None, or click's own word for it from 8.3 on


def defaults_of(*functions: Callable[..., Any]) -> Decorator:
    """A decorator, above the options: those without a default take, and show, that of the parameter
    of the same name; so a command and its analysis cannot drift apart."""
    defaults = {
        name: parameter.default
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default not in (parameter.empty, None, False, ())
    }

    def decorate(command: Any) -> Any:
        for option in command.__click_params__:
            if option.default is _UNSET and option.name in defaults:
                option.default = defaults[option.name]
                option.show_default = option.show_default or True
        return command

    return decorate


# ---------------------------------------------------------------- stores in, results out

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
    return _stores_argument(distinct_labels(command, "stores"))


def distinct_labels(command: Any, name: str) -> Any:
    """The command, refusing two stores of one label in its argument `name`."""

    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        seen: dict[str, StorePath] = {}
        for store in kwargs[name]:
            other = seen.setdefault(store.label, store)
            if other is not store:
                raise click.UsageError(
                    f"two stores are called {store.label!r}; "
                    f"name them: first={other.place} second={store.place}"
                )
        return command(*args, **kwargs)

    return checked


def open_stores(stores: Iterable[StorePath], *, allow_partial: bool = False) -> list[Store]:
    """The stores of the command line, opened in their order.

    Raises:
        StoreError: one of them is missing, foreign, damaged, or unfinished without allow_partial.
    """
    from vitsee_stores import open_store

    return [open_store(s.place, allow_partial=allow_partial, label=s.label) for s in stores]


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
    """-o, --png and --force, and --replicates of a command that has it, together as `outputs`: an
    Outputs."""

    @functools.wraps(command)
    def gathered(
        *args: Any, output: Any, png: Any, force: bool, replicates: bool = False, **kwargs: Any
    ) -> Any:
        from vitsee_core.outputs import Outputs

        output = None if output == Path("-") else output
        if replicates and output is None:
            raise click.UsageError("--replicates writes a file beside the table: give -o TABLE too")
        return command(*args, outputs=Outputs(output, png, force, replicates), **kwargs)

    return _output_option(_png_option(force_option(gathered)))


replicates_option = click.option(
    "--replicates",
    is_flag=True,
    help="Also keep each value without one block of images, in r.replicates.csv beside r.csv: for "
    "intervals of differences (best-layer --paired).  [default: leave them out]",
)


def table_options(command: Any) -> Any:
    """-o and --force of a command without a figure, together as `outputs`: an Outputs."""

    @functools.wraps(command)
    def gathered(*args: Any, output: Any, force: bool, **kwargs: Any) -> Any:
        from vitsee_core.outputs import Outputs

        output = None if output == Path("-") else output
        return command(*args, outputs=Outputs(csv=output, force=force), **kwargs)

    return _output_option(force_option(gathered))


# ---------------------------------------------------------------- what to look at


_PLACES = "first, last, stage:I, depth:F (0 to 1)"


def sites_option(*default: str, show_default: str | None = None) -> Decorator:
    """--sites, repeatable, as `sites`: a tuple of globs, groups and names.

    Args:
        default: the sites without the option.
        show_default: the default in words, where that is clearer.
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
        default: the word; None where the analysis decides (`show_default` then describes how).
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
    """The value of an option that takes one; several are refused, not silently dropped."""
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


def image_option(what: str, show_default: str, store: str, about: str = "") -> Decorator:
    """--image, repeatable: what to do with an image of `store`; about: what else is to say."""
    return click.option(
        "--image",
        metavar="ID",
        multiple=True,
        show_default=show_default,
        help=f"{what} this image, named by its id or its row in {store}{about}. Repeatable.",
    )


def metric_option(metrics: Iterable[str], show_default: str, about: str = "") -> Decorator:
    """--metric, repeatable, as `metrics`: some of `metrics`; about: what they are."""
    return click.option(
        "--metric",
        "metrics",
        multiple=True,
        type=click.Choice(list(metrics)),
        show_default=show_default,
        help=f"{about} Repeatable.".lstrip(),
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
    type=SEED,
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
    help="Slabs to work on at a time, by threads (--dask local:N: by processes); the result does "
    "not depend on it.",
)


def dask_option(what: str) -> Decorator:
    """--dask of a command that spreads `what`."""
    return click.option(
        "--dask",
        metavar="ADDRESS|local:N",
        type=parse_dask,
        help=f"Spread {what} over the workers of a Dask cluster, as tcp://HOST:8786, or over N "
        "processes of this machine; the result does not depend on it.  [default: this process]",
    )
