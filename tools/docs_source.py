"""Assembles the site's source for Sphinx: `python tools/docs_source.py FOLDER`, then `make docs`.

Nothing is written twice: the first page is README, guides and the recipes of each analysis are the
pages of docs/, what surrounds the recipes are docstrings and captions, the reference is the
commands' own help and the docstrings of what `import vitsee` gives, and the gallery's commands are
those that drew the pictures. Links are made to point into the site, or become plain text.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from pictures import ELSEWHERE, PICTURES, REAL

import vitsee
from vitsee_cli import sections
from vitsee_cli.main import main as vitsee_command
from vitsee_core.declaration import Analysis
from vitsee_core.pages.report.captions import caption, captions
from vitsee_core.runtime import registry
from vitsee_core.tables.results import Table

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
GUIDES = (
    "explore", "study", "training", "training-vit", "extraction", "checkpoints", "interventions",
    "two-libraries", "vision-language", "newest-models", "data", "clips",
    "tables", "intervals", "notebook", "guests", "export", "cluster", "dask", "bucket", "faults",
    "papers", "real-vit", "stability",
)  # fmt: skip
# Other files of the repository that are pages of the site, and how they are called there.
PAGES = {
    "README.md": "index",
    "docs/findings.md": "findings",
    "docs/studies.md": "studies",
    "docs/scale.md": "scale",
    "docs/performance.md": "performance",
    "docs/gpu.md": "gpu",
    "docs/architectures.md": "architectures",
    "docs/architectures-transformers.md": "architectures-transformers",
    "docs/architectures-towers.md": "architectures-towers",
    "docs/architecture.md": "architecture",
    "docs/files.md": "files",
    "docs/options.md": "options",
    "docs/tests.md": "tests",
    "docs/glossary.md": "glossary",
    "stores/vitsee_stores/FORMAT.md": "format",
    "CONTRIBUTING.md": "contributing",
    "docs/releasing.md": "releasing",
    "CHANGES.md": "changes",
}
TABLES = ("findings.csv", "findings-real.csv")
ABOUT = ("docs/findings.md", "docs/studies.md", "docs/scale.md", "docs/performance.md")
# Code that a page of the site says in words: of a module, and where on the page.
SPOKEN = {
    "vitsee_core/analyses": "/analyses/{}.md#definition",
    "cli/vitsee_cli/commands": "/commands/{}.md",
}
FOLDERS = ("docs/guide", "docs/analyses")
PICTURE = r"!\[([^\]]*)\]\(/pictures/([\w-]+)\.png\)"
PYTHON = (
    "open_store", "extract", "explore", "Store", "Table", "Segmentation", "Monitor",
    "NotebookProgress", "VitseeError",
)  # fmt: skip
EXAMPLES = (
    "Examples here and on the pages of the analyses run as they stand in a folder with the stores "
    "of [the first look](/index.md#a-first-look); the recipes of an analysis make its other stores."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)


def build(folder: Path) -> None:
    """Write the source of the whole site into a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SITE, folder)
    for picture in sorted((ROOT / "docs").glob("*.png")):
        _copy(picture, folder / "pictures" / picture.name)
    for name in TABLES:
        _copy(ROOT / "docs" / name, folder / name)
    for name in GUIDES:
        _write(folder / "guide" / f"{name}.md", page_of(f"docs/guide/{name}.md"))
    for file, name in PAGES.items():
        _write(folder / f"{name}.md", page_of(file))
    for command in captions():
        _write(folder / "analyses" / f"{command}.md", analysis_page(command))
    for command, text in commands():
        _write(
            folder / "commands" / f"{command}.md",
            f"# vitsee {command}\n\n{literal(text)}",
        )
    _write(folder / "python.md", python_page())
    _write(folder / "gallery.md", gallery())
    _write(folder / "index.md", "\n".join([page_of("README.md"), *trees()]))


# ------------------------------------------------------------ README and the pages in docs/


def page_of(file: str) -> str:
    return relinked((ROOT / file).read_text(), (ROOT / file).parent)


def relinked(text: str, folder: Path) -> str:
    """Links of a file in `folder` as links of the site; to what is no page of it, plain text."""

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if target.startswith(("http://", "https://", "#")):
            return match[0]
        path, _, anchor = target.partition("#")
        if not (folder / path).resolve().is_relative_to(ROOT):
            return match[0]  # of an example, written for another folder
        place = (folder / path).resolve().relative_to(ROOT)
        if mark:
            return f"![{words}](/pictures/{place.name})"
        found = place_in_site(place)
        return (
            f"[{words}]({found}{'#' + anchor if anchor else ''})"
            if found
            else f"`{place}`"
        )

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def place_in_site(place: Path) -> str | None:
    """The page of the site that shows a file of the repository, if one does."""
    place = place.parent if place.name == "__init__.py" else place
    name, folder = place.as_posix(), place.parent.as_posix()
    if name in PAGES:
        return f"/{PAGES[name]}.md"
    if folder in FOLDERS:
        return f"/{place.parent.name}/{place.name}"
    if folder in SPOKEN:
        return SPOKEN[folder].format(place.stem.replace("_", "-"))
    return f"/{place.name}" if folder == "docs" and place.name in TABLES else None


def written(command: str) -> tuple[str, str]:
    """What docs/analyses/ has of an analysis: its pictures, and recipes and traps under headings.
    Before both stand its title and links to the code, for readers of the repository."""
    _, _, text = page_of(f"docs/analyses/{command}.md").split("\n\n", 2)
    pictures, mark, rest = text.partition("## ")
    return pictures.strip(), mark + rest


# ------------------------------------------------------------ pages of their own


def analysis_page(command: str) -> str:
    """An analysis: what it computes, its figure and how to read it, recipes, its definition."""
    analysis = registry.load(command.replace("-", "_"))
    doc = analysis.docstring.partition("\n\n")
    said = caption(analysis)
    shown, recipes = written(command)
    parts = [f"# {command}: {said.question}", f"**{said.title}**"]
    parts += [f"[All options of `vitsee {command}`](/commands/{command}.md)", shown]
    parts += ["## How to read its figure", *readings(analysis)]
    parts += [f"Source: {said.source}.", recipes.strip()]
    if doc[2]:
        parts += ["## Definition", doc[2]]
    parts += [
        "## In Python",
        f"`vitsee.{command.replace('-', '_')}`; `plot` draws its table.",
    ]
    parts += [documented(analysis.run, "run"), documented(analysis.plot, "plot")]
    return "\n\n".join(filter(None, parts))


def readings(analysis: Analysis) -> list[str]:
    """How to read the figure, of each kind where there are several."""
    kinds = analysis.readings
    listed = [f"- {kind.replace('_', '-')}: {text}" for kind, text in kinds.items()]
    return [analysis.reading, *(["\n".join(listed)] if listed else [])]


def commands() -> Iterator[tuple[str, str]]:
    root = click.Context(vitsee_command, info_name="vitsee", max_content_width=100)
    for name in vitsee_command.list_commands(root):
        command = vitsee_command.get_command(root, name)
        assert command is not None
        with click.Context(
            command, parent=root, info_name=name, terminal_width=90
        ) as own:
            yield name, command.get_help(own)


def python_page() -> str:
    """What `import vitsee` gives besides the analyses, whose `run` stands on their own pages."""
    parts = ["# In Python", inspect.getdoc(vitsee) or "", EXAMPLES]
    for name in PYTHON:
        thing = getattr(vitsee, name)
        parts += [f"## {name}", documented(thing, name)]
        if inspect.isclass(thing):
            for called, member in vars(thing).items():
                if not called.startswith("_"):
                    parts += list(_member(thing, called, member))
    return "\n\n".join(parts)


def _member(owner: type, name: str, member: Any) -> Iterator[str]:
    """A public method or property of a class, if it has a docstring of its own."""
    function = member.fget if isinstance(member, property) else getattr(owner, name)
    if callable(function) and inspect.getdoc(function):
        yield f"### {owner.__name__}.{name}"
        yield documented(function, name, as_property=isinstance(member, property))


class _Verbatim(str):
    """An annotation as the code writes it."""

    def __repr__(self) -> str:
        return str(self)


def documented(thing: Any, name: str, as_property: bool = False) -> str:
    """Signature and docstring, as they stand in the code."""
    shown = "" if as_property else signature(thing)
    if len(name + shown) > 88:  # one argument a line
        shown = re.sub(r", (?=\*{0,2}\w+[:,)=]|\*,)", ",\n    ", shown)
        shown = shown.replace("(", "(\n    ", 1).replace(") ->", ",\n) ->")
    return literal(f"{name}{shown}\n\n{inspect.getdoc(thing) or ''}")


def signature(thing: Any) -> str:
    """Return a function's or class's signature; defaults that are objects by their class's name.

    A class without an `__init__` of its own, as an exception, has none.
    """
    if (
        inspect.isclass(thing)
        and "__init__" not in vars(thing)
        and issubclass(thing, BaseException)
    ):
        return ""
    found = inspect.signature(thing)
    found = found.replace(parameters=[_plain(one) for one in found.parameters.values()])
    if found.return_annotation is not found.empty:
        found = found.replace(return_annotation=_Verbatim(found.return_annotation))
    return re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1()", str(found))


def _plain(one: inspect.Parameter) -> inspect.Parameter:
    """As the code writes it."""
    if is_dataclass(one.default):
        one = one.replace(default=_Verbatim(f"{type(one.default).__name__}()"))
    if one.annotation is not one.empty:
        one = one.replace(annotation=_Verbatim(one.annotation))
    return one


def gallery() -> str:
    made = drawn_with()
    parts = [
        "# Gallery",
        "Commands are those of the folder that `make demo` leaves (`cd demo-out`), of real-vit's "
        "that of `vitsee demo --real` (`cd real-out`).",
    ]
    for command in captions():
        for words, name in re.findall(PICTURE, written(command)[0]):
            words = " ".join(words.split())
            parts += [f"## {words}", f"![{words}](/pictures/{name}.png)"]
            parts += [
                f"[{command}](/analyses/{command}.md): {reading_of(command, made[name])}"
            ]
            parts += [f"```sh\n{made[name]}\n```"]
    for guide in GUIDES:
        for words, name in re.findall(PICTURE, page_of(f"docs/guide/{guide}.md")):
            parts += [f"## {words}", f"![{words}](/pictures/{name}.png)"]
            parts += [f"[{guide}](/guide/{guide}.md)", f"```sh\n{made[name]}\n```"]
    return "\n\n".join(parts)


def reading_of(command: str, made: str) -> str:
    """How to read a figure that these commands made, of its kind where there are several."""
    kind = re.search(rf"vitsee {command} .*--kind (\S+)", made)
    notes = {"kind": kind[1]} if kind else {}
    analysis = registry.load(command.replace("-", "_"))
    return caption(analysis, Table.from_rows([{"metric": command}], notes=notes)).reading


def drawn_with() -> dict[str, str]:
    """Picture -> the commands that it was drawn with, by the demo or by tools/pictures.py."""
    words = ["-q", "demo", "--quick", "-o", "demo-out", "--dry-run"]
    plan = CliRunner().invoke(vitsee_command, words).stdout.replace("demo-out/", "")
    lines = {
        line.partition(" -o ")[2].split()[0]: line
        for line in plan.splitlines()
        if " -o " in line
    }
    found = dict(ELSEWHERE)
    for picture in (*PICTURES, *REAL):
        made = [f"vitsee {line}" for line in picture.commands] or [lines[picture.result]]
        found[picture.name] = "\n".join(
            folded(line.removesuffix(" --force")) for line in made
        )
    return found


def folded(line: str) -> str:
    lines = textwrap.wrap(line, 84, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


def trees() -> Iterator[str]:
    """The tables of contents of the first page."""
    about = [PAGES[file] for file in ABOUT]
    answers = sections.commands_by_question(captions())
    contents = {
        "Guide": [f"guide/{name}" for name in GUIDES],
        "What it found": ["gallery", *about],
        **{
            question: [f"analyses/{name}" for name in some]
            for question, some in answers.items()
        },
        "Commands": [f"commands/{name}" for name, _ in commands()],
        "Reference": [
            "python",
            *(n for n in PAGES.values() if n not in (*about, "index")),
        ],
    }
    for title, pages in contents.items():
        yield "\n".join(
            ["```{toctree}", f":caption: {title}", ":hidden:", "", *pages, "```", ""]
        )


def literal(text: str) -> str:
    """Text as it stands, in a fence that it cannot close."""
    return f"````text\n{text.rstrip()}\n````\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip("\n") + "\n")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
