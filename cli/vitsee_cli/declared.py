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
    """Return the option's name, e.g. --match-last-stage; of a switch both, `--align/--no-align`."""
    assert isinstance(parameter.metadata, Option)
    return parameter.metadata.flag or f"--{parameter.name.replace('_', '-')}"


def option_of(parameter: DeclaredParameter, **overrides: Any) -> Decorator:
    """Return the decorator that adds the option of a declared parameter to a command.

    overrides: keywords of `click.option` that replace those from the declaration.
    """
    option = parameter.metadata
    assert isinstance(option, Option)
    text = option.help
    settings: dict[str, Any] = {}
    if bool in parameter.types:
        settings["is_flag"] = True
        if parameter.is_optional:  # neither side given is None
            settings["default"] = None
    else:
        settings["type"] = _click_type(parameter, option)
        settings["metavar"] = option.metavar
        if option.metavar is None and not option.choices:
            metavars = (METAVARS[kind] for kind in parameter.types if kind in METAVARS)
            settings["metavar"] = next(metavars, None)
    if parameter.is_sequence:
        if "Repeatable" not in text:
            text = f"{text} Repeatable.".lstrip()
        has_numbers = int in parameter.types or float in parameter.types
        # A glob or a path may have a comma of its own; words and numbers have none.
        takes_lists = bool(option.choices or has_numbers) and option.parse is None
        if takes_lists:
            settings["cls"] = Listed
        else:
            settings["multiple"] = True
    if option.completes:
        settings["shell_complete"] = complete_from(option.completes)
    if parameter.default is REQUIRED:
        settings["required"] = True
    elif parameter.default not in (None, False, ()):
        settings["default"] = parameter.default
        settings["show_default"] = True
    # The declaration may put the default into words: "the cores of this process".
    if option.default is not None:
        settings["show_default"] = option.default
    names = [flag(parameter)]
    if option.alias:
        names.append(option.alias)
    return click.option(*names, parameter.name, help=text, **{**settings, **overrides})


def _click_type(parameter: DeclaredParameter, option: Option) -> Any:
    """Return click's type, or a parser, for a single value of an option."""
    if option.parse is not None:
        return with_usage_errors(option.parse)
    if option.choices:
        words = [*option.choices]
        if option.or_none:
            words.append("none")
        return Words(words)
    if Path in parameter.types:
        # A store, unlike other files, may be a URL.
        if "STORE" in (option.metavar or "").split("|"):
            return parse_place
        if option.metavar == "DIR":
            return parse_folder
        return parse_path
    # click has one limit on each side, which is open (above, below) or closed (least, most).
    limits: dict[str, Any] = {
        "min": option.least if option.above is None else option.above,
        "max": option.most if option.below is None else option.below,
        "min_open": option.above is not None,
        "max_open": option.below is not None,
    }
    if int in parameter.types:
        return WholeNumber(**limits)
    if float in parameter.types:
        return FiniteRange(**limits)
    return parse_words


class Words(click.Choice[str]):
    """A type of options: one of several words, in which `-` and `_` are the same."""

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """Return the word in the form in which words are compared."""
        return super().normalize_choice(str(choice), ctx).replace("-", "_")


def with_usage_errors(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser that turns the VitseeError of `parse` into a usage error (exit code 2)."""

    def parse_or_refuse(value: Any) -> Any:
        """Return the parsed value; defaults, which click passes too, are parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except VitseeError as error:
            raise click.BadParameter(str(error)) from None

    return parse_or_refuse


def without_none(
    parameter: DeclaredParameter, values: Iterable[str]
) -> tuple[str, ...] | None:
    """Return the words of an option whose word `none`, alone, means the empty sequence.

    None, where the option was not typed and has no default, leaves the choice to the analysis.

    Raises:
        click.UsageError: none stands beside other words.
    """
    words = tuple(values)
    if "none" not in words:
        return words or parameter.default
    if len({*words}) > 1:
        raise click.UsageError(f"{flag(parameter)} none excludes the other ones")
    return ()


REPEATABLE = "Repeatable."
LISTED = "Repeatable, or a comma list."


class Listed(click.Option):
    """An option that may be repeated, `--k 1 --k 5`, or take a comma list, `--k 1,5`."""

    def __init__(self, *args: Any, **settings: Any):
        """Take the settings of click.Option, and say in the help that a comma list is allowed."""
        text = settings.get("help") or ""
        settings |= {"help": text.replace(REPEATABLE, LISTED), "multiple": True}
        super().__init__(*args, **settings)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the values, each checked, after comma lists are split."""
        if isinstance(value, (tuple, list)):
            items: list[Any] = []
            for item in value:
                if isinstance(item, str):
                    items += item.split(",")
                else:  # a default: already a number
                    items.append(item)
            value = tuple(items)
        return super().type_cast_value(ctx, value)


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_from(
    words: Iterable[str] | Callable[[], Iterable[str]], *, files: bool = False
) -> Complete:
    """Return click's callback that completes words.

    Args:
        words: the words, or a function that returns them when the shell asks.
        files: offer paths if no word begins with the typed text.
    """

    def complete(
        _: click.Context, __: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the words that begin with the typed text."""
        all_words = words() if callable(words) else words
        items = [
            CompletionItem(word) for word in all_words if word.startswith(incomplete)
        ]
        if not items and files:
            return [CompletionItem(incomplete, type="file")]
        return items

    return complete


def model_names() -> list[str]:
    """Return the names of models that can be named without a path; torch and timm stay unloaded."""
    from vitsee_core.models.sources import known_names

    return known_names()
