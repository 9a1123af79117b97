"""Studies in files that a stranger wrote: nothing is written outside of -o, and each mistake is a
line before any work."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from tests.command_line import one_line
from tests.studies import study
from tests.test_study_recipes import OWN, written
from vitsee_cli.main import main
from vitsee_cli.recipe_steps import READ_PATHS
from vitsee_cli.values import PathType
from vitsee_core.runtime import registry
from vitsee_core.study.recipe_file import MAX_KEY_PARTS, RecipeError, read_recipe
from vitsee_core.study.recipe_plan import plan_recipe

CKA = 'commands = ["cka {both} --sites last", "cka a.zarr b.zarr --sites last"]'
STORE_A = "[stores.a]\n"
TITLE = 'title = "Two models"'


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def refusal(folder: Path, text: str) -> str:
    """The line that refuses a study in a file; nothing is written."""
    path = written(folder, text)
    before = files_below(folder)
    line = one_line("study", path, "--quick", "-o", folder / "out")
    assert files_below(folder) == before
    return line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../x", "expected a name without slashes"),
        ("/tmp/x", "expected a name without slashes"),
        ("a\\\\b", "expected a name without slashes"),
        ("a\\u0000b", "expected a name without slashes"),
        ("..", "expected a name without slashes"),
        (".hidden", "expected a name without slashes"),
        ("", "expected a name without slashes"),
        ("x" * 300, "expected a name without slashes"),
        ("-o", "expected letters, digits"),
        ("a=b", "expected letters, digits"),
        ("a b", "expected letters, digits"),
        ("x.zarr", "expected letters, digits"),
    ],
)
def test_the_name_of_a_store_is_no_path(tmp_path: Path, name: str, said: str) -> None:
    text = OWN.replace(STORE_A, f'[stores."{name}"]\n')
    assert said in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "commands[0] is empty"),
        ("   ", "commands[0] is empty"),
        ("/bin/true a.zarr", "expected an analysis: attn-dist"),
        ("../cka a.zarr", "expected an analysis: attn-dist"),
        ("extract demo:vit --data demo:test", "expected an analysis: attn-dist"),
        ("export a.zarr -o x.npy", "expected an analysis: attn-dist"),
        ("norms a.zarr -o", '-o of figures[0].commands[0] is ""'),
        ("norms a.zarr -o ../../x.csv", "expected a name without slashes"),
        ("norms a.zarr -o /tmp/x.csv", "expected a name without slashes"),
        ("norms a.zarr -o x.npy", "expected the name of a table"),
        ("norms a.zarr -o x.csv -o y.csv", "has -o 2 times"),
        ("norms a.zarr -o/tmp/x.csv", "-o is given twice"),
        ("norms a.zarr --output /tmp/x.csv", "-o is given twice"),
        ("norms a.zarr --output=/tmp/x.csv", "-o is given twice"),
        ("concepts a.zarr --save /tmp/x.npz", "--save /tmp/x.npz is not in"),
        ("concepts a.zarr --save=../x.npz", "--save ../x.npz is not in"),
        ("cka a.zarr b.zarr --cache grams", "--cache grams is not in"),
        ("cka a.zarr ../other", "the store ../other is not in"),
        ("cka a.zarr NAME=/tmp/other", "the store NAME=/tmp/other is not in"),
        ("norms a.zarr --no-such-option", "norms: No such option"),
        ("cka a.zarr --sites", "cka: --sites has no value: -o follows"),
        ("cka a.zarr --sites --images 4", "cka: --sites has no value: --images follows"),
        ("cka a.zarr --images 4 --seed", "cka: --seed has no value: -o follows"),
        ("cka a.zarr --sites -v", "cka: --sites has no value: -v follows"),
        ("cka a.zarr --png", "cka: --png has no value: -o follows"),
        ("cka --sites blocks a.zarr --seed", "cka: --seed has no value: -o follows"),
        ("norms a.zarr --help", "--help is not of a study's file"),
    ],
)
def test_a_command_writes_into_the_study_s_folder(
    tmp_path: Path, command: str, said: str
) -> None:
    line = refusal(tmp_path, OWN.replace(CKA, f"commands = ['{command}']"))
    assert said in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "stores.a.options has no --data"),
        ("--images 3", "stores.a.options has no --data"),
        ("--data", "stores.a.options has no --data"),
        ("--data demo:test -o /tmp/x", "-o is given twice"),
        ("--data demo:test --output=/tmp/x", "-o is given twice"),
        ("--data demo:test --sites", "extract: --sites has no value: -o follows"),
        ("--data --images 4 --data demo:test", "--data has no value: --images follows"),
        ("--data demo:test --force", "--force is not of a study's file"),
        ("--data demo:test --plan slurm", "extract: "),
        ("--data demo:test 'open", "expected words of a shell"),
    ],
)
def test_the_options_of_a_store(tmp_path: Path, options: str, said: str) -> None:
    before = '"--data pictures/val {few}"\nquick = "demo:vit"'
    text = OWN.replace(before, f'"""{options}"""\nquick = "demo:vit"')
    assert said in refusal(tmp_path, text)


def test_what_quick_puts_into_options_is_checked(tmp_path: Path) -> None:
    for put_in, said in (
        ("--data demo:test -o /tmp/x", "-o is given twice"),
        ("--data 'demo:test", "expected words of a shell"),
        ("--images 3", "has no --data"),
    ):
        assert said in refusal(tmp_path, OWN.replace('"--data demo:test"', f'"{put_in}"'))


def test_a_model_is_not_an_option(tmp_path: Path) -> None:
    for model in ("-o/tmp/x.zarr", "--force", ""):
        text = OWN.replace('model = "some_model"', f'model = "{model}"')
        assert "expected a model" in refusal(tmp_path, text)
        if model:
            text = OWN.replace('quick = "demo:vit"', f'quick = "{model}"')
            assert "expected a model" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (TITLE, "title = 1979-05-27", 'title is "1979-05-27", expected text'),
        (TITLE, "title = 07:32:00", 'title is "07:32:00", expected text'),
        (TITLE, "title = [1979-05-27]", "title is a list, expected text"),
        (TITLE, f"title = {'[' * 100_000}", "nested too deeply"),
        (TITLE, f"{'a.' * 50_000}a = 1", f"a key has more than {MAX_KEY_PARTS} parts"),
        (TITLE, f"[{'a . ' * 50_000}a]", f"a key has more than {MAX_KEY_PARTS} parts"),
        (
            TITLE,
            f"x = {{ {'a.' * 50_000}a = 1 }}",
            f"a key has more than {MAX_KEY_PARTS} parts",
        ),
        (
            TITLE,
            f"{chr(34) * 2 + '.' + chr(34) * 2}{'.a' * 5000} = 1",
            "a key has more than",
        ),
        (TITLE, f"title = {'9' * 5000}", "a number has 5000 digits; at most 4300 are r"),
        ("paper = 0.5", "paper = nan", "printed[0].paper"),
        ("paper = 0.5", "paper = inf", "printed[0].paper"),
        ("paper = 0.5", "paper = 1979-05-27", "printed[0].paper"),
        ('metric = "top1"', "metric = 1979-05-27", "printed[0].where"),
        ('names = "2"', f'names = "{"x" * 400}"', "its result"),
    ],
)
def test_values_that_no_field_has(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in OWN
    assert said in refusal(tmp_path, OWN.replace(before, after, 1))


def test_two_results_of_one_name(tmp_path: Path) -> None:
    twice = 'commands = ["norms a.zarr -o x.csv", "norms b.zarr -o x.parquet"]'
    assert "another result is called x" in refusal(tmp_path, OWN.replace(CKA, twice))
    alike = OWN.replace('names = "1"', 'names = "2"').replace("-o accuracy.csv", "")
    alike = alike.replace('"best-layer accuracy.csv"', '"best-layer best.csv"')
    alike = alike.replace("probe a.zarr --holdout 0.5", "cka a.zarr b.zarr")
    assert "another result is called figure-2-cka-1" in refusal(tmp_path, alike)


def test_what_is_not_a_file_of_text(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(b"\xef\xbb\xbf" + OWN.encode())
    assert read_recipe(str(path)).title == "Two models", (
        "a byte-order mark is no part of it"
    )
    path.write_bytes(OWN.encode("utf-16"))
    with pytest.raises(RecipeError, match="is no TOML"):
        read_recipe(str(path))
    path.unlink()
    path.mkdir()
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(str(path))


def test_a_name_is_a_file_s_name_with_or_without_letters(tmp_path: Path) -> None:
    """Titles of dots or signs alone give results that are neither hidden nor without a name."""
    for names in ("..", "!?", "", "../../x"):
        text = OWN.replace('names = "2"', f'names = "{names}"')
        recipe = read_recipe(str(written(tmp_path, text))).with_demo_models()
        plan = plan_recipe(recipe, study(tmp_path / "out"), None)
        output = plan.analyses[0].outputs[0]
        assert output.parent == tmp_path / "out" / "results"
        assert re.fullmatch(r"[a-z][\w.-]*-cka-1\.csv", output.name)


def test_options_with_an_equals_sign_are_as_those_without(tmp_path: Path) -> None:
    text = OWN.replace("--data pictures/val {few}", "--data=pictures/val {few}")
    text = text.replace('"--data pictures/val" =', '"--data pictures/val --images 24" =')
    assert read_recipe(str(written(tmp_path, text))).stores == (
        read_recipe(str(written(tmp_path))).stores
    )


def test_every_path_of_an_analysis_is_known_as_read_or_written() -> None:
    """An option that is added with a path must say on which side it is: unless it is in
    `READ_PATHS`, a study's file may give it a place in the study's folder alone."""
    written_paths = {
        "output",
        "png",
        "save",
        "cache",
        "printed",
        "export_queries",
        "export_truth",
    }
    stores = {"queries", "distractors", "untrained"}
    ctx = click.Context(main)
    for name in (*registry.builtin_names(), "extract"):
        command = main.get_command(ctx, name.replace("_", "-"))
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and isinstance(param.type, PathType):
                assert param.name in READ_PATHS | written_paths | stores, (
                    name,
                    param.name,
                )
