"""vitsee effect of stores with other preprocessing, and how controls in time are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.extractions import VIT, extracted, plant_images
from vitsee_cli.main import main
from vitsee_core.tables.results import Table
from vitsee_stores import open_store
from vitsee_stores.weights_names import described_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of one model and changed ones, with several crops; and clips of 4 and 8 frames."""
    path = tmp_path_factory.mktemp("effect")
    data = ["--data", plant_images(path / "data", 6), "--sites", "blocks,logits"]
    for name, options in {
        "base": ["--crop-pct", 0.9],
        "crop": ["--crop-pct", 1.0],
        "resized": ["--crop-pct", 0.9, "--img-mean", "0.1,0.2,0.3"],
        "skip": ["--crop-pct", 0.9, "--ablate-skip", "blocks.0.mlp"],
        "skip-crop": ["--crop-pct", 1.0, "--ablate-skip", "blocks.0.mlp"],
    }.items():
        extracted(*VIT, *data, *options, "-o", path / f"{name}.zarr")
    other = [VIT[0], "--random-init", "1", *VIT[3:]]
    normalised = ["--crop-pct", 0.9, "--img-mean", "0.1,0.2,0.3"]
    extracted(*other, *data, *normalised, "-o", path / "other.zarr")
    extracted(*other, *data, "--crop-pct", 1.0, "-o", path / "other-crop.zarr")
    return path


def effect(folder: Path, *args: str) -> Result:
    names = [
        str(folder / f"{arg}.zarr") if not arg.startswith("-") else arg for arg in args
    ]
    out = ["-o", str(folder / "effect.csv"), "--force", "--tokens", "mean"]
    return CliRunner().invoke(main, ["effect", *names, *out])


@pytest.mark.parametrize("changed", ["skip", "other"])
def test_a_change_on_the_same_pixels(folder: Path, changed: str) -> None:
    """Other weights may bring their own normalisation."""
    result = effect(folder, "base", changed)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("changed", ["crop", "resized"])
def test_other_preprocessing_has_to_be_asked_for(folder: Path, changed: str) -> None:
    result = effect(folder, "base", changed)
    assert result.exit_code == 1
    key = "crop_pct: 0.9 against 1.0" if changed == "crop" else "mean: "
    assert key in result.stderr and "--other-transform" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    asked = effect(folder, "base", changed, "--other-transform")
    assert asked.exit_code == 0, asked.output
    remarks = Table.read(folder / "effect.csv").notes["remarks"]
    assert any("this is the change that is measured" in remark for remark in remarks)


@pytest.mark.parametrize("changed", ["skip-crop", "other-crop"])
@pytest.mark.parametrize("option", [(), ("--other-transform",)])
def test_two_changes_at_once_are_refused(
    folder: Path, changed: str, option: tuple[str, ...]
) -> None:
    result = effect(folder, "base", changed, *option)
    assert result.exit_code == 1
    assert "an effect is of one change" in result.stderr
    what = "skip connections" if changed == "skip-crop" else "weights"
    assert what in result.stderr


def test_asked_for_in_vain(folder: Path) -> None:
    result = effect(folder, "base", "skip", "--other-transform")
    assert result.exit_code == 1
    assert "all stores have the preprocessing of base" in result.stderr


CONTROLS = {
    "four": (["--frames", 4], "4 frames"),
    "two": (["--frames", 2], "2 frames"),
    "shuffled": (["--frames", 4, "--time", "shuffled"], "4 frames, shuffled in time"),
    "other": (
        ["--frames", 4, "--time", "shuffled", "--seed", 3],
        "4 frames, shuffled in time by seed 3",
    ),
    "still": (["--frames", 4, "--time", "still"], "4 frames, still in time"),
    "near": (["--frames", 4, "--every", 1], "4 frames, every 1"),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clips")
    for k in range(6):
        plant_images(path / "data" / f"clip{k}", 8)
        # frames of a clip are files of one folder
        frames = sorted((path / "data" / f"clip{k}").rglob("*.png"))
        for frame in frames:
            frame.rename(path / "data" / f"clip{k}" / frame.name)
        for kind in ("class0", "class1"):
            (path / "data" / f"clip{k}" / kind).rmdir()
    for name, (options, _) in CONTROLS.items():
        sites = ["--sites", "blocks,logits", "--attention", "none"]
        extracted(
            *VIT, "--data", path / "data", *sites, *options, "-o", path / f"{name}.zarr"
        )
    return path


def test_controls_in_time_are_named(clips: Path) -> None:
    for name, (_, words) in CONTROLS.items():
        manifest = open_store(clips / f"{name}.zarr").manifest
        assert described_weights(manifest) == f"random 0, {words}"
    out = clips / "cka.csv"
    stores = [str(clips / f"{name}.zarr") for name in ("four", "two")]
    result = CliRunner().invoke(
        main, ["cka", *stores, "--tokens", "mean", "--no-cache", "-o", str(out)]
    )
    assert result.exit_code == 0, result.output
    table = Table.read(out)
    assert np.unique(table["weights_a"]).tolist() == ["random 0, 4 frames"]
    assert np.unique(table["weights_b"]).tolist() == ["random 0, 2 frames"]


@pytest.mark.parametrize("name", ["two", "shuffled", "still", "near"])
def test_the_effect_of_a_control_in_time_is_asked_for(clips: Path, name: str) -> None:
    refused = effect(clips, "four", name)
    assert refused.exit_code == 1
    assert "clip" in refused.stderr and "--other-transform" in refused.stderr
    if name != "two":
        asked = effect(clips, "four", name, "--other-transform")
        assert asked.exit_code == 0, asked.output
        assert (
            Table.read(clips / "effect.csv")["weights"][-1]
            == f"random 0, {CONTROLS[name][1]}"
        )
