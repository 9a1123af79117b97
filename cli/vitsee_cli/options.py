"""Options that several commands share, each declared once: those of every subject, and a table.

What analyses take beside their execution is declared in their signatures (`signature`), an option
of one command alone in that command; those of models, images and extraction have their own files.
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
from vitsee_cli.declared import Decorator as Decorator
from vitsee_cli.declared import a_file, a_number, option_of
from vitsee_cli.values import (
    SEED,
    StorePath,
    parse_dask,
    parse_device,
    parse_output,
    parse_size,
    parse_store,
)
from vitsee_core.runtime import machine
from vitsee_core.runtime import options as declarations
from vitsee_core.runtime.options import FEATURE_TOKENS as FEATURE_TOKENS
from vitsee_core.runtime.options import SITE_WORDS as SITE_WORDS
from vitsee_core.runtime.parameters import DeclaredParameter

if TYPE_CHECKING:
    from vitsee_stores import Store

VERBOSITY = (
    "vitsee.verbosity"  # in the click context, shared by the group and its command
)


def apply(command: Any, decorators: Sequence[Decorator]) -> Any:
    """The command with these options, which its help lists in this order."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def together(*decorators: Decorator) -> Decorator:
    """The decorator that adds all of these options."""
    return lambda command: apply(command, decorators)


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
        click.option(
            "-v", "--verbose", **shared, help="More detail on stderr, and tracebacks."
        ),
        click.option(
            "-q", "--quiet", **shared, help="Only warnings and errors on stderr."
        ),
    )
    # A finished command appends options, a function collects them from the last to the first.
    for option in both if isinstance(command, click.Command) else reversed(both):
        command = option(command)
    return command


def only_with(needs: str, met: bool, *names: str) -> None:
    """Refuse the running command's options `names`, which have no effect without what it `needs`,
    where the command line gives one and that is not `met`."""
    context = click.get_current_context()
    on_line = click.core.ParameterSource.COMMANDLINE
    for param in () if met else context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is on_line:
            option = "/".join([*param.opts, *param.secondary_opts])
            raise click.UsageError(f"{option} has no effect without {needs}")


def refuse_twice(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse single-valued options that are given several times."""
    try:
        _, _, order = command.make_parser(ctx).parse_args(list(args))
    except click.UsageError:  # the command says it, with its own context
        return
    for param in dict.fromkeys(order):
        repeatable = (
            param.multiple or (param.is_flag and not param.secondary_opts)
            if isinstance(param, click.Option)
            else True
        )
        if not repeatable and order.count(param) > 1:
            names = "/".join([*param.opts, *param.secondary_opts])
            raise click.UsageError(
                f"{names} is given {order.count(param)} times; expected once", ctx
            )


_UNSET = click.Option(["--x"]).default  # None, or click's own word for it from 8.3 on


def _lacks_default(option: click.Option) -> bool:
    """Whether a command gave an option no default. Before 8.5 click gives switches False."""
    return option.default is _UNSET or (option.is_flag and option.default is False)


def defaults_of(*functions: Callable[..., Any]) -> Decorator:
    """Decorator, above the options: those without a default take, and show, that of the parameter
    with the same name; so a command and its analysis cannot drift apart."""
    defaults = {
        name: parameter.default
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default not in (parameter.empty, None, False, ())
    }

    def decorate(command: Any) -> Any:
        for option in command.__click_params__:
            if _lacks_default(option) and option.name in defaults:
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
    """The command, refusing two stores with one label in its argument `name`."""

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


def open_stores(
    stores: Iterable[StorePath], *, allow_partial: bool = False
) -> list[Store]:
    """The stores of the command line, opened in their order; StoreError as of `open_store`."""
    from vitsee_stores import open_store

    return [
        open_store(s.place, allow_partial=allow_partial, label=s.label) for s in stores
    ]


force_option = click.option(
    "--force",
    is_flag=True,
    help="Overwrite existing output.  [default: refuse, before any work]",
)

_if_changed_option = click.option(
    "--if-changed",
    is_flag=True,
    help="Replace existing output only if it was made with other stores, options, files or "
    "versions, and succeed if it was not.  [default: refuse existing output]",
)

_table_option = click.option(
    "-o",
    "--output",
    metavar="TABLE",
    type=parse_output,
    help="Write the table to TABLE, a .csv, .csv.gz, .tsv, .json or .parquet, and how it was made "
    "to TABLE.json.  [default: - , CSV on stdout]",
)

_png_option = a_file(
    "--png",
    help="Draw the figure into FILE, a .png, .svg or .pdf.  [default: no figure]",
)


def output_options(command: Any) -> Any:
    """-o, --png, --force and --if-changed, and --replicates of a command that has it, together as
    `outputs`: an Outputs."""
    return _table_option(
        _png_option(force_option(_if_changed_option(_with_outputs(command))))
    )


def table_options(command: Any) -> Any:
    """-o, --force and --if-changed of a command without a figure, together as `outputs`: an
    Outputs."""
    return _table_option(force_option(_if_changed_option(_with_outputs(command))))


def _with_outputs(command: Any) -> Any:
    @functools.wraps(command)
    def gathered(
        *args: Any,
        output: Any,
        force: bool,
        if_changed: bool,
        png: Any = None,
        replicates: bool = False,
        **more: Any,
    ) -> Any:
        from vitsee_core.pages.report.outputs import Outputs

        output = None if output == Path("-") else output
        if replicates and output is None:
            raise click.UsageError(
                "--replicates writes a file beside the table: give -o TABLE too"
            )
        if if_changed and output is None:
            raise click.UsageError(
                "--if-changed is about a table's file: give -o TABLE too"
            )
        if if_changed and force:
            raise click.UsageError("--if-changed and --force exclude each other")
        outputs = Outputs(output, png, force or if_changed, replicates, if_changed)
        return command(*args, outputs=outputs, **more)

    return gathered


steps_option = click.option(
    "--x",
    type=click.Choice(["step", "epoch"]),
    help="Stores of one model over its training: read the step, or epoch, of each from its name "
    "(vit-step1000.zarr), put it in front of the table, and draw charts along it.  "
    "[default: the figure of the command]",
)

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON for programs.  [default: for people]",
)

replicates_option = click.option(
    "--replicates",
    is_flag=True,
    help="Also keep each value without one block of images, in r.replicates.csv beside r.csv: for "
    "intervals of differences (best-layer --paired).  [default: leave them out]",
)


# ---------------------------------------------------------------- what to look at


def sites_option(*default: str, show_default: str | None = None) -> Decorator:
    """--sites, repeatable, as `sites`: globs, groups and names; show_default: the default in
    words."""
    about = declarations.sites_option(show_default)
    return option_of(DeclaredParameter("sites", Sequence[str], default, None, about))


def blocks_option(show_default: str) -> Decorator:
    """--sites of an analysis of whole blocks, repeatable, as `sites`."""
    about = declarations.blocks_option(show_default)
    return option_of(DeclaredParameter("sites", Sequence[str], (), None, about))


def tokens_option(choices: Iterable[str], show_default: str) -> Decorator:
    """--tokens of one of these words or ROW,COL, as `tokens`; None where the analysis decides."""
    about = declarations.tokens_option(choices, show_default)
    return option_of(DeclaredParameter("tokens", str, None, None, about))


def image_option(what: str, show_default: str, store: str, about: str = "") -> Decorator:
    """--image, repeatable: what to do with an image of `store`; about: further help text."""
    option = declarations.image_option(what, show_default, store, about)
    return option_of(DeclaredParameter("image", Sequence[str], (), None, option))


images_option = a_number(
    "--images",
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

jobs_option = a_number(
    "-j",
    "--jobs",
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
