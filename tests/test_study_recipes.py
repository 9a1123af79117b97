"""Studies that are written as files: the papers' figures, and users' own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.command_line import invoke as vitsee
from tests.command_line import one_line
from tests.studies import study
from vitsee_core.pages.report.materials import find_materials
from vitsee_core.pages.report.overview import paper_numbers
from vitsee_core.pages.report.study_record import read_study
from vitsee_core.study.recipe_file import (
    RecipeError,
    RecipeFile,
    bundled_recipes,
    read_recipe,
)
from vitsee_core.study.recipe_plan import data_places, plan_recipe
from vitsee_core.tables.results import Table, read_result

OWN = """
title = "Two models"
note = "Of the bundled images."
[data]
pictures = "a folder of each class"
[words]
both = ["a.zarr", "b.zarr"]
few = "--images 24 --attention none --no-residual"
[quick]
"--data pictures/val" = "--data demo:test"
[stores.a]
model = "some_model"
options = "--data pictures/val {few}"
quick = "demo:vit"
[stores.b]
model = "another_model"
options = "--data pictures/val {few}"
quick = "demo:resnet"
[[figures]]
names = "2"
commands = ["cka {both} --sites last", "cka a.zarr b.zarr --sites last"]
note = "The second figure first."
[[figures]]
names = "1"
commands = ["probe a.zarr --holdout 0.5 --sites last -o accuracy.csv", "best-layer accuracy.csv"]
printed = [
    { what = "accuracy", paper = 0.5, result = "accuracy", where = { metric = "top1" } },
    { what = "another", paper = 1, result = "accuracy", where = { metric = "none" } },
]
"""


@pytest.fixture
def own(tmp_path: Path) -> RecipeFile:
    return read_recipe(str(written(tmp_path)))


def written(folder: Path, text: str = OWN) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_texts_are_put_in(own: RecipeFile) -> None:
    few = "--images 24 --attention none --no-residual"
    assert own.stores["a"].options == f"--data pictures/val {few}"
    both, alone = own.figures[0].commands
    assert str(both) == str(alone) == "cka a.zarr b.zarr --sites last"
    assert both.optional_stores == {"a.zarr", "b.zarr"} and not alone.optional_stores
    assert [figure.title for figure in own.figures] == ["Figure 2", "Figure 1"]


def test_fewer_images_and_other_models(own: RecipeFile, tmp_path: Path) -> None:
    fewer = own.with_n_images(7).with_models(["b=mine.py:build", "a"]).with_n_images(5)
    assert [store.model for store in fewer.stores.values()] == [
        "some_model",
        "mine.py:build",
    ]
    assert all("--images 5 " in store.options for store in fewer.stores.values())
    fields = "--images 10240 --erf 256", "--images 64 --erf 64"
    text = OWN.replace("--images 24", fields[0])
    assert (
        fields[1]
        in read_recipe(str(written(tmp_path, text))).with_n_images(64).stores["a"].options
    )
    demo = own.with_demo_models()
    with pytest.raises(RecipeError, match=r"says no `quick` model, demo:\.\.\., of a$"):
        read_recipe(
            str(written(tmp_path, OWN.replace('quick = "demo:vit"', "")))
        ).with_demo_models()
    assert (
        demo.stores["b"].model == "demo:resnet"
        and "demo:test" in demo.stores["b"].options
    )
    with pytest.raises(RecipeError, match=r"has no 'c'; expected a, b$"):
        own.with_models(["c"])


def test_stores_that_stores_are_made_of(own: RecipeFile, tmp_path: Path) -> None:
    """They come first, and their paths stand in the option."""
    text = OWN.replace(
        "[stores.b]",
        """[stores.c]
model = "some_model"
options = "--data pictures/val --replace cls@last=mean:a.zarr"
[stores.b]""",
    ).replace('"cka {both} --sites last", ', '"effect a.zarr new=c.zarr", ')
    recipe = read_recipe(str(written(tmp_path, text)))
    assert recipe.stores["c"].stores_read == ["a"]
    (tmp_path / "pictures" / "val").mkdir(parents=True)
    places = data_places(recipe, str(tmp_path))
    found = plan_recipe(recipe, study(tmp_path / "out"), places)
    stores = tmp_path / "out" / "stores"
    assert [step.name for step in found.extractions] == [
        "extract-a",
        "extract-c",
        "extract-b",
    ]
    assert f"--replace cls@last=mean:{stores}/a.zarr" in found.extractions[1].line
    assert found.extractions[1].inputs == (stores / "a.zarr",)
    assert f"effect {stores}/a.zarr new={stores}/c.zarr" in found.analyses[0].line
    with pytest.raises(RecipeError, match="nothing to do: it is not among --models"):
        plan_recipe(recipe.with_models(["c", "b"]), study(tmp_path / "out"), places)
    wrong = text.replace("mean:a.zarr", "mean:b.zarr")
    with pytest.raises(
        RecipeError, match=r"stores.c names b.zarr, expected stores above it$"
    ):
        read_recipe(str(written(tmp_path, wrong)))


def test_what_is_not_there_is_left_out(own: RecipeFile, tmp_path: Path) -> None:
    (tmp_path / "pictures" / "val").mkdir(parents=True)
    asked = study(tmp_path / "out", seed=3)
    found = plan_recipe(own.with_models(["a"]), asked, data_places(own, str(tmp_path)))
    assert [step.name for step in found.steps] == [
        "extract-a", "figure-2-cka-1", "accuracy", "figure-1-best-layer-2"
    ]  # fmt: skip
    assert found.left_out == {"Figure 2 (cka)": "it is not among --models"}
    extract, cka, probe, best = found.steps
    assert (
        f"--data {tmp_path}/pictures/val" in extract.line and "--seed 3" in extract.line
    )
    assert cka.inputs == extract.outputs == (tmp_path / "out" / "stores" / "a.zarr",)
    assert (
        best.inputs
        == probe.outputs[:1]
        == (tmp_path / "out" / "results" / "accuracy.csv",)
    )
    assert [section["results"] for section in found.sections] == [
        ["figure-2-cka-1"], ["accuracy", "figure-1-best-layer-2"]
    ]  # fmt: skip
    only = plan_recipe(
        own,
        study(analyses=("cka",)),
        data_places(own, f"pictures={tmp_path / 'pictures'}"),
    )
    assert {step.command for step in only.analyses} == {"cka"} and len(
        only.extractions
    ) == 2
    with pytest.raises(
        RecipeError, match=r"pictures/val \(a folder of each class\) is not at /no"
    ):
        plan_recipe(own, asked, data_places(own, "/nowhere"))
    with pytest.raises(
        RecipeError, match=r"has no 'other'; expected FOLDER, or NAME=FOLDER of pi"
    ):
        data_places(own, "other=/x")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('title = "Two models"', "", "title is missing"),
        ('title = "Two models"', "title = 3", "title is 3, expected text"),
        ("[quick]", "[fast]", "fast is no known field"),
        (
            "{few}",
            "{fewer}",
            r"stores.a has \{fewer\}, expected one of \[words\], both, few",
        ),
        ('model = "some_model"\n', "", "stores.a.model is missing"),
        (
            "cka a.zarr",
            "cka c.zarr",
            r"figures\[0\] names c.zarr, expected stores of \[stores\]",
        ),
        (
            '"cka a.zarr b',
            "\"cka 'a.zarr b",
            r"figures\[0\] is .*, expected words of a shell",
        ),
        ("paper = 0.5", 'paper = "x"', r'printed\[0\].paper is "x", expected a number'),
        ('names = "2"\n', "", r"figures\[0\].names is missing"),
        ("[words]", "[words", "is no TOML"),
        (
            'commands = ["cka {both}',
            'commands = [3, "cka {both}',
            r"commands\[0\] is 3, expected text",
        ),
    ],
)
def test_a_file_that_is_no_recipe(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in OWN
    path = written(tmp_path, OWN.replace(before, after, 1))
    line = one_line("study", path, "--quick", "-o", tmp_path / "out")
    assert re.search(said, line) and str(path) in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["raghu2021"], "takes either --data FOLDER"),
        (["raghu2021", "--data", "x", "--quick"], "takes either --data FOLDER"),
        (["raghu2021", "--quick", "--thorough"], "says itself what --thorough would"),
        (["raghu2021", "--quick", "--train", "x"], "says itself what --train would"),
        (["raghu2021", "demo:vit", "--quick"], "raghu2021 is a recipe: give it alone"),
        (
            ["demo:vit", "--quick"],
            "--quick is of a recipe: clips, dosovitskiy2021, heads, miniatures, ",
        ),
        (["demo:vit", "--models", "a", "--data", "demo:test"], "--models is of a recipe"),
        (["demo:vit"], "--data DATA is missing"),
        (["none.toml", "--quick"], "none.toml cannot be read: no such file"),
        (
            ["raghu2021", "--quick", "--models", "zz"],
            "raghu2021 has no 'zz'; expected b16",
        ),
        (["raghu2021", "--data", "nowhere"], "imagenet/val (ILSVRC 2012"),
        (["raghu2021", "--quick", "--analyses", "knn"], "nothing to do"),
    ],
)
def test_what_is_refused(args: list[str], said: str, tmp_path: Path) -> None:
    result = vitsee("study", *args, "-o", tmp_path / "out")
    assert result.exit_code in (1, 2) and said in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_one_s_own_study(tmp_path: Path) -> None:
    """From the file to a report with its figures in its order, the paper's numbers beside ours."""
    folder = tmp_path / "out"
    path = written(tmp_path)
    result = vitsee("study", path, "--quick", "-o", folder)
    assert result.exit_code == 0, result.stderr
    second, first = read_study(folder).sections
    assert (second.title, second.note) == ("Figure 2", "The second figure first.")
    accuracy = Table.read(folder / "results" / "accuracy.csv")
    best = accuracy.filter(metric="top1")["value"].astype(np.float64).max()
    one, none = paper_numbers(first, find_materials(folder).results)
    assert one[:2] == ("accuracy", "0.5") and one.ours.startswith(f"{best:.4g} [")
    assert none == ("another", "1", "not measured here")
    page = (folder / "report.html").read_text()
    headings = re.findall(r'<h2 id="s\d+">(.*?)</h2>', page)
    assert headings == ["Figure 2", "Figure 1"]
    assert "Two models (small models in their place)" in page
    assert "Of the bundled images." in page and one.ours in page
    again = vitsee("study", path, "--quick", "-o", folder)
    assert again.exit_code == 0 and "figure-2-cka-1: done before" in again.stderr


def _motion_is_known_by_its_order_alone(results: Path) -> None:
    """The trained model tells every direction, and no control more than the axis."""
    best = {}
    for control in ("videomae", "shuffled", "still", "untrained", "image"):
        frame = read_result(results / f"motion-{control}.csv").table.frame
        of_model = frame.filter(pl.col("baseline").is_null(), metric="top1")
        best[control] = max(of_model["value"])
    assert best.pop("videomae") > 0.95
    assert max(best.values()) < 0.5
    order = read_result(results / "order.csv").table.frame
    last = order.filter(site_a="blocks.3.out", site_b="blocks.3.out", metric="cka")[
        "value"
    ]
    assert max(last) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", bundled_recipes())
def test_every_figure_is_made(name: str, tmp_path: Path) -> None:
    """The papers' figures on the demo's models, and those of towers on tiny ones; every store is
    used."""
    if name in ("towers", "clips"):
        pytest.importorskip("transformers", minversion="5.20")
    result = vitsee("study", name, "--quick", "-o", tmp_path)
    assert result.exit_code == 0, result.stderr
    record = json.loads((tmp_path / "study.json").read_text())
    assert {entry["status"] for entry in record["steps"].values()} == {"done"}
    assert record["left_out"] == {} and {*record["models"]} == {*read_recipe(name).stores}
    recipe = read_recipe(name)
    assert [section["title"] for section in record["sections"]] == [
        f.title for f in recipe.figures
    ]
    if name == "clips":
        _motion_is_known_by_its_order_alone(tmp_path / "results")
    page = (tmp_path / "report.html").read_text()
    headings = re.findall(r'<h2 id="s\d+">(.*?)</h2>', page)
    assert headings == [figure.title for figure in recipe.figures]
    for section in read_study(tmp_path).sections:
        numbers = paper_numbers(section, find_materials(tmp_path).results)
        assert [number for number in numbers if "not measured" in number.ours] == []
