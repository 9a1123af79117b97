"""The cards of a report: an analysis with its question, and below it the results that answer it.

Each result has its figure, the first rows of its table and a link to the table.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from vitsee_core.pages.report.captions import Caption, caption, headline
from vitsee_core.pages.report.charts import charts_of
from vitsee_core.pages.report.facts import n_images, result_cautions, stores_of
from vitsee_core.pages.report.materials import relative
from vitsee_core.pages.report.pictures import Addresses, Picture, data_url, picture, tile
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
UNSAFE_BYTES = re.compile(rb"[^\w.~,:;/ -]", re.ASCII)  # to be escaped in a URL
MAX_EMBEDDED_BYTES = 400_000  # a larger table is linked, not part of the page
SHOWN_NAMES = 4  # of models in a title
SHOWN_ANSWERS = 4  # of a tile
MAX_TILE_CURVES = 7
MAX_TILE_HEATMAPS = 3  # side by side, of one store each
MAX_HEATMAP_ASPECT = 1.6  # width over height of those
MAX_NOTE_CHARACTERS = 600
OTHER = "Other results"
OVER_TRAINING = "Over training"
WIDE = 620  # CSS pixels, from where on a figure has a line of its own
Sections = Mapping[str, Iterable[str]]  # heading -> the commands below it


@dataclass(frozen=True)
class Card:
    """One result as the page shows it.

    Attributes:
        id: of the page's element.
        label: whose result it is and of which kind; unique within its analysis.
        kind: of figure, where the analysis has several.
        file: the table's name.
        caption: of the figure.
        command: that made the result.
        picture: the figure.
        charts: JSON for the page's script.
        n_stores: that the rows are about.
        n_images: behind the values; None if the table does not say.
        answers: of the table's headline.
        cautions: a line each.
        notes: (name, text) of the table.
        table: header and first rows.
        n_rows: of the whole table.
        link: to the table.
        link_name: under which the browser saves it.
        beside: where the table lies if it is not part of the page.
    """

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
        """Whether the card takes the width of the page."""
        if self.heat:
            return len(self.charts) > 1
        return not self.picture.width or self.picture.width > WIDE

    @property
    def is_square_heatmap(self) -> bool:
        """Whether it is a heatmap of one store that fits beside others on a tile."""
        if not self.heat or self.n_stores != 1 or self.picture.trouble:
            return False
        return self.picture.width <= MAX_HEATMAP_ASPECT * self.picture.height


@dataclass(frozen=True)
class Group:
    """The results of one analysis, in one order.

    `tile` is drawn only if a figure stands for the analysis at a glance, rather than a chart.
    """

    id: str
    command: str
    cards: list[Card]
    tile: Picture | None = None

    @property
    def caption(self) -> Caption:
        """Title, question and reading; of several readings the first result's."""
        return self.cards[0].caption

    @property
    def one_reading(self) -> bool:
        """Whether all figures are read in one way."""
        return len({card.caption.reading for card in self.cards}) == 1

    @property
    def pictures(self) -> list[str]:
        """The ids of the cards whose figures stand for the analysis.

        The first card, or up to three heatmaps of one store each if the first is one of them.
        """
        heatmaps = [card for card in self.cards if card.is_square_heatmap]
        heatmaps = heatmaps[:MAX_TILE_HEATMAPS]
        first = self.cards[0]
        return [card.id for card in (heatmaps if first in heatmaps else [first])]

    @property
    def alike(self) -> list[Card]:
        """The results of the first one's kind."""
        return [card for card in self.cards if card.kind == self.cards[0].kind]

    @property
    def curve(self) -> str:
        """The metric whose curves stand for the analysis; "" if its figure does."""
        metric = self.caption.glance
        curves = [chart for chart in self.cards[0].charts if chart["kind"] == "curves"]
        if curves and metric is None:
            metric = curves[0]["key"]
        n_lines = 0
        for card in self.alike:
            for chart in card.charts:
                if chart["kind"] == "curves" and chart["key"] == metric:
                    n_lines += sum(not line["baseline"] for line in chart["lines"])
        # More curves than that cannot be told apart on a tile.
        return str(metric) if 0 < n_lines <= MAX_TILE_CURVES else ""

    @property
    def answers(self) -> list[Answer]:
        """The answers of the results of the first one's kind, one per store."""
        answer_of: dict[str, Answer] = {}
        for card in self.alike:
            for answer in card.answers:
                answer_of.setdefault(answer[0], answer)
        return list(answer_of.values())

    @property
    def shown_answers(self) -> list[Answer]:
        """The answers on the tile."""
        answers = self.answers
        # "and 1 more" would take as much room as the one.
        if len(answers) == SHOWN_ANSWERS + 1:
            return answers
        return answers[:SHOWN_ANSWERS]


class Placement(NamedTuple):
    """Where a result stands on the page."""

    rank: int  # of its heading and command among all
    heading: str
    command: str


class Headings:
    """The headings of a report, in order, and which results stand below each.

    Args:
        sections: heading -> its commands.
        figures: heading -> the stems of its tables' files; these headings come first.
    """

    def __init__(self, sections: Sections, figures: Sections) -> None:
        self.names = (*figures, OVER_TRAINING, *sections, OTHER)
        self._of_file = {stem: name for name, stems in figures.items() for stem in stems}
        self._of_command = {
            c: name for name, commands in sections.items() for c in commands
        }

    def place(self, result: Result) -> Placement:
        """Return heading and rank of a result: by its file's name, else by its command."""
        stem = result.file.path.stem
        command = result.command
        if stem in self._of_file:
            rank = list(self._of_file).index(stem)
        elif command in self._of_command:
            rank = len(self._of_file) + list(self._of_command).index(command)
        else:
            rank = len(self._of_file) + len(self._of_command)
        heading = self._of_file.get(stem)
        if not heading and result.file.table.step_unit:
            heading = OVER_TRAINING
        return Placement(rank, heading or self._of_command.get(command, OTHER), command)


def group_results(
    results: Sequence[Result],
    headings: Headings,
    output: Path,
    *,
    stores: Mapping[str, Any],
    left_out: dict[Path, str],
    addresses: Addresses,
    progress: Progress,
) -> dict[str, list[Group]]:
    """Return heading -> its analyses with their cards, in the order of the headings.

    Args:
        results: in the order in which they were made, which stays within an analysis.
        headings: which results stand below which heading.
        output: the page.
        stores: those of the report, by their id.
        left_out: gets, by path, the results that were changed into something that cannot be shown,
            with the reason.
        addresses: of the pictures.
        progress: advanced by one per result.
    """
    results = sorted(results, key=lambda result: headings.place(result).rank)
    files = disambiguate_labels([result.file for result in results])
    results = [
        replace(result, file=file) for result, file in zip(results, files, strict=True)
    ]
    group_keys = [headings.place(result)[1:] for result in results]  # heading, command
    labels = _unique_labels(results, group_keys)
    cards: dict[tuple[str, str], list[Card]] = {}
    first_results: dict[tuple[str, str], Result] = {}
    groups: dict[str, list[Group]] = {name: [] for name in headings.names}
    with counting(progress, len(results), "results"):
        for number, (result, key) in enumerate(zip(results, group_keys, strict=True)):
            try:
                card = _make_card(
                    result,
                    card_id=f"r{number}",
                    label=labels[number],
                    output=output,
                    stores=stores,
                    addresses=addresses,
                )
                cards.setdefault(key, []).append(card)
                first_results.setdefault(key, result)
            except Exception as error:
                guest = guest_of(result.analysis.module)
                if result.file.as_written and guest is None:
                    raise  # our bug
                cause = "changed since" if guest is None else f"of the package {guest.by}"
                left_out[result.file.path] = f"{cause}: {type(error).__name__}: {error}"
            progress.advance(1)
        for number, (key, group_cards) in enumerate(cards.items()):
            heading, command = key
            group = Group(f"a{number}", command, group_cards)
            first_card = group_cards[0]
            has_chart = group.curve or first_card.heat
            if not has_chart and not first_card.picture.trouble:
                group = replace(group, tile=tile(first_results[key], addresses))
            groups[heading].append(group)
    return {heading: members for heading, members in groups.items() if members}


def _make_card(
    result: Result,
    *,
    card_id: str,
    label: str,
    output: Path,
    stores: Mapping[str, Any],
    addresses: Addresses,
) -> Card:
    """Return the card of a result; reads its file and draws its figure."""
    table = result.file.table
    path = result.file.path
    link, beside = link_of(path, output)
    notes = dict(table.notes)
    package = result.file.sidecar.get("package", {})
    if package:  # a guest's
        version = f"{package.get('name')} {package.get('version')}"
        notes = {"package": version, **notes}
    return Card(
        id=card_id,
        label=label,
        kind=_figure_kind(result),
        file=visible(path.name),
        caption=caption(result.analysis, table),
        command=command_of(result),
        picture=picture(result, addresses),
        charts=charts_of(table),
        n_stores=len(_store_names(result)),
        n_images=n_images(result),
        answers=headline(result.analysis, table),
        cautions=result_cautions(result, stores),
        notes=short_notes(notes),
        table=first_rows(table),
        n_rows=len(table),
        link=link,
        link_name=visible(path.name),
        beside=beside,
    )


# ------------------------------------------------------------------------------------ tables


def link_of(path: Path, output: Path) -> tuple[str, str]:
    """Return a link to the table, and where the table lies if it is not part of the page.

    The link carries the table itself if that is small; else it leads to the file, which has to be
    sent along with the page.
    """
    size = path.stat().st_size
    if size > MAX_EMBEDDED_BYTES:
        address = quote(relative(path, output.absolute().parent))
        return address, f"beside the page, {human_bytes(size)}"
    data = path.read_bytes()
    if path.suffix == ".csv":
        # Mostly digits and commas, which need no escape: shorter than base64.
        text = UNSAFE_BYTES.sub(lambda match: b"%%%02X" % ord(match[0]), data).decode()
        return f"data:text/csv,{text}", ""
    return data_url(data, "application/octet-stream"), ""


def command_of(result: Result) -> str:
    """Return the command, or the call in Python, that made a result; "" if it is not known."""
    call = result.file.sidecar.get(PYTHON)
    if call:
        return visible(str(call))
    return visible(shlex.join(map(str, result.file.sidecar.get("command", ()))))


def short_notes(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the notes of a table that are short enough to be read."""
    texts = []
    for name, value in notes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= MAX_NOTE_CHARACTERS:
            texts.append((visible(str(name)), visible(text)))
    return texts


def first_rows(table: Table) -> dict[str, Any]:
    """Return header and first rows of a table, without columns that are empty.

    `columns` is a list of (name, whether it holds numbers), `rows` a list of lists of texts.
    """
    columns = [c for c in table.written.get_columns() if c.null_count() < len(c)]
    rows = table.frame.head(SHOWN_ROWS).select(column.name for column in columns)
    return {
        "columns": [
            (visible(column.name), column.dtype.is_numeric()) for column in columns
        ],
        "rows": [[_cell_text(value) for value in row] for row in rows.rows()],
    }


def _cell_text(value: Any) -> str:
    """Return a cell as text, a float with four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(str(value))


# ------------------------------------------------------------------------------------ labels


def _unique_labels(
    results: Sequence[Result], group_keys: Sequence[tuple[str, str]]
) -> list[str]:
    """Return a label per result, unique within its group: kind and models, plus the file."""
    labels = [_label(result) for result in results]
    n_alike = Counter(zip(group_keys, labels, strict=True))
    unique = []
    for key, label, result in zip(group_keys, labels, results, strict=True):
        stem = result.file.path.stem
        if label and n_alike[key, label] > 1:
            label = f"{label} ({stem})"
        unique.append(visible(label or stem))
    return unique


def _label(result: Result) -> str:
    """Return kind and models of a result: `objects: vit, resnet`, `vit × resnet`."""
    stores = _store_names(result)
    table = result.file.table
    unit = table.step_unit
    names = ", ".join(stores)
    if unit:
        n_steps = table.frame[unit].n_unique()
        names = f"{', '.join(stores[:SHOWN_NAMES])}, {plural(n_steps, f'{unit}s')}"
    elif len(stores) > SHOWN_NAMES:
        names = f"{len(stores)} models"
    elif len(stores) == 2 and {"store_a", "store_b"} <= {*table.frame.columns}:
        names = " × ".join(stores)
    kind = _kind_words(result, stores)
    if kind and names:
        return f"{kind}: {names}"
    return kind or names


def _kind_words(result: Result, stores: Sequence[str]) -> str:
    """Return the kind of a result in words: the table's, or `objects` of `cluster-objects.csv`.

    In the file's name these are the words beside the command and the models.
    """
    kind = _figure_kind(result)
    if kind:
        return kind.replace("-", " ")
    stem = stem_of(result.file.path)
    if not stem.startswith(f"{result.command}-"):
        return ""
    words = stem.removeprefix(f"{result.command}-")
    for models in ("-".join(stores), "-".join(reversed(stores))):
        words = "" if words == models else words.removesuffix(f"-{models}")
    return words.replace("-", " ").replace("_", " ")


def _figure_kind(result: Result) -> str:
    """Return the kind of figure that the table's notes name; "" if they do not."""
    kind = result.file.table.notes.get("kind")
    return kind if isinstance(kind, str) else ""


def _store_names(result: Result) -> list[str]:
    """Return the stores that the rows are about; over a training, the models.

    If no row names a store, they are those of the sidecar.
    """
    rows = result.file.table.frame
    if result.file.table.step_unit:
        model = "model" if "model" in rows.columns else "model_b"
        return [str(name) for name in rows[model].unique(maintain_order=True)]
    labels: list[str] = []
    for name in ("store", "store_a", "store_b"):
        if name in rows.columns:
            labels += rows[name].drop_nulls().unique(maintain_order=True).to_list()
    if not labels:
        labels = [str(store.get("label", "")) for store in stores_of(result)]
    return list(dict.fromkeys(labels))
