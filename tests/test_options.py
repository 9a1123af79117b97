"""What is read from the command line: sizes, devices, stores, models, tokens, defaults."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from vitsee_cli import console, options, values
from vitsee_cli.main import main
from vitsee_cli.model_options import model_options
from vitsee_core import analyses
from vitsee_core.runtime.options import tokens_option
from vitsee_stores.errors import VitseeError

PARSED: dict[Any, dict[str, Any]] = {
    values.parse_size: {
        "4G": 4 << 30, "4GiB": 4 << 30, "4GB": 4 * 10**9, "512m": 512 << 20, "1.5K": 1536,
        "2T": 2 << 40, "100": 100, "100B": 100,
    },
    values.parse_device: {word: word for word in ("auto", "cpu", "cuda", "cuda:1", "mps")},
    values.parse_model_arg: {
        "depth=6": ("depth", 6), "qkv_bias=true": ("qkv_bias", True), "name=": ("name", ""),
        "qkv_bias=False": ("qkv_bias", False), "mlp_ratio=2.5": ("mlp_ratio", 2.5),
        "img_size=[224,160]": ("img_size", [224, 160]), "norm=None": ("norm", None),
        "img_size=(224,160)": ("img_size", (224, 160)), "name=a=b": ("name", "a=b"),
        "global_pool=avg": ("global_pool", "avg"),
    },
    values.parse_image_size: {"224": (224, 224), "224x320": (224, 320)},
    values.parse_floats: {"0.5": (0.5,), "0.1,0.2,0.3": (0.1, 0.2, 0.3), "-1,0,2": (-1.0, 0, 2)},
    values.parse_positive_floats: {"0.5,1,2": (0.5, 1.0, 2.0)},
}  # fmt: skip
REFUSED: list[tuple[Any, str, list[str]]] = [
    (
        values.parse_size,
        "is not a size",
        ["", "4X", "-1", "0", "G", "1e9", "9" * 400, "8388608T"],
    ),
    (
        values.parse_device,
        "is not a device",
        ["gpu", "cuda:", "cuda:x", "cpu:0", "CPU", ""],
    ),
    (values.parse_model_arg, "expected KEY=VALUE", ["depth", "=3", "a b=3"]),
    (values.parse_image_size, "is not a size", ["0", "224x", "a", "-3"]),
    (values.parse_floats, "expected numbers", ["0.5,x"]),
    (values.parse_floats, "one or three finite numbers", ["0.5,0.5", "nan", "0,inf,0"]),
    (values.parse_positive_floats, "above 0", ["0", "1,-1,1"]),
    (
        tokens_option(("all", "cls")).parse,
        "expected all, cls or ROW,COL",
        ["3", "-1,2", "3,4,5,6"],
    ),
    *(
        (parse, "an empty text is not a path", ["", "  "])
        for parse in (values.parse_path, values.parse_folder, values.parse_output)
    ),
    (values.parse_store, "an empty text is not a path", ["", "name="]),
    *(
        (parse, "- is not a path here", ["-"])
        for parse in (values.parse_path, values.parse_folder, values.parse_store)
    ),
]


@pytest.mark.parametrize("parse", PARSED)
def test_values(parse: Any) -> None:
    for text, value in PARSED[parse].items():
        assert parse(text) == value and type(parse(text)) is type(value)


@pytest.mark.parametrize(("parse", "phrase", "texts"), REFUSED)
def test_values_that_are_refused(parse: Any, phrase: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises((click.BadParameter, VitseeError), match=phrase):
            parse(text)


def test_store_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.zarr").mkdir()
    expected = {
        "b16.zarr": ("b16", "b16.zarr"),
        "runs/b16.zarr": ("b16", "runs/b16.zarr"),
        "B/16=runs/b16.zarr": ("b16", "B/16=runs/b16.zarr"),
        "ViT-B=runs/b16.zarr": ("ViT-B", "runs/b16.zarr"),
        "x=a=b.zarr": ("x", "a=b.zarr"),
        "a=b.zarr": ("a=b", "a=b.zarr"),
        ".": (tmp_path.stem, "."),
    }
    for text, (label, path) in expected.items():
        assert values.parse_store(text) == values.StorePath(label, Path(path))


def test_two_stores_need_two_labels() -> None:
    @click.command()
    @options.stores_argument
    def command(stores: tuple[values.StorePath, ...]) -> None:
        console.out(" ".join(s.label for s in stores))

    clash = CliRunner().invoke(command, ["x.zarr", "a/vit.zarr", "b/vit.zarr"])
    assert clash.exit_code == 2
    assert "two stores are called 'vit'; name them: first=a/vit.zarr" in clash.stderr
    assert CliRunner().invoke(command, ["a/vit.zarr", "B=b/vit.zarr"]).stdout == "vit B\n"


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for parse in (values.parse_path, values.parse_folder, values.parse_output):
        assert parse("~/a b") == Path("/home/me/a b") and parse(Path("x")) == Path("x")
    assert values.parse_output("-") == Path("-")


def declared(file: Path) -> dict[str, str]:
    """{call in one line: flag or help} of the options that a file declares."""
    calls = (
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    )
    return {
        ast.unparse(call): ast.unparse(call.args[0])
        for call in calls
        if ast.unparse(call.func) in ("click.option", "Option") and call.args
    }


@pytest.mark.slow
def test_no_option_is_declared_twice() -> None:
    """Two commands whose option means the same take it from one place."""
    cli = Path(options.__file__).parent
    core = Path(analyses.__file__ or "").parents[1]
    seen: dict[str, Path] = {}
    for file in sorted(
        (*cli.glob("*options.py"), *cli.glob("commands/*.py"), *core.rglob("*.py"))
    ):
        for call, what in declared(file).items():
            assert call not in seen, f"{what} of {file} is also in {seen[call]}"
            seen[call] = file
    assert len(seen) > 60, "the options were found"


@pytest.mark.slow
@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_whatever_the_option(name: str) -> None:
    """No nan, no inf, no empty path; and `-o a -o b` is refused, not taken for `-o b`."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    paths = {
        "output",
        "png",
        "cache",
        "store",
        "stores",
        "checkpoint",
        "masks",
        "results",
    }
    for param in command.params:
        kind: Any = param.type
        refused: tuple[str, ...] = ()
        if isinstance(kind, (click.types.FloatParamType, click.FloatRange)):
            refused = ("nan", "inf", "-inf", "1e999")
        elif param.name in paths or (param.name == "data" and name != "extract"):
            refused = ("", " ")
        for text in refused:
            with pytest.raises(click.BadParameter):
                kind.convert(text, param, click.Context(command))
        own = isinstance(param, click.Option) and not (param.is_flag or param.is_eager)
        if own and not param.multiple:
            args = [name, param.opts[-1], "1", param.opts[-1], "2"]
            result = CliRunner().invoke(main, args)
            assert (result.exit_code, result.stdout) == (2, ""), args
            assert (
                f"{'/'.join(param.opts)} is given 2 times; expected once" in result.stderr
            )


@pytest.mark.parametrize(
    "arguments",
    [
        ["head-types", "x.zarr", "--focus", "nan"],
        ["head-types", "x.zarr", "--keys", "inf"],
        ["probe", "x.zarr", "--seed", str(10**26)],
        [
            "extract",
            "demo:vit",
            "--data",
            "demo:test",
            "-o",
            "s.zarr",
            "--seed",
            str(2**63),
        ],
        ["cka", "x.zarr", "--cache", ""],
        ["cka", "x.zarr", "-o", ""],
        ["cka", "x.zarr", "--png", "-"],
        ["demo", "-o", ""],
        ["demo", "-o", "-"],
        ["extract", "demo:vit", "--data", "demo:test", "-o", ""],
        ["extract", "demo:vit", "--data", "demo:test", "-o", "-"],
        ["localize", "x.zarr", "--data", ""],
        ["best-layer", ""],
        ["info", ""],
    ],
)
def test_refused_with_nothing_written(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: Invalid value")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_dash_is_stdout(
    make_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store("tiny.zarr")
    monkeypatch.chdir(tmp_path)
    plain = CliRunner().invoke(main, ["attn-dist", str(store)])
    assert plain.exit_code == 0, plain.output
    dashed = CliRunner().invoke(
        main, ["attn-dist", str(store), "-o", "-", "--png", "d.svg"]
    )
    assert dashed.stdout == plain.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.svg", "tiny.zarr"]


def completions(*words: str) -> list[tuple[str, str]]:
    """(kind, text) that the shell is offered for the last word."""
    complete = ShellComplete(main, {}, "vitsee", "_VITSEE_COMPLETE")
    return [(c.type, c.value) for c in complete.get_completions([*words[:-1]], words[-1])]


def test_the_shell_completes_paths_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dir` and `file` leave it to the shell, which knows no path behind `NAME=`."""
    for folder in (
        "vit.zarr",
        "vit-runs/a.zarr",
        "vit-runs/b.zarr",
        "cnn/r50.zarr",
        ".hidden",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "vit.csv").touch()
    (tmp_path / "vit.zarr" / "zarr.json").touch()
    monkeypatch.chdir(tmp_path)
    for words, kind, expected in (
        (["info", "vi"], "dir", ["vi"]),
        (["attn-dist", "vit.zarr", "vi"], "dir", ["vi"]),
        (["attn-dist", "--cache", ""], "dir", [""]),
        (["attn-dist", "vit.zarr", "-o", "r"], "file", ["r"]),
        (["cka", "vit.zarr", "--png", "r"], "file", ["r"]),
        (["best-layer", "p"], "file", ["p"]),
        (["weights", "vi"], "dir", ["vi"]),
        (["cka", "a=vi"], "plain", ["a=vit-runs", "a=vit.zarr"]),
        (["cka", "a=vit."], "plain", ["a=vit.zarr"]),
        # One folder that is no store: what is in it.
        (["cka", "a=vit-"], "plain", ["a=vit-runs/a.zarr", "a=vit-runs/b.zarr"]),
        (["cka", "a=vit-runs/b"], "plain", ["a=vit-runs/b.zarr/"]),
        (["cka", "a=none/x"], "plain", []),
        (["cka", f"a={tmp_path}/cn"], "plain", [f"a={tmp_path}/cnn/r50.zarr/"]),
        (["cka", "--estimator", ""], "plain", ["exact", "minibatch", "biased"]),
    ):
        assert completions(*words) == [(kind, text) for text in expected], words
    assert ("plain", "info") in completions("in")


def test_defaults_fit_the_machine() -> None:
    @click.command()
    @options.memory_option
    @options.jobs_option
    @options.device_option
    def command(memory: int, jobs: int, device: str) -> None:
        console.out(f"{memory} {jobs} {device}")

    memory, jobs, device = CliRunner().invoke(command).stdout.split()
    assert int(memory) > 2**26
    assert (
        int(jobs) == len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else True
    )
    assert device == "auto"
    shown = " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
    assert "a quarter of the machine's memory" in shown
    assert CliRunner().invoke(command, ["--jobs", "0"]).exit_code == 2
    assert CliRunner().invoke(command, ["--device", "gpu"]).exit_code == 2


def test_model_options_are_gathered() -> None:
    @click.command()
    @model_options
    def command(model: Any) -> None:
        console.out(repr(model))

    runner = CliRunner()
    args = ["vit", "--random-init", "3", "--img-size", "96", "--model-arg", "depth=2"]
    shown = runner.invoke(command, [*args, "--img-mean", "0.5"]).stdout
    for part in ("'vit'", "random_init=3", "(96, 96)", "{'depth': 2}", "img_mean=(0.5,)"):
        assert part in shown
    clash = runner.invoke(command, ["vit", "--random-init", "3", "--checkpoint", "x.pth"])
    assert clash.exit_code == 2
    assert "exclude each other" in clash.stderr


def test_once_counts_short_and_long_names_and_both_sides_of_a_switch(
    tmp_path: Path,
) -> None:
    store, out = str(tmp_path / "a.zarr"), str(tmp_path / "r.csv")
    twice: list[list[str]] = [
        ["cka", store, "-o", out, "--output", out],
        ["cka", store, f"--output={out}", f"-o{out}"],
        ["attn-map", store, "--coverage", "--no-coverage"],
    ]
    for args in twice:
        result = CliRunner().invoke(main, args)
        assert (
            result.exit_code == 2 and "is given 2 times; expected once" in result.stderr
        )
    for args in (["cka", store, "--force", "--force"], ["cka", store, "-v", "-q", "-v"]):
        result = CliRunner().invoke(main, args)
        assert (
            result.exit_code == 1 and "a.zarr" in result.stderr
        )  # only the store is missing
    given = CliRunner().invoke(main, ["cka", store, "--sites", "a", "--sites", "b"])
    assert given.exit_code == 1
    after = CliRunner().invoke(main, ["cka", "--", "-o", "-o", store])
    assert "is given" not in after.stderr


def test_the_shell_completes_names(tmp_path: Path) -> None:
    def values(*words: str) -> list[str]:
        return [value for _, value in completions(*words)]

    assert "vit_small_patch16_224" in values("extract", "vit_small_p")
    assert {"demo:vit", "demo:vit-gap"} <= {*values("models", "demo:")}
    assert values("extract", "m", "--tokens", "norms=") == ["norms=all", "norms=pooled"]
    assert values("cka", "x", "--tokens", "mean") == ["mean", "mean-all"]
    assert values("attn-dist", "x", "--sites", "st") == ["stage:"]
    assert values("extract", "m", "--sites", "res") == ["residual"]
    assert values("study", "m", "--analyses", "attn-") == ["attn-dist", "attn-map"]
    assert values("norms", "x", "--metric", "outlier_share_") == ["outlier_share_mad"]
    table = tmp_path / "r.csv"
    table.write_text("store,site,metric,value\na,x,top1,0.5\na,x,top5,0.5\na,x,iou,0.5\n")
    assert values("best-layer", str(table), "--metric", "t") == ["top1", "top5"]
    assert values("best-layer", str(tmp_path / "none"), "--metric", "t") == []
