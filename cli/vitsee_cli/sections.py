"""Headings of the help: the questions that commands answer, and groups of a command's options."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterable
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
LONGEST = 72  # letters of a guest's line in the help

REST = "Other options"


def own_names() -> list[str]:
    """The names of vitsee's own commands, sorted: the files of `vitsee_cli.commands` and the
    analyses."""
    found = registry.modules_in(tuple(importlib.import_module(_COMMANDS).__path__))
    return sorted(name.replace("_", "-") for name in {*found, *registry.own_names()})


def names() -> list[str]:
    """The names of all commands, sorted: vitsee's own, and those of other packages."""
    return sorted(
        [*own_names(), *(guest.command for guest in registry.guests().values())]
    )


def module_of(name: str) -> str:
    """The name of the module that declares one of vitsee's own commands: its own file, else its
    analysis."""
    stem = name.replace("-", "_")
    own = f"{_COMMANDS}.{stem}"
    if importlib.util.find_spec(own) is not None:
        return own
    return f"{_ANALYSES}.{stem}"


def command_named(name: str) -> click.Command:
    """The command, its module imported. Raises GuestError: a guest that cannot be used."""
    from vitsee_cli.signature import command_of

    stem = name.replace("-", "_")
    if (
        guest := registry.guests().get(stem) if name not in own_names() else None
    ) is not None:
        console.show_lines_of(guest.module.partition(".")[0])
        return command_of(stem)
    module = module_of(name)
    if module.startswith(_COMMANDS):
        return importlib.import_module(module).command
    return command_of(stem)


def described(name: str) -> tuple[click.Command, str]:
    """A command's name and help, and its question, read from its file: importing all would take
    seconds."""
    if (guest := registry.guests().get(name.replace("-", "_"))) is not None:
        return _guest_described(guest)
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text("utf-8")
    docstring = re.search(
        r'^def command\(.*?^    ("""(?:.*?)""")', text, re.MULTILINE | re.DOTALL
    )
    if docstring:  # a file of commands
        heading = re.search(r"^QUESTION = (\w+)$", text, re.MULTILINE)
        help_text = ast.literal_eval(docstring[1])
        question = heading[1] if heading else ""
    else:
        help_text, question = _declared(text)
    heading_text: str = getattr(headings, question, OTHER_COMMANDS)
    return click.Command(name, help=inspect.cleandoc(help_text)), heading_text


class _Declared(NamedTuple):
    help_text: str
    question: str  # the name of the heading, `FLOW`


def _declared(source: str) -> _Declared:
    """The `help` and the `question` of the declaration in a module's source; "" of what is not
    written out there."""
    start = re.search(r"^ANALYSIS\b[^=\n]*= *[\w.]*Analysis\(", source, re.MULTILINE)
    # Parsing all functions would take most of the time: from the declaration, which is the last
    # statement, to the parenthesis that closes it.
    call = (
        re.match(r"ANALYSIS.*?^\)", source[start.start() :], re.DOTALL | re.M)
        if start
        else None
    )
    help_text = question = ""
    for node in ast.walk(ast.parse(call[0])) if call else ():
        if isinstance(node, ast.keyword) and node.arg == "help":
            if isinstance(node.value, ast.Constant):
                help_text = str(node.value.value)
        elif isinstance(node, ast.keyword) and node.arg == "question":
            question = ast.unparse(node.value).rpartition(".")[2]
    return _Declared(help_text, question)


def _guest_described(guest: registry.Guest) -> tuple[click.Command, str]:
    """The same of a guest, marked with its package; where its source does not say it, the package's
    summary."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another package's code
            declared = _declared(guest.source())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        declared = _Declared("", "")
    lines = [line for line in declared.help_text.splitlines() if line.strip()]
    line = visible((lines or [guest.summary])[0].strip().rstrip("."))
    line = shorten(line, LONGEST) if len(line) > LONGEST else line
    question = getattr(headings, declared.question, "")
    command = click.Command(
        guest.command, short_help=f"{line} [{visible(guest.package)}]"
    )
    return command, question if question in QUESTIONS else OTHER_COMMANDS


def commands_by_question(names: Iterable[str]) -> dict[str, dict[str, click.Command]]:
    """Question -> the commands that answer it, by name, with their help; empty ones left out."""
    found: dict[str, dict[str, click.Command]] = {question: {} for question in QUESTIONS}
    for name in names:
        command, question = described(name)
        found.setdefault(question, {})[name] = command
    return {question: some for question, some in found.items() if some}


def section(title: str, *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator: the command with these options, listed below `title` in this order."""

    def decorate(command: Any) -> Any:
        before = len(getattr(command, "__click_params__", ()))
        for one in reversed(decorators):
            command = one(command)
        for param in command.__click_params__[before:]:
            param.section = title
        return command

    return decorate


class SectionedCommand(click.Command):
    """A command whose help has a heading for each `section`, and one for the other options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                found.setdefault(getattr(param, "section", REST), []).append(record)
        rest = {REST: found.pop(REST)} if REST in found else {}
        for title, records in (found | rest).items():
            with formatter.section(title):
                formatter.write_dl(records)
