"""How to read an analysis' figure and where it comes from, as each analysis says beside itself.

All of it is in the analysis' declaration, `vitsee_core.declaration.Analysis`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitsee_core.declaration import Analysis
from vitsee_core.figures.training_values import answers_over_training
from vitsee_core.runtime.registry import builtin_names, load
from vitsee_core.tables.headlines import Answer
from vitsee_core.tables.results import Table
from vitsee_core.tables.words import name_examples
from vitsee_stores.errors import VitseeError

DEPTH = (
    "Relative depth counts sites of one kind from 0, the first (of block outputs what "
    "enters the first block), to 1, the last."
)


OVER_TRAINING = (
    "Each curve is a layer over the steps of a training, coloured from input to output; "
    "the map beside has a column for each step and a row for each layer. A layer's value "
    "is the mean over its heads or cells where it has several, with a band from the "
    "least to the largest; else the band is the 95 % interval over images."
)


@dataclass(frozen=True)
class Caption:
    """The words about a figure.

    Attributes:
        title: the analysis in a few words.
        question: what it answers, with a question mark.
        reading: how to read the figure.
        source: the papers.
        glance: the metric whose curves stand for the analysis; "" if its figure does, None if the
            table's first metric does.
    """

    title: str
    question: str
    reading: str
    source: str
    glance: str | None = None


def caption(analysis: Analysis, table: Table | None = None) -> Caption:
    """Return the caption of an analysis' figure; the table tells which of its kinds of figure."""
    # The docstring begins with "Title: the question?".
    first_line = analysis.docstring.partition("\n\n")[0].replace("\n", " ")
    title, colon, question = first_line.partition(": ")
    reading = analysis.reading
    if table is not None:
        kind = str(table.notes.get("kind", "")).replace("-", "_")
        reading = analysis.readings.get(kind, reading)
        if table.step_unit:
            reading = OVER_TRAINING
        reading = name_examples(reading, table.notes)
    if "depth" in reading and "elative depth" not in reading:
        reading = f"{reading} {DEPTH}"
    if not colon:
        title = first_line.rstrip(".")
        question = ""
    question = question.strip()
    question = question[:1].upper() + question[1:]
    return Caption(title, question, reading, analysis.source, analysis.glance_metric)


def headline(analysis: Analysis, table: Table) -> list[Answer]:
    """Return the table's answers, (store, text), or (model, text) over a training.

    None of them if the analysis declares no headline.
    """
    if table.step_unit:
        try:
            return answers_over_training(table)
        except VitseeError:  # several values of a layer, whose figure says so
            return []
    if analysis.headline is None or not len(table):
        return []
    answers = analysis.headline(table)
    return [(store, name_examples(text, table.notes)) for store, text in answers]


def captions() -> dict[str, Caption]:
    """Return command -> the caption of its figure, for vitsee's own analyses."""
    return {name.replace("_", "-"): caption(load(name)) for name in builtin_names()}
