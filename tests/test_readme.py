"""README's commands and those of docs/: what is marked as tested is run, and all at least parse."""

from __future__ import annotations

import importlib
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import docs_source
import pytest

from tests.recipes import (
    README,
    blocks_of,
    lines_of,
    link_first_look,
    run_blocks,
)
from vitsee_cli.main import main
from vitsee_core.pages.report.captions import captions

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for folder in ("guide", "analyses")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
}
TEXTS = {"README.md": README, **PAGES}


def vitsee_lines(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [
        line for text in blocks for line in lines_of(text) if line.startswith("vitsee ")
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_every_vitsee_line_parses(name: str) -> None:
    for line in vitsee_lines(TEXTS[name]):
        words = shlex.split(line, comments=True)[1:]
        ends = (words.index(w) for w in ("|", ">") if w in words)
        words = words[: min(ends, default=len(words))]
        if name == "guide/guests.md" and words[0] in ("token-norm", "--help"):
            continue  # a command that the page adds: tests/test_guests.py runs all of that page
        command = main.get_command(click.Context(main), words[0])
        assert command is not None, line
        command.make_context(words[0], words[1:], parent=click.Context(main))


@pytest.mark.slow
def test_readme_runs(first_look: Path) -> None:
    for picture in ("dist.png", "cka.png", "probe.png"):
        assert (first_look / picture).read_bytes().startswith(b"\x89PNG")
    header = (first_look / "dist.csv").read_text().splitlines()[0]
    assert header.startswith(
        "store,model,weights,site,block,depth,rel_depth,head,metric,value"
    )
    assert (first_look / "report.html").read_text().count("<figure") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, text in PAGES.items() if blocks_of(text)]
)
def test_a_page_runs_on_the_stores_of_readme(
    name: str, first_look: Path, tmp_path: Path
) -> None:
    link_first_look(first_look, tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    run_blocks(PAGES[name], tmp_path)
    for line in vitsee_lines(
        "".join(f"```{a}\n{b}```" for a, b in blocks_of(PAGES[name]))
    ):
        for picture in re.findall(r"--png (\S+\.png)", line):
            assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG"), line


def test_pages_can_run_one_after_another_in_one_folder() -> None:
    """No two commands write one file, so that none is refused; but a store may be resumed."""
    written: dict[str, str] = {}
    for page in TEXTS.values():
        for line in (
            x
            for language, text in blocks_of(page)
            if language == "sh"
            for x in lines_of(text)
        ):
            words = shlex.split(line, comments=True)
            for option, place in pairwise(words):
                if option in ("-o", "--png", "--table") and not place.endswith(".zarr"):
                    assert place not in written, (
                        f"two pages write {place}, and all run in one folder; name it otherwise in "
                        f"one of them: {line}; {written[place]}"
                    )
                    written[place] = line


def test_tables_of_recipes_have_sidecars() -> None:
    """What a shell redirects has none, and report and plot cannot use it."""
    for page in TEXTS.values():
        for line in vitsee_lines(page):
            words = shlex.split(line, comments=True)
            if ">" in words:
                assert words[1] in ("extract", "info", "sites", "study"), line


def test_every_command_is_run_by_a_page() -> None:
    """The demo goes through them all in its own tests."""
    blocks = [text for page in TEXTS.values() for language, text in blocks_of(page)]
    run = {
        line.split()[1]
        for text in blocks
        for line in lines_of(text)
        if "vitsee " in line[:7]
    }
    assert {*main.list_commands(click.Context(main))} - run == {"demo"}


def test_readme_leads_to_the_commands() -> None:
    """Rows of the table at the start name them and lead to where they are explained; each that is
    no analysis, and most analyses."""
    rows = re.findall(r"^\| [A-Z][^|]*\? \| (.*) \|$", README, re.MULTILINE)
    linked = [
        (name, target)
        for row in rows
        for names, target in re.findall(r"\[([^\]]*)\]\(docs/([^)]*)\)", row)
        for name in names.split(", ")
    ]
    names = [name for name, _ in linked]
    missing = {*main.list_commands(click.Context(main))} - {*names}
    assert len({*names}) == len(names) and missing <= {*captions()} and len(missing) < 5
    for name, target in linked:
        expected = f"analyses/{name}.md" if name in captions() else target
        assert target == expected
        assert f"vitsee {name}" in PAGES[target]


def test_pages_of_analyses_begin_alike() -> None:
    """With links to what is said in the code, which docs_source leaves out of the site."""
    assert {*PAGES} == {
        *(f"guide/{name}.md" for name in docs_source.GUIDES),
        *(f"analyses/{name}.md" for name in captions()),
    }
    for name in captions():
        module = name.replace("-", "_")
        definition = (
            importlib.import_module(f"vitsee_core.analyses.{module}").__file__ or ""
        )
        assert PAGES[f"analyses/{name}.md"].startswith(
            f"# {name}\n\n[Definition, options and how to read the figure]"
            f"(../../{Path(definition).relative_to(ROOT)})\n\n"
        )
        headings = re.findall(r"^## (.*)", PAGES[f"analyses/{name}.md"], re.MULTILINE)
        assert headings[0] == "Recipes" and headings[-1] == "Traps"


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    folder = ROOT if name == "README.md" else (ROOT / "docs" / name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        assert (folder / path).exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", (folder / path).read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w ]", "", t.lower()).replace(" ", "-") for t in titles
            ]
