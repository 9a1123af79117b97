"""The page: results and stores as one HTML file that needs nothing else.

Everything that comes from files is escaped by the template or written as JSON whose `<` is escaped;
the page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vitsee_core.figures.plotting import stores_in_order
from vitsee_core.pages.html import asset, csp_hash, json_for_html, script, template
from vitsee_core.pages.report.cards import (
    Group,
    Headings,
    Sections,
    command_of,
    group_results,
)
from vitsee_core.pages.report.earlier import (
    UNSEALED,
    code_digest,
    inputs_digest,
    read_page,
    sealed,
)
from vitsee_core.pages.report.facts import cautions, steps_without_values, store_facts
from vitsee_core.pages.report.materials import (
    ExploredPage,
    Materials,
    candidates,
    explored_pages,
    find_materials,
    relative,
)
from vitsee_core.pages.report.overview import (
    overview,
    paper_numbers,
    stores_by_model,
)
from vitsee_core.pages.report.pictures import Addresses
from vitsee_core.pages.report.study_record import failures, read_study, remarks
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_core.tables.files import check_new_files, write_files
from vitsee_core.tables.headlines import said_once
from vitsee_core.tables.text import visible


def write_report(
    folder: Path,
    output: Path,
    *,
    sections: Sections | None = None,
    title: str = "",
    force: bool = False,
    progress: Progress = SILENT,
) -> Materials | None:
    """Write the report of a folder, and return what it shows.

    None if the page at `output` shows that already. Figures of that page are not packed again.

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
    if folder.is_dir():  # if not, `find_materials` says so
        check_new_files([output], force=force)
    sections = {heading: list(commands) for heading, commands in (sections or {}).items()}
    earlier = read_page(output)
    pages = explored_pages(folder, output)
    about = [title, sections, [(page.link, page.title) for page in pages]]
    inputs = inputs_digest(folder, output, about) if folder.is_dir() else ""
    if earlier.inputs and earlier.inputs == inputs:
        return None
    made_of = f"{code_digest()} {inputs} {UNSEALED}"
    with closing(Addresses(earlier.pictures, candidates(folder))) as addresses:
        materials = find_materials(folder)
        page = render(
            materials,
            output=output,
            sections=sections,
            title=title,
            made_of=made_of,
            addresses=addresses,
            explored=pages,
            progress=progress,
        )
    write_files({output: sealed(page)}, force=force)
    return materials


def render(
    materials: Materials,
    *,
    output: Path,
    sections: Sections,
    title: str,
    made_of: str,
    addresses: Addresses,
    explored: Sequence[ExploredPage],
    progress: Progress = SILENT,
) -> str:
    """Return the page as text; figures are drawn meanwhile.

    Args:
        materials: of the report.
        output: the page, to which links are relative.
        sections: headings with their commands.
        title: of the page, "" for the default.
        made_of: the digests by which `report.earlier` recognises the page.
        addresses: of the pictures.
        explored: pages that this one leads to.
        progress: advanced by one per result.
    """
    study = read_study(materials.folder)
    # A study's figures, where it was written as a file: heading -> its section.
    figures = {}
    for section in study.sections:
        note = visible(section.note)
        figures[visible(section.title)] = msgspec.structs.replace(section, note=note)
    headings = Headings(
        sections, {name: section.results for name, section in figures.items()}
    )
    with (
        # One colour per store in all figures of the page.
        stores_in_order(_stores_of_tables(materials)),
        _collect_garbage_of_figures_only(),
    ):
        groups = group_results(
            materials.results,
            headings,
            output,
            stores={store.record["store_id"]: store for store in materials.stores},
            left_out=materials.left_out,
            addresses=addresses,
            progress=progress,
        )
    # Some results may have turned out not to be showable.
    materials = materials.without_left_out()
    code = script("pages/report/assets/script.js")
    style = asset("pages/html/assets/base.css") + asset("pages/report/assets/style.css")
    page: str = template("pages/report/assets/page.html").render(
        head=overview(materials, title),
        sections=groups,
        figures=figures,
        paper_numbers=paper_numbers,
        said_once=said_once,
        results=materials.results,
        stores=stores_by_model(materials),
        facts=store_facts,
        # The gravest first: the page shows one, and the others on demand.
        cautions=[
            *failures(study),
            *steps_without_values(materials.records),
            *cautions(materials),
            *remarks(study),
        ],
        left_out={
            relative(path, materials.folder): reason
            for path, reason in materials.left_out.items()
        },
        commands=[command for command in map(command_of, materials.results) if command],
        explored=explored,
        made_of=made_of,
        data=json_for_html(_charts_by_card(groups)),
        script=code,
        style=style,
        script_hash=csp_hash(code),
        style_hash=csp_hash(style),
    )
    return page


def _charts_by_card(groups: Mapping[str, Sequence[Group]]) -> dict[str, Any]:
    """Return id of the card -> its charts, for the page's script."""
    charts = {}
    for heading_groups in groups.values():
        for group in heading_groups:
            charts.update({card.id: card.charts for card in group.cards if card.charts})
    return charts


def _stores_of_tables(materials: Materials) -> list[str]:
    """Return the labels of the stores in all tables, each once, in order of appearance."""
    labels: dict[str, None] = {}
    for result in materials.results:
        rows = result.file.table.frame
        if "store" in rows.columns:
            labels.update(dict.fromkeys(str(label) for label in rows["store"].unique()))
    return list(labels)


@contextmanager
def _collect_garbage_of_figures_only() -> Iterator[None]:
    """Keep the garbage collector from searching what exists now, modules above all.

    Figures come and go, and would have it look through all of that again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
