"""Headings of the help: the questions that commands answer, and groups of a command's options."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

# In the order of `vitsee --help`. A command names its own: `QUESTION = ATTENTION`.
STORES = "Make and inspect stores"
SIMILARITY = "How similar layers and models are"
ATTENTION = "Where attention looks"
FLOW = "What flows through the layers"
KNOWLEDGE = "What a layer knows"
RESULTS = "Results of several commands"
QUESTIONS = (STORES, SIMILARITY, ATTENTION, FLOW, KNOWLEDGE, RESULTS)
OTHER_COMMANDS = "Other commands"
_COMMANDS = "vitsee_cli.commands"

REST = "Other options"


def module_of(name: str) -> str:
    """The name of a command's module."""
    return f"{_COMMANDS}.{name.replace('-', '_')}"


def described(name: str) -> tuple[click.Command, str]:
    """A command's name and help, and its question, read from its file: commands import their
    analyses, whose constants are choices and defaults, and the list of all commands is to be quick.
    """
    help_text, question = "", OTHER_COMMANDS
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "command":
            help_text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QUESTION":
            question = globals()[ast.unparse(node.value)]
    return click.Command(name, help=help_text), question


def commands_by_question(names: Iterable[str]) -> dict[str, dict[str, click.Command]]:
    """Question -> the commands that answer it, by name, with their help; empty ones left out."""
    found: dict[str, dict[str, click.Command]] = {question: {} for question in QUESTIONS}
    for name in names:
        command, question = described(name)
        found.setdefault(question, {})[name] = command
    return {question: some for question, some in found.items() if some}


def section(title: str, *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator: the command with these options, listed below `title` in this order."""

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
        """Write the options below their headings."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                found.setdefault(getattr(param, "section", REST), []).append(record)
        rest = {REST: found.pop(REST)} if REST in found else {}
        for title, records in (found | rest).items():
            with formatter.section(title):
                formatter.write_dl(records)
