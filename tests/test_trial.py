"""docs/architecture.md: its analysis, put into the tree as a newcomer would, runs; what it names is
there."""

from __future__ import annotations

import csv
import importlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import files_page
import numpy as np
import pytest
import room_tests
from click.testing import CliRunner

from tests.stores import write_model
from vitsee_cli.main import main
from vitsee_core import analyses
from vitsee_core.pages.report.captions import captions
from vitsee_core.study.catalogue import needs_of_analyses

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = ("", "vitsee_core", "stores", "cli", "tools")
MODULE, RECIPES = re.findall(r"<!-- trial -->\n(`{3,})\w+\n(.*?)\n\1\n", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file lies in a folder that the package has beside its own."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "token_norm.py").write_text(MODULE[1])
    monkeypatch.setattr(
        analyses, "__path__", [*analyses.__path__, str(tmp_path / "more")]
    )
    importlib.invalidate_caches()
    yield
    if sys.modules.pop("vitsee_core.analyses.token_norm", None):
        del analyses.token_norm  # type: ignore[attr-defined]


def vitsee(*args: object) -> str:
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_its_command_runs_on_tokens_and_on_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens, vectors = rng.normal(size=(9, 7, 4)), rng.normal(size=(9, 6))
    store = write_model(
        tmp_path / "a.zarr",
        {"embed": tokens, "blocks.0.out": 2 * tokens, "pooled": vectors},
    )
    out, png = tmp_path / "r.csv", tmp_path / "r.png"
    vitsee("token-norm", store.path, "--sites", "all", "-o", out, "--png", png)
    rows = {row["site"]: row for row in csv.DictReader(io.StringIO(out.read_text()))}
    mean = np.mean(
        [np.sqrt(sum(x**2 for x in token)) for image in tokens for token in image]
    )
    assert float(rows["embed"]["value"]) == pytest.approx(mean, rel=1e-6)
    assert float(rows["blocks.0.out"]["value"]) == pytest.approx(2 * mean, rel=1e-6)
    expected = np.mean([np.sqrt(sum(x**2 for x in vector)) for vector in vectors])
    assert float(rows["pooled"]["value"]) == pytest.approx(expected, rel=1e-6)
    vitsee("plot", out, "-o", tmp_path / "again.png")
    assert png.read_bytes() == (tmp_path / "again.png").read_bytes()


def test_it_is_found_by_its_file_alone() -> None:
    assert "token-norm" in main.list_commands(click.Context(main))
    assert re.search(
        r"\n  token-norm +Measure the mean norm of tokens\.\n", vitsee("--help")
    )
    shown = vitsee("token-norm", "--help")
    assert "$ vitsee token-norm b16.zarr" in shown and "--dask" in shown
    assert (
        "Columns: store, model, weights, site, block, depth, rel_depth, metric" in shown
    )
    run = importlib.import_module("vitsee_core.analyses.token_norm").run
    assert "sites: Sites by name, glob or group" in (inspect.getdoc(run) or "")
    assert "Annotated" not in str(inspect.signature(run))
    assert captions()["token-norm"].question == "How long are the tokens?"
    assert needs_of_analyses()["token-norm"] == ("sites",)


def test_its_page_begins_as_the_others() -> None:
    others = (ROOT / "docs" / "analyses" / "cka.md").read_text()
    own = RECIPES[1].replace("token-norm", "cka").replace("token_norm", "cka")
    assert own.split("\n\n")[:2] == others.split("\n\n")[:2]
    assert re.findall("^## (.*)", own, re.MULTILINE) == ["Recipes", "Traps"]


def named(page: str) -> list[str]:
    """The files and folders that a page names; `x` stands for an analysis to come."""
    words = re.findall(
        r"`([\w./]+)`", re.sub(r"^`{3,}.*?^`{3,}", "", page, flags=re.M | re.S)
    )
    found = [word for word in words if re.search(r"/|\.(py|md|toml)$", word)]
    return [w for w in found if not re.search(r"(^|/)(test_)?x(/|\.)|zarr|\.\.\.", w)]


def missing(page: str) -> list[str]:
    """Those that are not there, and functions that a file named beside them does not define."""
    of_rooms = {path.name for path in (ROOT / "vitsee_core").glob("*/**/*")}
    lost = [
        name
        for name in named(page)
        if name.rstrip("/") not in of_rooms
        and not any((ROOT / at / name).exists() for at in PLACES)
    ]
    for words, name in re.findall(
        r"((?:`[\w.]+`(?: and |, )?)+) in `([\w/]+\.py)`", page
    ):
        files = [ROOT / at / name for at in PLACES if (ROOT / at / name).exists()]
        text = files[0].read_text() if files else ""
        for word in re.findall(r"\w+(?=[.`])", words):
            if not re.search(rf"^ *(def|class) {word}\b|^{word} = ", text, re.MULTILINE):
                lost.append(f"{word} in {name}")
    return lost


def test_what_the_page_names_is_there() -> None:
    assert len(named(PAGE)) > 100
    assert missing(PAGE) == []
    gone = "`models/gone.py`, `no_such` in `models/load.py`, `models/load.py`, `analyses/x.py`"
    assert missing(gone) == ["models/gone.py", "no_such in models/load.py"]


def test_the_files_to_read_first_have_about_so_many_lines() -> None:
    listed = re.findall(r"^\| \[(\S+)\]\(\.\./(\S+)\) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(listed) == 6
    for name, target, lines in listed:
        n = len((ROOT / name).read_text().splitlines())
        assert name == target and abs(n - int(lines)) <= 0.15 * n, (name, n)


def test_the_page_of_tests_is_what_its_script_writes() -> None:
    """But for analyses that came since: a newcomer's need no row."""
    files_by_room = room_tests.room_tests()
    wanted = {(room, name) for room, names in files_by_room.items() for name in names}
    assert {name for _, name in wanted} == {
        path.name for path in (ROOT / "tests").glob("test_*.py")
    }
    assert ("analyses/cka", "test_cka.py") in wanted
    rows = re.findall(
        r"^\| `(.+?)` \| (.+) \|$", room_tests.PAGE.read_text(), re.MULTILINE
    )
    shown = {
        (room, name) for room, names in rows for name in re.findall("`(.+?)`", names)
    }
    of_analyses = {name for room, name in wanted if room.startswith("analyses/")}
    behind = (shown - wanted) | {
        (room, name) for room, name in wanted - shown if name not in of_analyses
    }
    assert not behind, (
        f"run python tools/room_tests.py, which writes docs/tests.md: {sorted(behind)}"
    )


def test_the_page_of_files_is_what_its_script_writes() -> None:
    """But for analyses that came since: a newcomer's need no line."""
    shown, wanted = (re.split("^## ", text, flags=re.MULTILINE) for text in (
        files_page.PAGE.read_text(), files_page.page(),
    ))  # fmt: skip
    behind = [part.splitlines()[0] for part in shown if part not in wanted]
    assert not behind, (
        f"run python tools/files_page.py, which writes docs/files.md: {behind}"
    )
    missing = [part for part in wanted if part not in shown]
    assert all(part.startswith("vitsee_core/analyses/") for part in missing), missing
