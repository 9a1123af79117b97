"""The page: results and stores as one HTML file that needs nothing else.

Everything that comes from files is escaped by the template or written as JSON whose `<` is escaped;
the page's policy allows no script but its own, by its hash, and no request at all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from vitsee_core.figures.plotting import stores_in_order
from vitsee_core.pages.html import asset, csp_hash, json_for_html, script, template
from vitsee_core.pages.report.cards import Sections, command_of, groups_of
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
    """Write the report of a folder; returns what it shows, None where the page at `output` shows
    that already. Figures that are on that page are not packed again.

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
    if folder.is_dir():  # else there is nothing to find
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
            output,
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
    output: Path,
    sections: Sections,
    title: str,
    made_of: str,
    addresses: Addresses,
    explored: Sequence[ExploredPage],
    progress: Progress = SILENT,
) -> str:
    """The page as text. made_of: see `report.earlier`; explored: where it leads to."""
    study = read_study(materials.folder)
    figures = {
        visible(one.title): msgspec.structs.replace(one, note=visible(one.note))
        for one in study.sections
    }
    own = {title: figure.results for title, figure in figures.items()}
    known = {store.record["store_id"]: store for store in materials.stores}
    left_out = materials.left_out
    tables = [result.file.table for result in materials.results]
    stores = [
        s
        for of in tables
        if "store" in of.frame.columns
        for s in of.frame["store"].unique()
    ]
    with (
        stores_in_order(list(dict.fromkeys(map(str, stores)))),
        _garbage_of_figures_alone(),
    ):
        found = groups_of(
            materials.results, sections, output, known, progress, left_out, addresses, own
        )
    shown = [r for r in materials.results if r.file.path not in materials.left_out]
    materials = replace(materials, results=tuple(shown))
    cards = [
        card for groups in found.values() for group in groups for card in group.cards
    ]
    code = script("pages/report/assets/script.js")
    style = asset("pages/html/assets/base.css") + asset("pages/report/assets/style.css")
    page: str = template("pages/report/assets/page.html").render(
        head=overview(materials, title),
        sections=found,
        figures=figures,
        paper_numbers=paper_numbers,
        said_once=said_once,
        results=materials.results,
        stores=stores_by_model(materials),
        facts=store_facts,
        cautions=[
            *failures(study),
            *steps_without_values(materials.records),
            *cautions(materials),
            *remarks(study),
        ],
        left_out={
            relative(p, materials.folder): why for p, why in materials.left_out.items()
        },
        commands=[line for line in map(command_of, materials.results) if line],
        explored=explored,
        made_of=made_of,
        data=json_for_html({card.id: card.charts for card in cards if card.charts}),
        script=code,
        style=style,
        script_hash=csp_hash(code),
        style_hash=csp_hash(style),
    )
    return page


@contextmanager
def _garbage_of_figures_alone() -> Iterator[None]:
    """While it lasts, the collector of garbage leaves what there is now alone, modules above all,
    which it would look through again as figures come and go."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
