"""The command of an analysis, made from the signatures of its `run` and `plot`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.analysis import run_analysis
from vitsee_cli.declared import flag, option_of, without_none
from vitsee_cli.values import parse_store
from vitsee_core.declaration import Analysis
from vitsee_core.runtime import registry
from vitsee_core.runtime.options import Gather, Offers, Option
from vitsee_core.runtime.parameters import (
    REQUIRED,
    DeclaredParameter,
    options_of,
    parameters_of,
)

_EXECUTION = {
    "images": options.images_option,
    "seed": options.seed_option,
    "device": options.device_option,
    "jobs": options.jobs_option,
    "memory": options.memory_option,
}
_SITE = ("store", "model", "weights", "site", "block", "depth", "rel_depth")
_MEANINGS = {"high": "95 % interval over images", "spread": "what std is"}


def command_of(name: str) -> click.Command:
    """The command of the analysis NAME: stores, -o and --png, its own options in the order of its
    parameters, and those of its execution. Raises GuestError: see `registry.load`."""
    analysis: Analysis = registry.load(name)
    stores = analysis.stores()
    drawing_options = options_of(analysis.plot)

    def body(outputs: Any, **given: Any) -> None:
        opened: list[Any] = []
        for own in stores:
            value = given.pop(own.name)
            opened += value if own.kind is inspect.Parameter.VAR_POSITIONAL else [value]
        drawing = {key: given.pop(key) for key in drawing_options}
        run_analysis(
            analysis.run,
            analysis.draw,
            _labelled(opened, stores[0].name if len(stores) > 1 else ""),
            outputs,
            resumes=console.GRAMS_KEPT if given.get("no_cache") is False else "",
            drawing=drawing or None,
            **given,
        )

    try:
        decorators = [_argument(own) for own in stores]
        if _has_layers(analysis) and stores[0].kind is inspect.Parameter.VAR_POSITIONAL:
            decorators.append(options.steps_option)
        command = options.apply(analysis_options(analysis)(body), decorators)
        return click.command(name.replace("_", "-"), help=help_of(analysis))(command)
    except Exception as error:
        if (guest := registry.guest_of(analysis.module)) is None:
            raise
        raise registry.GuestError(
            f"{guest.command} of the package {guest.by} makes no command: "
            f"{type(error).__name__}: {error}"
        ) from error


def analysis_options(analysis: Analysis) -> Callable[[Any], Any]:
    """The decorator that adds all options of an analysis to a function, which is called with the
    parameters of `run` and `plot`, and with `outputs`, `dask` and `allow_partial`."""
    own = options_of(analysis.run)
    drawn = options_of(analysis.plot)
    offers = Offers("", replicates=False)
    for parameter in parameters_of(analysis.run).values():
        if isinstance(parameter.about, Offers):
            offers = parameter.about
    fields = {
        key: option for key, option in _EXECUTION.items() if key in offers.fields.split()
    }
    decorators = [
        options.output_options,
        *([options.replicates_option] if offers.replicates else []),
        *map(option_of, (own | drawn).values()),
        *(fields[key] for key in fields if key != "memory"),
        *([options.dask_option(offers.dask)] if offers.dask else []),
        *(fields[key] for key in fields if key == "memory"),
        options.allow_partial_option,
    ]

    def decorate(body: Callable[..., None]) -> Any:
        def checked(**given: Any) -> None:
            _check(own | drawn, given)
            body(**_gathered(analysis, own, given))

        return options.apply(checked, decorators)

    return decorate


def _has_layers(analysis: Analysis) -> bool:
    """Whether the rows of an analysis are values of a store's or of two stores' sites."""
    columns = {*analysis.columns}
    sites = {"store", "site"} <= columns or {"store_b", "site_b"} <= columns
    return sites and {"metric", "value"} <= columns


def _argument(own: DeclaredParameter) -> Callable[[Any], Any]:
    """The argument of a parameter that takes a store, or several."""
    word = own.name.upper()
    if own.kind is not inspect.Parameter.VAR_POSITIONAL:
        return click.argument(own.name, metavar=word, type=parse_store)
    one = f"[NAME=]{word.rstrip('S')}"
    metavar, needed = (f"{one}...", True) if own.about is None else (f"[{one}]...", False)
    argument = click.argument(
        own.name, metavar=metavar, nargs=-1, required=needed, type=parse_store
    )
    return lambda command: argument(options.distinct_labels(command, own.name))


def _labelled(stores: list[Any], role: str) -> tuple[Any, ...]:
    """The stores; a first one with a role of its own (`train`, `base`) that is called like another
    is called `NAME (ROLE)`."""
    first, *rest = stores
    if role and first.label in [store.label for store in rest]:
        first = first._replace(label=f"{first.label} ({role})")
    return (first, *rest)


def _check(own: Mapping[str, DeclaredParameter], given: Mapping[str, Any]) -> None:
    """Refuse options without effect, and those that exclude each other. Raises UsageError: names
    them."""
    for name, parameter in own.items():
        assert isinstance(parameter.about, Option)
        other, *values = parameter.about.only_with or ("",)
        if other:
            value = given[other]
            has = set(value) if isinstance(value, (tuple, list)) else {value}
            met = bool(has & {*values}) if values else bool(value)
            needs = " ".join([flag(own[other]), " or ".join(values)]).rstrip()
            options.only_with(needs, met, name)
    if given.get("no_cache") and given["cache"] is not None:
        raise click.UsageError("--cache and --no-cache exclude each other")


def _gathered(
    analysis: Analysis, own: Mapping[str, DeclaredParameter], given: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of `run` and `plot` from the values of the options."""
    for name, parameter in own.items():
        if isinstance(parameter.about, Option) and parameter.about.or_none:
            given[name] = without_none(parameter, given[name])
    for parameter in parameters_of(analysis.run).values():
        if isinstance(parameter.about, Gather):
            of = options_of(parameter.about.kind)
            values = {key: given.pop(key) for key in parameter.about.fields or of}
            needed = [values[key] for key in values if of[key].default is REQUIRED]
            given[parameter.name] = (
                parameter.about.kind(**values) if all(needed) else None
            )
    for name, parameter in own.items():
        decide = getattr(parameter.about, "decide", None)
        if decide is not None and given[name] is None:
            given[name] = decide(given)
    return given


def help_of(analysis: Analysis) -> str:
    """The text of `--help`: what the analysis says, and its columns."""
    blocks = inspect.cleandoc(analysis.help).split("\n\n")
    # Click wraps a block of lines unless it begins with this mark.
    marked = ["\b\n" + block if block.startswith("  ") else block for block in blocks]
    return "\n\n".join([*marked, f"Columns: {columns_text(analysis)}."])


def columns_text(analysis: Analysis) -> str:
    """The names of the columns, with what they mean in brackets where that is said."""
    meanings = {**_MEANINGS, **analysis.meanings}
    named = [f"{c} ({meanings[c]})" if meanings.get(c) else c for c in analysis.columns]
    listed = ", ".join(named)
    pair = [", ".join(f"{name}_{side}" for name in _SITE) for side in "ab"]
    return re.sub(", ".join(pair), f"{pair[0]}, the same with _b", listed)
