"""Writes docs/tests.md: which test files are about which room of the packages.

python tools/room_tests.py                 # writes the page
python tools/room_tests.py analyses/knn    # prints the test files of a room, for pytest
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tests.md"
PACKAGES = {"vitsee_cli": "cli", "vitsee_core": "vitsee_core", "vitsee_stores": "stores"}
# A room of which a test imports this share of its names of vitsee, and more, is its subject.
SUBJECT_SHARE = 1 / 3
NO_ROOM = "several rooms"
HEAD = """# Tests by room

Written by `python tools/room_tests.py` from what the tests import; do not edit it. A test file
stands with each room from which a third of its imports of vitsee come, and with the analysis whose
name it has. `make test-room ROOM=analyses/knn` runs the fast tests of a room.

| room | test files |
|---|---|
"""


def main() -> int:
    """Write the page, or print the test files of one room; return the exit status."""
    files_by_room = room_tests()
    if len(sys.argv) == 1:
        PAGE.write_text(page(files_by_room))
        return 0
    room = sys.argv[1].removeprefix("vitsee_core/").strip("/")
    if room not in files_by_room:
        print(
            f"no room {room!r}; expected ROOM as one of {', '.join(files_by_room)}",
            file=sys.stderr,
        )
        return 2
    print(" ".join(f"tests/{name}" for name in files_by_room[room]))
    return 0


def page(files_by_room: dict[str, list[str]]) -> str:
    """Return the text of the page: a row of the table for each room."""
    rows = [
        f"| `{room}` | {', '.join(f'`{name}`' for name in names)} |"
        for room, names in files_by_room.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def room_tests() -> dict[str, list[str]]:
    """Return room -> names of its test files; rooms and names in alphabetic order."""
    analyses = analysis_names()
    files_by_room: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for room in subjects(path, analyses):
            files_by_room.setdefault(room, []).append(path.name)
    return dict(sorted(files_by_room.items()))


def analysis_names() -> set[str]:
    """Return the names of vitsee's own analyses, as their modules have them."""
    paths = (ROOT / "vitsee_core" / "analyses").iterdir()
    return {
        path.stem for path in paths if path.stem.isidentifier() and path.stem[0] != "_"
    }


def subjects(path: Path, analyses: set[str]) -> list[str]:
    """Return the rooms that a test file is about; `NO_ROOM` if it is about many alike."""
    counts = Counter(room_of(module) for module in imported_modules(path))
    n_imports = counts.total()
    rooms = {room for room, n in counts.items() if n >= SUBJECT_SHARE * n_imports}
    # Of several analyses whose names begin alike (cka, cka_heads) the longest is meant.
    topic = path.stem.removeprefix("test_")
    named = [name for name in analyses if topic == name or topic.startswith(f"{name}_")]
    if named:
        rooms.add(f"analyses/{max(named, key=len)}")
    return sorted(rooms) or [NO_ROOM]


def imported_modules(path: Path) -> list[str]:
    """Return the modules of vitsee that a test file imports, once for each import."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from vitsee_core import kernels` and `from vitsee_core.analyses import knn` name
            # the room in what is imported.
            is_parent = node.module in ("vitsee_core", "vitsee_core.analyses")
            for alias in node.names:
                modules.append(
                    f"{node.module}.{alias.name}" if is_parent else node.module
                )
    return [module for module in modules if module.split(".")[0] in PACKAGES]


def room_of(module: str) -> str:
    """Return the room of a module: a package, a folder of vitsee_core, or an analysis."""
    package, *folders = module.split(".")
    if package != "vitsee_core" or not folders:
        return PACKAGES[package]
    if folders[0] == "analyses":
        return "/".join(folders[:2])
    return folders[0]


if __name__ == "__main__":
    sys.exit(main())
