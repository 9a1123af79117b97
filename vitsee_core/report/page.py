"""The page: results and stores as one HTML file that needs nothing else.

Everything that comes from files is escaped by the template or written as JSON whose `<` is escaped;
the page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitsee_core.captions import caption
from vitsee_core.files import check_new_files, write_files
from vitsee_core.plotting import DPI, figure_bytes
from vitsee_core.progress import SILENT, Progress, counting
from vitsee_core.redrawing import Result
from vitsee_core.report.charts import charts_of
from vitsee_core.report.facts import (
    best_of,
    cautions,
    n_images,
    result_cautions,
    store_facts,
    stores_of,
)
from vitsee_core.report.materials import Materials, find_materials, picture_of
from vitsee_core.results import Table
from vitsee_core.text import visible

SHOWN_ROWS = 200
CARRIED_BYTES = 400_000  # a larger table is linked, not carried along
PIXELS_AN_INCH = 110  # of a figure on the page
OTHER = "Other results"
Sections = Mapping[str, Iterable[str]]  # heading -> the commands below it


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
        title: of the page; by default the folder's name.
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
    cards: dict[str, list[dict[str, Any]]] = {heading: [] for heading in (*sections, OTHER)}
    data: list[Any] = []
    commands = {name: heading for heading, names in sections.items() for name in names}
    order = list(commands)
    results = sorted(
        materials.results,
        key=lambda one: order.index(one.command) if one.command in order else len(order),
    )
    with counting(progress, len(results), "results"):
        for number, result in enumerate(results):
            card = _card(result, number, output, known)
            charts = charts_of(result.file.table)
            card |= {"chart": len(data) if charts else None, "n_charts": len(charts)}
            if charts:
                data.append(charts)
            cards[commands.get(result.command, OTHER)].append(card)
            progress.advance(1)
    script, style = _asset("script.js"), _asset("style.css")
    page: str = _template().render(
        title=visible(title or materials.folder.resolve().name),
        sections=[(heading, some) for heading, some in cards.items() if some],
        stores=[
            {"name": visible(one.name), "record": one.record, "facts": store_facts(one),
             "command": visible(str(one.record["info"].get("command", "")))}
            for one in materials.stores
        ],
        cautions=cautions(materials),
        left_out={_relative(p, materials.folder): why for p, why in materials.left_out.items()},
        commands=[_command(one) for one in materials.results if one.file.sidecar.get("command")],
        glance=_glance(materials),
        data=json_for_html(data),
        script=script,
        style=style,
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
    )  # fmt: skip
    return page


def json_for_html(value: Any) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _card(result: Result, number: int, output: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of one result."""
    table = result.file.table
    words = caption(result.analysis, table)
    labels = [str(store.get("label", "")) for store in stores_of(result)]
    picture, (width, height), trouble = _picture(result)
    n = n_images(result)
    return {
        "id": f"r{number}",
        "caption": words,
        "name": visible(result.file.path.stem),
        "stores": [visible(label) for label in labels],
        "command": _command(result),
        "picture": picture,
        "width": width,
        "height": height,
        "trouble": trouble,
        "n_images": n,
        "best": best_of(result),
        "cautions": result_cautions(result, known),
        "notes": _notes(table.notes),
        "table": _rows(table),
        "n_rows": len(table),
        "csv": _link(result, output),
        "csv_name": visible(result.file.path.name),
    }


def _picture(result: Result) -> tuple[str, tuple[int, int], str]:
    """The figure as an image's address, its size on the page (0: its own), or why it lacks."""
    place = picture_of(result)
    if place is not None and place.suffix.lower() == ".svg":
        return _carried(place.read_bytes(), "image/svg+xml"), (0, 0), ""
    try:
        png = place.read_bytes() if place else figure_bytes(result.figure(), ".png")
    except Exception as error:  # a stranger's table may be anything: the page says so
        return "", (0, 0), f"no figure: {type(error).__name__}: {visible(str(error))[:300]}"
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    size = (round(width * PIXELS_AN_INCH / DPI), round(height * PIXELS_AN_INCH / DPI))
    return _carried(png, "image/png"), size, ""


def _carried(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _link(result: Result, output: Path) -> str:
    """Where the page finds the table: in itself where that is small, else beside it."""
    path = result.file.path
    if path.stat().st_size <= CARRIED_BYTES:
        data = path.read_bytes()
        return _carried(data, "text/csv" if path.suffix == ".csv" else "application/octet-stream")
    return quote(_relative(path, output.absolute().parent))


def _relative(path: Path, folder: Path) -> str:
    return visible(os.path.relpath(path.absolute(), folder.absolute()))


def _command(result: Result) -> str:
    words = result.file.sidecar.get("command")
    return visible(shlex.join(map(str, words)) if isinstance(words, list) else "")


def _notes(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The notes of a table that are short enough to be read."""
    found = []
    for name, value in notes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= 600:
            found.append((visible(str(name)), visible(text)))
    return found


def _rows(table: Table) -> dict[str, Any]:
    """The first rows, columns that are empty left out: header, cells with their sorting keys."""
    kept = {}
    for name, values in table.columns.items():
        cells = values.tolist()
        if any(cell is not None and cell != "" and cell == cell for cell in cells):
            kept[name] = cells[:SHOWN_ROWS]
    numbers = {
        name: all(isinstance(c, (int, float)) or c is None for c in cells)
        for name, cells in kept.items()
    }
    lines = zip(*kept.values(), strict=True)
    return {
        "columns": [(visible(name), numbers[name]) for name in kept],
        "rows": [[_cell(value) for value in line] for line in lines],
    }


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(str(value))


def _glance(materials: Materials) -> list[tuple[str, str]]:
    """Numbers for the head of the page."""
    models = {str(one.record["model"].get("name")) for one in materials.stores}
    images = max((one.record["n_images"] for one in materials.stores), default=0)
    kinds = {one.command for one in materials.results}
    found = [("models", len(models)), ("stores", len(materials.stores)),
             ("images in the largest", images), ("analyses", len(kinds)),
             ("results", len(materials.results))]  # fmt: skip
    return [(name, f"{n:,}") for name, n in found if n]


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
