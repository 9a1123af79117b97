"""Headings of the help: the questions that commands answer, and groups of a command's options."""

from __future__ import annotations

from collections.abc import Callable
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

REST = "Other options"


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
