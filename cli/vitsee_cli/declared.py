"""click options for the parameters that analyses declare, see `vitsee_core.runtime.options`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
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
from vitsee_core.runtime.options import Declared, Option
from vitsee_stores.errors import VitseeError

Decorator = Callable[[Any], Any]
# Options of a whole number above 0, and of a file.
a_number = partial(click.option, metavar="N", type=WholeNumber(min=1))
a_file = partial(click.option, metavar="FILE", type=parse_path)
METAVARS = {"int": "N", "float": "X", "Path": "PATH"}


def flag(own: Declared) -> str:
    """The option's name, e.g. --match-last-stage; for a switch both, `--align/--no-align`."""
    assert isinstance(own.about, Option)
    return own.about.flag or f"--{own.name.replace('_', '-')}"


def option_of(own: Declared, **instead: Any) -> Decorator:
    """The decorator that adds a declared option to a command; instead: keywords of
    `click.option`."""
    about = own.about
    assert isinstance(about, Option)
    text, settings = about.help, dict[str, Any]()
    if own.annotation.startswith("bool"):
        settings["is_flag"] = True
        if own.annotation != "bool":  # neither side given is None
            settings["default"] = None
    else:
        settings |= {"type": _type_of(own, about), "metavar": about.metavar}
        kinds = [] if about.choices else re.findall(r"\w+", own.annotation)
        settings["metavar"] = about.metavar or next(
            (METAVARS[kind] for kind in kinds if kind in METAVARS), None
        )
    if "Sequence[" in own.annotation:
        if "Repeatable" not in text:
            text = f"{text} Repeatable.".lstrip()
        listed = about.choices or "int" in own.annotation or "float" in own.annotation
        settings |= {"cls": Listed} if listed and about.parse is None else {"multiple": True}
    if about.completes:
        settings["shell_complete"] = one_of(about.completes)
    if own.default is inspect.Parameter.empty:
        settings["required"] = True
    elif own.default not in (None, False, ()):
        settings |= {"default": own.default, "show_default": True}
    if about.default is not None:
        settings["show_default"] = about.default
    names = [flag(own), *([about.alias] if about.alias else [])]
    return click.option(*names, own.name, help=text, **(settings | instead))


def _type_of(own: Declared, about: Option) -> Any:
    kinds = re.findall(r"\w+", own.annotation)
    if about.parse is not None:
        return _refusing(about.parse)
    if about.choices:
        return Words([*about.choices, *(["none"] if about.or_none else [])])
    if "Path" in kinds and "STORE" in (about.metavar or "").split("|"):
        return parse_place
    if "Path" in kinds:
        return parse_folder if about.metavar == "DIR" else parse_path
    limits: dict[str, Any] = {
        "min": about.least if about.above is None else about.above,
        "max": about.most if about.below is None else about.below,
    }
    opened = {"min_open": about.above is not None, "max_open": about.below is not None}
    if "int" in kinds:
        return WholeNumber(**limits, **opened)
    return FiniteRange(**limits, **opened) if "float" in kinds else parse_words


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


def without_none(own: Declared, given: Iterable[str]) -> tuple[str, ...] | None:
    """The words given to an option with the word none: () for that, None if nothing was given and
    the analysis decides. Raises UsageError: none beside other words."""
    words = tuple(given)
    if "none" not in words:
        return words or own.default
    if len({*words}) > 1:
        raise click.UsageError(f"{flag(own)} none excludes the other ones")
    return ()


REPEATABLE, LISTED = "Repeatable.", "Repeatable, or a comma list."


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
            parts = (part.split(",") if isinstance(part, str) else [part] for part in value)
            value = tuple(one for some in parts for one in some)
        return super().type_cast_value(ctx, value)


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def one_of(words: Iterable[str] | Callable[[], Iterable[str]], *, files: bool = False) -> Complete:
    """Completes these words; files: also paths, if no word begins like that."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = words() if callable(words) else words
        found = [CompletionItem(word) for word in known if word.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def model_names() -> list[str]:
    """See `known_names`; torch and timm are not imported."""
    from vitsee_core.models.sources import known_names

    return known_names()
