"""What decides a study beside its models: a file, --set, --control, --memory; what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
import pytest
from click.testing import Result

from tests.command_line import invoke, one_line
from tests.extractions import plant_images
from vitsee_cli.main import main
from vitsee_cli.study_settings import in_a_study
from vitsee_core.study import catalogue

FILE = """
data = "demo:test"
images = 8
analyses = ["cka", "attn-dist", "knn"]
train = "demo:train"
control = true
[models]
v = "demo:vit"
r = "demo:resnet?random-init=4"
[set.cka]
estimator = "minibatch"
batch = 4
[set.attn-dist]
metric = ["distance_px", "distance_unit"]
[set.extract]
inputs = true
crop-pct = 0.5
[set.knn]
allow-shared = true
"""


def study(*args: object) -> Result:
    return invoke("study", *args)


def steps(done: Result) -> list[str]:
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[1:]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(FILE)
    return path


@pytest.mark.slow
def test_a_study_file_is_a_command_line(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    same = ["v=demo:vit", "r=demo:resnet?random-init=4", "--data", "demo:test", "--images", 8,
            "--train", "demo:train", "--control", "--analyses", "cka", "--analyses", "attn-dist",
            "--analyses", "knn"]  # fmt: skip
    for setting in ("cka.estimator=minibatch", "cka.batch=4", "attn-dist.metric=distance_px",
                    "attn-dist.metric=distance_unit", "extract.inputs=true", "extract.crop-pct=0.5",
                    "knn.allow-shared=true"):  # fmt: skip
        same += ["--set", setting]
    found = steps(study("--file", file, "-o", out, "--dry-run"))
    assert found == steps(study(*same, "-o", out, "--dry-run"))
    assert found[0] == (
        f"vitsee extract demo:vit --data demo:test --images 8 -o {out}/stores/v.zarr --no-residual "
        "--inputs --crop-pct 0.5"
    )
    assert any(
        line.startswith("vitsee extract 'demo:vit?random-init=0' ") for line in found
    )
    assert not any("r-untrained" in line for line in found), "it is untrained already"
    (cka,) = (
        line
        for line in found
        if line.startswith(f"vitsee cka {out}/stores/v.zarr --sites")
    )
    assert " --sites blocks --estimator minibatch --batch 4 -o " in cka
    (distances,) = (line for line in found if line.startswith("vitsee attn-dist "))
    assert " --metric distance_px --metric distance_unit -o " in distances
    assert all(
        "--allow-shared" in line for line in found if line.startswith("vitsee knn ")
    )
    for line in found:
        command = main.get_command(click.Context(main), shlex.split(line)[1])
        assert command is not None
        command.make_context("x", shlex.split(line)[2:], parent=click.Context(main))


@pytest.mark.slow
def test_the_command_line_wins_over_the_file(file: Path, tmp_path: Path) -> None:
    words = ("-o", tmp_path / "out", "--dry-run", "--images", 5, "--memory", "1G")
    found = steps(study("demo:mixer", "--file", file, *words, "--analyses", "cka"))
    assert found[0].startswith("vitsee extract demo:mixer --data demo:test --images 5 ")
    assert "--memory 1073741824" in found[2] and "--memory" not in found[0]
    assert len(found) == 6, (
        "of two models: their stores, their CKA, that of both; the report"
    )


def test_what_a_file_may_not_say(file: Path, tmp_path: Path) -> None:
    for text, code, expected in (
        ("data = 'x", 1, f"{file} is no TOML: "),
        (
            "datas = 'x'",
            1,
            f"{file}: no key 'datas'; expected models, data, quick, train, output",
        ),
        ("data = ['x', 'y']", 1, f"{file}: data takes one value, and is ['x', 'y']"),
        ("set = 3", 1, f"{file}: set is 3; expected a table, [set]"),
        ("set.cka = 3", 1, f"{file}: set.cka is 3; expected a table, [set.cka]"),
        ("models = ['demo:vit']\nimages = 'few'", 2, "'few' is not a valid whole number"),
        ("[models]\n'a b' = 'demo:vit'", 1, "'a b' cannot name a store"),
        (
            "models = ['demo:vit']\n[set.ckaa]\nbatch = 3",
            2,
            "--set 'ckaa.batch=3'; expected ",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\nbtch = 3",
            2,
            "--set cka.btch: expected an option of ",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\nbatch = [3, 4]",
            2,
            "cka.batch is given as 3 and 4",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\nbatch = 'x'",
            2,
            "--set cka.batch: 'x' is not a valid",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\nsites = '-o'",
            2,
            "--set cka.sites has no value: -o is an option",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\nsites = '--png'",
            2,
            "--set cka.sites has no value: --png is an option",
        ),
        (
            "models = ['demo:vit']\n[set.cka]\noutput = 'x'",
            2,
            "--set cka.output: expected an",
        ),
    ):
        file.write_text(text)
        data = () if text.startswith("data") else ("--data", "demo:test")
        words = ("study", "--file", file, "-o", tmp_path / "out", *data)
        assert expected in one_line(*words, code=code), text
        assert not (tmp_path / "out").exists()
    line = one_line("study", "--file", tmp_path / "no.toml", "-o", tmp_path / "out")
    assert "no.toml cannot be read: " in line


def test_the_images_themselves_are_not_to_learn_from(tmp_path: Path) -> None:
    """By another path too; before anything is read."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for data, train in (
        ("demo:test", "demo:test"),
        (tmp_path / "photos", tmp_path / "link"),
    ):
        words = ("demo:vit", "--data", data, "--train", train, "-o", tmp_path / "out")
        assert f"--train {train} has the images of --data" in one_line("study", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_advises_what_it_has(tmp_path: Path) -> None:
    context = click.Context(main)

    def of(name: str, text: str) -> str:
        own, command = main.get_command(context, "study"), main.get_command(context, name)
        assert own is not None and command is not None
        return in_a_study(text, command, own)

    large = "choose some with --tokens ROW,COL, or give --memory 12M"
    assert of("localize", large) == (
        "choose some with --set localize.tokens=ROW,COL, or give --memory 12M"
    )
    assert of("extract", "give --checkpoint FILE or --random-init SEED") == (
        "give MODEL?checkpoint=FILE or MODEL?random-init=SEED"
    )
    assert of("knn", "--allow-shared goes on") == "--set knn.allow-shared=true goes on"
    assert of(
        "cka", "extract it with --tokens blocks.0.out=all (every site: --tokens all)"
    ) == (
        "extract it with --set extract.tokens=blocks.0.out=all (every site: --set "
        "extract.tokens=all)"
    )
    assert of("knn", "drop --force, --nothing") == "drop --force, --nothing"
    images = tmp_path / "images.npz"
    done = study("vit_tiny_patch16_224?checkpoint=no.pth", "--data", "demo:test", "--images", 4,
                 "-o", tmp_path / "out", "--analyses", "weights")  # fmt: skip
    assert done.exit_code == 1 and "no.pth" in done.stderr and not images.exists()
    record = json.loads((tmp_path / "out" / "study.json").read_text())["steps"]
    assert "--" not in record["extract-vit_tiny_patch16_224"]["reason"]


@pytest.mark.slow
def test_a_warning_is_said_once(tmp_path: Path) -> None:
    """Not by the extraction of each model."""
    images = plant_images(tmp_path / "photos", 4)
    done = study("demo:vit", "demo:resnet", "--data", images, "-o", tmp_path / "out",
                 "--analyses", "weights")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stderr.count("has 4 images, fewer than 2000: all taken") == 1


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_study_stopped_while_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt(signal)

    monkeypatch.setattr(catalogue, "survey", stop)
    done = study("demo:vit", "--data", "demo:test", "-o", tmp_path / "out")
    assert done.exit_code == 75 and done.stdout == ""
    assert done.stderr == "vitsee study: interrupted; repeat the command to go on\n"
