"""Commands that make stores, and studies, killed at random moments and between any two changes of
the disk: nothing that was committed is made again, the same command gives what an undisturbed run
gives, byte for byte, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.extractions import array_bytes
from tests.faults.commands import Command, undisturbed
from tests.faults.conftest import Trial
from tests.faults.trials import (
    changed,
    check_finished,
    check_unfinished,
    ends_well,
    extraction,
    n_committed,
    seeds,
)
from tests.processes import Server
from vitsee_core.sae.dictionary import Dictionary
from vitsee_core.sae.dictionary_files import save_dictionary

STORE = "stores/a.zarr"
FEW = ["--sites", "blocks.0..1.out", "--attention", "none", "--no-residual"]


# ------------------------------------------------------------------------------------ stores


@pytest.fixture(scope="module")
def base(run: Server, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that is encoded, and whose means replace tokens."""
    path = tmp_path_factory.mktemp("base") / "base.zarr"
    ends_well(run.run(*extraction(images, path, *FEW)))
    return path


def words_of_import(folder: Path) -> Callable[[Path], list[object]]:
    n, rng = 2600, np.random.default_rng(0)  # eleven slabs
    np.save(folder / "a.npy", rng.normal(size=(n, 7, 4)).astype(np.float32))
    np.save(folder / "b.npy", rng.normal(size=(n, 5)).astype(np.float32))
    (folder / "ids.txt").write_text("".join(f"image{i}\n" for i in range(n)))
    files = [folder / "a.npy", folder / "b.npy", "--ids", folder / "ids.txt"]
    return lambda path: ["import", *files, "--prefix", "cls", "--grid", "2x3", "-o", path]


def words_of_encode(folder: Path, base: Path) -> Callable[[Path], list[object]]:
    w, zeros = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32), np.zeros
    topk = Dictionary(
        "topk", w.T.copy(), zeros(64, np.float32), w, zeros(16, np.float32), k=3
    )
    save_dictionary(topk, folder / "d.safetensors")
    words = [
        "encode",
        base,
        "--dictionary",
        folder / "d.safetensors",
        "--sites",
        "blocks.0.out",
    ]
    return lambda path: [*words, "-o", path, "--device", "cpu"]


def words_of_intervention(base: Path, images: Path) -> Callable[[Path], list[object]]:
    changes = ["--replace", f"cls@blocks.0.out=mean:{base}"]
    changes += ["--replace", f"random:2@blocks.0.out=shuffle:{base}"]
    changes += ["--ablate-heads", "blocks.1:0"]
    return lambda path: extraction(images, path, *FEW, *changes)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.fault(f"{name} killed"))
        for name in ("import", "encode", "interventions")
    ],
)
def command(
    run: Server,
    images: Path,
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Command:
    folder = tmp_path_factory.mktemp(request.param)
    words = {
        "import": partial(words_of_import, folder),
        "encode": partial(words_of_encode, folder, base),
        "interventions": partial(words_of_intervention, base, images),
    }[request.param]()
    return undisturbed(run, words, folder / "whole" / "s.zarr")


def markers(path: Path) -> dict[str, bytes]:
    """The commit markers of a store's slabs, which name the process and the time of each."""
    return {place.name: place.read_bytes() for place in path.glob("commits/c.*.0")}


@seeds(1)
def test_a_store_in_the_making_killed_again_and_again(
    trial: Trial, command: Command, seed: int
) -> None:
    whole, folder = array_bytes(command.path), trial.folder / "out"
    folder.mkdir()
    path = folder / "s.zarr"
    committed: dict[str, bytes] = {}
    for _ in range(3):
        command.kill(trial, path, changed(partial(n_committed, path)))
        check_unfinished(path, whole)
        assert committed.items() <= markers(path).items(), (
            "committed slabs were made again"
        )
        committed = markers(path)
    ends_well(trial.run.run(*command.words(path)))
    check_finished(path, whole)
    assert committed.items() <= markers(path).items(), "committed slabs were made again"
    assert os.listdir(folder) == ["s.zarr"]


# ------------------------------------------------------------------------------------ studies


@pytest.fixture(scope="module")
def study(run: Server, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A store, a table with its figure, and the report."""
    model = "a=test_vit?random-init=0&img-size=32x48&model-arg=patch_size=8"
    words = ["study", model, "--data", images, "--images", 6, "--device", "cpu"]
    words += ["--set", "extract.slab=2", "--memory", "1G", "--analyses", "attn-dist"]
    folder = tmp_path_factory.mktemp("study") / "whole"
    return undisturbed(run, lambda path: [*words, "-o", path], folder / "out")


def files_of(folder: Path) -> dict[str, bytes | None]:
    """The files of a study by name; bytes of those that name no time or place."""
    found = [place for place in folder.rglob("*") if place.is_file()]
    plain = (".csv", ".png")
    return {
        str(place.relative_to(folder)): place.read_bytes()
        if place.suffix in plain
        else None
        for place in found
    }


def steps_done(folder: Path) -> dict[str, object]:
    """The finished steps in a study's record, by name."""
    record = folder / "study.json"
    steps = json.loads(record.read_text())["steps"] if record.exists() else {}
    return {name: step for name, step in steps.items() if step["status"] == "done"}


@pytest.mark.fault("a study killed")
@seeds(1)
def test_a_study_killed_again_and_again(trial: Trial, study: Command, seed: int) -> None:
    whole, expected = files_of(study.path), array_bytes(study.path / STORE)
    folder = trial.folder / "study" / "out"
    folder.parent.mkdir()
    done: dict[str, object] = {}
    committed: dict[str, bytes] = {}
    for last in (False, False, True):
        if last:
            ends_well(trial.run.run(*study.words(folder)))
        else:
            study.kill(trial, folder, changed(partial(files_of, folder)))
        now = steps_done(folder)
        assert all(
            now[name] == step for name, step in done.items() if name != "report"
        ), "a step was done again"
        assert committed.items() <= markers(folder / STORE).items(), (
            "slabs were made again"
        )
        check_unfinished(folder / STORE, expected)
        done, committed = now, markers(folder / STORE)
    check_finished(folder / STORE, expected)
    assert files_of(folder) == whole
    assert os.listdir(folder.parent) == ["out"]
