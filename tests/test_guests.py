"""Analyses of other packages: what a good one gets, and that a bad one harms nothing."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import vitsee
from tests.stores import write_model
from vitsee import api
from vitsee_cli import commands, console
from vitsee_cli.main import main
from vitsee_cli.sections import builtin_names
from vitsee_core.pages.report.page import write_report
from vitsee_core.runtime import dask_worker, registry
from vitsee_core.runtime.execution import Execution
from vitsee_core.runtime.versions import worker_versions
from vitsee_core.study.catalogue import needs_of_analyses, survey
from vitsee_core.study.planning import plan
from vitsee_core.study.recipes import recipe_of
from vitsee_core.study.steps import Study
from vitsee_core.tables.sidecars import describe_work
from vitsee_stores.errors import VitseeError

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "guest"
GOOD = (EXAMPLE / "vitsee_token_norm.py").read_text()
PAGE = (ROOT / "docs" / "guide" / "guests.md").read_text()

LABEL = ["mean", "norm", "of", "tokens"]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages as pip does: metadata and one module each, in a folder on `sys.path`."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(console, "PACKAGES", list(console.PACKAGES))
    made: list[str] = []

    def install(package: str, name: str, source: str = GOOD, module: str = "") -> None:
        module = module or f"of_{package.replace('-', '_')}"
        info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\nSummary: All of {package}\n"
        )
        (info / "entry_points.txt").write_text(f"[vitsee.analyses]\n{name} = {module}\n")
        (folder / f"{module.partition(':')[0]}.py").write_text(source)
        made.append(module)
        registry._guests_and_refusals.cache_clear()

    yield install
    registry._guests_and_refusals.cache_clear()
    registry.code_digest.cache_clear()
    worker_versions.cache_clear()
    registry._warned.clear()
    for module in made:
        sys.modules.pop(module, None)
    vars(vitsee).pop("token_norm", None)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tokens = np.random.default_rng(0).normal(size=(9, 7, 4))
    return write_model(
        tmp_path / "a.zarr", {"embed": tokens, "blocks.0.out": 2 * tokens}
    ).path


def vitsee_(*args: object) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def done(*args: object) -> str:
    result = vitsee_(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


# ------------------------------------------------------------------- what a good one gets


@pytest.mark.slow
def test_its_command_its_files_and_their_return(
    install: Install, store: Path, tmp_path: Path
) -> None:
    install("some-guest", "token_norm")
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    done("token-norm", store, "--order", "1", "-o", out, "--png", png)
    table = vitsee.Table.read(out)
    images = vitsee.open_store(store).acts("blocks.0.out")[:].astype(float)
    expected = np.mean(
        [sum(abs(x) for x in token) for image in images for token in image]
    )
    assert table["value"].tolist()[-1] == pytest.approx(expected, rel=1e-6)

    sidecar = json.loads(Path(f"{out}.json").read_text())
    assert sidecar["package"] == {"name": "some-guest", "version": "1.5"}
    assert sidecar["parameters"]["order"] == "1"

    done("plot", out, "-o", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == png.read_bytes()
    assert table.plot().axes[0].get_ylabel().split() == LABEL
    first = out.read_bytes()
    done("rerun", f"{out}.json", "--force")
    assert out.read_bytes() == first


def test_in_python(install: Install, store: Path, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    assert "token_norm" in dir(vitsee)
    table = vitsee.token_norm(store, images=5)
    assert table["n_images"].tolist() == [5, 5]
    assert table.plot().axes[0].get_ylabel().split() == LABEL
    table.write(tmp_path / "r.csv")
    sidecar = json.loads((tmp_path / "r.csv.json").read_text())
    assert sidecar["package"] == {"name": "some-guest", "version": "1.5"}
    assert sidecar["python"].startswith("vitsee.token_norm(")
    assert "order: one of 1, 2, inf." in (inspect.getdoc(vitsee.token_norm) or "")
    with pytest.raises(
        TypeError, match=r"token_norm\(\) has no keyword 'ordr'; did you mean order"
    ):
        vitsee.token_norm(store, ordr="1")


def test_help_and_completion_import_none(install: Install) -> None:
    install("some-guest", "token_norm", GOOD + "\nraise RuntimeError('imported')\n")
    result = vitsee_("--help")
    assert result.exit_code == 0 and result.stderr == ""
    below = result.stdout.split("What flows through the layers:")[1].split("\n\n")[0]
    assert re.search(
        r"\n  token-norm +Measure the mean norm of tokens \[some-guest\]$", below
    )
    ctx = click.Context(main)
    (item,) = main.shell_complete(ctx, "token-n")
    assert (
        item.value == "token-norm"
        and item.help == "Measure the mean norm of tokens [some-guest]"
    )
    assert "of_some_guest" not in sys.modules


def test_its_own_help_and_completion_of_its_options(install: Install) -> None:
    install("some-guest", "token_norm")
    shown = done("token-norm", "--help")
    assert (
        "--order [1|2|inf]" in shown
        and "--dask" in shown
        and "Columns: store, model" in shown
    )
    command = main.get_command(click.Context(main), "token-norm")
    assert command is not None
    assert {"--order", "--sites", "--png"} <= {o for p in command.params for o in p.opts}


@pytest.mark.slow
def test_a_card_of_the_report(install: Install, store: Path, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    folder = tmp_path / "results"
    folder.mkdir()
    done("token-norm", store, "-o", folder / "norm.csv", "--png", folder / "norm.png")
    done("report", folder)
    page = (folder / "report.html").read_text()
    assert "How long are the tokens?" in page and "some-guest 1.5" in page
    assert "In a residual stream it grows with depth" in page.replace("\n", " ")
    assert re.search(r"of 9 images|at embed, ", page), "the headline"
    assert "What flows through the layers" in page
    # Its code decides the page, too.
    assert write_report(folder, folder / "report.html", force=True) is not None


@pytest.mark.slow
def test_a_step_of_a_study(install: Install, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    install("looks", "gaze", changed('needs=("sites",)', 'needs=("attention",)'))
    two = changed("*stores: api.Store,", "a: api.Store, b: api.Store, *,")
    install("two", "apart", two)
    masks = '    masks: Annotated[str, api.Option("Masks.")],\n'
    install(
        "asks",
        "thing",
        changed("    execution: Annotated[", f"{masks}    execution: Annotated["),
    )
    assert needs_of_analyses()["token-norm"] == ("sites",)
    models = [survey(name, f"demo:{name}") for name in ("vit", "resnet")]
    names = ("token-norm", "gaze", "apart", "thing")
    study = Study(tmp_path, {}, "demo:test", images=8, analyses=names)
    found = plan(study, models, labelled=False)
    lines = {step.command: step.line for step in found.analyses}
    assert {*lines} == {"token-norm", "gaze"}
    assert "vit.zarr" in lines["token-norm"] and "resnet.zarr" in lines["token-norm"]
    assert "resnet.zarr" not in lines["gaze"], "it has no attention"
    assert found.left_out["apart"] == "it takes stores of several kinds (a, b)"
    assert "--set thing.masks=PATH" in found.left_out["thing"]
    assert recipe_of("token-norm").contents == ("tokens",)
    assert recipe_of("gaze").contents == ("attention",)
    (extract,) = (step for step in found.extractions if step.name == "extract-vit")
    assert "--attention" not in extract.words and "pooled" not in extract.words


@pytest.mark.slow
def test_a_study_runs_it(install: Install, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    install(
        "raises",
        "bad",
        changed("    selected = api", "    1 / 0\n    selected = api"),
    )
    words = [
        "demo:vit",
        "--data",
        "demo:test",
        "--images",
        "6",
        "--analyses",
        "token-norm",
    ]
    words += [
        "--analyses",
        "bad",
        "--set",
        "token-norm.order=inf",
        "-o",
        str(tmp_path / "out"),
    ]
    result = vitsee_("study", *words)
    assert result.exit_code == 1 and "1 of 4 steps failed: bad" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "token-norm" in page and "--order inf" in page


def test_annotations_that_are_no_text(install: Install, store: Path) -> None:
    source = changed("from __future__ import annotations\n", "")
    source = source.replace("if TYPE_CHECKING:", "if True:")
    install("some-guest", "token_norm", source)
    assert done("token-norm", store, "--order", "inf").count("\n") == 3


def test_a_module_in_a_package(install: Install, store: Path, tmp_path: Path) -> None:
    """The package is not imported for the help; its `run` may be that of a submodule."""
    folder = tmp_path / "site" / "pack"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import sys\nsys.imported_pack = True\n")
    inner = folder / "norms"
    inner.mkdir()
    (inner / "engine.py").write_text(GOOD)
    (inner / "__init__.py").write_text(
        '"""Norms in a package: how long?"""\n'
        "from pack.norms import engine\n"
        "from vitsee import api\n"
        "ANALYSIS = api.Analysis(\n"
        "    module=__name__,\n"
        "    question=api.FLOW,\n"
        '    help="Measure it in a package.",\n'
        "    needs=(),\n"
        '    reading="Like the other.",\n'
        '    source="Nobody 2024",\n'
        "    columns=engine.COLUMNS,\n"
        '    metrics=("token_norm",),\n'
        "    run=engine.run,\n"
        "    plot=engine.plot,\n"
        ")\n"
    )
    install("pack-guest", "in_pack", "", module="pack.norms")
    assert "Measure it in a package [pack-guest]" in done("--help")
    assert not hasattr(sys, "imported_pack")
    done("in-pack", store, "-o", tmp_path / "r.csv")
    assert hasattr(sys, "imported_pack")
    assert vitsee.in_pack(store).plot().axes
    assert (
        registry.code_digest("pack.norms")
        != registry.code_digest("of_nothing")
        == "missing"
    )
    for name in ("imported_pack",):
        delattr(sys, name)
    for name in [m for m in sys.modules if m == "pack" or m.startswith("pack.")]:
        del sys.modules[name]
    vars(vitsee).pop("in_pack", None)


# ------------------------------------------------------------------- bad ones

# Name -> a module that is wrong, and what its line says. The first ones cannot be imported.
BROKEN = {
    "syntax": ("def run(:\n", "SyntaxError"),
    "missing": (GOOD + "\nimport not_there_at_all\n", "No module named 'not_there_at_all'"),
    "raises": (GOOD + "\nraise RuntimeError('a bug\\nin two lines')\n", "a bug in two lines ("),
    "exits": (GOOD + "\nimport sys\n\nsys.exit(3)\n", "SystemExit: 3"),
    "no_plot": (
        changed("    plot=plot,\n", ""),
        "missing 1 required keyword-only argument: 'plot'",
    ),
    "no_declaration": (
        changed("ANALYSIS = ", "analysis = "),
        "has no ANALYSIS; expected ANALYSIS =",
    ),
    "no_help": (
        changed('    help="""', '    help="" and """'),
        "help is empty; expected the text of",
    ),
    "no_docstring": (GOOD[GOOD.index("from __future__") :], "the docstring is empty; expected"),
    "no_reading": (
        changed("    reading=(", '    reading="" and ('),
        "reading is empty; expected how",
    ),
    "needs": (
        changed('needs=("sites",)', 'needs=("site",)'),
        "needs has 'site'; expected sites, or",
    ),
    "question": (
        changed("question=api.FLOW", "question='Why?'"),
        "question is 'Why?'; expected one",
    ),
    "columns": (
        changed("columns=COLUMNS", "columns=3"),
        "columns is 3; expected a tuple of names",
    ),
    "no_value": (changed('"value", ', ""), "with metric and value among them"),
    "twice": (
        changed('"std", ', '"std", "std", '),
        "columns has std twice; expected every column",
    ),
    "column": (
        changed('"metric", "value"', '"sharpness", "metric", "value"'),
        "columns has 'sharpness', which is not a column of vitsee's tables; expected its type in "
        "column_types, as column_types={'sharpness': float}",
    ),
    "near": (changed("*api.SITE,", '*api.SITE, "clas",'), "expected class, or its type in"),
    "kind": (
        changed("columns=COLUMNS,", 'columns=COLUMNS, column_types={"std": list},'),
        "column_types has std as <class 'list'>; expected str, int or float",
    ),
    "meaning": (
        changed("columns=COLUMNS,", 'columns=COLUMNS, meanings={"sites": "where"},'),
        "meanings has 'sites'; expected site, or some of store, model",
    ),
    "metrics": (
        changed('metrics=("token_norm",)', 'metrics=("token_norm")'),
        "metrics is 'token_n",
    ),
    "glance": (
        changed("run=run,", 'run=run, glance_metric="norm",'),
        "glance_metric has 'norm'; expected some of token_norm",
    ),
    "headline": (
        changed("headline=headline", "headline=3"),
        "headline is 3; expected a function",
    ),
    "undecorated": (changed("@api.analysis\n", ""), "run has no decorator; expected @analysis"),
    "no_stores": (
        changed("*stores: api.Store", "*stores: str"),
        "run has no parameter of the type",
    ),
    "no_execution": (
        changed("    execution: Anno", "    work: Anno"),
        "run has no parameter exec",
    ),
    "offers": (
        changed('"images seed jobs', '"images seeds jobs'),
        "run, execution, Offers has 'seeds'; expected seed, or some of images, seed, device, jobs",
    ),
    "no_offers": (
        changed("execution: Anno", "execution: api.Execution = api.DEFAULT, more: Anno"),
        "run, execution has no Offers; expected Annotated[Execution, Offers(",
    ),
    "no_option": (
        changed('    sites: Annotated[Sequence[str], api.SITES] =', "    sites: Sequence[str] ="),
        "run, sites is Sequence[str] without an Option; expected sites: Annotated[Sequence[str], "
        "Option(...)], or a shared one like SITES",
    ),
    "list": (
        changed("Annotated[Sequence[str], api.SITES]", "Annotated[list[str], api.SITES]"),
        "run, sites is list[str]; expected int, float, bool, str, Path, or a Sequence of these",
    ),
    "default": (
        changed('    ] = "2"', '    ] = "3"'),
        "run, order, its default has '3'; expected some of 1, 2, inf",
    ),
    "only_with": (
        changed("choices=tuple(ORDERS))", 'choices=tuple(ORDERS), only_with=("site", "x"))'),
        "run, order, only_with has 'site'; expected sites, or some of sites, order",
    ),
    "drawing": (
        changed("def plot(table: api.Table)", "def plot(table: api.Table, scale: str = 'x')"),
        "plot, scale is str without an Option",
    ),
    "option": (
        changed('"Which norm: 2 is the length.", ', "unknown_name, "),
        "run, order: name 'unknown_name' is not defined; expected types and options that are "
        "imported",
    ),
    "unreadable": (
        changed("*stores: api.Store", "*stores: DataFrame"),
        "run, stores: name 'DataFrame' is not defined",
    ),
    "jobs": (changed("choices=tuple(ORDERS)", "'--jobs/--jobs'"), "makes no command"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_one_line(name: str, install: Install, store: Path) -> None:
    source, line = BROKEN[name]
    install("broken", name, source)
    command = name.replace("_", "-")
    for words in ([command, store], [command, "--help"]):
        result = vitsee_(*words)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith(f"vitsee: {command} of the package broken 1.5 ")
        assert line in result.stderr and result.stderr.count("\n") == 1
    assert f"\n  {command} " in done("--help")
    if name != "jobs":  # it is a function, and no command
        with pytest.raises(VitseeError, match=f"{command} of the package broken 1.5 "):
            getattr(vitsee, name)
    assert vitsee_("attn-dist", "--help").exit_code == 0


@pytest.mark.slow
def test_broken_ones_do_no_harm(install: Install, store: Path, tmp_path: Path) -> None:
    """Lists of analyses leave them out, with a warning each, once."""
    for name, (source, _) in BROKEN.items():
        install(f"package-{name}", name, source)
    install("some-guest", "token_norm")
    assert "token-norm" in done("--help")
    done("info", store)
    shown = needs_of_analyses()
    assert "token-norm" in shown and "cka" in shown
    assert {*shown} & {name.replace("_", "-") for name in BROKEN} == {"jobs"}
    registry._warned.clear()
    result = vitsee_("study", "demo:vit", "--data", "demo:test", "--images", "4", "--memory", "1G",
                     "--analyses", "token-norm", "--dry-run", "-o", tmp_path / "out")  # fmt: skip
    assert result.exit_code == 0 and "vitsee token-norm" in result.stdout
    assert result.stderr.count("warning: left out: ") == len(BROKEN) - 1
    assert "Traceback" not in result.stderr
    out = tmp_path / "results" / "norm.csv"
    out.parent.mkdir()
    done("token-norm", store, "-o", out)
    done("report", out.parent)


REFUSED = {
    "cka": "vitsee has that name itself",
    "extract": "vitsee has that name itself",
    "open_store": "vitsee has that name itself",
    "help": "vitsee has that name itself",
    "dashed-name": "no Python identifier in lower-case letters, digits and _, as dashed_name",
    "Upper": "no Python identifier in lower-case letters, digits and _, as upper",
    "class": "no Python identifier",
    "_hidden": "no Python identifier in lower-case letters, digits and _, as hidden",
    "9.lives": "no Python identifier in lower-case letters, digits and _",
}


def test_names_that_are_refused(install: Install, store: Path) -> None:
    for number, name in enumerate(REFUSED):
        install(f"package-{number}", name)
    install("z-last", "token_norm")
    install("a-first", "token_norm")
    install("object", "of_object", module="of_object:run")
    result = vitsee_("--help")
    assert result.exit_code == 0
    for number, (name, why) in enumerate(REFUSED.items()):
        line = f"warning: the analysis {name} of the package package-{number} 1.5 is left out: "
        assert re.search(re.escape(line) + ".*" + re.escape(why), result.stderr)
    assert (
        "the analysis token_norm of the package z-last 1.5 is left out: a-first 1.5 has that name, "
        "too, and comes first"
    ) in result.stderr
    assert (
        "'of_object:run' is no module; expected of_object = 'mypackage.of_object'"
        in result.stderr
    )
    assert result.stderr.count("\n") == len(REFUSED) + 2
    assert "[a-first]" in result.stdout and "[z-last]" not in result.stdout
    assert result.stdout.count("\n  cka  ") == 1


def test_ours_is_run_and_the_other_named(install: Install, store: Path) -> None:
    install("clash", "cka", GOOD + "\nraise RuntimeError\n")
    result = vitsee_("cka", store)
    assert result.exit_code == 0 and ",cka," in result.stdout
    assert result.stderr.startswith(
        "warning: the analysis cka of the package clash 1.5 is left out: vitsee has that name "
        "itself\n"
    )
    result = vitsee_("attn-dist", "--help")
    assert result.stderr == ""
    install("dashed", "my-own")
    result = vitsee_("my-own", store)
    assert (
        result.exit_code == 2
        and "the analysis my-own of the package dashed" in result.stderr
    )


def test_ours_are_all_reserved() -> None:
    """And no name is reserved that nobody has."""
    own = {name.replace("-", "_") for name in builtin_names()} - {
        *registry.builtin_names()
    }
    python = {name for name in dir(vitsee) if name.islower()} - {
        *registry.builtin_names()
    }
    assert own | python | {"api", "help"} == registry.RESERVED
    assert {"info", "extract"} <= own and commands.__path__


def test_metadata_that_cannot_be_read(install: Install, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    for number, text in enumerate(
        (b"\xff\xfe\x00[vitsee.analyses]\nx", b"[vitsee.analyses]\nx\ny=\n")
    ):
        info = tmp_path / "site" / f"damaged{number}-1.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_bytes(text)
    registry._guests_and_refusals.cache_clear()
    result = vitsee_("--help")
    assert result.exit_code == 0 and "[some-guest]" in result.stdout


def test_help_of_any_length_and_content(install: Install) -> None:
    long = "Measure " + "very " * 100_000 + "much."
    install("longest", "long_one", changed("Measure the mean norm of tokens.", long))
    too_long = "Measure " + "very " * 300_000 + "much."
    install("too-long", "longer", changed("Measure the mean norm of tokens.", too_long))
    install(
        "steers",
        "steering",
        changed("Measure the mean norm", "Measure \\x1b[31m the mean norm"),
    )
    install("computed", "computed", changed('help="""', 'help="" or """'))
    install("escapes", "escapes", changed("Measure the mean", "Measure \\\\d the mean"))
    result = CliRunner().invoke(main, ["--help"], terminal_width=150)
    assert result.exit_code == 0 and result.stderr == ""
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")
             and "[" in line}  # fmt: skip
    assert "Measure very very" in lines["long-one"] and len(lines["long-one"]) < 120
    assert lines["longer"].endswith("All of too-long [too-long]")
    assert "\\x1b[31m" in lines["steering"] and "\x1b" not in result.stdout
    assert lines["computed"].endswith("All of computed [computed]")
    assert "\\d the mean" in lines["escapes"]


def test_its_bug_keeps_its_traceback_and_names_the_package(
    install: Install, store: Path
) -> None:
    install("buggy", "token_norm", changed("    norms = {}\n", "    norms = {}['x']\n"))
    for result in (vitsee_("token-norm", store), vitsee_("token-norm", store, "-q")):
        assert isinstance(result.exception, KeyError)
        assert result.exception.__notes__ == [
            "token-norm is an analysis of the package buggy 1.5, not of vitsee itself"
        ]
    with pytest.raises(KeyError) as caught:
        vitsee.token_norm(store)
    assert "buggy 1.5" in caught.value.__notes__[0]


ROW = '            row["metric"] = "token_norm"\n'
FROM_ROWS = "api.Table.from_rows(rows, COLUMNS, notes)"
# Name -> a module whose table is not as declared, and what the line says.
WRONG_TABLES = {
    "nothing": (
        changed(f"return {FROM_ROWS}", "return None"),
        "run returned a NoneType; expected a Table",
    ),
    "key": (
        changed(ROW, f'{ROW}            row["sharpness"] = 1.0\n'),
        "rows have 'sharpness', which is not among the columns; expected some of store, model",
    ),
    "column": (
        changed(FROM_ROWS, "api.Table.from_rows(rows, (*COLUMNS, 'null'), notes)"),
        "run returned the columns null, which columns do not name; expected some of store",
    ),
    "metric": (
        changed(ROW, ROW.replace("token_norm", "token_norms")),
        "run returned rows of the metric 'token_norms'; expected some of metrics, token_norm",
    ),
    "kind": (
        changed('n_images")', 'n_images", "mood")')
        .replace("columns=COLUMNS,", "columns=COLUMNS, column_types={'mood': float},")
        .replace(ROW, f'{ROW}            row["mood"] = "good"\n'),
        "run returned mood as String; expected float, as column_types says",
    ),
    "empty": (
        changed("row |= means[site.name].cells()", 'row["value"] = float("nan")'),
        "run returned no value: all 2 rows are NaN; expected a number in one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_a_table_that_is_not_as_declared_is_one_line(
    name: str, install: Install, store: Path, tmp_path: Path
) -> None:
    source, line = WRONG_TABLES[name]
    install("wrong", f"wrong_{name}", source)
    result = vitsee_(f"wrong-{name}", store, "-o", tmp_path / "r.csv")
    assert result.exit_code == 1 and result.stdout == ""
    assert line in result.stderr and result.stderr.count("\n") == 1
    assert "wrong 1.5" in result.stderr or "of_wrong" in result.stderr
    assert not (tmp_path / "r.csv").exists()


PANELS = 'api.draw_depth_panels(table.frame, ["token_norm"], name_axis)'
# Name -> a module whose `plot` shows nothing of what `run` made, and what the line says.
WRONG_FIGURES = {
    "panels": (
        changed(PANELS, PANELS.replace("token_norm", "norm")),
        "of_wrong: plot: the figure is to show the metric 'norm', which no row has; expected some "
        "of token_norm",
    ),
    "one_panel_more": (
        changed(PANELS, PANELS.replace('["token_norm"]', '["token_norm", "norm"]')),
        "the figure is to show the metric 'norm', which no row has",
    ),
    "filtered": (
        changed(PANELS, "figure_of(table)")
        + "\n\ndef figure_of(table):\n    figure, (axes,) = api.panels(1)\n"
        + "    for row in table.filter(metric='norm').frame.rows(named=True):\n"
        + "        axes.plot(row['depth'], row['value'])\n    return figure\n",
        "of_wrong: plot drew nothing of a table with metric token_norm; expected a figure of each",
    ),
}


@pytest.mark.parametrize("name", WRONG_FIGURES)
def test_a_figure_of_another_metric_is_one_line(
    name: str, install: Install, store: Path, tmp_path: Path
) -> None:
    source, line = WRONG_FIGURES[name]
    install("wrong", "wrong_plot", source)
    result = vitsee_(
        "wrong-plot", store, "-o", tmp_path / "r.csv", "--png", tmp_path / "r.png"
    )
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert line in result.stderr
    assert not (tmp_path / "r.csv").exists() and not (tmp_path / "r.png").exists()


@pytest.mark.slow
def test_a_report_without_what_made_its_results(
    install: Install, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninstalled, or with a headline that fails: the other results are shown."""
    install(
        "some-guest",
        "token_norm",
        changed("    answers = []", "    1 / 0\n    answers = []"),
    )
    folder = tmp_path / "results"
    folder.mkdir()
    done("token-norm", store, "-o", folder / "norm.csv")
    done("cka", store, "-o", folder / "cka.csv")
    result = vitsee_("report", folder)
    assert result.exit_code == 0
    assert "of the package some-guest 1.5: ZeroDivisionError" in result.stderr
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path / "site")])
    result = vitsee_("report", folder, "--force")
    assert result.exit_code == 0
    assert "of the package some-guest 1.5, which is not installed here" in result.stderr
    assert "norm.csv" not in result.stdout
    with pytest.raises(VitseeError, match="token_norm is no analysis that is installed"):
        vitsee.Table.read(folder / "norm.csv").plot()
    monkeypatch.undo()
    other = tmp_path / "other"  # of the same name, from another package
    shutil.copytree(tmp_path / "site", other)
    (other / "some_guest-1.5.dist-info").rename(other / "others-2.dist-info")
    metadata = other / "others-2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("some-guest", "others"))
    monkeypatch.syspath_prepend(str(other))
    result = vitsee_("plot", folder / "norm.csv", "-o", tmp_path / "norm.png")
    assert result.exit_code == 1
    assert "of the package some-guest 1.5, which is not installed here" in result.stderr


def test_stdout_is_for_the_table(install: Install, store: Path) -> None:
    install("prints", "token_norm", changed("ORDERS = {", "print('hello')\nORDERS = {"))
    assert done("token-norm", store).startswith("store,")


def test_its_log_lines_are_shown(install: Install, store: Path) -> None:
    source = changed(
        "    selected = api",
        "    logging.getLogger(__name__).info('so far')\n    selected = api",
    )
    install(
        "says",
        "token_norm",
        source.replace("import numpy as np", "import logging\n\nimport numpy as np"),
    )
    assert "so far\n" in vitsee_("token-norm", store).stderr
    assert "so far\n" not in vitsee_("token-norm", store, "-q").stderr


# ------------------------------------------------------------------- elsewhere


def test_workers_need_its_code(install: Install, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    ours = worker_versions(("of_some_guest",))
    code = "the code of of_some_guest"
    assert dask_worker.refusal("w", worker_versions(("of_some_guest",)), ours) is None
    # Half a sum is of this code, too.
    work = describe_work("token-norm", [], {}, leave_out=tmp_path)
    assert work["versions"][code] == ours[code]
    assert code not in describe_work("cka", [], {}, leave_out=tmp_path)["versions"]
    error = dask_worker.refusal("w", {**ours, code: "missing"}, ours)
    assert f"has {code} missing; here: {code} {ours[code]}" in str(error)
    registry.code_digest.cache_clear()
    (tmp_path / "site" / "of_some_guest.py").write_text(GOOD + "\n")
    assert registry.code_digest("of_some_guest") != ours[code]


def test_the_map_knows_whose_code_it_carries(install: Install, store: Path) -> None:
    class Builtin:
        modules: set[str]

        def __init__(self) -> None:
            self.modules = set()

        def __call__(self, function: Any, items: Any) -> Any:
            return map(function, items)

    install("some-guest", "token_norm")
    over = Builtin()
    vitsee.token_norm(store, execution=Execution(map=over))
    assert callable(vitsee.attn_dist)
    assert over.modules == {"of_some_guest"}


@pytest.mark.slow
def test_dask(install: Install, store: Path, tmp_path: Path) -> None:
    install("some-guest", "token_norm")
    paths = os.pathsep.join(p for p in sys.path if p)
    for words in (["-o", "here.csv"], ["-o", "there.csv", "--dask", "local:2"]):
        result = subprocess.run(
            [sys.executable, "-m", "vitsee_cli", "token-norm", str(store), *words],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "here.csv").read_bytes() == (tmp_path / "there.csv").read_bytes()


# ------------------------------------------------------------------- what is promised


def imported(source: str) -> set[str]:
    """The modules of ours that a source imports, and the names that it takes of `vitsee`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.partition(".")[0] in registry.VITSEE_PACKAGES}


def test_the_public_names_are_those_of_the_page() -> None:
    public = {
        name for name in vars(api) if not name.startswith("_") and name != "annotations"
    }
    assert public == {*api.__all__} and len(public) < 50
    listed = re.findall(
        r"^\| (`.*?) \| ", PAGE.partition("## What it may")[2], re.MULTILINE
    )
    named = [name for cell in listed for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(public)


def test_the_example_imports_nothing_else_of_ours() -> None:
    for file in EXAMPLE.glob("*.py"):
        assert imported(file.read_text()) <= {"vitsee", "vitsee.api"}, file
    used = {*re.findall(r"\bapi\.(\w+)", GOOD)}
    assert used <= {*api.__all__}
    assert len(GOOD.splitlines()) <= 130


@pytest.mark.slow
def test_the_public_names_are_light() -> None:
    code = "import sys, vitsee.api; print([m for m in sys.modules if m in HEAVY])"
    code = f"HEAVY = ('torch', 'matplotlib', 'timm', 'zarr', 'sklearn', 'scipy', 'polars'); {code}"
    paths = os.pathsep.join(p for p in sys.path if p)
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "[]\n"


@pytest.mark.slow
def test_the_page_from_the_first_line_to_the_last(tmp_path: Path) -> None:
    """Its commands, in an environment of their own that sees this one's packages."""
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    site = next((place / "lib").glob("python*/site-packages"))
    (site / "ours.pth").write_text(
        "\n".join(p for p in sys.path if p and Path(p).is_dir())
    )
    python = place / "bin" / "python"
    offline = "--no-index --no-deps --no-build-isolation"
    for name, line in {
        "vitsee": f'exec {python} -m vitsee_cli "$@"',
        "pip": f'exec {sys.executable} -m pip --python {python} "$@" {offline}',
        "pytest": f'exec {python} -m pytest -p no:cacheprovider "$@"',
    }.items():
        script = place / "bin" / name
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    environ["PATH"] = f"{place / 'bin'}{os.pathsep}{environ['PATH']}"
    environ.pop("PYTHONPATH", None)
    blocks = re.findall(
        r"^(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)^```$",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
    assert len(blocks) == 6
    for file, language, text in blocks:
        if file:
            assert text == (EXAMPLE / Path(file).name).read_text()
            (tmp_path / file).write_text(text)
            continue
        how = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [str(python), "-c"]}[
            language
        ]
        result = subprocess.run(
            [*how, text],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "norm.png").read_bytes().startswith(b"\x89PNG")
    sidecar = json.loads((tmp_path / "norm.csv.json").read_text())
    assert sidecar["package"] == {"name": "vitsee-token-norm", "version": "0.1.0"}
    own = subprocess.run(
        [str(place / "bin" / "pytest"), "-q", str(EXAMPLE / "test_token_norm.py")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert own.returncode == 0 and "3 passed" in own.stdout, own.stdout
