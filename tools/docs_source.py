"""Assembles the site's source for Sphinx: `python tools/docs_source.py FOLDER`, then `make docs`.

Nothing is written twice: guides are README's sections, pages of analyses their docstrings and
captions, the reference the commands' own help and the docstrings of what `import vitsee` gives;
everything else lies in docs/. Links are made to point into the site, or become plain text.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import vitsee
from vitsee_cli.main import main as vitsee_command
from vitsee_core.captions import caption, captions

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
# Files of the repository that are pages of the site, and how they are called there.
PAGES = {
    "docs/findings.md": "findings",
    "docs/studies.md": "studies",
    "docs/scale.md": "scale",
    "docs/performance.md": "performance",
    "docs/gpu.md": "gpu",
    "docs/architectures.md": "architectures",
    "docs/architecture.md": "architecture",
    "stores/vitsee_stores/FORMAT.md": "format",
    "CONTRIBUTING.md": "contributing",
    "CHANGES.md": "changes",
}
ABOUT = ("docs/findings.md", "docs/studies.md", "docs/scale.md", "docs/performance.md")
# Pictures whose names do not begin with their analysis' own.
DRAWN_BY = {"attn-sinks": "attn-map", "best-table": "best-layer", "objects": "cluster"}
PYTHON = ("open_store", "extract", "Store", "Table", "Segmentation")


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
    _copy(ROOT / "docs" / "findings.csv", folder / "findings.csv")
    readme = (ROOT / "README.md").read_text()
    start, guides = sections(readme)
    for slug, text in guides.items():
        _write(folder / "guide" / f"{slug}.md", relinked(text, ROOT))
    for file, name in PAGES.items():
        _write(folder / f"{name}.md", relinked((ROOT / file).read_text(), (ROOT / file).parent))
    shown = pictures(readme)
    for command in captions():
        _write(folder / "analyses" / f"{command}.md", analysis_page(command, shown))
    for command, text in commands():
        _write(folder / "commands" / f"{command}.md", f"# vitsee {command}\n\n{literal(text)}")
    _write(folder / "python.md", python_page())
    _write(folder / "gallery.md", gallery(shown))
    _write(folder / "index.md", index(relinked(start, ROOT), [*guides]))


# ------------------------------------------------------------ README and the pages in docs/


def sections(readme: str) -> tuple[str, dict[str, str]]:
    """What stands before the first heading, and slug -> each section as a page of its own."""
    start, *rest = re.split(r"^## ", readme, flags=re.MULTILINE)
    found = {}
    for text in rest:
        title = text.partition("\n")[0]
        found[re.sub(r"\W+", "-", title.lower()).strip("-")] = f"# {text}"
    return start, found


def relinked(text: str, folder: Path) -> str:
    """Links of a file in `folder` as links of the site; to what is no page of it, plain text."""

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if target.startswith(("http://", "https://", "#")):
            return match[0]
        path, _, anchor = target.partition("#")
        place = (folder / path).resolve().relative_to(ROOT).as_posix()
        if place in PAGES:
            return f"[{words}](/{PAGES[place]}.md{'#' + anchor if anchor else ''})"
        if mark:
            return f"![{words}](/pictures/{Path(place).name})"
        if place == "docs/findings.csv":
            return f"[{words}](/findings.csv)"
        return f"`{place}`"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def pictures(readme: str) -> dict[str, str]:
    """Name of a picture -> what it shows, as README says it."""
    found = re.findall(r"!\[([^\]]*)\]\(docs/([\w-]+)\.png\)", readme)
    return {name: " ".join(words.split()) for words, name in found}


def drawn_by(picture: str) -> str:
    """The command that a picture was drawn by.

    Raises:
        ValueError: no analysis is called like it.
    """
    if picture in DRAWN_BY:
        return DRAWN_BY[picture]
    names = [n for n in captions() if picture == n or picture.startswith(f"{n}-")]
    if not names:
        raise ValueError(f"{picture}.png: by which analysis? say it in DRAWN_BY")
    return max(names, key=len)


# ------------------------------------------------------------ pages of their own


def analysis_page(command: str, shown: dict[str, str]) -> str:
    """An analysis: what it computes, its figure and how to read it, its source, how to call it."""
    module = importlib.import_module(f"vitsee_core.analyses.{command.replace('-', '_')}")
    said = caption(module)
    doc = (inspect.getdoc(module) or "").partition("\n\n")
    parts = [f"# {command}", f"**{doc[0].replace(chr(10), ' ')}**"]
    parts += [f"[`vitsee {command}`](/commands/{command}.md) on the command line"]
    drawn = [name for name in shown if drawn_by(name) == command]
    parts += [f"![{shown[name]}](/pictures/{name}.png)" for name in drawn]
    parts += ["## How to read its figure", *readings(module), f"Source: {said.source}."]
    if doc[2]:
        parts += ["## Definition", doc[2]]
    parts += ["## In Python", f"`vitsee.{command.replace('-', '_')}`; `plot` draws its table."]
    parts += [documented(module.run, "run"), documented(module.plot, "plot")]
    return "\n\n".join(parts)


def readings(module: ModuleType) -> list[str]:
    """How to read the figure, of each kind where there are several."""
    kinds: dict[str, str] = getattr(module, "READINGS", {})
    listed = [f"- {kind.replace('_', '-')}: {text}" for kind, text in kinds.items()]
    return [module.READING, *(["\n".join(listed)] if listed else [])]


def commands() -> Iterator[tuple[str, str]]:
    """(name, what `--help` prints) of every command."""
    root = click.Context(vitsee_command, info_name="vitsee", max_content_width=100)
    for name in vitsee_command.list_commands(root):
        command = vitsee_command.get_command(root, name)
        assert command is not None
        with click.Context(command, parent=root, info_name=name, terminal_width=90) as own:
            yield name, command.get_help(own)


def python_page() -> str:
    """What `import vitsee` gives besides the analyses."""
    parts = ["# In Python", inspect.getdoc(vitsee) or ""]
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
    """Of a function or class; objects that are defaults by the name of their class."""
    found = inspect.signature(thing)
    plain = [
        one.replace(annotation=_Verbatim(one.annotation))
        if one.annotation is not one.empty
        else one
        for one in found.parameters.values()
    ]
    found = found.replace(parameters=plain)
    if found.return_annotation is not found.empty:
        found = found.replace(return_annotation=_Verbatim(found.return_annotation))
    return re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1()", str(found))


def gallery(shown: dict[str, str]) -> str:
    """All pictures, each with how to read it."""
    found = captions()
    parts = ["# Gallery", "How each was made stands with its analysis and in its guide."]
    for name, words in shown.items():
        command = drawn_by(name)
        parts += [f"## {words}", f"![{words}](/pictures/{name}.png)"]
        parts += [f"[{command}](/analyses/{command}.md): {found[command].reading}"]
    return "\n\n".join(parts)


def index(start: str, guides: list[str]) -> str:
    """The first page."""
    about = [PAGES[file] for file in ABOUT]
    trees = {
        "Guide": [f"guide/{slug}" for slug in guides],
        "What it found": ["gallery", *about],
        "Analyses": [f"analyses/{command}" for command in captions()],
        "Commands": [f"commands/{name}" for name, _ in commands()],
        "Reference": ["python", *(n for n in PAGES.values() if n not in about)],
    }
    lines = [start]
    for title, pages in trees.items():
        lines += ["```{toctree}", f":caption: {title}", ":hidden:", "", *pages, "```", ""]
    return "\n".join(lines)


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
