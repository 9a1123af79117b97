"""Checks the steps of a study in a file before any of its work: their options exist, and what they
write lies in the study's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from vitsee_cli.study_settings import OPTION, commands_of
from vitsee_cli.values import PathType
from vitsee_core.tables.files import TABLE_ENDINGS
from vitsee_stores.errors import VitseeError
from vitsee_stores.schema import MAX_SHOWN_CHARS

if TYPE_CHECKING:
    from vitsee_core.study.steps import Step, Study

# Options of paths that are read and never written, by parameter. Any other path, of a guest's
# options, too, is taken for a place that is written.
READ_PATHS = frozenset(
    (
        "checkpoint",
        "depth",
        "dictionary",
        "ids",
        "masks",
        "only",
        "pairs",
        "panoptic",
        "response",
        "response_ids",
        "truth",
    )
)
# Options that a study's file cannot give: of any command, and of extract.
NOT_OF_A_FILE = ("--help",)
NOT_OF_A_STORE = ("--dry-run", "--force", "--help", "--plan", "--shard")


MAX_ERROR_CHARS = 300  # characters of a wrong option's error in a message


class TypedValue(NamedTuple):
    """The text that a parameter has in a command line."""

    param: click.Parameter
    text: str


def check_steps(ctx: click.Context, study: Study, steps: Sequence[Step]) -> None:
    """Refuse a step with unknown options, and one that writes outside of the study's folder. What
    the user set with --set is not checked.

    Raises:
        VitseeError: names the command, and the option or path.
    """
    for step in steps:
        if step.make is not None:
            continue
        command = commands_of(ctx)(step.command)
        if command is None:
            raise VitseeError(f"{step.name}: there is no command {step.command}")
        try:
            for value in _typed_values(command, step):
                _check_path(study, step, value)
        except click.UsageError as error:
            text = error.format_message()[:MAX_ERROR_CHARS]
            raise VitseeError(f"{step.name}: {step.command}: {text}") from None


def _typed_values(command: click.Command, step: Step) -> Iterator[TypedValue]:
    """Yield the text of each parameter; nothing is converted, and no callback is called.

    Raises:
        click.UsageError: an unknown option, a word too many, a path that is given twice, or an
            option that a study's file cannot give.
    """
    ctx = click.Context(command, info_name=step.command)
    parser = command.make_parser(ctx)
    _check_values(command.get_params(ctx), step.words[1:])
    texts, rest, order = parser.parse_args(list(step.words[1:]))
    if rest:
        raise click.UsageError(f"{rest[0][:MAX_SHOWN_CHARS]} is one word too many")
    for param in order:
        is_path = isinstance(param, click.Option) and isinstance(param.type, PathType)
        if is_path and order.count(param) > 1 and not getattr(param, "multiple", False):
            raise click.UsageError(f"{param.opts[0]} is given twice")
    for param in command.get_params(ctx):  # with --help
        typed = texts.get(param.name or "")
        for text in typed if isinstance(typed, (list, tuple)) else [typed]:
            if isinstance(text, str):
                yield TypedValue(param, text)
        refused = NOT_OF_A_STORE if step.command == "extract" else NOT_OF_A_FILE
        if typed and param.opts[-1] in refused:
            raise click.UsageError(f"{param.opts[-1]} is not of a study's file")


def _check_values(params: Sequence[click.Parameter], words: Sequence[str]) -> None:
    """Refuse an option without its value, which takes the next option for it.

    What follows a command's last option is what a study appends, `-o` and `--png`: they would be
    swallowed, and the command would go on without them.

    Raises:
        click.UsageError: names both options.
    """
    with_value = {
        spelling
        for param in params
        if isinstance(param, click.Option) and not param.is_flag and not param.count
        for spelling in param.opts
    }
    for word, following in pairwise(words):
        if word in with_value and OPTION.match(following):
            raise click.UsageError(
                f"{word} has no value: {following[:MAX_SHOWN_CHARS]} follows"
            )


def _check_path(study: Study, step: Step, value: TypedValue) -> None:
    """Refuse a path that is written, or a store that is read, outside of the study's folder.

    A file by a stranger must not overwrite anything else.

    Raises:
        VitseeError: names the option and the path.
    """
    param = value.param
    text = value.text
    if not isinstance(param.type, PathType) or param.name in READ_PATHS:
        return
    if isinstance(param, click.Option) and study.sets(step.command, param.opts[-1]):
        return
    path = text
    if isinstance(param, click.Argument):
        if text.endswith(TABLE_ENDINGS):  # a table that is read
            return
        path = text.rpartition("=")[2]  # of NAME=STORE
    # Without following links: those in the study's folder are the user's own.
    if Path(os.path.abspath(path)).is_relative_to(os.path.abspath(study.folder)):
        return
    name = param.opts[-1] if isinstance(param, click.Option) else "the store"
    raise VitseeError(
        f"{step.name}: {name} {text[:MAX_SHOWN_CHARS]} is not in {study.folder}, where "
        "all that a study's file makes is written"
    )
