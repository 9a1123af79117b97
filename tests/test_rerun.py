"""Results made again by the command in their sidecar, and what a stranger's sidecar cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import invoke as vitsee
from tests.stores import write_sites


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, and its CKA as table and figure."""
    rng = np.random.default_rng(0)
    acts = {f"blocks.{i}.out": rng.normal(size=(12, 7, 4)) for i in range(3)}
    write_sites(tmp_path / "a.zarr", acts)
    monkeypatch.chdir(tmp_path)
    done = vitsee(
        "-q",
        "cka",
        "a.zarr",
        "--sites=!blocks.1.out,blocks",
        "-o",
        "r.csv",
        "--png=r.png",
    )
    assert done.exit_code == 0, done.stderr
    return tmp_path


@pytest.mark.slow
def test_a_result_is_made_again_to_the_byte(folder: Path) -> None:
    table, png = (folder / "r.csv").read_bytes(), (folder / "r.png").read_bytes()
    done = vitsee("rerun", "r.csv.json", "-o", "new.csv")
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    said = "vitsee -q cka a.zarr '--sites=!blocks.1.out,blocks' -o new.csv"
    assert said in done.stderr
    assert (folder / "new.csv").read_bytes() == table and not (
        folder / "new.png"
    ).exists()
    done = vitsee("rerun", "r.csv")
    assert done.exit_code == 1 and "r.csv exists" in done.stderr
    (folder / "r.png").write_bytes(b"old")
    assert vitsee("rerun", "r.csv", "--force").exit_code == 0
    assert (folder / "r.csv").read_bytes() == table and (
        folder / "r.png"
    ).read_bytes() == png


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["vitsee", "extract", "demo:vit", "--data", "demo:test", "-o", "x.zarr"],
            "no figure",
        ),
        (["vitsee", "rerun", "r.csv.json"], "no figure"),
        (["rm", "-r", "a.zarr"], "no figure"),
        (
            ["vitsee", "cka", "--", "a.zarr", "-o", "x.csv"],
            "a command with -- is not run again",
        ),
        (["vitsee", "cka", "gone.zarr"], "gone.zarr"),
    ],
)
def test_what_is_not_run_again(folder: Path, words: list[str], said: str) -> None:
    sidecar = folder / "r.csv.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "command": words}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = vitsee("rerun", sidecar, "--force")
    assert (done.exit_code, done.stdout) == (1, "") and said in done.stderr, done.output
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before


def test_a_strangers_sidecar_writes_nothing_elsewhere(folder: Path) -> None:
    sidecar = folder / "r.csv.json"
    outside = [
        "--png",
        "out.png",
        "-oelse.csv",
        "--output=other.csv",
        "--cache",
        "c",
        "--force",
    ]
    words = ["vitsee", "cka", "a.zarr", *outside]
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "command": words}))
    before = {path.name for path in folder.iterdir()}
    done = vitsee("rerun", sidecar, "-o", "new.csv")
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in folder.iterdir()} - before == {
        "new.csv",
        "new.csv.json",
    }
