"""The command of an analysis, made from the signatures of its `run` and `plot`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import flag, option_of, without_none
from vitsee_cli.values import parse_store
from vitsee_core.runtime import registry
from vitsee_core.runtime.options import Gather, Offers, Option
from vitsee_core.runtime.parameters import (
    REQUIRED,
    DeclaredParameter,
    options_of,
    parameters_of,
)

if TYPE_CHECKING:
    # A declaration imports NumPy, which commands that are not analyses do without.
    from vitsee_core.declaration import Analysis

_EXECUTION = {
    "images": options.images_option,
    "seed": options.seed_option,
    "device": options.device_option,
    "jobs": options.jobs_option,
    "memory": options.memory_option,
}
# Columns that say where a value was measured; tables of pairs have them with _a and with _b.
_SITE = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
# Columns of several analyses, unless a declaration says it otherwise.
_MEANINGS = {"high": "95 % interval over images", "spread": "what std is"}


def command_of(name: str) -> click.Command:
    """Return the click command of the analysis `name`.

    Its help lists the stores, -o and --png, the options in the order of the parameters of `run`
    and `plot`, and the options of the execution.

    Raises:
        GuestError: the analysis belongs to another package and cannot be imported, or its
            declaration does not give a command.
    """
    analysis: Analysis = registry.load(name)
    store_parameters = analysis.stores()
    drawing_options = options_of(analysis.plot)

    def body(outputs: Any, **arguments: Any) -> None:
        """Run the analysis; arguments: values of `run` and `plot` by the names of parameters."""
        store_paths: list[Any] = []
        for parameter in store_parameters:
            value = arguments.pop(parameter.name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                store_paths += value
            else:
                store_paths.append(value)
        drawing = {key: arguments.pop(key) for key in drawing_options}
        # Two stores of different roles, `train` and `tests`, may be files of the same name.
        first_role = store_parameters[0].name if len(store_parameters) > 1 else ""
        # Only analyses that keep Gram matrices have a parameter `no_cache`.
        keeps_grams = arguments.get("no_cache") is False
        run_analysis(
            analysis.run,
            analysis.draw,
            _with_role_in_label(store_paths, first_role),
            outputs,
            resumes=console.GRAMS_KEPT if keeps_grams else "",
            drawing=drawing or None,
            **arguments,
        )

    try:
        decorators = [_store_argument(parameter) for parameter in store_parameters]
        takes_several = store_parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        if takes_several and _has_layers(analysis):
            decorators.append(options.steps_option)
        command = options.add_options(analysis_options(analysis)(body), decorators)
        return click.command(name.replace("_", "-"), help=help_of(analysis))(command)
    except Exception as error:
        if (guest := registry.guest_of(analysis.module)) is None:
            raise
        raise registry.GuestError(
            f"{guest.command} of the package {guest.by} makes no command: "
            f"{type(error).__name__}: {error}"
        ) from error


def analysis_options(analysis: Analysis) -> Callable[[Any], Any]:
    """Return the decorator that adds all options of an analysis to a function.

    The function is called with the parameters of `run` and `plot`, and with `outputs`, `dask` and
    `allow_partial`, after the options were checked against each other.
    """
    run_options = options_of(analysis.run)
    plot_options = options_of(analysis.plot)
    all_options = {**run_options, **plot_options}
    offers = Offers("", replicates=False)
    for parameter in parameters_of(analysis.run).values():
        if isinstance(parameter.metadata, Offers):
            offers = parameter.metadata
    offered_fields = offers.fields.split()
    # The order of this list is that of `--help`.
    decorators: list[Callable[[Any], Any]] = [options.output_options]
    if offers.replicates:
        decorators.append(options.replicates_option)
    decorators += [option_of(parameter) for parameter in all_options.values()]
    decorators += [
        option
        for field, option in _EXECUTION.items()
        if field in offered_fields and field != "memory"
    ]
    if offers.dask:
        decorators.append(options.dask_option(offers.dask))
    if "memory" in offered_fields:
        decorators.append(options.memory_option)
    decorators.append(options.allow_partial_option)

    def decorate(body: Callable[..., None]) -> Any:
        """Return the function with the options of the analysis, for `click.command`."""

        def check_and_call(**values: Any) -> None:
            """Check click's values against each other, then call `body` with arguments."""
            _refuse_conflicting_options(all_options, values)
            body(**_arguments_of_run(analysis, run_options, values))

        return options.add_options(check_and_call, decorators)

    return decorate


def _has_layers(analysis: Analysis) -> bool:
    """Return whether each row of the analysis' table is a value of a site, or of a pair of sites.

    Only such tables can be drawn along the steps of a training.
    """
    columns = {*analysis.columns}
    rows_have_sites = {"store", "site"} <= columns or {"store_b", "site_b"} <= columns
    return rows_have_sites and {"metric", "value"} <= columns


def _store_argument(parameter: DeclaredParameter) -> Callable[[Any], Any]:
    """Return the decorator that adds the argument of a parameter that takes a store, or several."""
    word = parameter.name.upper()
    if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
        return click.argument(parameter.name, metavar=word, type=parse_store)
    # `*tests: Annotated[Store, Option(...)]` may be left out, `*stores: Store` may not.
    is_required = parameter.metadata is None
    store = f"[NAME=]{word.rstrip('S')}"
    argument = click.argument(
        parameter.name,
        metavar=f"{store}..." if is_required else f"[{store}]...",
        nargs=-1,
        required=is_required,
        type=parse_store,
    )
    return lambda command: argument(options.distinct_labels(command, parameter.name))


def _with_role_in_label(stores: list[Any], role: str) -> tuple[Any, ...]:
    """Return the stores, the first one as `NAME (ROLE)` if another one has the label NAME.

    role: parameter of the first store, such as `train` or `base`; "" if all have the same role.
    """
    first, *rest = stores
    if role and first.label in [store.label for store in rest]:
        first = first._replace(label=f"{first.label} ({role})")
    return (first, *rest)


def _refuse_conflicting_options(
    parameters: Mapping[str, DeclaredParameter], values: Mapping[str, Any]
) -> None:
    """Refuse options that have no effect beside the others, and options that exclude each other.

    Raises:
        click.UsageError: names the options.
    """
    for name, parameter in parameters.items():
        option = parameter.metadata
        assert isinstance(option, Option)
        if not option.only_with:
            continue
        # With `only_with=("tokens", "each")` the option acts only beside `--tokens each`.
        required_name, *accepted_values = option.only_with
        value = values[required_name]
        if accepted_values:
            chosen = set(value) if isinstance(value, (tuple, list)) else {value}
            has_effect = not chosen.isdisjoint(accepted_values)
        else:
            has_effect = bool(value)
        required_flag = flag(parameters[required_name])
        needs = f"{required_flag} {' or '.join(accepted_values)}".rstrip()
        options.only_with(needs, has_effect, name)
    if values.get("no_cache") and values["cache"] is not None:
        raise click.UsageError("--cache and --no-cache exclude each other")


def _arguments_of_run(
    analysis: Analysis,
    run_options: Mapping[str, DeclaredParameter],
    values: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `run` and `plot`, made from the values of the options.

    Args:
        analysis: declaration of the analysis.
        run_options: name -> parameter with an option, of `run`.
        values: name -> value as click converted it; changed in place.
    """
    for name, parameter in run_options.items():
        if isinstance(parameter.metadata, Option) and parameter.metadata.or_none:
            values[name] = without_none(parameter, values[name])
    for parameter in parameters_of(analysis.run).values():
        gather = parameter.metadata
        if isinstance(gather, Gather):
            field_options = options_of(gather.kind)
            fields = {key: values.pop(key) for key in gather.fields or field_options}
            is_complete = all(
                value
                for key, value in fields.items()
                if field_options[key].default is REQUIRED
            )
            values[parameter.name] = gather.kind(**fields) if is_complete else None
    # Last, since a default may follow from any other argument.
    for name, parameter in run_options.items():
        decide = getattr(parameter.metadata, "decide", None)
        if decide is not None and values[name] is None:
            values[name] = decide(values)
    return values


def help_of(analysis: Analysis) -> str:
    """Return the text of `--help`: the declaration's own text, then the columns of the table."""
    blocks = inspect.cleandoc(analysis.help).split("\n\n")
    # Click wraps a block of lines unless it begins with this mark.
    marked = ["\b\n" + block if block.startswith("  ") else block for block in blocks]
    return "\n\n".join([*marked, f"Columns: {columns_text(analysis)}."])


def columns_text(analysis: Analysis) -> str:
    """Return the names of the columns in a line, each with its meaning in brackets if it has one.

    The columns of a pair's second site are shortened to "the same with _b".
    """
    meanings = {**_MEANINGS, **analysis.meanings}
    names = []
    for column in analysis.columns:
        meaning = meanings.get(column)
        names.append(f"{column} ({meaning})" if meaning else column)
    first_site = ", ".join(f"{name}_a" for name in _SITE)
    second_site = ", ".join(f"{name}_b" for name in _SITE)
    return ", ".join(names).replace(
        f"{first_site}, {second_site}", f"{first_site}, the same with _b"
    )
