"""Headings of the help: the questions that commands answer, and groups of a command's options."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from vitsee_cli import console
from vitsee_core.runtime import options as headings
from vitsee_core.runtime import registry
from vitsee_core.runtime.options import ATTENTION as ATTENTION
from vitsee_core.runtime.options import FLOW as FLOW
from vitsee_core.runtime.options import KNOWLEDGE as KNOWLEDGE
from vitsee_core.runtime.options import QUESTIONS as QUESTIONS
from vitsee_core.runtime.options import RESULTS as RESULTS
from vitsee_core.runtime.options import SIMILARITY as SIMILARITY
from vitsee_core.runtime.options import STORES as STORES
from vitsee_core.tables.text import shorten, visible

OTHER_COMMANDS = "Other commands"
_COMMANDS = "vitsee_cli.commands"
_ANALYSES = "vitsee_core.analyses"
MAX_GUEST_LINE = 72  # letters of a guest's line in the help

OTHER_OPTIONS = "Other options"


def builtin_names() -> list[str]:
    """Return the sorted names of vitsee's own commands.

    These are the files of `vitsee_cli.commands`, and vitsee's own analyses.
    """
    files = registry.modules_in(tuple(importlib.import_module(_COMMANDS).__path__))
    return sorted(name.replace("_", "-") for name in {*files, *registry.builtin_names()})


def names() -> list[str]:
    """Return the sorted names of all commands: vitsee's own, and those of other packages."""
    guest_names = [guest.command for guest in registry.guests().values()]
    return sorted([*builtin_names(), *guest_names])


def module_of(name: str) -> str:
    """Return the module that declares one of vitsee's own commands.

    It is the command's file in `vitsee_cli.commands` if there is one, else the analysis.
    """
    stem = name.replace("-", "_")
    command_module = f"{_COMMANDS}.{stem}"
    if importlib.util.find_spec(command_module) is not None:
        return command_module
    return f"{_ANALYSES}.{stem}"


def command_named(name: str) -> click.Command:
    """Return the command, whose module is imported.

    Raises:
        GuestError: the command is of another package and cannot be used.
    """
    from vitsee_cli.signature import command_of

    stem = name.replace("-", "_")
    # Guests are looked up last: their metadata has to be searched in all installed packages.
    if name not in builtin_names():
        guest = registry.guests().get(stem)
        if guest is not None:
            console.show_lines_of(guest.module.partition(".")[0])
            return command_of(stem)
    module = module_of(name)
    if module.startswith(_COMMANDS):
        return importlib.import_module(module).command
    return command_of(stem)


def described(name: str) -> tuple[click.Command, str]:
    """Return a command that has only its name and help, and the question that it answers.

    Both are read from the source: importing the modules of all commands would take seconds.
    """
    guest = registry.guests().get(name.replace("-", "_"))
    if guest is not None:
        return _describe_guest(guest)
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text("utf-8")
    docstring = re.search(
        r'^def command\(.*?^    ("""(?:.*?)""")', source, re.MULTILINE | re.DOTALL
    )
    if docstring:  # a file of `vitsee_cli.commands`, not an analysis
        heading = re.search(r"^QUESTION = (\w+)$", source, re.MULTILINE)
        help_text = ast.literal_eval(docstring[1])
        question = heading[1] if heading else ""
    else:
        help_text, question = _help_in_source(source)
    heading_text: str = getattr(headings, question, OTHER_COMMANDS)
    return click.Command(name, help=inspect.cleandoc(help_text)), heading_text


class _SourceHelp(NamedTuple):
    """The help of an analysis as its source has it; "" where the source computes it."""

    help_text: str
    question: str  # the name of the heading, `FLOW`


def _help_in_source(source: str) -> _SourceHelp:
    """Return the `help` and the `question` of the declaration `ANALYSIS = Analysis(...)`."""
    start = re.search(r"^ANALYSIS\b[^=\n]*= *[\w.]*Analysis\(", source, re.MULTILINE)
    if start is None:
        return _SourceHelp("", "")
    # Only the declaration is parsed, which is the last statement, up to the parenthesis that
    # closes it: parsing all functions before it would take most of the time.
    call = re.match(r"ANALYSIS.*?^\)", source[start.start() :], re.DOTALL | re.MULTILINE)
    if call is None:
        return _SourceHelp("", "")
    help_text = ""
    question = ""
    for node in ast.walk(ast.parse(call[0])):
        if isinstance(node, ast.keyword) and node.arg == "help":
            if isinstance(node.value, ast.Constant):
                help_text = str(node.value.value)
        elif isinstance(node, ast.keyword) and node.arg == "question":
            question = ast.unparse(node.value).rpartition(".")[2]
    return _SourceHelp(help_text, question)


def _describe_guest(guest: registry.Guest) -> tuple[click.Command, str]:
    """Return the command and the question of another package's analysis.

    The line of help ends with the package's name; it is the package's summary if the source of
    the analysis has no text.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another package's code
            source_help = _help_in_source(guest.source())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        source_help = _SourceHelp("", "")
    lines = [line for line in source_help.help_text.splitlines() if line.strip()]
    first_line = lines[0] if lines else guest.summary
    line = visible(first_line.strip().rstrip("."))
    if len(line) > MAX_GUEST_LINE:
        line = shorten(line, MAX_GUEST_LINE)
    command = click.Command(
        guest.command, short_help=f"{line} [{visible(guest.package)}]"
    )
    question = getattr(headings, source_help.question, "")
    if question not in QUESTIONS:
        question = OTHER_COMMANDS
    return command, question


def commands_by_question(names: Iterable[str]) -> dict[str, dict[str, click.Command]]:
    """Return question -> name -> command with its help; empty questions are left out."""
    commands: dict[str, dict[str, click.Command]] = {
        question: {} for question in QUESTIONS
    }
    for name in names:
        command, question = described(name)
        commands.setdefault(question, {})[name] = command
    return {question: answers for question, answers in commands.items() if answers}


def section(
    title: str, decorators: Sequence[Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Return the decorator that adds options, which the help lists below `title` in this order."""

    def decorate(command: Any) -> Any:
        """Return the command with the options, each of which knows its section."""
        n_params_before = len(getattr(command, "__click_params__", ()))
        for add_option in reversed(decorators):
            command = add_option(command)
        for param in command.__click_params__[n_params_before:]:
            param.section = title
        return command

    return decorate


class SectionedCommand(click.Command):
    """A command whose help has a heading for each `section`, and one for the other options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings, those without a section last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            help_record = param.get_help_record(ctx)
            if help_record is not None and isinstance(param, click.Option):
                title = getattr(param, "section", OTHER_OPTIONS)
                sections.setdefault(title, []).append(help_record)
        if OTHER_OPTIONS in sections:
            sections[OTHER_OPTIONS] = sections.pop(OTHER_OPTIONS)
        for title, help_records in sections.items():
            with formatter.section(title):
                formatter.write_dl(help_records)
