"""What commands import: little work does not wait for libraries that take long to be imported, and
no command does before it has read something."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.every_command import TABLES
from tests.extractions import VIT, extract, extracted, plant_images
from vitsee_core.runtime import progress

HEAVY = (
    "torch",
    "torchvision",
    "timm",
    "matplotlib",
    "sklearn",
    "pandas",
    "dask",
    "numba",
)
# What the work of some commands is made of; pandas comes with scikit-learn where it is installed.
USED = {
    "cluster": {"sklearn", "pandas"},
    "concepts": {"sklearn", "pandas", "torch"},
    "keypoints": {"torch"},
    "head-importance": {"timm", "torch", "torchvision"},
    "knn": {"torch"},
    "pca": {"numba"},
    "propagate": {"torch"},
    "retrieve": {"torch"},
    "spectrum": {"numba"},
}
MODELS = {"head-importance"}  # run one before all else

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
    lines: list[list[Any]] = [
        json.loads(x) for x in done.stderr.splitlines() if x[:1] == "["
    ]
    assert [number for number, *_ in lines] == [*range(len(runs))], done.stderr
    return [({*first}, {*end}) for _, first, end in lines]


@pytest.mark.slow
def test_nothing_slow_is_imported_that_the_work_does_not_deserve(
    everything: Path,
) -> None:
    runs = [[command, *variants[0]] for command, variants in TABLES.items()]
    for run, (first, end) in zip(runs, imported(everything, runs), strict=True):
        assert not first or run[0] in MODELS, (
            f"{run} imports {first} before it reads an array"
        )
        used = USED.get(run[0], set())
        assert end <= used, f"{run} imports {end - used}"


@pytest.mark.slow
def test_a_complete_store_is_known_by_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that made it imports no torch and needs no images; another command does."""
    monkeypatch.chdir(tmp_path)
    plant_images(tmp_path / "data", 3)
    words = [*VIT, "--data", "data", "--tokens", "pooled", "-o", "a.zarr"]
    extracted(*words)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    ((_, end),) = imported(tmp_path, [["extract", *words]])
    assert end == set()
    again = extracted(*words, "--device", "cpu", "--shard", "0/1")
    assert again.stderr.startswith(
        "a.zarr is complete (3 images): nothing to do (this command"
    )
    assert again.stderr.count("\n") == 1
    other = extract(*words, "--images", 2)
    assert other.exit_code == 1 and "data" in other.stderr
    monkeypatch.chdir(tmp_path / "elsewhere")
    words[-1] = str(tmp_path / "a.zarr")
    assert extract(*words).exit_code == 1, "data is another folder here"


def test_only_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()
    lines: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            said.set()

    handler, logger = Noted(), logging.getLogger(progress.__name__)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    with progress.soon_said("loading the model"):  # within an hour, see conftest.py
        pass
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    with progress.soon_said("listing the images"):
        assert said.wait(60)
    assert lines == ["listing the images ..."]
