"""`vitsee extract` on wrong input: one line, exit code 1, empty stdout, no half-made result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from tests.extractions import RESNET, VIT, extract, extracted, plant_images
from vitsee_core.extraction import run
from vitsee_stores import StoreError, open_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("images"), 6)


def refused(result: Result, *phrases: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("vitsee extract: ")]
    assert len(lines) == 1, result.stderr
    for phrase in phrases:
        assert phrase in lines[0]


@pytest.mark.parametrize(
    ("model", "phrases"),
    [
        (["vit_bse_patch16_224", "--random-init", "0"], ["vit_bse_patch16_224"]),
        (["demo:vgg"], ["vgg", "demo:vit"]),
        (["local-dir:/nowhere/at/all"], ["/nowhere/at/all"]),
        ([VIT[0], "--checkpoint", "/nowhere.pth"], ["/nowhere.pth"]),
        ([*VIT, "--sites", "blokcs.*"], ["blokcs.*", "vitsee sites"]),
        ([*VIT, "--tokens", "some"], ["--tokens is 'some'"]),
        ([*VIT, "--dtype", "bfloat16"], ["--dtype is 'bfloat16'"]),
        ([*VIT, "--dtype", "=float32"], ["--dtype is '=float32'"]),
        ([*VIT, "--shard", "3/3"], ["count from 0"]),
        ([*VIT, "--device", "cuda:7"], ["--device cuda:7"]),
        ([*VIT, "--precision", "tf32", "--device", "cpu"], ["CUDA only"]),
        ([*VIT, "--slab", "1000000000", "--images", "6"], []),
        ([*RESNET, "--attention", "summary"], ["--attention summary cannot be served"]),
        (["test_efficientnet", "--random-init", "0", "--residual"], ["--residual"]),
    ],
)
def test_options_that_cannot_be_served(
    model: list[str], phrases: list[str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.zarr"
    result = extract(*model, "--data", folder, "-o", path)
    if not phrases:  # an explicit slab is kept, at most the images there are
        assert result.exit_code == 0, result.output
        return
    refused(result, *phrases)
    assert list(tmp_path.iterdir()) == []


def test_missing_data_and_data_without_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "store.zarr"
    for data, phrase in ((tmp_path / "none", "none"), (tmp_path / "empty", "no image")):
        refused(extract(*VIT, "--data", data, "-o", path), phrase)
    assert not path.exists()


def test_none_of_the_images_can_be_read(tmp_path: Path) -> None:
    folder = plant_images(tmp_path / "data", 4)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    path = tmp_path / "store.zarr"
    refused(extract(*VIT, "--data", folder, "-o", path), "none of the first 4 images can be read")
    assert not path.exists()


def test_an_output_that_is_no_store_is_left_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter1.tex").write_text("dear reader")
    for extra in ([], ["--force"]):
        refused(extract(*VIT, "--data", folder, "-o", path, *extra), str(path))
    assert (path / "chapter1.tex").read_text() == "dear reader"


def test_an_output_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    refused(extract(*VIT, "--data", folder, "-o", file / "store.zarr"), "file")
    refused(extract(*VIT, "--data", folder, "-o", "/proc/store.zarr"), "/proc")


def test_more_than_the_free_disk_is_refused_before_anything_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "free_disk_bytes", lambda _path: 1000)
    path = tmp_path / "store.zarr"
    refused(extract(*VIT, "--data", folder, "-o", path), "1.0 kB free", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way(folder: Path, tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: the same path through the writer."""
    path = tmp_path / "store.zarr"
    command = [sys.executable, "-m", "vitsee_cli", "extract", *VIT]
    command += ["--data", str(folder), "-o", str(path), "--slab", "6"]
    limited = "import resource, signal, sys, os; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); "
    limited += "os.execv(sys.argv[1], sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", limited, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    with pytest.raises(StoreError):
        open_store(path)
    extracted(*VIT, "--data", folder, "-o", path, "--slab", "6")  # space again: it resumes
    assert np.isfinite(open_store(path).acts("blocks.0.out")[:]).all()


def test_a_corrupted_chunk_is_found_by_readers_and_by_validate(
    folder: Path, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from vitsee_cli.main import main

    path = tmp_path / "store.zarr"
    extracted(*VIT, "--data", folder, "-o", path)
    chunk = next((path / "attention" / "distance_px").glob("c.*"))
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(bytes(data))
    found = CliRunner().invoke(main, ["validate", "--deep", str(path)])
    assert found.exit_code == 1
    assert "attention/distance_px" in found.output
    read = CliRunner().invoke(main, ["attn-dist", str(path)])
    assert read.exit_code == 1
    assert read.stdout == ""
    assert "attention/distance_px" in read.stderr
