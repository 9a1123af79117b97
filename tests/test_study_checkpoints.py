"""`vitsee study --checkpoints`: which files are which steps, and the tables of all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from PIL import Image

import vitsee
from tests.extractions import plant_images
from vitsee_cli.main import main
from vitsee_core.tables.results import Table
from vitsee_core.training.checkpoints import find_checkpoints
from vitsee_core.training.series import DIVERGED, FAILED, MEASURED, SKIPPED, Series
from vitsee_stores import open_store
from vitsee_stores.errors import VitseeError

MODEL = "test_vit?img-size=32&model-arg=patch_size=8"
FEW = ("--analyses", "attn-dist", "--analyses", "cka:first", "--analyses", "cka:last")


def files(folder: Path, *names: str, **fields: Any) -> str:
    for name in names:
        (folder / name).write_bytes(b"")
    return str(folder / "*")


@pytest.mark.parametrize(
    ("names", "unit", "steps"),
    [
        (["step_1000.pt", "step_900.pt", "step_10000.pt"], "step", [900, 1000, 10000]),
        (
            ["checkpoint-epoch=3-step=40.ckpt", "checkpoint-epoch=2-step=30.ckpt"],
            "step",
            [30, 40],
        ),
        (["vit_epoch7.pth", "vit_epoch12.pth"], "epoch", [7, 12]),
        (["b16-global_step00500.pt"], "step", [500]),
        (["vit16_5.pt", "vit16_30.pt"], "step", [5, 30]),
        (["day1_5.pt", "day2_30.pt"], "step", [5, 30]),
        (["ckpt-ep-3.pt"], "epoch", [3]),
    ],
)
def test_steps_of_names(
    tmp_path: Path, names: list[str], unit: str, steps: list[int]
) -> None:
    found_unit, found, without = find_checkpoints(files(tmp_path, *names))
    assert (found_unit, [file.step for file in found], without) == (unit, steps, {})
    for file in found:
        assert str(file.step) in file.path.name


def test_steps_of_the_files_own_fields(tmp_path: Path) -> None:
    """Names without any: a number, and a tensor of one; a file that cannot be read is named."""
    weights = {"w": torch.zeros(2)}
    torch.save(
        {"model": weights, "epoch": 3, "global_step": torch.tensor(70)}, tmp_path / "a.pt"
    )
    torch.save({"model": weights, "epoch": 1, "global_step": 500}, tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:300])
    unit, found, without = find_checkpoints(str(tmp_path / "*.pt"))
    assert unit == "step" and [(f.step, f.path.name) for f in found] == [
        (70, "a.pt"),
        (500, "b.pt"),
    ]
    assert list(without) == ["c.pt"] and "no readable checkpoint" in without["c.pt"]


def test_files_without_a_step_or_with_the_same(tmp_path: Path) -> None:
    with pytest.raises(VitseeError, match="no file matches --checkpoints"):
        find_checkpoints(str(tmp_path / "*.pt"))
    torch.save({"w": torch.zeros(2)}, tmp_path / "best.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "last.pt")
    with pytest.raises(VitseeError, match=r"no step in the names .* nor a field step"):
        find_checkpoints(str(tmp_path / "*.pt"))
    (tmp_path / "step_7.pt").write_bytes(b"")
    (tmp_path / "step_07-v1.pt").write_bytes(b"")
    with pytest.raises(VitseeError, match="two checkpoints of step 7"):
        find_checkpoints(str(tmp_path / "step*.pt"))


def test_which_steps_are_done_and_which_are_dropped(tmp_path: Path) -> None:
    """A step that failed, or whose file is another now, is measured again; from a step on, its own
    row goes with the later ones."""
    series = Series(tmp_path / "out", str(tmp_path / "photos"), [], name="m")
    for step, status in enumerate((MEASURED, DIVERGED, FAILED, SKIPPED, MEASURED)):
        series.record(step, status, checkpoint=f"{step}.pt")
    done = [series.is_done(step, {"checkpoint": f"{step}.pt"}) for step in range(6)]
    assert done == [True, True, False, False, True, False]
    assert not series.is_done(0, {"checkpoint": "other.pt"})
    assert series.drop_from(4) == [4] and series.steps_of(MEASURED) == [0]
    assert series.drop_from(2) == [] and series.steps_of(FAILED) == []
    assert series.steps_of(DIVERGED) == [1]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_images(tmp_path_factory.mktemp("photos"), 8)


def plant(folder: Path, *steps: int) -> list[Any]:
    """Checkpoints of one module on its way."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, patch_size=8)
    states = []
    for step in steps:
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        states.append({name: x.clone() for name, x in model.state_dict().items()})
        torch.save({"state_dict": states[-1], "step": step}, folder / f"step_{step}.pt")
    return states


def study(run: Path, photos: Path, out: Path, *words: object) -> Result:
    given = [
        "study",
        f"vit={MODEL}",
        "--checkpoints",
        run / "step_*.pt",
        "--data",
        photos,
    ]
    return CliRunner().invoke(main, [*map(str, given), "-o", str(out), *map(str, words)])


@pytest.mark.slow
def test_every_checkpoint_is_a_step_of_every_table(photos: Path, tmp_path: Path) -> None:
    """Values are those of extract and the commands; what is half-written or diverged is a row, and
    a later call does the new ones alone."""
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    states = plant(run, 0, 200, 1000)
    (run / "step_500.pt").write_bytes((run / "step_0.pt").read_bytes()[:5000])
    broken = torch.load(run / "step_0.pt")
    broken["state_dict"]["head.bias"][0] = float("nan")
    torch.save(broken, run / "step_700.pt")
    result = study(run, photos, out, *FEW)
    assert result.exit_code == 1 and result.stdout == f"{out / 'report.html'}\n"
    assert "5 checkpoints over 8 images: about" in result.stderr
    assert "1 of 5 checkpoints were not measured: step_500.pt" in result.stderr
    page = (out / "report.html").read_text()
    assert ">Over training</h2>" in page and "step 500 failed: " in page
    record = Table.read(out / "steps.csv")
    assert record["step"].tolist() == [0, 200, 500, 700, 1000]
    ends = ["measured", "measured", "failed", "diverged", "measured"]
    assert record["status"].tolist() == ends
    assert (
        "no readable checkpoint" in record["note"][2] and "head.bias" in record["note"][3]
    )
    table = Table.read(out / "results/attn-dist.csv")
    assert sorted(set(table["step"])) == [0, 200, 1000]
    stores = {}
    for step in (0, 200, 1000):
        stores[step] = tmp_path / f"vit-step{step}.zarr"
        vitsee.extract(
            MODEL, photos, stores[step], checkpoint=run / f"step_{step}.pt", images=8
        )
        own = vitsee.attn_dist(stores[step])
        assert np.array_equal(table.filter(step=step)["value"], own["value"])
    for word, end, others in (("first", 0, {200, 1000}), ("last", 1000, {0, 200})):
        compared = Table.read(out / f"results/cka-{word}.csv")
        assert set(compared["step"]) == others
        own = vitsee.cka(stores[end], stores[200], pairs="same-depth")
        assert np.array_equal(compared.filter(step=200)["value"], own["value"])
    assert sorted(p.name for p in (out / "stores").glob("*.zarr")) == [
        "vit-step0.zarr",
        "vit-step1000.zarr",
    ]
    # One more, and the half-written one is whole now.
    torch.save({"state_dict": states[1]}, run / "step_500.pt")
    plant(tmp_path, 2000)
    (tmp_path / "step_2000.pt").rename(run / "step_2000.pt")
    again = study(run, photos, out, *FEW)
    assert again.exit_code == 0, again.stderr
    assert "4 of 6 checkpoints: done before" in again.stderr
    assert (
        "cka:last compares with step 1000, the last one of the first call" in again.stderr
    )
    done = Table.read(out / "steps.csv")
    assert done["status"].tolist()[2] == "measured" and done["step"].tolist()[-1] == 2000
    assert done.filter(step=0).frame.equals(record.filter(step=0).frame)
    after = Table.read(out / "results/attn-dist.csv")
    assert np.array_equal(
        after.filter(step=500)["value"], after.filter(step=200)["value"]
    )
    # A file that was written again is another step.
    os.utime(run / "step_200.pt", (1, 1))
    assert "5 of 6 checkpoints: done before" in study(run, photos, out, *FEW).stderr


@pytest.mark.slow
def test_a_reason_that_holds_at_every_step_is_said_once(
    photos: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    plant(run, 0, 200, 1000)
    words = ("--train", photos, "--analyses", "attn-dist", "--analyses", "knn")
    result = study(run, photos, out, *words)
    said = [line for line in result.stderr.splitlines() if "knn failed: " in line]
    assert len(said) == 1 and said[0].startswith("step 0: knn failed: "), result.stderr
    notes = Table.read(out / "steps.csv")["note"]
    assert [note.startswith("knn: ") for note in notes] == [True] * 3


def test_a_dry_run_lists_the_steps(photos: Path, tmp_path: Path) -> None:
    files(tmp_path, "step_20.pt", "step_3.pt")
    result = study(tmp_path, photos, tmp_path / "out", "--dry-run")
    lines = [f"step {step}: {tmp_path / f'step_{step}.pt'}\n" for step in (3, 20)]
    assert result.exit_code == 0 and result.stdout == "".join(lines)
    assert "left out: knn: it learns from images" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "line", "code"),
    [
        (["--control"], "--control and --checkpoints exclude each other", 2),
        (["--analyses", "probe"], "probe learns from images: give train=", 2),
        (["b=test_vit"], "--checkpoints are of one model", 2),
    ],
)
def test_what_it_refuses(
    photos: Path, tmp_path: Path, words: list[str], line: str, code: int
) -> None:
    files(tmp_path, "step_20.pt")
    result = study(tmp_path, photos, tmp_path / "out", *words)
    assert (result.exit_code, result.stdout) == (code, "") and line in result.stderr


def test_a_name_with_weights_and_a_folder_of_another_study(
    photos: Path, tmp_path: Path
) -> None:
    files(tmp_path, "step_20.pt")
    given = [
        "study",
        "vit=test_vit?random-init=0",
        "--checkpoints",
        str(tmp_path / "step_*.pt"),
    ]
    result = CliRunner().invoke(
        main, [*given, "--data", str(photos), "-o", str(tmp_path / "out")]
    )
    assert (
        result.exit_code == 2
        and "its weights are those of --checkpoints" in result.stderr
    )
    (tmp_path / "out/results").mkdir(parents=True)
    (tmp_path / "out/results/attn-dist.csv").write_text("mine")
    result = study(tmp_path, photos, tmp_path / "out", *FEW)
    assert result.exit_code == 1 and "would be replaced" in result.stderr
    assert (tmp_path / "out/results/attn-dist.csv").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "n_train"),
    [(("--images", "6"), 6), (("--images", "6", "--train-images", "4"), 4)],
)
def test_stores_to_train_on_are_as_large_as_asked_and_kept(
    photos: Path, tmp_path: Path, words: tuple[str, ...], n_train: int
) -> None:
    """By default as many images as --images; --keep stores keeps what sidecars name."""
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    plant(run, 0, 200)
    others = tmp_path / "others"
    rng = np.random.default_rng(7)
    for i in range(10):
        place = others / f"class{i % 2}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (50, 60, 3), dtype=np.uint8)).save(place)
    more = ("--train", others, "--analyses", "probe", "--keep", "stores", *words)
    result = study(run, photos, out, *more)
    assert result.exit_code == 0, result.stderr
    sidecar = json.loads((out / "results/probe.csv.json").read_text())
    assert sidecar["notes"]["train"]["rows"] == n_train
    kept = sorted(path.name for path in (out / "stores").glob("*.zarr"))
    ends = ("-train.zarr", ".zarr")
    assert kept == [f"vit-step{step}{end}" for step in (0, 200) for end in ends]
    for step in (0, 200):
        assert (
            open_store(out / "stores" / f"vit-step{step}-train.zarr").n_images == n_train
        )
