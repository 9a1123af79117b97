"""The page: results and stores as one HTML file that needs nothing else.

Everything that comes from files is escaped by the template or written as JSON whose `<` is escaped;
the page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from vitsee_core.files import check_new_files, write_files
from vitsee_core.progress import SILENT, Progress
from vitsee_core.report.cards import Sections, groups_of
from vitsee_core.report.facts import cautions, store_facts
from vitsee_core.report.materials import Materials, find_materials
from vitsee_core.report.overview import not_in_study, overview, stores_by_model
from vitsee_core.report.tables import command_of, relative
from vitsee_core.text import visible


def write_report(
    folder: Path,
    output: Path,
    *,
    sections: Sections | None = None,
    title: str = "",
    force: bool = False,
    progress: Progress = SILENT,
) -> Materials:
    """Write the report of a folder; returns what it shows.

    Args:
        folder: with results and stores, anywhere below.
        output: the page, .html.
        sections: headings with their commands, in order; others come last.
        title: of the page; by default the models of the study in the folder, else its name.
        force: an existing file is replaced.
        progress: advanced by one per result.

    Raises:
        VitseeError: nothing to show, or the file exists or cannot be written.
    """
    check_new_files([output], force=force)
    materials = find_materials(folder)
    page = render(materials, output, sections or {}, title, progress)
    write_files({output: page.encode()}, force=force)
    return materials


def render(
    materials: Materials, output: Path, sections: Sections, title: str, progress: Progress = SILENT
) -> str:
    """The page as text."""
    known = {store.record["store_id"]: store for store in materials.stores}
    found = groups_of(materials.results, sections, output, known, progress)
    cards = [card for groups in found.values() for group in groups for card in group.cards]
    script, style = _asset("script.js"), _asset("style.css")
    page: str = _template().render(
        head=overview(materials, title),
        sections=found,
        stores=stores_by_model(materials),
        facts=store_facts,
        cautions=[*cautions(materials), *not_in_study(materials.folder)],
        left_out={relative(p, materials.folder): why for p, why in materials.left_out.items()},
        commands=[line for line in map(command_of, materials.results) if line],
        data=json_for_html({card.id: card.charts for card in cards if card.charts}),
        script=script,
        style=style,
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
    )
    return page


def json_for_html(value: Any) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (resources.files("vitsee_core.report") / "assets" / name).read_text("utf-8")


def _csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template() -> Any:
    from jinja2 import BaseLoader, Environment, StrictUndefined

    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["visible"] = lambda text: visible(str(text))
    return environment.from_string(_asset("page.html"))
