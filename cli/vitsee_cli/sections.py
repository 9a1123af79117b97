"""Headings of the help: the questions that commands answer, and groups of a command's options."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from vitsee_core.runtime import options as headings
from vitsee_core.runtime.options import ATTENTION as ATTENTION
from vitsee_core.runtime.options import FLOW as FLOW
from vitsee_core.runtime.options import KNOWLEDGE as KNOWLEDGE
from vitsee_core.runtime.options import QUESTIONS as QUESTIONS
from vitsee_core.runtime.options import RESULTS as RESULTS
from vitsee_core.runtime.options import SIMILARITY as SIMILARITY
from vitsee_core.runtime.options import STORES as STORES

OTHER_COMMANDS = "Other commands"
_COMMANDS, _ANALYSES = "vitsee_cli.commands", "vitsee_core.analyses"

REST = "Other options"


def names() -> list[str]:
    """The commands' names, sorted: the files of `vitsee_cli.commands` and the analyses."""
    folders = [importlib.import_module(package).__path__ for package in (_COMMANDS, _ANALYSES)]
    found = {m.name for folder in folders for m in pkgutil.iter_modules(folder)}
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))


def module_of(name: str) -> str:
    """The name of the module that declares a command: its own file, else its analysis."""
    stem = name.replace("-", "_")
    own = f"{_COMMANDS}.{stem}"
    return own if importlib.util.find_spec(own) is not None else f"{_ANALYSES}.{stem}"


def command_named(name: str) -> click.Command:
    """The command, its module imported."""
    module = module_of(name)
    if module.startswith(_COMMANDS):
        return importlib.import_module(module).command
    from vitsee_cli.signature import command_of

    return command_of(name.replace("-", "_"))


def described(name: str) -> tuple[click.Command, str]:
    """A command's name and help, and its question, read from its file: importing all would take
    seconds."""
    help_text, question = "", OTHER_COMMANDS
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.FunctionDef) and node.name == "command":
            help_text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and target == "HELP":
            help_text = inspect.cleandoc(ast.literal_eval(node.value))
        elif isinstance(node, ast.Assign) and target == "QUESTION":
            question = getattr(headings, ast.unparse(node.value))
    return click.Command(name, help=help_text), question


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
