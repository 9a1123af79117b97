"""Promises: the deprecation decorator, the experimental marks, and the checks before a commit."""

from __future__ import annotations

import doctest
import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml

import vitsee
from vitsee_cli.main import main
from vitsee_core.runtime import stability
from vitsee_core.runtime.stability import EXPERIMENTAL, deprecated

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "stability.md"


def test_a_deprecated_function_works_and_says_what_to_write() -> None:
    @deprecated(since="0.2", removed_in="0.4", instead="total(values)")
    def add(values: list[int]) -> int:
        """Sum the values."""
        return sum(values)

    with pytest.warns(
        FutureWarning, match=r"add will be removed in 0\.4; use total"
    ) as caught:
        assert add([1, 2]) == 3
    assert caught[0].filename == __file__
    assert add.__doc__ is not None and add.__doc__.startswith(
        "Deprecated since 0.2: add "
    )
    assert add.__doc__.endswith("Sum the values.")


def test_examples_of_the_module() -> None:
    results = doctest.testmod(stability)
    assert results.attempted > 2 and results.failed == 0


def _marked_options() -> set[str]:
    """`COMMAND --option` for every option of `extract` and `study` whose help has the mark."""
    marked = set()
    for name in ("extract", "study"):
        with click.Context(main) as context:
            command = main.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if EXPERIMENTAL in (getattr(parameter, "help", None) or ""):
                marked.add(f"{name} {parameter.opts[0]}")
    return marked


def test_the_page_lists_what_the_helps_mark() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    listed = set()
    for row in rows:
        command = ""
        for text in re.findall(r"`([^`]+)`", row):
            words = text.split()
            if len(words) == 2 and words[1].startswith("--"):
                command = words[0]
                listed.add(text)
            elif text.startswith("--"):
                listed.add(f"{command} {text}")
    assert listed == _marked_options() != set()


def test_experimental_commands_and_classes_say_so() -> None:
    with click.Context(main) as context:
        encode = main.get_command(context, "encode")
    assert encode is not None and EXPERIMENTAL in (encode.help or "")
    assert EXPERIMENTAL in (vitsee.Monitor.__doc__ or "")


def test_checks_before_a_commit_have_the_versions_of_the_project() -> None:
    """`make test` and a commit must not disagree about the formatting of a file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        text.split("~=")[0]: text for text in project["optional-dependencies"]["dev"]
    }
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = config["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "format", "lint-imports", "mypy"}
    for hook in hooks:
        for requirement in hook.get("additional_dependencies", []):
            assert requirement == pinned[requirement.split("~=")[0]]
        assert ".venv" not in hook["entry"]
