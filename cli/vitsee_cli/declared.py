"""click options for the parameters that analyses declare in their signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitsee_cli.values import (
    FiniteRange,
    WholeNumber,
    parse_folder,
    parse_path,
    parse_place,
    parse_words,
)
from vitsee_core.runtime.options import Option
from vitsee_core.runtime.parameters import REQUIRED, DeclaredParameter
from vitsee_stores.errors import VitseeError

Decorator = Callable[[Any], Any]
# Options of a whole number above 0, and of a file.
a_number = partial(click.option, metavar="N", type=WholeNumber(min=1))
a_file = partial(click.option, metavar="FILE", type=parse_path)
METAVARS = {int: "N", float: "X", Path: "PATH"}


def flag(parameter: DeclaredParameter) -> str:
    """The option's name, e.g. --match-last-stage; for a switch both, `--align/--no-align`."""
    assert isinstance(parameter.about, Option)
    return parameter.about.flag or f"--{parameter.name.replace('_', '-')}"


def option_of(parameter: DeclaredParameter, **instead: Any) -> Decorator:
    """The decorator that adds a declared option to a command; instead: keywords of
    `click.option`."""
    about = parameter.about
    assert isinstance(about, Option)
    text = about.help
    settings = dict[str, Any]()
    if bool in parameter.types:
        settings["is_flag"] = True
        if parameter.is_optional:  # neither side given is None
            settings["default"] = None
    else:
        settings["type"] = _type_of(parameter, about)
        settings["metavar"] = about.metavar
        if about.metavar is None and not about.choices:
            metavars = (METAVARS[kind] for kind in parameter.types if kind in METAVARS)
            settings["metavar"] = next(metavars, None)
    if parameter.is_sequence:
        if "Repeatable" not in text:
            text = f"{text} Repeatable.".lstrip()
        has_numbers = int in parameter.types or float in parameter.types
        takes_lists = bool(about.choices or has_numbers) and about.parse is None
        settings |= {"cls": Listed} if takes_lists else {"multiple": True}
    if about.completes:
        settings["shell_complete"] = one_of(about.completes)
    if parameter.default is REQUIRED:
        settings["required"] = True
    elif parameter.default not in (None, False, ()):
        settings |= {"default": parameter.default, "show_default": True}
    if about.default is not None:
        settings["show_default"] = about.default
    names = [flag(parameter)]
    if about.alias:
        names.append(about.alias)
    return click.option(*names, parameter.name, help=text, **(settings | instead))


def _type_of(parameter: DeclaredParameter, about: Option) -> Any:
    """click's type, or parser, of one value."""
    if about.parse is not None:
        return _refusing(about.parse)
    if about.choices:
        return Words([*about.choices, *(["none"] if about.or_none else [])])
    if Path in parameter.types:
        if "STORE" in (about.metavar or "").split("|"):
            return parse_place
        return parse_folder if about.metavar == "DIR" else parse_path
    limits: dict[str, Any] = {
        "min": about.least if about.above is None else about.above,
        "max": about.most if about.below is None else about.below,
        "min_open": about.above is not None,
        "max_open": about.below is not None,
    }
    if int in parameter.types:
        return WholeNumber(**limits)
    if float in parameter.types:
        return FiniteRange(**limits)
    return parse_words


class Words(click.Choice[str]):
    """A choice of words, in which `-` and `_` are the same."""

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """A word as it is compared with another."""
        return super().normalize_choice(str(choice), ctx).replace("-", "_")


def _refusing(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A parser whose refusal is a usage error; a default that is not text is unchanged."""

    def converted(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except VitseeError as error:
            raise click.BadParameter(str(error)) from None

    return converted


def without_none(
    parameter: DeclaredParameter, given: Iterable[str]
) -> tuple[str, ...] | None:
    """The words given to an option with the word none: () for that, None if nothing was given and
    the analysis decides. Raises UsageError: none beside other words."""
    words = tuple(given)
    if "none" not in words:
        return words or parameter.default
    if len({*words}) > 1:
        raise click.UsageError(f"{flag(parameter)} none excludes the other ones")
    return ()


REPEATABLE = "Repeatable."
LISTED = "Repeatable, or a comma list."


class Listed(click.Option):
    """`--k 1 --k 5`, or `--k 1,5`; for values that have no comma of their own."""

    def __init__(self, *args: Any, **settings: Any):
        """Accept the settings of click.Option; the help text also explains comma lists."""
        text = settings.get("help") or ""
        settings |= {"help": text.replace(REPEATABLE, LISTED), "multiple": True}
        super().__init__(*args, **settings)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The values, each checked."""
        if isinstance(value, (tuple, list)):
            parts = (
                part.split(",") if isinstance(part, str) else [part] for part in value
            )
            value = tuple(one for some in parts for one in some)
        return super().type_cast_value(ctx, value)


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def one_of(
    words: Iterable[str] | Callable[[], Iterable[str]], *, files: bool = False
) -> Complete:
    """Completes these words; files: also paths, if no word begins like that."""

    def complete(
        _: click.Context, __: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        known = words() if callable(words) else words
        found = [CompletionItem(word) for word in known if word.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def model_names() -> list[str]:
    """See `known_names`; torch and timm are not imported."""
    from vitsee_core.models.sources import known_names

    return known_names()
