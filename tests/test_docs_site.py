"""The site of `make docs`: built without warnings or a network, and nothing left out of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import docs_source
import pytest
import studies_page

from tests.browser import NONE, PROGRAM, Browser
from vitsee_cli.main import main
from vitsee_core.analyses import attn_map
from vitsee_core.pages.report.captions import captions
from vitsee_core.runtime.execution import DEFAULT, Execution

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; any warning of Sphinx fails."""
    folder = tmp_path_factory.mktemp("site")
    docs_source.build(folder / "source")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    done = subprocess.run(
        [*command, str(folder / "source"), str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc=["'](?:https?:)?//"""
        r"""|<link\b[^>]*\bhref=["'](?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
    )
    assert loads.search('<script src="https://x.org/a.js">')
    assert loads.search("url(//x.org/font.woff)") and loads.search(
        '<link href="http://x">'
    )
    files = [path for end in ("html", "css") for path in site.rglob(f"*.{end}")]
    assert len(files) > 60
    for path in files:
        assert not loads.search(path.read_text()), path.relative_to(site)


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=NONE)
def test_pages_fit_a_phone_and_a_desk(site: Path, tmp_path: Path) -> None:
    """Tables and commands that are wider scroll in themselves."""
    with Browser(tmp_path / "profile") as browser:
        for width in (360, 1400):
            browser.look(width)
            for name in (
                "index",
                "gallery",
                "guide/extraction",
                "analyses/cka",
                "performance",
            ):
                browser.open(site / f"{name}.html")
                assert browser.run(
                    "document.documentElement.scrollWidth <= innerWidth"
                ), name
                wide = (
                    "[...document.images].filter(i => i.getBoundingClientRect().right > "
                    "innerWidth)"
                )
                assert browser.run(f"{wide}.length") == 0
                assert browser.errors == []
                asked = {url.partition(":")[0] for url in browser.requests}
                assert asked <= {"file", "data"}


@pytest.mark.slow
def test_every_analysis_and_command_has_a_page(site: Path) -> None:
    for name, said in captions().items():
        page = text_of(site / "analyses" / f"{name}.html")
        assert said.question in page.replace("`", "")
        assert "How to read its figure" in page and "Definition" in page
        assert "Args:" in page
    for name in main.list_commands(click.Context(main)):
        page = text_of(site / "commands" / f"{name}.html")
        assert f"Usage: vitsee {name}" in page and "--help" in page


def text_of(path: Path) -> str:
    text = re.sub(r"<[^>]+>", "", path.read_text())
    for name, letter in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#x27;", "'")):
        text = text.replace(name, letter)
    return " ".join(text.replace("’", "'").split())


@pytest.mark.slow
def test_the_first_page_leads_everywhere(site: Path) -> None:
    """Each page is in a table of contents (Sphinx warns else)."""
    start = (site / "index.html").read_text()
    pages = ["gallery", "python", *docs_source.PAGES.values()]
    pages += [f"guide/{name}" for name in docs_source.GUIDES]
    for name in {*pages} - {"index"}:
        assert (site / f"{name}.html").exists() and f'href="{name}.html"' in start, name


@pytest.mark.slow
def test_recipes_and_traps_stand_between_reading_and_definition(site: Path) -> None:
    for name in captions():
        html = (site / "analyses" / f"{name}.html").read_text()
        found = re.findall(r"<h2>(.*?)<", html)
        assert found[:2] == ["How to read its figure", "Recipes"]
        assert found[-3:] == ["Traps", "Definition", "In Python"], name


@pytest.mark.slow
def test_all_pictures_are_shown(site: Path) -> None:
    pictures = {path.name for path in (ROOT / "docs").glob("*.png")}
    shown = (site / "gallery.html").read_text()
    assert {name for name in pictures if f"_images/{name}" not in shown} == set()
    assert pictures <= {path.name for path in (site / "_images").iterdir()}


# ------------------------------------------------------------ its source


def test_links_point_into_the_site_or_become_text() -> None:
    text = (
        "[a](docs/gpu.md#x) [b](https://e.org) ![c](docs/cka-vit.png) [d](tests/faults) "
        "[e](#here) [f](docs/findings.csv) [g](docs/guide/dask.md) [h](docs/analyses/cka.md)"
    )
    assert docs_source.relinked(text, ROOT) == (
        "[a](/gpu.md#x) [b](https://e.org) ![c](/pictures/cka-vit.png) `tests/faults` "
        "[e](#here) [f](/findings.csv) [g](/guide/dask.md) [h](/analyses/cka.md)"
    )
    inside = (
        "[f](../../stores/vitsee_stores/FORMAT.md) [r](../../README.md#a) [c](cka.md) "
    )
    inside += "[d](../../vitsee_core/analyses/attn_map.py)"
    assert docs_source.relinked(inside, ROOT / "docs" / "analyses") == (
        "[f](/format.md) [r](/index.md#a) [c](/analyses/cka.md) "
        "[d](/analyses/attn-map.md#definition)"
    )


@pytest.mark.slow
def test_the_gallery_says_how_each_picture_was_made() -> None:
    made = docs_source.drawn_with()
    for name, kind in (("attn-map-aligned", "aligned"), ("attn-sinks", "sink")):
        assert docs_source.reading_of("attn-map", made[name]).startswith(
            attn_map.ANALYSIS.readings[kind]
        )
    assert {*made} == {path.stem for path in (ROOT / "docs").glob("*.png")}
    long = f"vitsee cka {'a' * 60}.zarr b.zarr --sites c"
    assert (
        docs_source.folded(long) == f"vitsee cka {'a' * 60}.zarr b.zarr \\\n    --sites c"
    )
    assert made["erf"].startswith("vitsee erf stores/vit.zarr stores/resnet.zarr")
    assert (
        made["attn-sinks"].count("\nvitsee attn-map ") == 1
        and "--force" not in made["erf"]
    )


def test_a_function_as_the_code_writes_it() -> None:
    """Strings keep their quotes, and no place in memory is named."""
    thing = object()

    def function(a: int, b: object = thing, *, c: str = "x") -> int:
        """Adds."""
        return a

    shown = docs_source.documented(function, "function")
    expected = "function(a: int, b: object = object(), *, c: str = 'x') -> int"
    assert shown == f"````text\n{expected}\n\nAdds.\n````\n"

    def analysis(execution: Execution = DEFAULT) -> None: ...

    assert (
        docs_source.signature(analysis) == "(execution: Execution = Execution()) -> None"
    )
    name = "a_function_with_quite_a_long_name_and_more_of_it_for_the_line"
    assert docs_source.documented(function, name).splitlines()[1:7] == [
        f"{name}(",
        "    a: int,",
        "    b: object = object(),",
        "    *,",
        "    c: str = 'x',",
        ") -> int",
    ]


# ------------------------------------------------------------ real studies


@pytest.mark.slow
def test_the_page_of_studies_is_what_the_script_prints() -> None:
    assert (ROOT / "docs" / "studies.md").read_text() == studies_page.page(500)


def test_commands_of_the_studies_parse() -> None:
    lines = studies_page.COMMANDS.replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith("vitsee ")]
    assert len(found) == 5
    for line in found:
        words = shlex.split(line.partition(">")[0])[1:]
        command = main.get_command(click.Context(main), words[0])
        assert command is not None
        command.make_context(words[0], words[1:], parent=click.Context(main))


def test_amounts_and_durations() -> None:
    sizes = {2.5e12: "2.5 TB", 1.234e9: "1.23 GB", 5e6: "5 MB", 5e5: "0.5 MB"}
    assert {size: studies_page.amount(size) for size in sizes} == sizes
    times = {7200: "2 h", 5400: "1.5 h", 90: "1.5 min", 45.4: "45 s"}
    assert {seconds: studies_page.duration(seconds) for seconds in times} == times
