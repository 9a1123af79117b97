"""What commands import: little work does not wait for libraries that take long to be imported, and
no command does before it has read something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.every_command import TABLES

HEAVY = ("torch", "torchvision", "timm", "matplotlib", "sklearn", "pandas", "dask", "numba")
# What the work of some commands is made of; pandas comes with scikit-learn where it is installed.
USED = {
    "cluster": {"sklearn", "pandas"},
    "keypoints": {"torch"},
    "pca": {"numba"},
    "probe": {"numba"},
    "propagate": {"torch"},
    "spectrum": {"numba"},
}

# A process for each command, forked from one that has imported none; where there is a first read,
# what had been imported until then.
SCRIPT = """
import json, os, sys
from vitsee_cli.main import main
from vitsee_stores.folder import Folder

heavy, runs = json.loads(sys.argv[1])
found = lambda: [name for name in heavy if name in sys.modules]
assert found() == []
for number, arguments in enumerate(runs):
    if os.fork() == 0:
        first, read = [], Folder.read_chunk
        def read_chunk(self, *arguments):
            first or first.append(found())
            return read(self, *arguments)
        Folder.read_chunk = read_chunk
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            main(arguments, standalone_mode=False)
        print(json.dumps([number, *(first[:1] or [[]]), found()]), file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""


def imported(folder: Path, runs: list[list[str]]) -> list[tuple[set[str], set[str]]]:
    """Of each command: what it had imported at its first read, and at its end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([HEAVY, runs])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines: list[list[Any]] = [json.loads(x) for x in done.stderr.splitlines() if x[:1] == "["]
    assert [number for number, *_ in lines] == [*range(len(runs))], done.stderr
    return [({*first}, {*end}) for _, first, end in lines]


def test_nothing_slow_is_imported_that_the_work_does_not_deserve(everything: Path) -> None:
    runs = [[command, *variants[0]] for command, variants in TABLES.items()]
    for run, (first, end) in zip(runs, imported(everything, runs), strict=True):
        assert not first, f"{run} imports {first} before it reads an array"
        used = USED.get(run[0], set())
        assert end <= used, f"{run} imports {end - used}"
