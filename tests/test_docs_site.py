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

from vitsee_cli.main import main
from vitsee_core.captions import captions

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


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


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|iframe)\b[^>]*\bsrc=["'](?:https?:)?//"""
        r"""|<link\b[^>]*\bhref=["'](?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
    )
    assert loads.search('<script src="https://x.org/a.js">')
    assert loads.search("url(//x.org/font.woff)") and loads.search('<link href="http://x">')
    files = [path for end in ("html", "css") for path in site.rglob(f"*.{end}")]
    assert len(files) > 60
    for path in files:
        assert not loads.search(path.read_text()), path.relative_to(site)


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


def test_the_first_page_leads_everywhere(site: Path) -> None:
    """Each page is in a table of contents (Sphinx warns else), each README section is a page."""
    titles = re.findall(r"^## (.*)", README, re.MULTILINE)
    start = text_of(site / "index.html")
    assert len(titles) > 10
    for title in titles:
        assert title.replace("`", "") in start
    for name in (*docs_source.PAGES.values(), "gallery", "python"):
        assert (site / f"{name}.html").exists()


def test_all_pictures_are_shown(site: Path) -> None:
    pictures = {path.name for path in (ROOT / "docs").glob("*.png")}
    shown = (site / "gallery.html").read_text()
    assert {name for name in pictures if f"_images/{name}" not in shown} == set()
    assert pictures <= {path.name for path in (site / "_images").iterdir()}


# ------------------------------------------------------------ its source


def test_links_point_into_the_site_or_become_text() -> None:
    text = (
        "[a](docs/gpu.md#x) [b](https://e.org) ![c](docs/cka-vit.png) [d](tests/faults) "
        "[e](#here) [f](docs/findings.csv)"
    )
    assert docs_source.relinked(text, ROOT) == (
        "[a](/gpu.md#x) [b](https://e.org) ![c](/pictures/cka-vit.png) `tests/faults` "
        "[e](#here) [f](/findings.csv)"
    )
    inside = docs_source.relinked("[f](../stores/vitsee_stores/FORMAT.md)", ROOT / "docs")
    assert inside == "[f](/format.md)"


def test_readme_in_sections() -> None:
    start, found = docs_source.sections("# v\n\nhello\n\n## On a `laptop`, now\n\nx\n\n## B\ny\n")
    assert start == "# v\n\nhello\n\n"
    assert found == {"on-a-laptop-now": "# On a `laptop`, now\n\nx\n\n", "b": "# B\ny\n"}


def test_by_which_analysis_a_picture_was_drawn() -> None:
    drawn = {"cka-vit-resnet": "cka", "cka-heads-x": "cka-heads", "attn-sinks": "attn-map"}
    assert {name: docs_source.drawn_by(name) for name in drawn} == drawn
    with pytest.raises(ValueError, match="by which analysis"):
        docs_source.drawn_by("holiday")


def test_a_function_as_the_code_writes_it() -> None:
    """Strings keep their quotes, and no place in memory is named."""
    thing = object()

    def function(a: int, b: object = thing, *, c: str = "x") -> int:
        """Adds."""
        return a

    shown = docs_source.documented(function, "function")
    expected = "function(a: int, b: object = object(), *, c: str = 'x') -> int"
    assert shown == f"````text\n{expected}\n\nAdds.\n````\n"
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


@pytest.mark.parametrize(
    ("size", "shown"), [(2.5e12, "2.5 TB"), (1.234e9, "1.23 GB"), (5e6, "5 MB"), (5e5, "0.5 MB")]
)
def test_amounts(size: float, shown: str) -> None:
    assert studies_page.amount(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(7200, "2 h"), (5400, "1.5 h"), (90, "1.5 min"), (45.4, "45 s")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert studies_page.duration(seconds) == shown
