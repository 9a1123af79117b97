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

# Entry of the click context, which the group and its command share.
VERBOSITY = "vitsee.verbosity"


def add_options(command: Any, decorators: Sequence[Decorator]) -> Any:
    """Return the command with these options, which its help lists in this order."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def together(decorators: Sequence[Decorator]) -> Decorator:
    """Return the decorator that adds all of these options, in this order."""
    return lambda command: add_options(command, decorators)


# ---------------------------------------------------------------- every command


def verbosity(command: Any) -> Any:
    """Add -v and -q to the group or to a command; of several, the last one typed counts."""

    def set_up(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        """Choose what is shown, when click has read the option."""
        if value:
            ctx.meta[VERBOSITY] = 1 if param.name == "verbose" else -1
        # Every option's callback runs, the ones that were not given after the others.
        console.setup(ctx.meta.get(VERBOSITY, 0))

    shared: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": set_up}
    v_and_q = (
        click.option(
            "-v", "--verbose", **shared, help="More detail on stderr, and tracebacks."
        ),
        click.option(
            "-q", "--quiet", **shared, help="Only warnings and errors on stderr."
        ),
    )
    # A finished command appends options, a function collects them from the last to the first.
    if isinstance(command, click.Command):
        ordered = v_and_q
    else:
        ordered = v_and_q[::-1]
    for option in ordered:
        command = option(command)
    return command


def only_with(needs: str, has_effect: bool, *names: str) -> None:
    """Refuse options of the running command that have no effect beside the others.

    An option is refused only if it was typed: its default may stand beside anything.

    Args:
        needs: the option, or options, that would give them an effect.
        has_effect: whether those were given.
        names: parameters of the options.

    Raises:
        click.UsageError: names the option.
    """
    if has_effect:
        return
    context = click.get_current_context()
    for param in context.command.params:
        if param.name not in names:
            continue
        source = context.get_parameter_source(param.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            option = "/".join([*param.opts, *param.secondary_opts])
            raise click.UsageError(f"{option} has no effect without {needs}")


def refuse_twice(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse an option with a single value that is typed several times.

    click takes the last one without a word.

    Raises:
        click.UsageError: names the option.
    """
    try:
        _, _, params_in_order = command.make_parser(ctx).parse_args(list(args))
    except click.UsageError:  # the command itself reports it, with its own context
        return
    for param in dict.fromkeys(params_in_order):
        if not isinstance(param, click.Option) or param.multiple:
            continue
        if (
            param.is_flag and not param.secondary_opts
        ):  # -v -v; but not --align --no-align
            continue
        count = params_in_order.count(param)
        if count > 1:
            names = "/".join([*param.opts, *param.secondary_opts])
            raise click.UsageError(f"{names} is given {count} times; expected once", ctx)


_UNSET = click.Option(["--x"]).default  # None, or click's own word for it from 8.3 on


def _lacks_default(option: click.Option) -> bool:
    """Return whether a command gave an option no default."""
    # Before 8.5 click itself gives switches False.
    return option.default is _UNSET or (option.is_flag and option.default is False)


def defaults_of(*functions: Callable[..., Any]) -> Decorator:
    """Return a decorator that gives options the defaults of these functions.

    It stands above the options. An option without a default gets, and shows in the help, the
    default of the parameter with its name; so a command and its analysis cannot drift apart.
    """
    defaults = {
        name: parameter.default
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default not in (parameter.empty, None, False, ())
    }

    def decorate(command: Any) -> Any:
        """Return the command, whose options now have their defaults."""
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
    """Add an argument for one or more stores, `stores`: StorePaths with distinct labels."""
    return _stores_argument(distinct_labels(command, "stores"))


def distinct_labels(command: Any, name: str) -> Any:
    """Return the command, which now refuses two stores with one label in its argument `name`."""

    @functools.wraps(command)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        """Refuse equal labels, then call the command."""
        # A table's rows name their store by its label alone.
        store_of_label: dict[str, StorePath] = {}
        for store in kwargs[name]:
            first = store_of_label.setdefault(store.label, store)
            if first is not store:
                raise click.UsageError(
                    f"two stores are called {store.label!r}; "
                    f"name them: first={first.place} second={store.place}"
                )
        return command(*args, **kwargs)

    return check_and_call


def open_stores(
    stores: Iterable[StorePath], *, allow_partial: bool = False
) -> list[Store]:
    """Return the stores of the command line, opened, in their order.

    Raises:
        StoreError: a store is missing, damaged, or unfinished without `allow_partial`.
    """
    from vitsee_stores import open_store

    return [
        open_store(path.place, allow_partial=allow_partial, label=path.label)
        for path in stores
    ]


force_option = click.option(
    "--force",
    is_flag=True,
    help="Overwrite existing output.  [default: refuse, before any work]",
)

_if_changed_option = click.option(
    "--if-changed",
    is_flag=True,
    help="Replace existing output only if it was made with other stores, options, files "
    "or versions, and succeed if it was not.  [default: refuse existing output]",
)

_table_option = click.option(
    "-o",
    "--output",
    metavar="TABLE",
    type=parse_output,
    help="Write the table to TABLE, a .csv, .csv.gz, .tsv, .json or .parquet, and how it "
    "was made to TABLE.json.  [default: - , CSV on stdout]",
)

_png_option = a_file(
    "--png",
    help="Draw the figure into FILE, a .png, .svg or .pdf.  [default: no figure]",
)


def output_options(command: Any) -> Any:
    """Add -o, --png, --force and --if-changed, which the command gets as one Outputs, `outputs`.

    It also has the value of --replicates, if the command has that option.
    """
    return add_options(
        _gather_outputs(command),
        [_table_option, _png_option, force_option, _if_changed_option],
    )


def table_options(command: Any) -> Any:
    """Add the same options without --png, for a command without a figure."""
    return add_options(
        _gather_outputs(command), [_table_option, force_option, _if_changed_option]
    )


def _gather_outputs(command: Any) -> Any:
    """Return the command, called with `outputs` in place of the values of the output options."""

    @functools.wraps(command)
    def check_and_call(
        *args: Any,
        output: Any,
        force: bool,
        if_changed: bool,
        png: Any = None,
        replicates: bool = False,
        **more: Any,
    ) -> Any:
        """Refuse output options that exclude each other, then call the command with `outputs`."""
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
        outputs = Outputs(
            csv=output,
            png=png,
            force=force or if_changed,
            with_replicates=replicates,
            if_changed=if_changed,
        )
        return command(*args, outputs=outputs, **more)

    return check_and_call


steps_option = click.option(
    "--x",
    type=click.Choice(["step", "epoch"]),
    help="Stores of one model over its training: read the step, or epoch, of each from "
    "its name (vit-step1000.zarr), put it in front of the table, and draw charts along "
    "it.  [default: the figure of the command]",
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
    help="Also keep each value without one block of images, in r.replicates.csv beside "
    "r.csv: for intervals of differences (best-layer --paired).  [default: leave them "
    "out]",
)


# ---------------------------------------------------------------- what to look at


def sites_option(*default: str, show_default: str | None = None) -> Decorator:
    """Return --sites, repeatable, as `sites`: globs, groups and names of sites.

    show_default: the default in words.
    """
    option = declarations.sites_option(show_default)
    return _shared_option("sites", Sequence[str], default, option)


def blocks_option(show_default: str) -> Decorator:
    """Return --sites of a command that looks at whole blocks, repeatable, as `sites`."""
    option = declarations.blocks_option(show_default)
    return _shared_option("sites", Sequence[str], (), option)


def tokens_option(choices: Iterable[str], show_default: str) -> Decorator:
    """Return --tokens, one of these words or ROW,COL, as `tokens`; None if it is left out."""
    option = declarations.tokens_option(choices, show_default)
    return _shared_option("tokens", str, None, option)


def image_option(
    verb: str, show_default: str, store: str, details: str = ""
) -> Decorator:
    """Return --image, repeatable, as `image`.

    Args:
        verb: the verb of the help's first sentence, of which the image is the object: `Draw`.
        show_default: the default in words.
        store: words for the store that has the images.
        details: further sentences of the help.
    """
    option = declarations.image_option(verb, show_default, store, details)
    return _shared_option("image", Sequence[str], (), option)


def _shared_option(
    name: str, annotation: Any, default: Any, option: declarations.Option
) -> Decorator:
    """Return the decorator that adds an option shared by analyses to a command that has a file of
    its own in `commands/`."""
    parameter = DeclaredParameter(
        name=name,
        annotation=annotation,
        default=default,
        kind=None,
        metadata=option,
    )
    return option_of(parameter)


images_option = a_number(
    "--images",
    show_default="all",
    help="Use N images: the first rows of a shuffled store, a random sample of an "
    "ordered one.",
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
    help="Slabs to work on at a time, by threads (--dask local:N: by processes); the "
    "result does not depend on it.",
)


def dask_option(items: str) -> Decorator:
    """Return --dask of a command that spreads `items` (a plural: slabs, videos) over workers."""
    return click.option(
        "--dask",
        metavar="ADDRESS|local:N",
        type=parse_dask,
        help=f"Spread {items} over the workers of a Dask cluster, as tcp://HOST:8786, or "
        "over N processes of this machine; the result does not depend on it.  [default: "
        "this process]",
    )
