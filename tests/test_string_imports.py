"""Modules are imported by statements, so that lint-imports sees every arrow between rooms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitsee_core.runtime import registry

ROOT = Path(__file__).parents[1]
# Who may import ours by a string: what finds modules by their files, and facades of their own room.
FINDERS = {
    "vitsee_core/runtime/registry.py": "analyses, ours and guests, by the names of their files",
    "cli/vitsee_cli/sections.py": "commands, by the names of their files",
    "cli/vitsee/__init__.py": "names of the facade, when they are first used",
    "stores/vitsee_stores/__init__.py": "names of the package, when they are first used",
    "vitsee_core/models/sources/__init__.py": "the source of a name, by its prefix",
}


def imports_by_string(source: str) -> Iterator[str]:
    """What is handed to `import_module` or `__import__`, as the source writes it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in ("import_module", "__import__"):
                yield ast.unparse(node.args[0])


def names_another_library(argument: str) -> bool:
    """Whether it is a text that begins with another package than ours: `f'PIL.{plugin}'`."""
    package = re.match(r"f?['\"](\w+)\.", argument)
    return package is not None and package[1] not in registry.VITSEE_PACKAGES


def offences(sources: dict[str, str]) -> dict[str, list[str]]:
    """File -> imports by a string in it that its place does not allow."""
    found = {}
    for name, source in sources.items():
        wrong = [x for x in imports_by_string(source) if not names_another_library(x)]
        if wrong and name not in FINDERS:
            found[name] = wrong
    return found


def sources() -> dict[str, str]:
    """File -> text of our packages."""
    roots = (ROOT / "cli", ROOT / "vitsee_core", ROOT / "stores")
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


@pytest.mark.slow
def test_no_module_of_ours_is_imported_by_a_string() -> None:
    files = sources()
    assert len(files) > 400
    # It holds the name of polars, which is imported late.
    assert offences(files) == {"vitsee_core/types.py": ["self._name"]}
    for name in FINDERS:
        assert list(imports_by_string(files[name])), f"{name} needs no exception any more"


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        ("importlib.import_module('vitsee_core.figures')", "'vitsee_core.figures'"),
        ("import_module(f'vitsee_core.{name}')", "f'vitsee_core.{name}'"),
        ("__import__('vitsee_cli.main')", "'vitsee_cli.main'"),
        ("import_module(name)", "name"),
    ],
)
def test_such_an_import_is_found(source: str, argument: str) -> None:
    assert offences({"tables/new.py": source}) == {"tables/new.py": [argument]}
    assert offences({"tables/new.py": "import_module('IPython.display')"}) == {}
