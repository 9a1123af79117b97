"""Writes docs/files.md: every module, and what its docstring says first.

python tools/files_page.py
"""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
ROOTS = ("cli/vitsee_cli", "vitsee_core", "stores/vitsee_stores")
HEAD = """# Every file

Written by `python tools/files_page.py` from the first sentences of the modules; do not edit it.
[Architecture](architecture.md) says how they belong together.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """A heading per folder, and a line per file."""
    files = [path for root in ROOTS for path in (ROOT / root).rglob("*.py")]
    found = [HEAD]
    for folder, paths in groupby(
        sorted(files, key=by_folder), key=lambda path: path.parent
    ):
        rows = [
            f"- `{path.name}`: {said}" for path in paths if (said := first_sentence(path))
        ]
        if rows:
            found += [f"## {folder.relative_to(ROOT)}", "", *rows, ""]
    return "\n".join(found)


def by_folder(path: Path) -> tuple[Path, str]:
    """The order of the page."""
    return path.parent, path.name


def first_sentence(path: Path) -> str:
    """What the docstring says before its first full stop; of an `__init__` only if it is an
    analysis: the others hand on names."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    if path.name == "__init__.py" and path.parents[1].name != "analyses":
        return ""
    return re.split(r"(?<!al)(?<!Fig)(?<!Figs)(?<!Sec)\.(?:\s|$)|\n\n", text)[0].replace(
        "\n", " "
    )


if __name__ == "__main__":
    main()
