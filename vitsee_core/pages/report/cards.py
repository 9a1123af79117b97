"""The cards of a report: an analysis with its question, and below it the results that answer it,
each with the first rows of its table and a link to the whole of it."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitsee_core.pages.report.captions import Caption, caption, headline
from vitsee_core.pages.report.charts import charts_of
from vitsee_core.pages.report.facts import n_images, result_cautions, stores_of
from vitsee_core.pages.report.materials import relative
from vitsee_core.pages.report.pictures import Addresses, Picture, carried, picture, tile
from vitsee_core.pages.report.redrawing import Result
from vitsee_core.runtime.machine import human_bytes, plural
from vitsee_core.runtime.progress import Progress, counting
from vitsee_core.runtime.registry import guest_of
from vitsee_core.tables.formats import stem_of
from vitsee_core.tables.headlines import Answer
from vitsee_core.tables.results import Table
from vitsee_core.tables.same_labels import disambiguate_labels
from vitsee_core.tables.sidecars import PYTHON
from vitsee_core.tables.text import visible

SHOWN_ROWS = 60
SPECIAL = re.compile(rb"[^\w.~,:;/ -]", re.ASCII)  # to be escaped in a URL
CARRIED_BYTES = 400_000  # a larger table is linked, not carried along
SHOWN_NAMES = 4  # of models in a title
SHOWN_ANSWERS = 4  # of a tile
MOST_CURVES = 7  # of a tile
SIDE_BY_SIDE = 3  # heatmaps of one store each on a tile
WIDEST = 1.6  # width over height of those
OTHER = "Other results"
OVER_TRAINING = "Over training"
WIDE = 620  # CSS pixels, from where on a figure has a line of its own
Sections = Mapping[str, Iterable[str]]  # heading -> the commands below it


@dataclass(frozen=True)
class Card:
    """One result. label: whose it is and of which kind, told from others of its analysis; charts:
    as JSON for the page; kind: of figure, where the analysis has several."""

    id: str
    label: str
    kind: str
    file: str
    caption: Caption
    command: str
    picture: Picture
    charts: list[dict[str, Any]]
    n_stores: int
    n_images: int | None
    answers: list[Answer]
    cautions: list[str]
    notes: list[tuple[str, str]]
    table: dict[str, Any]
    n_rows: int
    link: str
    link_name: str
    beside: str

    @property
    def heat(self) -> bool:
        """Whether the charts say all that the figure does, cell by cell."""
        return bool(self.charts) and all(chart["kind"] == "heat" for chart in self.charts)

    @property
    def wide(self) -> bool:
        if self.heat:
            return len(self.charts) > 1
        return not self.picture.width or self.picture.width > WIDE


@dataclass(frozen=True)
class Group:
    """The results of one analysis, in one order."""

    id: str
    command: str
    cards: list[Card]
    tile: Picture | None = (
        None  # drawn for the tile, where a figure stands for the analysis
    )

    @property
    def caption(self) -> Caption:
        """Title, question and reading, the first result's where there are several readings."""
        return self.cards[0].caption

    @property
    def one_reading(self) -> bool:
        """Whether all figures are read in one way."""
        return len({card.caption.reading for card in self.cards}) == 1

    @property
    def pictures(self) -> list[str]:
        """The cards whose figures stand for the analysis: the first, or some heatmaps of one store
        each."""
        first = self.cards[0]
        several = [card for card in self.cards if _square_heat(card)][:SIDE_BY_SIDE]
        return [card.id for card in (several if first in several else [first])]

    @property
    def alike(self) -> list[Card]:
        """The results of the first one's kind."""
        return [card for card in self.cards if card.kind == self.cards[0].kind]

    @property
    def curve(self) -> str:
        """The metric whose curves stand for the analysis in place of its figure, "" for none."""
        wanted = self.caption.glance
        curves = [chart for chart in self.cards[0].charts if chart["kind"] == "curves"]
        metric = curves[0]["key"] if curves and wanted is None else wanted
        lines = [
            line
            for card in self.alike
            for chart in card.charts
            if chart["kind"] == "curves" and chart["key"] == metric
            for line in chart["lines"]
            if not line["baseline"]
        ]
        return str(metric) if 0 < len(lines) <= MOST_CURVES else ""

    @property
    def answers(self) -> list[Answer]:
        """The answers of the results of the first one's kind, each store's once."""
        found: dict[str, Answer] = {}
        for card in self.alike:
            for answer in card.answers:
                found.setdefault(answer[0], answer)
        return [*found.values()]

    @property
    def shown_answers(self) -> list[Answer]:
        most = (
            len(self.answers) if len(self.answers) == SHOWN_ANSWERS + 1 else SHOWN_ANSWERS
        )
        return self.answers[:most]


def _square_heat(card: Card) -> bool:
    flat = card.picture.width <= WIDEST * card.picture.height
    return card.heat and card.n_stores == 1 and not card.picture.trouble and flat


def groups_of(
    results: Sequence[Result],
    sections: Sections,
    output: Path,
    known: Mapping[str, Any],
    progress: Progress,
    left_out: dict[Path, str],
    addresses: Addresses,
    figures: Sections,
) -> dict[str, list[Group]]:
    """Heading -> its analyses: `figures` by the stems of their files, then tables over a training,
    then `sections` in the order of the commands, those of no heading last. `left_out` gets the
    results that were changed into something that cannot be shown, and why. `addresses`: of the
    pictures."""
    by_file = {stem: heading for heading, stems in figures.items() for stem in stems}
    commands = {name: heading for heading, names in sections.items() for name in names}
    order = [*((stem, True) for stem in by_file), *((name, False) for name in commands)]

    def place(result: Result) -> int:
        stem = result.file.path.stem
        key = (stem, True) if stem in by_file else (result.command, False)
        return order.index(key) if key in order else len(order)

    results = sorted(results, key=place)
    files = disambiguate_labels([result.file for result in results])
    results = [replace(one, file=file) for one, file in zip(results, files, strict=True)]
    cards: dict[tuple[str, str], list[Card]] = {}
    of = [
        (
            by_file.get(one.file.path.stem)
            or (
                OVER_TRAINING
                if one.file.table.step_unit
                else commands.get(one.command, OTHER)
            ),
            one.command,
        )
        for one in results
    ]
    labels = _labels(results, of)
    found: dict[str, list[Group]] = {
        h: [] for h in (*figures, OVER_TRAINING, *sections, OTHER)
    }
    with counting(progress, len(results), "results"):
        for number, result in enumerate(results):
            try:
                card = _card(
                    result, f"r{number}", labels[number], output, known, addresses
                )
                cards.setdefault(of[number], []).append(card)
            except Exception as error:
                guest = guest_of(result.analysis.module)
                if result.file.as_written and guest is None:
                    raise  # our bug
                cause = "changed since" if guest is None else f"of the package {guest.by}"
                left_out[result.file.path] = f"{cause}: {type(error).__name__}: {error}"
            progress.advance(1)
        for number, ((heading, command), some) in enumerate(cards.items()):
            group = Group(f"a{number}", command, some)
            first = results[int(some[0].id.removeprefix("r"))]
            if not (group.curve or some[0].heat or some[0].picture.trouble):
                group = replace(group, tile=tile(first, addresses))
            found[heading].append(group)
    return {heading: groups for heading, groups in found.items() if groups}


def _card(
    result: Result,
    id: str,
    label: str,
    output: Path,
    known: Mapping[str, Any],
    addresses: Addresses,
) -> Card:
    table = result.file.table
    path = result.file.path
    link, beside = link_of(path, output)
    return Card(
        id=id,
        label=label,
        kind=_kind(result),
        file=visible(path.name),
        caption=caption(result.analysis, table),
        command=command_of(result),
        picture=picture(result, addresses),
        charts=charts_of(table),
        n_stores=len(_stores(result)),
        n_images=n_images(result),
        answers=headline(result.analysis, table),
        cautions=result_cautions(result, known),
        notes=short_notes({**_package(result), **table.notes}),
        table=first_rows(table),
        n_rows=len(table),
        link=link,
        link_name=visible(path.name),
        beside=beside,
    )


def _package(result: Result) -> dict[str, str]:
    """The package that a guest's result was made with, for its notes."""
    about = result.file.sidecar.get("package", {})
    if about:
        return {"package": f"{about.get('name')} {about.get('version')}"}
    return {}


# ------------------------------------------------------------------------------------ tables


def link_of(path: Path, output: Path) -> tuple[str, str]:
    """The link by which the page finds the table: in itself where that is small, else beside it;
    and then what somebody has to know who sends the page away."""
    size = path.stat().st_size
    if size > CARRIED_BYTES:
        place = quote(relative(path, output.absolute().parent))
        return place, f"beside the page, {human_bytes(size)}"
    data = path.read_bytes()
    if path.suffix == ".csv":
        # Mostly digits and commas, which need no escape: shorter than base64.
        return f"data:text/csv,{SPECIAL.sub(_escaped, data).decode()}", ""
    return carried(data, "application/octet-stream"), ""


def _escaped(byte: re.Match[bytes]) -> bytes:
    return b"%%%02X" % ord(byte[0])


def command_of(result: Result) -> str:
    """The command, or the call in Python, that made a result; "" where it is not known."""
    if call := result.file.sidecar.get(PYTHON):
        return visible(str(call))
    return visible(shlex.join(map(str, result.file.sidecar.get("command", ()))))


def short_notes(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The notes of a table that are short enough to be read."""
    found = []
    for name, value in notes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= 600:
            found.append((visible(str(name)), visible(text)))
    return found


def first_rows(table: Table) -> dict[str, Any]:
    """The first rows, columns that are empty left out: header, cells with their sorting keys."""
    columns = [c for c in table.written.get_columns() if c.null_count() < len(c)]
    shown = table.frame.head(SHOWN_ROWS).select(column.name for column in columns)
    return {
        "columns": [
            (visible(column.name), column.dtype.is_numeric()) for column in columns
        ],
        "rows": [[_cell(value) for value in row] for row in shown.rows()],
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(str(value))


# ------------------------------------------------------------------------------------ labels


def _labels(results: Sequence[Result], groups: Sequence[tuple[str, str]]) -> list[str]:
    """A label per result, unique within its group: kind and models, plus the file if needed."""
    labels = [*map(_label, results)]
    seen = Counter(zip(groups, labels, strict=True))
    found = []
    for group, label, result in zip(groups, labels, results, strict=True):
        stem = result.file.path.stem
        own = f"{label} ({stem})" if label and seen[group, label] > 1 else label
        found.append(visible(own or stem))
    return found


def _label(result: Result) -> str:
    stores = _stores(result)
    if unit := result.file.table.step_unit:
        n = result.file.table.frame[unit].n_unique()
        names = f"{', '.join(stores[:SHOWN_NAMES])}, {plural(n, f'{unit}s')}"
        return ": ".join(part for part in (_variant(result, stores), names) if part)
    apart = {"store_a", "store_b"} <= {*result.file.table.frame.columns} and len(
        stores
    ) == 2
    names = (" × " if apart else ", ").join(stores)
    if len(stores) > SHOWN_NAMES:
        names = f"{len(stores)} models"
    return ": ".join(part for part in (_variant(result, stores), names) if part)


def _variant(result: Result, stores: Sequence[str]) -> str:
    """The words of a file's name beside command and models: `objects` of `cluster-objects.csv`."""
    if _kind(result):
        return _kind(result).replace("-", " ")
    stem = stem_of(result.file.path)
    if not stem.startswith(f"{result.command}-"):
        return ""
    rest = stem.removeprefix(f"{result.command}-")
    for models in ("-".join(stores), "-".join(reversed(stores))):
        rest = "" if rest == models else rest.removesuffix(f"-{models}")
    return rest.replace("-", " ").replace("_", " ")


def _kind(result: Result) -> str:
    kind = result.file.table.notes.get("kind")
    return kind if isinstance(kind, str) else ""


def _stores(result: Result) -> list[str]:
    """The stores that the rows are about, or over a training the models; those of the sidecar where
    no row says it."""
    rows = result.file.table.frame
    if result.file.table.step_unit:
        model = "model" if "model" in rows.columns else "model_b"
        return [str(name) for name in rows[model].unique(maintain_order=True)]
    found = [
        label
        for name in ("store", "store_a", "store_b")
        if name in rows.columns
        for label in rows[name].drop_nulls().unique(maintain_order=True)
    ]
    return list(
        dict.fromkeys(found or (str(s.get("label", "")) for s in stores_of(result)))
    )
